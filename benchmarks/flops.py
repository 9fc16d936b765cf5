"""Floating-point operations that training needs, counted exactly for packs. Shares of the ceiling
are based on them.
"""

from collections.abc import Iterable
from typing import Any


def training_flops(config: dict[str, Any], seqlens: Iterable[int], *, num_labels: int) -> int:
    """Count the forward and backward pass of a dense decoder over documents of these lengths, with
    the head on `num_labels` positions.

    Each matrix parameter and token costs 6 (2 forward, 4 backward). Causal attention over a
    document of n tokens multiplies n * (n + 1) / 2 pairs twice forward and four times backward, 2 *
    width each. Norms, rotations and softmax are not counted; nor are padding, recomputation and the
    head on positions without a label, because they are not needed.
    """
    hidden = config["hidden_size"]
    layers = config["num_hidden_layers"]
    head_size = config.get("head_dim") or hidden // config["num_attention_heads"]
    width = head_size * config["num_attention_heads"]
    key_width = head_size * config["num_key_value_heads"]
    layer = hidden * (2 * width + 2 * key_width) + 3 * hidden * config["intermediate_size"]
    lengths = list(seqlens)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    return (
        6 * layers * layer * sum(lengths)
        + 12 * layers * width * pairs
        + 6 * hidden * config["vocab_size"] * num_labels
    )
