"""Reads the questions for a model, with the same prompts that training would build from their rows."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import chain, islice
from pathlib import Path

from trainer.checkpoint import layout
from trainer.config import Config, ConfigError, parse_recorded, sources_of
from trainer.data.chat import RowEncoder
from trainer.data.formats import columns_of
from trainer.data.readers import iter_rows
from trainer.data.rows import Row, UnusableError, location
from trainer.errors import DataError
from trainer.model.pretrained import ModelSource
from trainer.tools.evaluate.scorers import Question
from trainer.tracking.run_info import read_config
from trainer.train.start.inputs import (
    Encoders,
    prepare_data_alone,
    source_at,
    source_without_weights,
)
from trainer.train.start.preflight import find_files

PROMPT = "prompt"
ANSWER = "answer"


def read_questions(run_dir: Path, path: Path | None, *, answer_key: str) -> list[Question]:
    """Return a question for every row of the file `path`, read as the files in `data.train_files`;
    without a path, for every validation row of the run.

    Raises `ConfigError` if there is no such file or the run has no validation rows, `DataError` if
    the file has no rows or an unusable row.
    """
    config = parse_recorded(read_config(run_dir))
    places: list[set[str] | None] = [None]  # of the rows to ask, by source; None for all rows
    if path is None:
        validation = prepare_data_alone(config).validation
        if validation is None:
            raise ConfigError("the run holds out no rows for validation.\nFix: add --prompts FILE")
        files = find_files(config)
        sources = files.validation or files.train
        places = [set(map(part.dataset.location, part.samples)) for part in validation.sources]
    elif path.is_file():
        asked = replace(config.data, val_files=str(path))
        sources = [(source, [path]) for source in sources_of(asked, "val_files")]
    else:
        raise ConfigError(
            f"--prompts: '{path}' does not exist.\n"
            f"Fix: pass a file with rows of messages or {PROMPT} (.jsonl, .json, .parquet)"
        )
    encoders = Encoders(config, _model_of(run_dir, config))
    is_text = cache(lambda: _is_trained_on_text(config, encoders))  # may download the data
    questions = []
    for (source, paths), wanted in zip(sources, places, strict=True):
        encoder = encoders.row_encoder(source)
        keys = source.keys
        columns = (*columns_of(keys), keys.messages_key, keys.tools_key, PROMPT, answer_key)
        for row in _rows(paths, tuple(dict.fromkeys(columns))):
            if wanted is None or location(row.file, row.line) in wanted:
                questions.append(_question(row, encoder, answer_key, is_text=is_text))
    if not questions:
        raise DataError(f"'{path}' has no rows")
    return questions


def _model_of(run_dir: Path, config: Config) -> ModelSource:
    """Return the run's model or, if it is gone, the newest export, which has the same tokenizer.
    Raises `ConfigError` if both are gone.
    """
    try:
        return source_without_weights(config)
    except ConfigError:
        exports = [info.path / layout.HUGGINGFACE for info in layout.committed(run_dir)]
        if not exports:
            raise
        return source_at(config, str(exports[-1]))


def _is_trained_on_text(config: Config, encoders: Encoders) -> bool:
    """Return True if the first row of every training source is plain text; False if the files are
    gone.
    """
    with suppress(ConfigError, DataError):
        return all(
            encoders.row_encoder(source).is_plain_text(row)
            for source, paths in find_files(config).train
            for row in islice(_rows(paths, columns_of(source.keys)), 1)
        )
    return False


def _rows(paths: list[Path], columns: tuple[str, ...]) -> Iterator[Row]:
    return chain.from_iterable(iter_rows(path, columns) for path in paths)


def _question(
    row: Row,
    encoder: RowEncoder,
    answer_key: str,
    *,
    is_text: Callable[[], bool],
) -> Question:
    place = location(row.file, row.line)
    try:
        prompt = encoder.prompt(row, is_text=is_text)
    except UnusableError as error:
        raise DataError(
            f"{place}: {error}.\nFix: repair the row; a question needs {PROMPT} (text) or messages "
            f"(a list of role and content)"
        ) from error
    expected = row.record.get(answer_key)
    if expected is None and answer_key == ANSWER:
        expected = prompt.answer
    return Question(prompt.text, prompt.ids, expected, place)
