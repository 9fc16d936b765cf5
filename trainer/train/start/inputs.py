"""Prepare the inputs of a run (model files, tokenizer and tokens) before a process group exists.

Commands that need only tokens use `prepare_data_alone`.
"""

import copy
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trainer.checkpoint.model_files import ModelFiles
from trainer.config import QUICKSTART, Config, ConfigError, Source
from trainer.data.batch_plan import Schedule
from trainer.data.chat import RowEncoder
from trainer.data.files import missing_shards
from trainer.data.rows import PrepareOptions
from trainer.data.samples import Samples, SourceSamples, TokenDataset
from trainer.data.token_cache import prepare
from trainer.data.tokens import tokenizer_digest
from trainer.errors import DataError
from trainer.model import new_tokens, packed_lm
from trainer.model.assemble import Design, design_model
from trainer.model.pretrained import ModelSource, whole_checkpoint
from trainer.model.source import find_model
from trainer.model.weights import WholeCheckpoint
from trainer.optim.groups import require_matches
from trainer.runtime.json_lines import read_object
from trainer.runtime.progress import Position
from trainer.train.start.preflight import (
    TEMPLATE_NAMES,
    DataFiles,
    Files,
    file_states,
    find_files,
    read_chat_template,
)

logger = logging.getLogger(__name__)
Progress = Callable[[], None]
"""Called repeatedly during slow work, so that the watchdog does not consider the rank hung."""


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """Training and validation samples, and their tokenizer."""

    train: Samples
    validation: Samples | None
    tokenizer: PreTrainedTokenizerBase
    """The tokenizer with the chat template that is exported. `tokenizer_digest` covers both."""
    tokenizer_digest: str
    chat_template: str | None


@dataclass(frozen=True, kw_only=True)
class Inputs(PreparedData):
    """The configuration of a run and everything that was read for it."""

    config: Config
    design: Design
    model_files: ModelFiles
    """Small model files, read first, so that exports contain the files that the run started with.
    """
    whole: WholeCheckpoint | None
    """The tensors in the model's files, if the files contain more than the trained model."""
    data_files: Mapping[str, list[int]]
    """Size and modification time of each data file, recorded before the file is read."""

    @property
    def source(self) -> ModelSource:
        return self.design.source

    def schedule_from(self, start: Position) -> Schedule:
        """Return the schedule of rows from a position on. Only some orders need row lengths."""
        data = self.config.data
        seed = self.config.trainer.seed
        lengths = None if data.order == "shuffled" else self.train.row_lengths
        return Schedule(self.train.shares, data.train_batch_size, seed, start, data.order, lengths)

    def total_steps_from(self, start: Position) -> int:
        """Return the number of steps in the whole run, including those before `start`."""
        trainer = self.config.trainer
        schedule = self.schedule_from(start)
        return trainer.total_training_steps or schedule.steps_until(trainer.total_epochs)


def prepare_inputs(config: Config, *, progress: Progress) -> Inputs:
    """Read model files, tokenizer and tokens. The first rank does the work; the others wait.

    Calls `progress` while it works. Raises `ConfigError`, `DataError`, `CannotWriteError`.
    """
    files = find_files(config)
    data_files = file_states(files)
    source = resolve_source(config, progress=progress)
    inputs = Inputs(  # in this order: first the model and data files, then values made from them
        config=config,
        data_files=data_files,
        model_files=ModelFiles.read(Path(source.path)),
        design=require_trainable(config, source),
        whole=whole_checkpoint(source),
        **vars(prepare_data(config, files, source, progress=progress)),
    )
    all_samples = filter(None, (inputs.train, inputs.validation))
    sources = chain.from_iterable(samples.sources for samples in all_samples)
    for dataset in dict.fromkeys(source.dataset for source in sources):
        _require_room(inputs, dataset, progress)
    return inputs


