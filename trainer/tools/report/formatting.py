"""How numbers, steps and names are written: text, page and comparison use these functions and
no others.
"""

import math
from collections.abc import Iterable
from datetime import timedelta
from numbers import Integral

from trainer.tools.report.result import Finding, Report

MISSING = "–"
NUM_DIGITS = 4
LONG_FACT = 60


def number(value: float | None) -> str:
    """Four significant digits: 0.8123, 1.5, 12,345, 5.5e7; infinities by name, a dash for what
    is not known.
    """
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.{NUM_DIGITS - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if abs(value) >= 10 ** (NUM_DIGITS - 1):
        return f"{value:,.0f}"
    return f"{value:.{NUM_DIGITS}g}"


def share(value: float | None) -> str:
    """A share of one as a percentage with one decimal."""
    return MISSING if value is None or math.isnan(value) else f"{100 * value:.1f} %"


def step(value: int) -> str:
    return f"{value:,}" if abs(value) >= 10_000 else str(value)


def shown(value: object) -> str:
    """Write a value by its type: a whole number as steps are, another with four digits, what is not known as
    a dash.
    """
    if isinstance(value, Integral):
        return step(int(value))
    return number(value) if value is None or isinstance(value, float) else str(value)


def told(value: object, sentence: str) -> str:
    """A sentence with a value; nothing where it is not known."""
    return "" if (words := shown(value)) in ("", MISSING) else sentence.format(words)


def interval(steps: tuple[int, int] | None) -> str:
    """`step 2800`, `steps 2855–2870`, or nothing."""
    if steps is None:
        return ""
    first, last = steps
    return f"step {step(first)}" if first == last else f"steps {step(first)}–{step(last)}"


def listed(items: Iterable[str], limit: int = 10) -> str:
    """`a, b and c`; what is beyond the limit is counted."""
    words = list(items)
    if len(words) > limit:
        words = [*words[:limit], f"{len(words) - limit} more"]
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def counted(count: int, noun: str) -> str:
    """`1 spike`, `3 spikes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration(seconds: float) -> str:
    """`1:02:03`, with days in front where there are any."""
    return str(timedelta(seconds=round(seconds)))


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def place(finding: Finding) -> str:
    """Where a finding is: metric, steps, and what was measured against which limit."""
    limit = "" if finding.threshold is None else f" (limit {number(finding.threshold)})"
    measured = "" if finding.value is None else f"{number(finding.value)}{limit}"
    return ", ".join(
        part for part in (finding.metric or "", interval(finding.steps), measured) if part
    )


def facts(report: Report) -> tuple[str, tuple[str, ...]]:
    """The header's facts: short ones as one line, long ones each as its own."""
    words = [f"{name} {value}" for name, value in report.facts.items()]
    return " · ".join(w for w in words if len(w) <= LONG_FACT), tuple(
        w for w in words if len(w) > LONG_FACT
    )
