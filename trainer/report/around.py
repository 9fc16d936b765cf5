"""The rows around one step, of the metrics that moved there."""

import math

import numpy as np

from trainer.detection.window import MAD_TO_SIGMA
from trainer.report.curves import finite, within
from trainer.report.formatting import clean, number
from trainer.report.formatting import step as step_words
from trainer.report.run_log import RunLog, Series
from trainer.report.sections import Section, Table

ALWAYS = "train/loss"
MIN_SCORE = 6.0
MAX_METRICS = 6
MAX_ROWS = 200


def around(log: RunLog, *, step: int, window: int) -> Section:
    """Rows from `step - window` to `step + window`; what moved most comes first, the loss always."""
    first, last = step - window, step + window
    scores = {key: _score(series, first, last) for key, series in log.series.items()}
    moved = sorted((key for key in scores if scores[key] > MIN_SCORE), key=lambda key: -scores[key])
    keys = list(dict.fromkeys([*([ALWAYS] if ALWAYS in log.series else []), *moved]))[:MAX_METRICS]
    near = {key: within(log.series[key], first, last) for key in keys}
    columns = {key: dict(zip(one.steps.tolist(), one.values.tolist(), strict=True)) for key, one in near.items()}
    steps = sorted({at for column in columns.values() for at in column})
    rows = [(step_words(at), *(number(column.get(at)) for column in columns.values())) for at in steps[:MAX_ROWS]]
    notes = (
        [f"{len(steps) - MAX_ROWS} later rows are left out: choose a smaller window."] if len(steps) > MAX_ROWS else []
    )
    title = f"{clean(str(log.path))}, steps {step_words(first)} to {step_words(last)}"
    if not rows:
        return Section("around", title, "No rows there.")
    lead = f"{len(moved)} of {len(log.series)} metrics left their usual range here, the {len(keys)} shown first."
    shown = Table(("step", *map(clean, keys)), tuple(rows), frozenset())
    return Section("around", title, lead, shown, tuple(notes))


def _score(series: Series, first: int, last: int) -> float:
    """How far the window goes from the median of the whole series, in robust standard deviations."""
    near, known = finite(within(series, first, last)).values, finite(series).values
    if not len(near):
        return 0.0
    centre = float(np.median(known))
    spread = MAD_TO_SIGMA * float(np.median(np.abs(known - centre)))
    distance = float(np.abs(near - centre).max())
    if spread == 0:
        return math.inf if distance > 0 else 0.0
    return distance / spread
