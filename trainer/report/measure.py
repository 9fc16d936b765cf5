"""What a rule measures, and the statistics that rows of the table can ask for by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainer.report.analysed_run import NotJudged, steps_of
from trainer.report.run_log import Series
from trainer.report.statistics import longest_run

NUM_ENDS = 10
"""Points whose median stands for the start or the end of a curve."""
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


@dataclass(frozen=True)
class Stretch:
    """Neighbouring points of a series."""

    steps: tuple[int, int]
    num_points: int
    highest: float
    median: float
    mean: float


def stretch(series: Series, mask: NDArray[np.bool_], least: float) -> Stretch | None:
    """The longest one in which `mask` holds; None where it has fewer than `least` points."""
    start, stop = longest_run(mask)
    if stop - start < max(least, 1):
        return None
    part = series.values[start:stop]
    numbers = (float(statistic(part)) for statistic in (np.max, np.median, np.mean))
    return Stretch(steps_of(series, start, stop), stop - start, *numbers)


def first_part(series: Series, last_step: float) -> Series:
    """The points up to a step."""
    stop = int(np.searchsorted(series.steps, last_step, side="right"))
    return Series(series.steps[:stop], series.values[:stop])


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
    "last": lambda series: float(series.values[-1]),
    "start": lambda series: float(np.median(series.values[:NUM_ENDS])),
    "end": lambda series: float(np.median(series.values[-NUM_ENDS:])),
}
PLACES: Mapping[str, slice] = {"start": slice(None, NUM_ENDS), "end": slice(-NUM_ENDS, None)}
"""Statistics of a part of the run: these points."""
