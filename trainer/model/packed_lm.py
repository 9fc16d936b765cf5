"""A transformers causal LM that takes a `PackedBatch` and returns the summed cross-entropy.

Shape suffixes: T packed tokens, S supervised positions, H hidden size.
"""

import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from trainer.batch import PackedBatch
from trainer.config import ConfigError
from trainer.model import attention
from trainer.model.head import LossHead

_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
_LOGIT_TRANSFORMS = ("logit_scale", "logits_scaling", "final_logit_softcapping")


@dataclass(frozen=True)
class ModelSource:
    """Where architecture and weights come from. `path` is a local directory (Hub ids are resolved before)."""

    path: str
    random_weights: bool
    trust_remote_code: bool


def read_config(source: ModelSource) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(source.path, trust_remote_code=source.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.partial_pretrain={source.path} has no usable config.json: {error}") from error


def unpackable_reason(config: PretrainedConfig) -> str | None:
    """Why documents of this architecture cannot lie side by side in one forward pass, or None."""
    layer_types = set(getattr(config, "layer_types", None) or ())
    if odd := layer_types - _PACKABLE_LAYERS:
        return f"its layers ({', '.join(sorted(odd))}) mix documents or need kernels that know their bounds"
    if getattr(config, "attn_logit_softcapping", None):
        return "its attention caps logits"
    if config.model_type in ("gpt_oss",):
        return "its attention has sinks"
    return None


def build_on_meta(source: ModelSource, config: PretrainedConfig, *, is_packed: bool) -> PreTrainedModel:
    """The model without weights (buffers are real), its forward replaced by `PackedBatch -> summed loss`."""
    attention.register()
    implementation = attention.PACKED if is_packed else "sdpa"
    with init_empty_weights(include_buffers=False):
        try:
            model = AutoModelForCausalLM.from_config(
                config,
                attn_implementation=implementation,
                dtype=torch.float32,
                trust_remote_code=source.trust_remote_code,
            )
        except ValueError as error:
            if is_packed or "attention" not in str(error).lower():
                raise ConfigError(f"model.partial_pretrain={source.path}: {error}") from error
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", dtype=torch.float32, trust_remote_code=source.trust_remote_code
            )
    model.tie_weights()  # parameters registered under init_empty_weights are copies
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ConfigError(f"model.partial_pretrain={source.path}: {type(model).__name__} has no linear output head")
    model.set_output_embeddings(LossHead.from_linear(head))
    model.config.use_cache = False
    transforms = [name for name in _LOGIT_TRANSFORMS if getattr(config, name, None) not in (None, 0, 1, 1.0)]
    model.original_forward = model.forward
    forward = _forward_full_logits if transforms else _forward_fused
    model.forward = types.MethodType(forward, model)
    model.is_packed = is_packed
    return model


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks that are sharded, compiled and recomputed one by one."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]
    if not layers:
        raise ConfigError(f"{type(model).__name__} does not say which of its modules are decoder layers")
    return layers


def _bounds(model: PreTrainedModel, batch: PackedBatch) -> dict[str, object]:
    if model.is_packed:
        return {
            "cu_seq_lens_q": batch.cu_seqlens_D1,
            "cu_seq_lens_k": batch.cu_seqlens_D1,
            "max_length_q": batch.max_seqlen,
            "max_length_k": batch.max_seqlen,
            "seqlens": batch.seqlens,
        }
    if len(batch.seqlens) > 1:
        raise RuntimeError("several documents in one batch of a model that takes them one by one")
    return {}


def _forward_fused(self: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """Summed cross-entropy over the supervised positions, float64 scalar; the head sees only those positions."""
    hidden_TH = self.base_model(
        input_ids=batch.input_ids_T[None],
        position_ids=batch.position_ids_T[None],
        use_cache=False,
        **_bounds(self, batch),
    ).last_hidden_state[0]
    loss: Tensor = self.get_output_embeddings()(hidden_TH[batch.supervised_S], batch.labels_T[batch.supervised_S])
    return loss


def _forward_full_logits(self: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """The same for models that transform their logits: their own forward, asked for the supervised positions."""
    plain: Any = self.original_forward
    logits_SV = plain(
        input_ids=batch.input_ids_T[None],
        position_ids=batch.position_ids_T[None],
        use_cache=False,
        logits_to_keep=batch.supervised_S,
        **_bounds(self, batch),
    ).logits[0]
    losses_S = F.cross_entropy(logits_SV.float(), batch.labels_T[batch.supervised_S], reduction="none")
    return losses_S.sum(dtype=torch.float64)
