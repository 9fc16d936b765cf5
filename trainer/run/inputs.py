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
from trainer.run import finished
from trainer.run.preflight import find_files, find_model_dir
from trainer.run.prepared_data import PreparedData, prepare_data
from trainer.runtime.environment import rank_and_size
from trainer.weights import WholeCheckpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Inputs(PreparedData):
    """What a run is made from, ready before any process group exists."""

    source: ModelSource
    whole: WholeCheckpoint | None
    """Where the model is the text part of a checkpoint of several parts."""
    stamp: str
    """Of all that, for `finished`."""


def prepare_inputs(config: Config, *, progress: Callable[[], None]) -> Inputs:
    """Model files, tokenizer and tokens. Needs no process group; the first rank that asks does the work once.

    `progress` is called while it goes on.
    """
    files, model_dir = find_files(config), find_model_dir(config.model, progress=progress)
    stamp = finished.stamp_of(config, files, model_dir, num_ranks=rank_and_size()[1])
    source = source_at(config, model_dir)
    require_trainable(config, source)
    if (whole := whole_checkpoint(source)) is not None:
        logger.info("trains the text part; %d other tensors pass through", len(whole.others))
    data = prepare_data(config, files, source, progress=progress)
    return Inputs(**vars(data), source=source, whole=whole, stamp=stamp)


def require_trainable(config: Config, source: ModelSource) -> str | None:
    """Raises `ConfigError` for what config.json alone refuses, before anything is tokenised; why documents run one by
    one, None if they run packed.
    """
    reason = per_document_reason(config.model, source, max_length=config.data.max_length)
    require_splittable(config.model, source, max_length=config.data.max_length)
    require_parts(config.model, source)
    return reason


def prepare_data_alone(config: Config, *, only_cached: bool = False) -> PreparedData:
    """The tokens of `prepare_inputs`, from the same cache; of the model its tokenizer and config.json are enough.

    Raises `NotPreparedError` where they would have to be made and only those `only_cached` are asked for.
    """
    source = source_without_weights(config)
    return prepare_data(config, find_files(config), source, progress=lambda: None, only_cached=only_cached)


def source_without_weights(config: Config) -> ModelSource:
    """Of a Hub id config.json and tokenizer alone are fetched."""
    return resolve_source(replace(config, model=replace(config.model, random_weights=True)))


def resolve_source(config: Config) -> ModelSource:
    return source_at(config, find_model_dir(config.model))


def source_at(config: Config, path: str, *, random_weights: bool = False) -> ModelSource:
    """The model of a directory, with the tokens that the configuration adds; `random_weights` whatever that says."""
    model, ids = config.model, dict[str, int]()
    random_weights = random_weights or model.random_weights or model.partial_pretrain == QUICKSTART
    if model.new_tokens:
        path, ids = new_tokens.extended(path, model.new_tokens, Path(config.data.cache_dir))
    return ModelSource(path, random_weights, model.trust_remote_code, ids)
