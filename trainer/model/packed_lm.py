"""A transformers causal LM that takes a `PackedBatch` and returns its loss.

Shape suffixes: T packed tokens, S supervised positions, H hidden size, V vocabulary.
"""

import copy
import inspect
import re
import types
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from trainer.config import ConfigError
from trainer.data.batch import LossOutput, PackedBatch
from trainer.model import attention, experts, rope, state_mixers
from trainer.model.attention import DocumentLengths
from trainer.model.head import LossHead, measure, train
from trainer.model.losses import LOSSES, Loss
from trainer.model.pretrained import ModelSource
from trainer.model.weights import base_name_of, has_tied_head

_DRAWN = ("dropout", "pdrop", "dropout_prob", "jitter_noise")
_POSITION_TABLE = re.compile(r"\.(wpe|positions_embed|embed_positions)(\.weight)?$|\.pos_encoding$")


def notes(config: PretrainedConfig) -> Iterator[str]:
    """Yield notes for the user on how training treats this architecture."""
    drawn = [
        f"{name}={value:g}"
        for name, value in sorted(vars(config).items())
        if name.endswith(_DRAWN) and not name.startswith(("classifier", "summary")) and value
    ]
    if config.model_type == "phimoe":
        drawn.append("its router's choice of experts")
    if drawn:
        yield f"drawn at random in training for each step and rank: {', '.join(drawn)}"


def unpackable_reason(config: PretrainedConfig, *, max_length: int) -> str | None:
    """Return the reason why documents of up to `max_length` tokens cannot share a forward pass, or
    None.
    """
    limit = rope.length_limit(config)
    if limit is not None and max_length > limit:
        return (
            f"above {limit} tokens, its rotary positions depend on the longest document of the batch "
            f"(packed with data.max_length={limit} or less)"
        )
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        chunk_size = vars(config)["attention_chunk_size"]
        if max_length > chunk_size:
            return (
                f"its layers attend in chunks of {chunk_size} tokens (packed with "
                f"data.max_length={chunk_size} or less)"
            )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "its code comes with the model"
    return None


def num_known_tokens(model: PreTrainedModel) -> int:
    """Return the number of tokens that the model can both read and write.

    The output head has fewer rows than the embeddings if the checkpoint omits tokens that the model
    never writes.
    """
    embeddings: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    return min(len(embeddings.weight), head.out_features)


def length_limit(model: PreTrainedModel) -> int | None:
    """Return the maximum length of a document, in tokens; None unless the model has a table of
    positions.
    """
    names = (name for name, _ in chain(model.named_parameters(), model.named_buffers()))
    has_table = any(map(_POSITION_TABLE.search, names))
    return model.config.max_position_embeddings if has_table else None


def build_on_meta(
    source: ModelSource,
    *,
    is_packed: bool,
    uses_kernels: bool = False,
    loss: Loss = LOSSES["cross_entropy"],
) -> PreTrainedModel:
    """Build the model without weights (buffers are real). Its forward becomes `PackedBatch ->
    LossOutput`.

    `uses_kernels`: linear attention and Mamba use installed kernels that take document bounds.
    """
    model: Any = _empty_model(source)
    model.tie_weights()  # parameters registered under init_empty_weights are copies
    if model.base_model is model:  # some classes name a submodule that does not exist
        model.base_model_prefix = base_name_of(model)
    _require_trainable(model, source)
    rope.follow_documents(model, is_packed=is_packed)
    model.attends_packed = is_packed and state_mixers.loop_over_documents(
        model, uses_kernels=uses_kernels
    )
    model.mixes_packed = bool(state_mixers.kernel_kinds(model))
    if model.attends_packed:
        attention.register()
        model.set_attn_implementation(attention.PACKED)
    forward = _forward_fused if _is_head_all(model) else _forward_full_logits
    model.set_output_embeddings(LossHead.from_linear(model.get_output_embeddings(), loss))
    _require_unshared(model, source)
    model.config.use_cache = False
    model.original_forward = model.forward
    model.forward = types.MethodType(forward, model)
    model.is_packed = is_packed
    model.trains_cross_entropy = loss.is_cross_entropy
    model.loss_terms = tuple(loss.terms)
    return model


def _empty_model(source: ModelSource) -> PreTrainedModel:
    """Build transformers' own model without allocating its parameters."""
    config = copy.deepcopy(source.config)  # the model writes to it
    # fused attention ignores soft caps without a warning; None selects it where it exists
    is_capped = getattr(config, "attn_logit_softcapping", None)
    try:
        with init_empty_weights(include_buffers=False):
            return AutoModelForCausalLM.from_config(
                config,
                attn_implementation="eager" if is_capped else None,
                experts_implementation=experts.COUNTED,
                dtype=torch.float32,
                trust_remote_code=source.trust_remote_code,
            )
    except ValueError as error:
        raise ConfigError(f"model.partial_pretrain={source.path}: {error}") from error


