"""What rules measure: a statistic of a role against limits, points beyond one, a level that shifts."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trainer.report.analysed_run import AnalysedRun, NotJudged
from trainer.report.rule_table import FindingRow
from trainer.report.run_log import Series
from trainer.report.statistics import level_shift, logarithm, longest_run, noise, period, slope

NUM_ENDS = 10
"""Points whose median stands for the start or the end of a curve."""
NUM_PARTS = 3
"""Parts of a run with a usual level of their own: one that vanishes early is no level to hold the others against."""
CLEAR_SIGMA = 3
"""A fall is at least so many times the noise from epoch to epoch: of many good runs some end lower by chance."""

STATISTICS: Mapping[str, Callable[[Series], float]] = {
    "median": lambda series: float(np.median(series.values)),
    "highest_median": lambda series: max(
        float(np.median(part)) for part in np.array_split(series.values, NUM_PARTS) if len(part)
    ),
    "mean": lambda series: float(series.values.mean()),
    "sum": lambda series: float(series.values.sum()),
    "highest": lambda series: float(series.values.max()),
    "peak_ratio": lambda series: float(series.values.max() / max(np.median(series.values), 1.0)),
    "first": lambda series: float(series.values[0]),
    "last": lambda series: float(series.values[-1]),
    "start": lambda series: float(np.median(series.values[:NUM_ENDS])),
    "end": lambda series: float(np.median(series.values[-NUM_ENDS:])),
}
PLACES: Mapping[str, slice] = {"start": slice(None, NUM_ENDS), "end": slice(-NUM_ENDS, None)}
"""Statistics of a part of the run: these points."""


@dataclass(frozen=True)
class Measure:
    """One measurement of a rule: by which row it is told, where, and what the row's words are filled with."""

    row: str = "main"
    value: float | None = None
    steps: tuple[int, int] | None = None
    words: Mapping[str, Any] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    metric: str | None = None
    """Its key; that of the row's role unless given."""
    limit: float | None = None
    """That of the row unless given."""
    is_fault: bool = True
    """False: measured and in order, which the checklist tells."""


def measured_by(row: FindingRow, key: str, run: AnalysedRun) -> Iterator[Measure]:
    """What a row of the table measures of its role, which the log has."""
    if row.statistic is not None:
        yield _compared(row, key, run)
    elif row.shift is not None:
        yield from _shifted(row, key, run)
    elif row.points is not None:
        yield _beyond(row, key, run)


def limit_of(name: str | float | None, run: AnalysedRun) -> float | None:
    """By its name, with a minus for its negative; or the number itself."""
    if isinstance(name, str):
        return -run.limits[name[1:]] if name.startswith("-") else run.limits[name]
    return None if name is None else float(name)


def _range(row: FindingRow, run: AnalysedRun) -> tuple[float | None, float | None]:
    low, high = (limit_of(limit, run) for limit in (row.outside or (row.below, row.above)))
    return low, high


def _compared(row: FindingRow, key: str, run: AnalysedRun) -> Measure:
    """A statistic of a role against its limits."""
    series, name = run.get(row.role or ""), row.statistic or ""
    if "from_the_start" in row.requires and series.steps[0] > run.limits["first_steps"]:
        raise NotJudged(f"the log begins at step {series.steps[0]}")
    if "pretrained" in row.requires:
        run.require_pretrained()
    value, (low, high) = STATISTICS[name](series), _range(row, run)
    is_low, is_high = low is not None and value < low, high is not None and value > high
    return Measure(
        key,
        value,
        series[PLACES[name]].ends if name in PLACES else None,
        {"low": low, "high": high},
        limit=low if is_low else high,
        is_fault=is_low or is_high,
    )