def _require_room(inputs: Inputs, dataset: TokenDataset, progress: Progress) -> None:
    """Raise `DataError` for a token without an embedding or output, or a sample that is longer than
    the table of positions.
    """
    model = inputs.design.model
    num_known = packed_lm.num_known_tokens(model)
    if (found := dataset.first_beyond(num_known, progress)) is not None:
        index, token_id = found
        token = inputs.tokenizer.convert_ids_to_tokens(token_id)
        raise DataError(
            f"{dataset.location(index)}: the token {token!r} has the id {token_id}, but the model "
            f"knows only {num_known} tokens.\n"
            f"Fix: use the model's own tokenizer; new tokens belong in model.new_tokens instead of "
            f"{inputs.source.path}/tokenizer.json"
        )
    lengths = dataset.rows["num_tokens"]
    limit = packed_lm.length_limit(model)
    if limit is not None and lengths.max() > limit:
        index = int(np.argmax(lengths))
        raise DataError(
            f"{dataset.location(index)}: the sample has {lengths[index]} tokens, but the model has "
            f"only {limit} positions.\nFix: data.max_length={limit}"
        )


def require_trainable(config: Config, source: ModelSource) -> Design:
    """Return the model's design. Raises `ConfigError` for a model that cannot be trained."""
    design = design_model(config.model, source, max_length=config.data.max_length)
    require_matches(design.model, config.optim)
    return design


def prepare_data(
    config: Config,
    files: DataFiles,
    model: ModelSource,
    *,
    progress: Progress,
) -> PreparedData:
    """Return the samples of `files`, encoded with the tokenizer of `model`.

    The first process does the work; the others wait for it. Calls `progress` while it works. Raises
    `ConfigError`, `DataError`, `CannotWriteError`.
    """
    data = config.data
    encoders = Encoders(config, model)
    train = _prepare(encoders, files.train, progress)
    if files.validation:
        validation = _prepare(encoders, files.validation, progress)
    else:
        parts = [source.split(data.val_ratio, seed=config.trainer.seed) for source in train]
        train = [trained for trained, _ in parts]
        validation = [held_out for _, held_out in parts]
    held_out = Samples(validation)
    others = [s.name for s, _ in files.train if s.chat_template != data.chat_template]
    if others:
        logger.warning(
            "huggingface/ will not contain the chat templates of these sources: %s",
            ", ".join(others),
        )
    tokenizer, digest = encoders.tokenizer(data.chat_template)
    return PreparedData(
        train=Samples(train),
        validation=held_out if len(held_out) else None,
        tokenizer=tokenizer,
        tokenizer_digest=digest,
        chat_template=read_chat_template(data.chat_template),
    )


def prepare_data_alone(config: Config) -> PreparedData:
    """Return the same tokens as `prepare_inputs`, from the same cache, without the weights."""
    source = source_without_weights(config)
    return prepare_data(config, find_files(config), source, progress=lambda: None)


class Encoders:
    """Turns the rows of each source into tokens, with the tokenizer of a model."""

    def __init__(self, config: Config, model: ModelSource) -> None:
        """Load the model's tokenizer. Raises `ConfigError` if that fails."""
        self.config = config
        trusts_code = config.model.trust_remote_code
        has_code = "auto_map" in read_object(Path(model.path, "tokenizer_config.json"))
        if has_code and not trusts_code and not Path(model.path, "tokenizer.json").exists():
            raise ConfigError(
                f"the tokenizer in {model.path} is Python code, which transformers would replace "
                f"by a tokenizer with other tokens.\nFix: save it there as tokenizer.json"
            )
        try:
            self._own = AutoTokenizer.from_pretrained(model.path, trust_remote_code=trusts_code)
        except Exception as error:  # tokenizers raise many kinds of errors
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"the tokenizer in {model.path} cannot be loaded: {reason}.\n"
                f"Fix: copy a complete tokenizer to that directory"
            ) from error
        # Computing the digest of a large vocabulary takes half a second.
        self.tokenizer = cache(self._tokenizer)

    def _tokenizer(self, chat_template: str | None) -> tuple[PreTrainedTokenizerBase, str]:
        """Return the tokenizer with a chat template, and a digest of both. Raises `ConfigError`."""
        tokenizer = copy.copy(self._own)
        tokenizer.chat_template = read_chat_template(chat_template) or self._own.chat_template
        if chat_template in TEMPLATE_NAMES:
            _require_tokens(tokenizer, chat_template)
        if text := str(tokenizer.chat_template or ""):
            variables = self.config.data.apply_chat_template_kwargs
            if unread := variables.keys() - set(re.findall(r"\w+", text)):
                logger.warning(
                    "data.apply_chat_template_kwargs: the chat template %s does not read %s. "
                    "Fix: correct the name, or remove it",
                    chat_template or "of the model",
                    ", ".join(sorted(unread)),
                )
        return tokenizer, tokenizer_digest(tokenizer)

    def encoding(self, source: Source) -> tuple[PreTrainedTokenizerBase, str, PrepareOptions]:
        """Return the tokenizer for a source's rows, its digest, and the options for the rows."""
        data = self.config.data
        options = PrepareOptions(
            keys=source.keys,
            max_length=data.max_length,
            truncation=data.truncation,
            on_bad_row=data.on_bad_row,
            max_samples=source.max_samples,
            special_in_content=data.special_in_content,
        )
        # Plain text has no template and no turns, so a change of their settings must not prepare
        # it again.
        if source.keys.text_key is not None:
            return *self.tokenizer(None), options
        kwargs = data.apply_chat_template_kwargs
        options = replace(
            options,
            turns=data.turns,
            train_on=data.train_on,
            template_kwargs=kwargs,
        )
        return *self.tokenizer(source.chat_template), options

    def row_encoder(self, source: Source) -> RowEncoder:
        """Return the encoder of a source's rows."""
        tokenizer, _, options = self.encoding(source)
        return RowEncoder(tokenizer, options)


