"""What samples cost, from the shapes of a model."""

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from trainer.batch import StepFlops


def step_flops(model: PreTrainedModel) -> StepFlops | None:
    """None for a mixture of experts (parameters of three dimensions), which uses a part of its parameters only."""
    return _flops(model) if all(p.ndim < 3 for p in model.parameters()) else None


def quadratic_cost(model: PreTrainedModel) -> float:
    """c such that n tokens, all supervised, cost in proportion to n + c * n**2, when attention skips what is masked.

    An architecture without attention heads has c = 0. Of a mixture of experts every expert counts, so c is too small.
    """
    cost = _flops(model)
    return cost.per_squared_length / 2 / (cost.per_token + cost.per_loss_token)


def _flops(model: PreTrainedModel) -> StepFlops:
    """An embedding only looks up, which costs nothing; a tied one is the head too, and counts as that."""
    config = model.config.get_text_config()
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    lookup: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    outside = {lookup.weight, head.weight}
    return StepFlops(
        per_token=6.0 * sum(p.numel() for p in model.parameters() if p.ndim >= 2 and p not in outside),
        per_loss_token=6.0 * head.weight.numel(),
        per_squared_length=6.0 * sum(_width(layer) for layer in layers),
    )


def _width(layer: PretrainedConfig) -> int:
    """Of all heads of a layer's attention together, keys and values."""
    num_heads: int = getattr(layer, "num_attention_heads", None) or 0
    head_size = (getattr(layer, "head_dim", None) or layer.hidden_size // num_heads) if num_heads else 0
    qk_size: int = getattr(layer, "qk_head_dim", None) or head_size
    v_size: int = getattr(layer, "v_head_dim", None) or head_size
    return num_heads * (qk_size + v_size)
