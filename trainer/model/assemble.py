"""From a configuration to a model ready to train: meta device, sharding, memory, weights, self-check, in this order."""

import logging

import torch
from transformers import PreTrainedModel

from trainer.config import ConfigError, ModelConfig
from trainer.model import load, packed_lm, parallelize, selfcheck
from trainer.model.packed_lm import ModelSource
from trainer.runtime import distributed
from trainer.runtime.distributed import World

logger = logging.getLogger(__name__)


def build_model(config: ModelConfig, source: ModelSource, *, world: World, seed: int) -> PreTrainedModel:
    """Collective. Raises `ConfigError` if its loss is not that of transformers' own forward pass."""
    architecture = packed_lm.read_config(source)
    is_packed = wants_packing(config, source)
    model = packed_lm.build_on_meta(source, architecture, is_packed=is_packed)
    parallelize.parallelize(model, config, world)
    offload = config.fsdp_config.cpu_offload
    load.materialize(model, torch.device("cpu") if offload else world.device, buffer_device=world.device)
    load.load_weights(model, source, seed=seed)
    error = selfcheck.packing_error(model, world.device)
    tolerance = selfcheck.TOLERANCE[distributed.compute_dtype(config.fsdp_config.param_dtype, world.device)]
    if not error <= tolerance:
        raise ConfigError(
            f"self-check failed: the loss of {type(model).__name__} differs by {error:.1e} from transformers' "
            f"own forward pass (allowed: {tolerance:.0e}); model.attention=per_document may "
            f"help, unless this architecture transforms its logits in a way not known here"
        )
    logger.info("self-check: loss equals transformers' own forward pass within %.0e (relative)", max(error, 1e-9))
    return model


def wants_packing(config: ModelConfig, source: ModelSource) -> bool:
    """Whether documents share a forward pass, as configured or as the architecture allows."""
    if config.attention == "per_document":
        return False
    reason = packed_lm.unpackable_reason(packed_lm.read_config(source))
    if reason is not None and config.attention == "packed":
        raise ConfigError(f"model.attention=packed: this model cannot be packed, {reason}; use model.attention=auto")
    return reason is None