def _require_tokens(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise `ConfigError` if the tokenizer lacks tokens that the template writes around turns."""
    known = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    written = dict.fromkeys(re.findall(r"<\|\w+\|>", str(tokenizer.chat_template)))
    if missing := [token for token in written if token not in known]:
        listed = ",".join(f'"{token}"' for token in missing)
        raise ConfigError(
            f"data.chat_template={name} writes special tokens that this tokenizer does not have.\n"
            f"Fix: add them with 'model.new_tokens=[{listed}]'"
        )
    if not tokenizer.eos_token:
        raise ConfigError(
            f"data.chat_template={name} needs a tokenizer with an eos_token, but this one has none.\n"
            f"Fix: set eos_token in its tokenizer_config.json"
        )


def _prepare(encoders: Encoders, sources: Files, progress: Progress) -> list[SourceSamples]:
    """Prepare the tokens of each source. Each source has its own cache entry."""
    prepared = []
    for source, files in sources:
        for shards in missing_shards(files):
            logger.warning(
                "source '%s': some files of %s are missing. Fix: copy them too", source.name, shards
            )
        tokenizer, digest, options = encoders.encoding(source)
        try:
            dataset = prepare(
                files,
                tokenizer=tokenizer,
                tokenizer_digest=digest,
                options=options,
                cache_dir=Path(encoders.config.data.cache_dir),
                progress=progress,
            )
        except DataError as error:
            if len(sources) == 1:
                raise
            raise DataError(f"source '{source.name}': {error}") from error
        prepared.append(dataset.whole(source.name, source.repeat))
    return prepared


def source_without_weights(config: Config) -> ModelSource:
    """Return the configured model without weights.

    From the Hub, this fetches only config.json and the tokenizer.
    """
    return resolve_source(replace(config, model=replace(config.model, random_weights=True)))


def resolve_source(config: Config, *, progress: Progress = lambda: None) -> ModelSource:
    """Return the configured model, downloaded if necessary. Raises `ConfigError`.

    `progress` is called as bytes arrive.
    """
    name = config.model.partial_pretrain
    has_random_weights = config.model.random_weights
    path = find_model(name, random_weights=has_random_weights, progress=progress)
    return source_at(config, path)


def source_at(config: Config, path: str, *, random_weights: bool = False) -> ModelSource:
    """Return the model in a directory, with the tokens that the configuration adds.

    `random_weights`: use random weights even if the configuration does not.
    """
    model = config.model
    ids = dict[str, int]()
    random_weights = random_weights or model.random_weights or model.partial_pretrain == QUICKSTART
    if model.new_tokens:
        path, ids = new_tokens.extended(path, model.new_tokens, Path(config.data.cache_dir))
    return ModelSource(path, random_weights, model.trust_remote_code, ids)
