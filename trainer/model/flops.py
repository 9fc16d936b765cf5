"""What a sample costs by its length, from the shapes of a model."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel


def quadratic_cost(model: PreTrainedModel) -> float:
    """c such that n tokens cost in proportion to n + c * n**2: attention against matrix products, per token.

    A token costs 6 FLOPs per matrix parameter; attention over n tokens adds 6 * layers * width * n per token (causal).
    An architecture without attention heads has c = 0.
    """
    config = model.config.get_text_config()
    num_heads = getattr(config, "num_attention_heads", None)
    if not num_heads:
        return 0.0
    width = num_heads * (getattr(config, "head_dim", None) or config.hidden_size // num_heads)
    num_matrix_parameters = sum(p.numel() for p in model.parameters() if p.ndim >= 2)
    return float(config.num_hidden_layers * width / num_matrix_parameters)


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of forward and backward pass: 6 per matrix parameter and token, and attention.

    Attention over n tokens costs 6 * layers * heads * (query-key size + value size) * n**2: two products forward, four
    backward, no credit for causality or recomputation. Source: PaLM (2022), appendix B.
    """

    per_token: float
    per_squared_length: float

    def of(self, *, num_tokens: int, sum_squared_lengths: int) -> float:
        return self.per_token * num_tokens + self.per_squared_length * sum_squared_lengths


def step_flops(model: PreTrainedModel) -> StepFlops | None:
    """An embedding that only looks up costs nothing; a tied one is the output projection too, and counts once.

    None for a mixture of experts (parameters of three dimensions), which uses a part of its parameters only.
    """
    if any(p.ndim > 2 for p in model.parameters()):
        return None
    config = model.config.get_text_config()
    num_heads = getattr(config, "num_attention_heads", None) or 0
    head_size = (getattr(config, "head_dim", None) or config.hidden_size // num_heads) if num_heads else 0
    qk_size = getattr(config, "qk_head_dim", None) or head_size
    v_size = getattr(config, "v_head_dim", None) or head_size
    num_matrix_parameters = sum(p.numel() for p in model.parameters() if p.ndim >= 2)
    lookup: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if head.weight is not lookup.weight:
        num_matrix_parameters -= lookup.weight.numel()
    return StepFlops(
        per_token=6.0 * num_matrix_parameters,
        per_squared_length=6.0 * config.num_hidden_layers * num_heads * (qk_size + v_size),
    )
