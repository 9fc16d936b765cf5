"""How the cost of a sample grows with its length, from the shapes of a model."""

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