def _require_trainable(model: PreTrainedModel, source: ModelSource) -> None:
    """Raise `ConfigError` for models that sharding or the fused head would compute incorrectly."""
    name = f"model.partial_pretrain={source.path}: {type(model).__name__}"
    for key, share in vars(source.config).items():
        if key.endswith("layerdrop") and share:
            raise ConfigError(
                f"{name} skips layers at random in training ({key}={share:g} in config.json). "
                f"Each rank would skip different layers, so sharded gradients would be wrong.\n"
                f'Fix: set "{key}" to 0 in {source.path}/config.json'
            )
    head: Any = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ConfigError(
            f"{name}: its output head is {type(head).__name__}, not a linear layer.\n"
            f"Fix: choose a causal language model with a linear output head"
        )
    if model.base_model is model:
        raise ConfigError(
            f"{name} has no submodule without the output head (base_model_prefix), so it cannot be "
            f"trained"
        )


def _require_unshared(model: PreTrainedModel, source: ModelSource) -> None:
    """Raise `ConfigError` if layers share parameters: sharding by layer and the export would be
    wrong.

    Some architectures share the bias of a head if they have one.
    """
    num_names = len(list(model.named_parameters(remove_duplicate=False)))
    if num_names - len(list(model.parameters())) != has_tied_head(model):
        raise ConfigError(
            f"model.partial_pretrain={source.path}: {type(model).__name__} shares parameters "
            f"between layers, which cannot be sharded layer by layer"
        )


class _BaseOutput(list[Tensor]):
    """A stand-in for the output of a base model, with hidden states only."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


def _is_head_all(model: PreTrainedModel) -> bool:
    """Return True if the logits are just the output head applied to the last hidden states, without
    a scale, a cap, another layer or a shorter vocabulary.

    This runs the architecture's own forward once, with stand-ins for the base model and the head.
    """
    head: Any = model.get_output_embeddings()
    # With the stand-in for the head, all logits of a position equal its first hidden value. This is
    # -9 for the first position, which a scale or a soft cap changes.
    hidden_1TH = torch.linspace(-9.0, 9.0, 2 * head.in_features).view(1, 2, -1)
    parts = [part for part in model.base_model.modules() if isinstance(part, PreTrainedModel)]
    try:
        for part in parts:
            part.forward = lambda *_, **__: _BaseOutput([hidden_1TH])
        head.forward = lambda hidden: hidden[..., :1].expand(*hidden.shape[:-1], head.out_features)
        logits_1TV = model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False).logits
        return torch.equal(logits_1TV, head(hidden_1TH))
    except Exception:  # the architecture does more with the hidden states
        return False
    finally:
        for module in (*parts, head):
            vars(module).pop("forward", None)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks that are sharded, compiled and recomputed one by one: the largest
    list of modules.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ConfigError(
            f"{type(model).__name__} has no list of decoder layers, so it cannot be trained"
        )
    sizes = [sum(parameter.numel() for parameter in layers.parameters()) for layers in lists]
    return list(lists[sizes.index(max(sizes))])


def sequence_group(model: PreTrainedModel) -> ProcessGroup | None:
    """Return the ranks that share the tokens of a batch; None if each rank has its own batch."""
    return vars(model).get("sequence_group")


def run_plain(
    model: PreTrainedModel,
    forward: Callable[..., Any],
    batch: PackedBatch,
    **more: Any,
) -> Any:
    """Call a forward of the architecture. Modules inside it can look up the batch's documents."""
    with attention.documents(
        DocumentLengths(batch.seqlens, sequence_group(model)) if model.is_packed else None
    ):
        return forward(**forward_arguments(model, batch), **more)


def forward_arguments(model: PreTrainedModel, batch: PackedBatch) -> dict[str, Any]:
    """Return the arguments of the architecture's forward. A single document needs neither positions
    nor bounds.
    """
    arguments: dict[str, Any] = {"input_ids": batch.input_ids_T[None], "use_cache": False}
    if model.is_packed:
        arguments["position_ids"] = batch.position_ids_T[None]
    elif len(batch.seqlens) > 1:
        raise RuntimeError("a batch has several documents, but this model takes one at a time")
    if model.attends_packed:
        arguments |= {"max_length_q": batch.max_seqlen, "lengths": attention.running()}
    if model.attends_packed or model.mixes_packed:
        arguments["cu_seq_lens_q"] = batch.cu_seqlens_D1
    if model.mixes_packed:
        is_first_1T = arguments["position_ids"] == 0
        arguments["seq_idx"] = is_first_1T.cumsum(1, dtype=torch.int32) - 1
    return arguments


def _forward_fused(self: PreTrainedModel, batch: PackedBatch) -> LossOutput:
    """Return the loss of the supervised positions. The head computes only these."""
    hidden_TH = run_plain(self, self.base_model, batch).last_hidden_state[0]
    head: Any = self.get_output_embeddings()
    return head(hidden_TH[batch.supervised_S], batch.labels_T[batch.supervised_S])


def _forward_full_logits(self: PreTrainedModel, batch: PackedBatch) -> LossOutput:
    """Return the loss of a model that transforms its logits. The model's own forward computes the
    logits of the supervised positions.
    """
    plain: Any = self.original_forward
    if "logits_to_keep" in inspect.signature(plain).parameters:
        logits_SV = run_plain(self, plain, batch, logits_to_keep=batch.supervised_S).logits[0]
    else:
        logits_SV = run_plain(self, plain, batch).logits[0, batch.supervised_S]
    labels_S = batch.labels_T[batch.supervised_S]
    if not torch.is_grad_enabled():
        return measure(logits_SV, labels_S)
    head: Any = self.get_output_embeddings()
    return train(logits_SV, labels_S, head.loss)
