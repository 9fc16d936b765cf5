"""What a run is made from: model files, tokenizer and tokens, ready before any process group exists."""

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trainer.config import QUICKSTART, Config, Source, sources_of
from trainer.data.chat import tokenizer_digest
from trainer.data.conversation import RowKeys
from trainer.data.rows import resolve_files
from trainer.data.sample_writer import PrepareOptions
from trainer.data.samples import Samples, SourceSamples
from trainer.data.token_cache import prepare
from trainer.errors import DataError
from trainer.model import new_tokens
from trainer.model.assemble import per_document_reason, require_parts
from trainer.model.load import whole_checkpoint
from trainer.model.packed_lm import ModelSource
from trainer.model.source import find_model
from trainer.quickstart import MODEL_DIR, TRAIN_FILE
from trainer.run.preflight import read_chat_template
from trainer.weights import WholeCheckpoint

logger = logging.getLogger(__name__)
Renderer = tuple[PreTrainedTokenizerBase, str]
"""A tokenizer with a chat template, and the digest of both."""


@dataclass(frozen=True)
class Inputs:
    """What a run is made from, ready before any process group exists."""

    source: ModelSource
    tokenizer: PreTrainedTokenizerBase
    """With the chat template that is exported; its `tokenizer_digest` covers both."""
    tokenizer_digest: str
    chat_template: str | None
    train: Samples
    validation: Samples | None
    whole: WholeCheckpoint | None
    """Where the model is the text part of a checkpoint of several parts."""


def prepare_inputs(config: Config, *, progress: Callable[[], None]) -> Inputs:
    """Model files, tokenizer and tokens. Needs no process group; the first rank that asks does the work once.

    `progress` is called while it goes on.
    """
    data = config.data
    train_files, val_files = _files(config, "train_files"), _files(config, "val_files")
    source = resolve_source(config, progress=progress)
    # what config.json alone refuses is refused before anything is tokenised
    per_document_reason(config.model, source, max_length=data.max_length)
    require_parts(config.model, source)
    if (whole := whole_checkpoint(source)) is not None:
        logger.info("trains the text part; %d other tensors pass through", len(whole.others))
    own = AutoTokenizer.from_pretrained(source.path, trust_remote_code=source.trust_remote_code)

    @cache
    def renderer(chat_template: str | None) -> Renderer:
        tokenizer = copy.copy(own)
        tokenizer.chat_template = read_chat_template(chat_template) or own.chat_template
        return tokenizer, tokenizer_digest(tokenizer)  # half a second for a large vocabulary

    train = _prepare(config, train_files, renderer, progress)
    if val_files:
        held_out = _prepare(config, val_files, renderer, progress)
    else:
        limit = None if data.val_max_samples == -1 else data.val_max_samples
        parts = [source.split(val_ratio=data.val_ratio, seed=config.trainer.seed, limit=limit) for source in train]
        train, held_out = [part for part, _ in parts], [part for _, part in parts]
    if own_templates := [source.name for source, _ in train_files if source.chat_template != data.chat_template]:
        logger.warning(
            "rendered with chat templates of their own, which huggingface/ does not carry: %s", ", ".join(own_templates)
        )
    tokenizer, digest = renderer(data.chat_template)
    validation = Samples(held_out)
    return Inputs(
        source=source,
        tokenizer=tokenizer,
        tokenizer_digest=digest,
        chat_template=read_chat_template(data.chat_template),
        train=Samples(train),
        validation=validation if len(validation.lengths) else None,
        whole=whole,
    )


def resolve_source(config: Config, *, progress: Callable[[], None] = lambda: None) -> ModelSource:
    model = config.model
    if model.partial_pretrain == QUICKSTART:
        return source_at(config, str(MODEL_DIR), random_weights=True)
    path = find_model(model.partial_pretrain, random_weights=model.random_weights, progress=progress)
    return source_at(config, path, random_weights=model.random_weights)


def source_at(config: Config, path: str, *, random_weights: bool) -> ModelSource:
    """The model of a directory, with the tokens that the configuration adds."""
    model, ids = config.model, dict[str, int]()
    if model.new_tokens:
        path, ids = new_tokens.extended(path, model.new_tokens, Path(config.data.cache_dir))
    return ModelSource(path, random_weights, model.trust_remote_code, ids)


def _files(config: Config, key: str) -> list[tuple[Source, list[Path]]]:
    """The sources of a key with their files. Raises `DataError` for what is missing or no data file."""

    def resolved(files: str | list[str]) -> list[Path]:
        if files == QUICKSTART:
            return [TRAIN_FILE]
        return resolve_files(files)

    return [(source, resolved(source.files)) for source in sources_of(config.data, key)]


def _prepare(
    config: Config,
    sources: list[tuple[Source, list[Path]]],
    renderer: Callable[[str | None], Renderer],
    progress: Callable[[], None],
) -> list[SourceSamples]:
    """Each source with a cache entry of its own."""
    data, prepared = config.data, []
    for source, files in sources:
        tokenizer, digest = renderer(source.chat_template)
        options = PrepareOptions(
            keys=RowKeys(source.messages_key, source.tools_key, source.prompt_key, source.response_key),
            max_length=data.max_length,
            truncation=data.truncation,
            on_bad_row=data.on_bad_row,
            max_bad_fraction=data.max_bad_fraction,
            max_samples=source.max_samples,
            special_in_content=data.special_in_content,
            template_kwargs=data.apply_chat_template_kwargs,
        )
        try:
            dataset = prepare(
                files,
                tokenizer=tokenizer,
                tokenizer_digest=digest,
                options=options,
                cache_dir=Path(data.cache_dir),
                progress=progress,
            )
        except DataError as error:
            raise error if len(sources) == 1 else DataError(f"source '{source.name}': {error}") from error
        prepared.append(dataset.whole(source.name, source.repeat))
    return prepared
