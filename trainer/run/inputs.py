"""What a run is made from: model files, tokenizer and tokens, ready before any process group
exists.

The tokens are a step of their own, for who only looks at them.
"""

import copy
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trainer.checkpoint.model_files import ModelFiles
from trainer.config import QUICKSTART, Config, ConfigError, Source
from trainer.data.formats import columns_of
from trainer.data.prepare import PrepareOptions, Result, RowEncoder
from trainer.data.readers import iter_rows
from trainer.data.rows import Row
from trainer.data.samples import Samples, SourceSamples
from trainer.data.token_cache import prepare
from trainer.data.tokens import tokenizer_digest
from trainer.errors import DataError
from trainer.model import new_tokens
from trainer.model.assemble import Design, design_model
from trainer.model.pretrained import ModelSource, whole_checkpoint
from trainer.run.preflight import (
    TEMPLATE_NAMES,
    DataFiles,
    Files,
    file_states,
    find_files,
    find_model_dir,
    read_chat_template,
)
from trainer.weights import WholeCheckpoint

Renderer = tuple[PreTrainedTokenizerBase, str]
"""A tokenizer with a chat template, and the digest of both."""


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """What is trained and validated on."""

    train: Samples
    validation: Samples | None
    tokenizer: PreTrainedTokenizerBase
    """With the chat template that is exported; its `tokenizer_digest` covers both."""
    tokenizer_digest: str
    chat_template: str | None


def prepare_data(
    config: Config,
    files: DataFiles,
    model: ModelSource,
    *,
    progress: Callable[[], None],
) -> PreparedData:
    """The samples of `files`, with the tokenizer of `model`; the first process that asks does the
    work.

    `progress` is called while it goes on. Raises `DataError`, `CannotWriteError`.
    """
    data, renderer = config.data, _renderer(config, model)

    def prepared(side: Files) -> list[SourceSamples]:
        return _prepare(config, side, renderer, progress)

    train = prepared(files.train)
    if files.validation:
        validation = prepared(files.validation)
    else:
        limit = None if data.val_max_samples == -1 else data.val_max_samples
        parts = [
            source.split(data.val_ratio, seed=config.trainer.seed, limit=limit) for source in train
        ]
        train = [trained for trained, _ in parts]
        validation = [held_out for _, held_out in parts]
    held_out = Samples(validation)
    if own_templates := [
        source.name for source, _ in files.train if source.chat_template != data.chat_template
    ]:
        logger.warning(
            "rendered with chat templates of their own, which huggingface/ does not carry: %s",
            ", ".join(own_templates),
        )
    tokenizer, digest = renderer(data.chat_template)
    return PreparedData(
        train=Samples(train),
        validation=held_out if len(held_out) else None,
        tokenizer=tokenizer,
        tokenizer_digest=digest,
        chat_template=read_chat_template(data.chat_template),
    )


def encode_first_rows(
    config: Config, files: DataFiles, model: ModelSource
) -> Iterator[tuple[Row, Result, PreTrainedTokenizerBase]]:
    """What the first row of each file becomes, and the tokenizer that makes it. Raises
    `DataError`, `ConfigError`.
    """
    renderer = _renderer(config, model)
    for source, paths in (*files.train, *files.validation):
        tokenizer, _, options = _encoding(config, source, renderer)
        columns = columns_of(source.keys)
        rows = [row for path in paths for row in itertools.islice(iter_rows(path, columns), 1)]
        for row, result in zip(rows, RowEncoder(tokenizer, options).encode(rows), strict=True):
            yield row, result, tokenizer


def _renderer(config: Config, model: ModelSource) -> Callable[[str | None], Renderer]:
    """By the name of a chat template. Raises `ConfigError`."""
    try:
        own = AutoTokenizer.from_pretrained(
            model.path, trust_remote_code=config.model.trust_remote_code
        )
    except Exception as error:  # tokenizers raise many kinds
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"the tokenizer in {model.path} cannot be loaded ({reason}); copy a whole one there"
        ) from error

    @cache
    def renderer(chat_template: str | None) -> Renderer:
        tokenizer = copy.copy(own)
        tokenizer.chat_template = read_chat_template(chat_template) or own.chat_template
        if chat_template in TEMPLATE_NAMES:
            _require_tokens(tokenizer, chat_template)
        return tokenizer, tokenizer_digest(tokenizer)  # half a second for a large vocabulary

    return renderer


