"""Numbers and lists in sentences."""

import math
from collections.abc import Iterable, Sequence


def number(value: float) -> str:
    """Four significant digits, as the pages write them: 0.8123, 12,345, 5.5e7."""
    if not math.isfinite(value):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def span(steps: tuple[int, int]) -> str:
    return f"step {steps[0]}" if steps[0] == steps[1] else f"steps {steps[0]} to {steps[1]}"


def listed(items: Iterable[str], limit: int = 10) -> str:
    """`a, b and c`; what is beyond the limit is counted."""
    words: Sequence[str] = list(items)
    if len(words) > limit:
        words = [*words[:limit], f"{len(words) - limit} more"]
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def counted(count: int, noun: str) -> str:
    """`1 spike`, `3 spikes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
