"""What a rule measures, and the statistics that rows of the table can ask for by name."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainer.report.analysed_run import AnalysedRun, NotJudged, steps_of
from trainer.report.collapse import collapse
from trainer.report.remedies import checkpoint
from trainer.report.run_log import Series
from trainer.report.statistics import longest_run, noise, slope

NUM_ENDS = 10
"""Points whose median stands for the start or the end of a curve."""
CLEAR_SIGMA = 3
"""A fall is at least so many times the noise from epoch to epoch: of many good runs some end lower by chance."""
NUM_WARMING = 20
"""Steps in which devices are not yet busy."""


@dataclass(frozen=True)
class Measure:
    """One measurement of a rule: by which row it is told, where, and what the row's words are filled with."""

    row: str = "main"
    value: float | None = None
    steps: tuple[int, int] | None = None
    words: Mapping[str, object] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    metric: str | None = None
    """Its key; that of the row's role unless given."""
    limit: float | None = None
    """That of the row unless given."""
    is_fault: bool = True
    """False: measured and in order, which the checklist tells."""


def beyond(series: Series, mask: NDArray[np.bool_], row: str = "main", *, usual: float = 1.0) -> Iterator[Measure]:
    """The points for which `mask` holds: how many, where, and the highest against what is usual."""
    if steps := series.steps[mask].tolist():
        peak = series.values[mask].max()
        at = steps[int(np.argmax(series.values[mask]))]
        words = {"count": len(steps), "first": steps[0], "all": steps, "peak": peak, "at": at, "usual": usual}
        yield Measure(row, float(peak / usual), (steps[0], steps[-1]), words)


def stretch(series: Series, mask: NDArray[np.bool_], row: str, least: float, value: str) -> Iterator[Measure]:
    """The longest stretch of at least so many points for which `mask` holds, told by its `value`."""
    start, stop = longest_run(mask)
    if stop - start >= max(least, 1):
        part = series.values[start:stop]
        words = {"points": stop - start, "highest": part.max(), "median": np.median(part), "mean": part.mean()}
        yield Measure(row, float(words[value]), steps_of(series, start, stop), words)


def collapsed(run: AnalysedRun, role: str, row: str) -> Iterator[Measure]:
    """What a reward or accuracy had reached and lost."""
    if (fall := collapse(run.get(role), run.limits)) is not None:
        at, size = fall.steps[0], fall.before - fall.after
        words = {"before": fall.before, "after": fall.after, "at": at, "checkpoint": checkpoint(run, at)}
        yield Measure(row, size, fall.steps, words, metric=run.name(role), limit=fall.least)


def going_wrong(run: AnalysedRun, role: str, row: str, *, good: float) -> Iterator[Measure]:
    """More epochs in a row than the limit in which a role went away from `good` (+1 up) by more than noise explains."""
    means, needed = run.epochs(role), int(run.limits["rising_epochs"]) + 1
    last = Series(means.steps[-needed:], means.values[-needed:])
    trend = slope(last)
    is_clear = -good * trend.change > CLEAR_SIGMA * noise(means) and trend.p_value < run.limits["rising_p"]
    if len(last) == needed and is_clear:
        best = int(means.steps[int(np.argmax(good * means.values))])
        words = {"size": abs(trend.change), "checkpoint": checkpoint(run, best)}
        yield Measure(row, trend.change, steps_of(last, 0, needed), words)


def _late_mean(series: Series) -> float:
    late = series.values[series.steps > NUM_WARMING]
    if not len(late):
        raise NotJudged(f"no sample after step {NUM_WARMING}")
    return float(late.mean())


STATISTICS: Mapping[str, Callable[[Series], float]] = {
    "median": lambda series: float(np.median(series.values)),
    "mean": lambda series: float(series.values.mean()),
    "late_mean": _late_mean,
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
