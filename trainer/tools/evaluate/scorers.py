"""The questions for a model, and the functions that score its answers.

The functions that read questions import what is slow, so that the command line starts fast.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

from trainer.checkpoint import layout
from trainer.config import Config, ConfigError, Source, parse_recorded, sources_of
from trainer.data.rows import UnusableError, location
from trainer.errors import DataError
from trainer.runtime.evaluations import EXEC
from trainer.tools.evaluate.programs import run_tests

PROMPT = "prompt"
ANSWER = "answer"
TESTS = "tests"
NUMBER = re.compile(
    r"((?:(?<![\w)])[-+])?)[$€£¥]?"  # a hyphen after a number or word is no sign
    r"((?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+|[eE][-+]?\d{1,3}(?!\d))?)"
)
"""Sign and value. Longer exponents are none, because their numbers would not fit in memory."""
FINAL = "####"
"""The mark that precedes the final answer in GSM8K."""
FENCED = re.compile(r"```[^`\n]*\n(.*?)(?:\n```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Question:
    """A question that was read from one row of a file.

    `ids` are the tokens of `prompt`. `expected` is the value in the row's answer column; if the row
    has none, it is the answer that training would teach. `place` is `file:line`.
    """

    prompt: str
    ids: Sequence[int]
    expected: Any
    place: str


Judge = Callable[[str], str]
"""Returns the reason why an answer is wrong, or an empty string if it is right. Each thread calls
a different one.
"""
Scorer = Callable[[Question], Judge]
"""Returns the judge of the answers to a question. Raises `DataError` for a question that it cannot
score.
"""


def read_questions(run_dir: Path, path: Path, *, answer_key: str) -> list[Question]:
    """Return a question for every row of a file, read as the files in `data.train_files`.

    Raises `ConfigError` if the file is missing, `DataError` if it has no rows or an unusable row.
    """
    from trainer.tracking.run_info import read_config

    if not path.is_file():
        raise ConfigError(
            f"--prompts: there is no file '{path}'.\n"
            f"Fix: a file with rows of messages or {PROMPT} (.jsonl, .json, .parquet)"
        )
    config = parse_recorded(read_config(run_dir))
    [source] = sources_of(replace(config.data, val_files=str(path)), "val_files")
    questions = list(_questions(run_dir, config, [(source, [path], None)], answer_key))
    if not questions:
        raise DataError(f"'{path}' has no rows")
    return questions


def held_out_questions(run_dir: Path, *, answer_key: str) -> list[Question]:
    """Return the validation rows of a run as questions.

    Raises `ConfigError` if the run has none, `DataError` for an unusable row.
    """
    from trainer.tracking.run_info import read_config
    from trainer.train.start.inputs import prepare_data_alone
    from trainer.train.start.preflight import find_files

    config = parse_recorded(read_config(run_dir))
    validation = prepare_data_alone(config).validation
    if validation is None:
        raise ConfigError("the run holds out no rows for validation.\nFix: add --prompts FILE")
    found = find_files(config)
    held_out = [
        (source, files, set(map(samples.dataset.location, samples.samples)))
        for (source, files), samples in zip(
            found.validation or found.train, validation.sources, strict=True
        )
    ]
    return list(_questions(run_dir, config, held_out, answer_key))


def _questions(
    run_dir: Path,
    config: Config,
    sources: Sequence[tuple[Source, list[Path], set[str] | None]],
    answer_key: str,
) -> Iterator[Question]:
    """Yield the rows of sources as questions, with the prompts that training would make of them.

    A source comes with its files and the places of the rows to ask, None for all.
    """
    from trainer.data.chat import RowEncoder
    from trainer.data.formats import columns_of
    from trainer.data.readers import iter_rows
    from trainer.train.start.inputs import Encoders, source_at, source_without_weights

    try:
        model = source_without_weights(config)
    except ConfigError:  # an export has the same tokenizer
        exports = [info.path / layout.HUGGINGFACE for info in layout.committed(run_dir)]
        if not exports:
            raise
        model = source_at(config, str(exports[-1]))
    encoders = Encoders(config, model)
    for source, files, wanted in sources:
        tokenizer, _, options = encoders.encoding(source)
        encoder = RowEncoder(tokenizer, options)
        keys = source.keys
        columns = (*columns_of(keys), keys.messages_key, keys.tools_key, PROMPT, answer_key)
        rows = chain.from_iterable(iter_rows(path, tuple(dict.fromkeys(columns))) for path in files)
        for row in rows:
            place = location(row.file, row.line)
            if wanted is not None and place not in wanted:
                continue
            try:
                prompt = encoder.prompt(row)
            except UnusableError as error:
                raise DataError(
                    f"{place}: {error}.\nFix: repair the row; a question has {PROMPT} (text) or "
                    f"messages (a list of role and content)"
                ) from error
            expected = row.record.get(answer_key)
            if expected is None and answer_key == ANSWER:
                expected = prompt.answer
            yield Question(prompt.text, prompt.ids, expected, place)


def exact(question: Question) -> Judge:
    """Compare the answer with the expected text, ignoring differences in white space."""
    expected = _text(question)
    return lambda answer: "" if answer.split() == expected.split() else f"is not: {expected}"


def numeric(question: Question) -> Judge:
    """Compare the last numbers of the answer and the expected text.

    If a text contains `####`, only the part after the last one counts.
    """
    expected = _number(_text(question))
    if expected is None:
        raise DataError(f"{question.place}: its answer has no number")

    def judge(answer: str) -> str:
        found = _number(answer)
        return "" if found == expected else f"{found} is not {expected}"

    return judge


def executed(question: Question) -> Judge:
    """Run the program in the answer against the tests of the question."""
    tests = [question.expected] if isinstance(question.expected, str) else question.expected
    is_usable = isinstance(tests, list) and all(isinstance(t, str) and t.strip() for t in tests)
    if not is_usable or not tests:
        raise DataError(
            f"{question.place}: {EXEC} needs tests: a Python text, or a list of them.\n"
            f"Fix: name their column with --answer"
        )
    return lambda answer: run_tests(program_of(answer), tests)


SCORERS: dict[str, Scorer] = {"exact": exact, "numeric": numeric, EXEC: executed}


def program_of(answer: str) -> str:
    """Return the first fenced block of an answer, even if it is not closed. Without a fence, return
    the whole answer.
    """
    found = FENCED.search(answer)
    return found[1] if found else answer


def _text(question: Question) -> str:
    if not isinstance(question.expected, str | int | float):
        raise DataError(
            f"{question.place}: the row has no answer to compare with.\n"
            f"Fix: name its column with --answer"
        )
    return str(question.expected)


def _number(text: str) -> Fraction | None:
    found = NUMBER.findall(text.rpartition(FINAL)[2].replace("\N{MINUS SIGN}", "-"))
    try:
        return Fraction("".join(found[-1]).replace(",", "")) if found else None
    except (ValueError, ZeroDivisionError):
        return None