def _require_tokens(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raises `ConfigError` if the tokenizer has not the tokens that a template of ours writes
    around turns.
    """
    known = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    written = dict.fromkeys(re.findall(r"<\|\w+\|>", str(tokenizer.chat_template)))
    if missing := [token for token in written if token not in known]:
        listed = ",".join(f'"{token}"' for token in missing)
        raise ConfigError(
            f"data.chat_template={name} writes special tokens that this tokenizer does not have: "
            f"add them with 'model.new_tokens=[{listed}]'"
        )
    if not tokenizer.eos_token:
        raise ConfigError(
            f"data.chat_template={name} needs the tokenizer's end token (eos_token), and it has "
            f"none"
        )


def _prepare(
    config: Config,
    sources: Files,
    renderer: Callable[[str | None], Renderer],
    progress: Callable[[], None],
) -> list[SourceSamples]:
    """Each source with a cache entry of its own."""
    prepared = []
    for source, files in sources:
        tokenizer, digest, options = _encoding(config, source, renderer)
        try:
            dataset = prepare(
                files,
                tokenizer=tokenizer,
                tokenizer_digest=digest,
                options=options,
                cache_dir=Path(config.data.cache_dir),
                progress=progress,
            )
        except DataError as error:
            raise (
                error if len(sources) == 1 else DataError(f"source '{source.name}': {error}")
            ) from error
        prepared.append(dataset.whole(source.name, source.repeat))
    return prepared


def _encoding(
    config: Config,
    source: Source,
    renderer: Callable[[str | None], Renderer],
) -> tuple[PreTrainedTokenizerBase, str, PrepareOptions]:
    """With what the rows of a source become tokens; the second is the digest of the first."""
    # neither template nor turns say anything of plain text: what is said of them must not prepare
    # it anew
    data, is_text = config.data, source.keys.text_key is not None
    options = PrepareOptions(
        keys=source.keys,
        max_length=data.max_length,
        truncation=data.truncation,
        on_bad_row=data.on_bad_row,
        max_samples=source.max_samples,
        special_in_content=data.special_in_content,
    )
    if not is_text:
        kwargs = data.apply_chat_template_kwargs
        options = replace(options, turns=data.turns, train_on=data.train_on, template_kwargs=kwargs)
    return *renderer(None if is_text else source.chat_template), options


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Inputs(PreparedData):
    """What a run is made from, ready before any process group exists."""

    design: Design
    model_files: ModelFiles
    """Read before anything else of the model, so that what is trained and what is exported are
    the same files.
    """
    whole: WholeCheckpoint | None
    """Where the files of the model hold more than is trained."""
    data_files: Mapping[str, list[int]]
    """Size and modification time of each data file, before any of them was read."""

    @property
    def source(self) -> ModelSource:
        return self.design.source


def prepare_inputs(config: Config, *, progress: Callable[[], None]) -> Inputs:
    """Model files, tokenizer and tokens. Needs no process group; the first rank that asks does the
    work once.

    `progress` is called while it goes on.
    """
    files, model_dir = find_files(config), find_model_dir(config.model, progress=progress)
    data_files = file_states(files)
    source = source_at(config, model_dir)
    model_files = ModelFiles.read(Path(source.path))
    design = require_trainable(config, source)
    whole = whole_checkpoint(source)
    data = prepare_data(config, files, source, progress=progress)
    return Inputs(
        **vars(data), design=design, model_files=model_files, whole=whole, data_files=data_files
    )


def require_trainable(config: Config, source: ModelSource) -> Design:
    """Raises `ConfigError` for what config.json alone refuses, before anything is tokenised."""
    return design_model(config.model, source, max_length=config.data.max_length)


def prepare_data_alone(config: Config) -> PreparedData:
    """The tokens of `prepare_inputs`, from the same cache; of the model its tokenizer and
    config.json are enough.
    """
    source = source_without_weights(config)
    return prepare_data(config, find_files(config), source, progress=lambda: None)


def prepare_data_of_run(config: Config, run_dir: Path) -> PreparedData:
    """The tokens that a run was trained on, by its configuration. Raises `ConfigError`,
    `DataError`.
    """
    try:
        return prepare_data_alone(config)
    except (ConfigError, DataError) as error:
        own = Path(config.trainer.default_local_dir)
        if own.is_absolute() or own.resolve() == run_dir.resolve():
            raise
        where = f"paths of '{run_dir}' begin where it was started, and this is '{Path.cwd()}': call it from there"
        raise type(error)(f"{error}\n{where}") from error


def source_without_weights(config: Config) -> ModelSource:
    """Of a Hub id config.json and tokenizer alone are fetched."""
    return resolve_source(replace(config, model=replace(config.model, random_weights=True)))


def resolve_source(config: Config) -> ModelSource:
    return source_at(config, find_model_dir(config.model))


def source_at(config: Config, path: str, *, random_weights: bool = False) -> ModelSource:
    """The model of a directory, with the tokens that the configuration adds; `random_weights`
    whatever that says.
    """
    model, ids = config.model, dict[str, int]()
    random_weights = random_weights or model.random_weights or model.partial_pretrain == QUICKSTART
    if model.new_tokens:
        path, ids = new_tokens.extended(path, model.new_tokens, Path(config.data.cache_dir))
    return ModelSource(path, random_weights, model.trust_remote_code, ids)
