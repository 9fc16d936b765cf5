"""What a run is made from: model files, tokenizer and tokens, ready before any process group exists."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.config import QUICKSTART, Config
from trainer.model import new_tokens
from trainer.model.assemble import per_document_reason, require_parts, require_splittable
from trainer.model.load import whole_checkpoint
from trainer.model.packed_lm import ModelSource
from trainer.model.source import find_model
from trainer.quickstart import MODEL_DIR
from trainer.run.prepared_data import PreparedData, find_files, prepare_data
from trainer.weights import WholeCheckpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Inputs(PreparedData):
    """What a run is made from, ready before any process group exists."""

    source: ModelSource
    whole: WholeCheckpoint | None
    """Where the model is the text part of a checkpoint of several parts."""


def prepare_inputs(config: Config, *, progress: Callable[[], None]) -> Inputs:
    """Model files, tokenizer and tokens. Needs no process group; the first rank that asks does the work once.

    `progress` is called while it goes on.
    """
    files = find_files(config)
    source = resolve_source(config, progress=progress)
    # what config.json alone refuses is refused before anything is tokenised
    per_document_reason(config.model, source, max_length=config.data.max_length)
    require_splittable(config.model, source, max_length=config.data.max_length)
    require_parts(config.model, source)
    if (whole := whole_checkpoint(source)) is not None:
        logger.info("trains the text part; %d other tensors pass through", len(whole.others))
    data = prepare_data(config, files, source, progress=progress)
    return Inputs(**vars(data), source=source, whole=whole)


def prepare_data_alone(config: Config) -> PreparedData:
    """The tokens of `prepare_inputs`, from the same cache; of the model its tokenizer and config.json are enough."""
    files = find_files(config)
    without_weights = replace(config, model=replace(config.model, random_weights=True))
    return prepare_data(config, files, resolve_source(without_weights), progress=lambda: None)


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
