"""The rows around one step, of the metrics that moved there."""

import math

import numpy as np

from trainer.detection.robust import spread
from trainer.report.formatting import number
from trainer.report.formatting import step as step_words
from trainer.report.run_log import RunLog, Series
from trainer.report.sections import Section, Table
from trainer.report.statistics import finite, within

ALWAYS = "train/loss"
MIN_SCORE = 6.0
MAX_METRICS, MAX_ROWS = 6, 200


def around(log: RunLog, *, step: int, window: int) -> Section:
    """Rows from `step - window` to `step + window`; what moved most comes first, the loss always."""
    first, last = step - window, step + window
    title = f"{log.path}, steps {step_words(first)} to {step_words(last)}"
    scores = {key: _score(series, first, last) for key, series in log.series.items()}
    moved = sorted((key for key in scores if scores[key] > MIN_SCORE), key=lambda key: -scores[key])
    keys = [key for key in dict.fromkeys([ALWAYS, *moved]) if key in log.series][:MAX_METRICS]
    near = [within(log.series[key], first, last) for key in keys]
    columns = [dict(zip(one.steps.tolist(), one.values.tolist(), strict=True)) for one in near]
    steps = sorted(set().union(*columns))
    if not steps:
        return Section("around", title, "No rows there.")
    rows = tuple((step_words(at), *(number(column.get(at)) for column in columns)) for at in steps[:MAX_ROWS])
    lead = f"{len(moved)} of {len(log.series)} metrics left their usual range here, the {len(keys)} shown first."
    left = len(steps) - len(rows)
    notes = (f"{left} later rows are left out: choose a smaller window.",) if left else ()
    return Section("around", title, lead, Table(("step", *keys), rows), notes)


def _score(series: Series, first: int, last: int) -> float:
    """How far the window goes from the median of the whole series, in robust standard deviations."""
    near, known = finite(within(series, first, last)).values, finite(series).values
    if not len(near):
        return 0.0
    centre = float(np.median(known))
    usual, distance = float(spread(known - centre)), float(np.abs(near - centre).max())
    return distance / usual if usual else math.inf if distance else 0.0
