"""Costs of samples in floating-point operations, computed from the shapes of a model."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from trainer.data.batch import StepBatch
from trainer.data.batch_plan import squared_length
from trainer.model.experts import experts_of, num_chosen
from trainer.model.nf4 import num_weights
from trainer.model.packed_lm import decoder_layers

_WITHOUT_PAIRS = ("linear_attention", "mamba", "conv", "moe", "mlp")
"""Types of layers in which no token attends to single other tokens."""
_UNCOUNTED = ("cpmant", "dbrx", "diffllama", "hrm_text", "xlstm")
"""Model types whose cost does not follow from their weights: layers run several times (hrm_text),
attention has two maps (diffllama), or experts are stored as flat matrices (dbrx).
"""


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of the forward and backward pass.

    The cost is 6 per matrix parameter and token, plus attention. The head is computed only at
    supervised positions. A frozen parameter costs 4, because it gets no gradient. It costs 2 if
    nothing before it is trained, because its input then needs no gradient either.

    Attention over n tokens costs 6 * layers * heads * (query-key size + value size) * n**2: two
    products forward, four backward, without credit for causality or recomputation. Source: PaLM
    (2022), appendix B. Within a sliding window, n**2 becomes `squared_length`.
    """

    per_token: float
    per_loss_token: float
    per_squared_length: float
    """Attention cost of the layers without a sliding window."""
    per_window: Mapping[int, float] = field(default_factory=dict)
    """{sliding window: attention cost of the layers with this window}."""

    def of(self, batch: StepBatch) -> float:
        matrices = self.per_token * batch.num_tokens + self.per_loss_token * batch.num_loss_tokens
        return matrices + self.attention(batch.lengths)

    def attention(self, lengths: Sequence[int]) -> float:
        """Return the number of floating-point operations of attention over documents of these
        lengths.
        """
        lengths_D = np.asarray(lengths, dtype=np.float64)
        windowed = sum(
            cost * float(squared_length(lengths_D, w).sum()) for w, cost in self.per_window.items()
        )
        return self.per_squared_length * float((lengths_D**2).sum()) + windowed


def step_flops(model: PreTrainedModel) -> StepFlops | None:
    """Return the cost of a step; None if it is unknown, as for a model with states
    (three-dimensional parameters that are not experts).
    """
    shares = _met_shares(model)
    has_states = any(p.ndim > 2 and p not in shares for p in model.parameters())
    is_unknown = has_states or model.config.get_text_config().model_type in _UNCOUNTED
    return None if is_unknown else _flops(model)


def length_costs(model: PreTrainedModel) -> tuple[float, dict[int, float]]:
    """Return (c, {window w: c_w}), which determine the cost of a sample from its length.

    n supervised tokens cost in proportion to n + c * n**2 + the sum over sliding windows of c_w *
    `squared_length(n, w)`, if attention skips masked pairs. An architecture without attention heads
    has c = 0 and no windows.
    """
    cost = _flops(model)
    doubled = 2 * (cost.per_token + cost.per_loss_token)
    return cost.per_squared_length / doubled, {
        window: per / doubled for window, per in cost.per_window.items()
    }


def _met_shares(model: PreTrainedModel) -> dict[nn.Parameter, float]:
    """Return {expert parameter: share of it that is used for each token}. Expert biases, which have
    two dimensions, get 0.
    """
    chosen = num_chosen(model.config) or 0
    shares: dict[nn.Parameter, float] = {}
    for module in experts_of(model) if chosen else ():
        share = chosen / module.num_experts
        shares |= {p: share if p.ndim == 3 else 0.0 for p in module.parameters()}
        for adapter in vars(module).get("adapters", {}).values():
            for part in (adapter.lora_A, adapter.lora_B):
                shares |= dict.fromkeys(part.parameters(), share)
    return shares


def _flops(model: PreTrainedModel) -> StepFlops:
    """Return the cost of a step. An embedding lookup costs nothing; tied embeddings count as the
    head.
    """
    config = model.config.get_text_config()
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    head: Any = model.get_output_embeddings()
    lookups = (module for module in model.modules() if isinstance(module, nn.Embedding))
    outside = {head.weight, *(lookup.weight for lookup in lookups)}
    shares = _met_shares(model)
    per_token = 0.0
    is_reached = False
    for parameter in model.parameters():  # in order of use
        is_reached |= parameter.requires_grad
        if parameter.ndim >= 2 and parameter not in outside:
            per_token += (
                _per_use(parameter, is_reached)
                * num_weights(parameter)
                * shares.get(parameter, 1.0)
            )
    first = _first_reached_layer(model)
    attention = Counter[int | None]()
    types = getattr(config, "layer_types", None) or [""] * len(layers)
    for n, layer in enumerate(layers):
        if types[n] not in _WITHOUT_PAIRS:
            attention[_window(layer, types[n])] += (6 if n >= first else 2) * _width(layer)
    return StepFlops(
        per_token=per_token,
        per_loss_token=_per_use(head.weight, True) * head.weight.numel(),
        per_squared_length=attention[None],
        per_window={window: cost for window, cost in attention.items() if window is not None},
    )


def _per_use(parameter: nn.Parameter, is_reached: bool) -> int:
    """Return operations per element and token: two forward, two for the input's gradient if this
    parameter or an earlier one is trained, and two for the parameter's own gradient if it is
    trained.
    """
    return 2 + 2 * is_reached + 2 * parameter.requires_grad


def _first_reached_layer(model: PreTrainedModel) -> int:
    """Return the number of the first layer that a gradient passes through."""
    lookup: Any = model.get_input_embeddings()
    # Part 0 is the embeddings, and part n + 1 is layer n. A gradient passes through the first
    # trained part and all parts after it.
    parts = [[lookup.weight], *(layer.parameters() for layer in decoder_layers(model))]
    trained = [
        n for n, part in enumerate(parts) if any(parameter.requires_grad for parameter in part)
    ]
    return max(0, trained[0] - 1) if trained else len(parts)


def _window(layer: PretrainedConfig, kind: str) -> int | None:
    """Return the largest number of tokens that a token sees in a layer, itself included; None if it
    sees all tokens before it.

    `kind`: the type of the layer. If config.json has no types (''), its window applies to all layers.
    """
    window = getattr(layer, "sliding_window", None)
    is_windowed = (
        kind == "sliding_attention" if kind else getattr(layer, "use_sliding_window", True)
    )
    return window if window and is_windowed else None


def _width(layer: PretrainedConfig) -> int:
    """Return the total size of keys and values over all heads of a layer."""
    num_heads: int = getattr(layer, "num_attention_heads", None) or 0
    if not num_heads:
        return 0
    head_size = getattr(layer, "head_dim", None) or layer.hidden_size // num_heads
    qk_size: int = getattr(layer, "qk_head_dim", None) or head_size
    v_size: int = getattr(layer, "v_head_dim", None) or head_size
    return num_heads * (qk_size + v_size)
