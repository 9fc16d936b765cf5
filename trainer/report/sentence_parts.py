"""Numbers and lists in sentences."""

from collections.abc import Iterable, Sequence

from trainer.report.formatting import number

__all__ = ["counted", "listed", "number", "percent", "span"]


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
