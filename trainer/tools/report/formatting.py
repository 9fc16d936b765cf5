"""Formats numbers, steps and lists for the terminal, the page and the comparison of runs."""

import math
from collections.abc import Iterable
from numbers import Integral

from trainer.tools.report.result import Finding

MISSING = "–"


def number(value: float | None) -> str:
    """Format a number with four significant digits: 0.8123, 1.5, 12,345, 5.5e7. None and NaN become
    a dash.
    """
    if value is None or math.isnan(value):
        return MISSING
    size = abs(value)
    if 1e3 <= size < 1e5:
        return f"{value:,.0f}"
    if size == 0 or 1e-3 <= size < 1e5 or math.isinf(size):
        return f"{value:.4g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def shown(value: object) -> str:
    """Return a value as text, formatted by its type."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        separator = "–" if value and isinstance(value[0], Integral) else "; "
        return separator.join(map(shown, value))
    return number(value) if value is None or isinstance(value, float) else str(value)


def interval(steps: tuple[int, int] | None) -> str:
    """Return `step 2800` or `steps 2855–2870`; an empty string for None."""
    if steps is None:
        return ""
    first, last = steps
    return f"step {first}" if first == last else f"steps {first}–{last}"


def listed(items: Iterable[str], limit: int = 10) -> str:
    """Join items as in `a, b and c`. Items beyond the limit are replaced by a count."""
    words = list(items)
    if len(words) > limit:
        words = [*words[:limit], f"{len(words) - limit} more"]
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, as in `1 spike` or `3 spikes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def place(finding: Finding) -> str:
    """Return a finding's metric, its steps, and the measured value with its limit."""
    limit = "" if finding.threshold is None else f" (limit {number(finding.threshold)})"
    measured = "" if finding.value is None else f"{number(finding.value)}{limit}"
    return ", ".join(filter(None, (finding.metric, interval(finding.steps), measured)))
