"""Numbers that a training step and a validation make of summed losses."""

import math
from collections.abc import Iterable, Mapping

MAX_PPL_LOSS = 50.0
"""Perplexity is capped at exp of this: a number, not an infinity."""


def perplexity(loss: float) -> float:
    """Return exp(loss), capped."""
    return math.exp(min(loss, MAX_PPL_LOSS)) if math.isfinite(loss) else loss


def losses_by_source(
    split: str, loss_sums: Iterable[float], num_loss_tokens: Mapping[str, int]
) -> dict[str, float]:
    """Return `<split>/loss_by/<source>`, the mean loss of each source that has supervised tokens.

    `loss_sums` are in the order of `num_loss_tokens`.
    """
    return {
        f"{split}/loss_by/{source}": loss_sum / count
        for (source, count), loss_sum in zip(num_loss_tokens.items(), loss_sums, strict=True)
        if count
    }