def _beyond(row: FindingRow, key: str, run: AnalysedRun) -> Measure:
    """The points outside a range: how many, where, and the highest against what is usual."""
    series, whole = run.get(row.role or ""), run.get((row.role or "").partition(":")[0])
    low, high = _range(row, run)
    if row.times is not None:
        times = STATISTICS[row.times](whole)
        low, high = (None if limit is None else limit * times for limit in (low, high))
    values, mask = series.values, np.zeros(len(series), dtype=bool)
    for limit, is_beyond in ((low, np.less), (high, np.greater), (limit_of(row.equal, run), np.equal)):
        mask |= is_beyond(values, np.nan if limit is None else limit)
    part = series[slice(*longest_run(mask))] if row.in_a_row else series[mask]
    usual, share = STATISTICS["median"](whole), float(mask.mean())
    least = limit_of(row.points, run) or 0
    is_fault = share > (limit_of(row.share, run) or 0) and len(part) >= least
    if "irregular" in row.requires:  # what comes at regular distances is a task of its own
        is_fault &= period(part.steps) is None
    words: dict[str, Any] = {"share": share, "inside": 1 - share, "count": len(part), "usual": usual}
    if len(part):
        words |= {"first": part.ends[0], "all": part.steps.tolist(), "at": int(part.steps[np.argmax(part.values)])}
        words |= {name: STATISTICS[name](part) for name in ("highest", "median", "mean")}
        words |= {"times": STATISTICS["highest"](part) / usual if usual else 0.0}
    limit = None if row.limit is not None else high if low is None or usual > (high or np.inf) else low
    value = words.get(row.value) if len(part) else None
    return Measure(
        key,
        None if value is None else float(value),
        part.ends if len(part) else None,
        words,
        limit=limit,
        is_fault=is_fault,
    )


def _shifted(row: FindingRow, key: str, run: AnalysedRun) -> Iterator[Measure]:
    """What a role had reached and lost, or the level that it left, to the end."""
    sign, ratio = 1 if row.shift == "up" else -1, limit_of(row.ratio, run) or 1.0
    for found in lasting_shift(run, row.role or "", key, sign=sign, ratio=ratio):
        yield found if row.value == "highest" else replace(found, value=found.words[row.value], limit=ratio)


def lasting_shift(
    run: AnalysedRun, role: str, key: str, *, sign: int, ratio: float = 1.0, width: int = 0
) -> Iterator[Measure]:
    """A level that is another one up to the end, by more than noise and by a share of all there was.

    One that is to change by more than a `ratio` is looked at in logarithms.
    """
    limits, is_log = run.limits, ratio != 1
    found = level_shift(
        logarithm(run.get(role)) if is_log else run.get(role),
        sign=sign,
        sigma=limits["collapse_sigma"],
        share=limits["collapse_share"],
        rise=abs(math.log(ratio)),
        width=width,
    )
    if found is not None and found.is_lasting:
        before, after = (math.exp(level) if is_log else level for level in (found.before, found.after))
        words: dict[str, Any] = {"before": before, "after": after, "at": found.at, "onset": found.steps[0]}
        words |= {"times": after / before if is_log else math.nan, "checkpoint": run.checkpoint(found.at)}
        steps = found.at, found.steps[1]
        yield Measure(key, abs(before - after), steps, words, metric=run.name(role), limit=found.least)


def going_wrong(run: AnalysedRun, role: str, row: str, *, good: float) -> Iterator[Measure]:
    """More epochs in a row than the limit in which a role went away from `good` (+1 up) by more than noise explains."""
    means, needed = run.epochs(role), int(run.limits["rising_epochs"]) + 1
    last = means[-needed:]
    trend = slope(last)
    is_clear = -good * trend.change > CLEAR_SIGMA * noise(means) and trend.p_value < run.limits["rising_p"]
    if len(last) == needed and is_clear:
        best = int(means.steps[int(np.argmax(good * means.values))])
        words = {"size": abs(trend.change), "checkpoint": run.checkpoint(best)}
        yield Measure(row, trend.change, last.ends, words)
