"""Metrics that training steps and validations compute from summed losses."""

import math
from collections.abc import Iterable, Mapping

MAX_PPL_LOSS = 50.0
"""Perplexity is capped at the exponential of this loss, so that it stays finite."""


def perplexity(loss: float) -> float:
    """Return exp(loss), capped. A loss that is not finite is returned unchanged."""
    return math.exp(min(loss, MAX_PPL_LOSS)) if math.isfinite(loss) else loss


def losses_by_source(
    split: str, loss_sums: Iterable[float], num_loss_tokens: Mapping[str, int]
) -> dict[str, float]:
    """Return the mean loss of each source with supervised tokens, as `<split>/loss_by/<source>`.

    `loss_sums` are in the order of `num_loss_tokens`.
    """
    return {
        f"{split}/loss_by/{source}": loss_sum / count
        for (source, count), loss_sum in zip(num_loss_tokens.items(), loss_sums, strict=True)
        if count
    }
