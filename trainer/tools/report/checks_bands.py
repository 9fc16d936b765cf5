"""Checks of one metric each: the rows of `bands.py`."""

from functools import partial

import numpy as np

from trainer.tools.report.analysed_run import AnalysedRun, NotJudged
from trainer.tools.report.bands import BANDS, MOVES, Row
from trainer.tools.report.checks import START_STEPS, Check, Findings, finding_of
from trainer.tools.report.formatting import number, step
from trainer.tools.report.run_log import Series
from trainer.tools.report.shapes import beyond, shift
from trainer.tools.report.statistics import within

NUM_ENDS = 10
"""Points whose median stands for the start or the end of a curve."""
NUM_SUDDEN = 5
"""A sudden move takes no more points."""


def _outside(row: Row, run: AnalysedRun, _: Series) -> Findings:
    """Compare a metric with the range of one row."""
    if row.role in ("loss", "val_loss") and not run.is_pretrained:
        raise NotJudged("no usual range for a model trained from random weights")
    part = points = run.levels(row.role)
    if "first" in row.options:
        part = points[:NUM_ENDS] if points.steps[0] <= START_STEPS else points[:0]
    elif "last" in row.options:
        part = points[-1 if row.role == "val_loss" else -NUM_ENDS :]
    is_end = bool(row.options & {"first", "last"})
    # an open side has no limit: its name may be that of another row
    low, high = (
        run.limits[name] if np.isfinite(limit) else limit for name, limit in row.limits.items()
    )
    of = np.mean if "mean" in row.options else np.median
    found = beyond(part, low=low, high=high, width=len(part) if is_end else row.width, of=of)
    if found is None or len(part) < row.width:
        return
    level, where = found.level, "" if is_end else f" from step {step(found.steps[0])} on"
    if row.width == 1:
        peak = np.argmax(part.values)
        level, where = part.values[peak], f" at step {step(part.steps[peak])}"
    limit = high if found.is_high else low
    usual = f"{'at most' if found.is_high else 'at least'} {number(limit)}"
    if np.isfinite([low, high]).all():
        usual = f"{number(low)} to {number(high)}"
    cause, *remedy = row.reason
    yield finding_of(
        row.level,
        f"{row.what} is {number(level)}{where}; {usual} is usual.",
        metric=run.name(row.role),
        steps=found.steps,
        value=level,
        threshold=limit,
        cause=cause.format_map(run.options),
        remedy=remedy,
    )


def _moved(row: Row, run: AnalysedRun, _: Series) -> Findings:
    """Look for the move of one row."""
    points, factor = run.levels(row.role), float(row.range)
    found = shift(points, sign=1 if factor > 0 else -1, ratio=abs(factor))
    if found is None or not found.is_lasting or len(within(points, *found.steps)) < row.width:
        return
    if "sudden" in row.options and not _is_sudden(points, found.steps[0], abs(factor)):
        return
    cause, *remedy = row.reason
    yield finding_of(
        row.level,
        f"{run.name(row.role)} went from {number(found.before)} to {number(found.after)} after "
        f"step {step(found.at)}: {row.what}.",
        steps=(found.at, found.steps[1]),
        value=found.after,
        cause=cause,
        remedy=[text.replace("{checkpoint}", run.checkpoint(found.at)) for text in remedy],
    )


def _is_sudden(points: Series, onset: int, ratio: float) -> bool:
    """Return whether most of a change by a ratio happens within a few points."""
    at = int(np.searchsorted(points.steps, onset))
    before = points.values[max(0, at - NUM_SUDDEN) : at + 1]
    after = points.values[at + NUM_SUDDEN :][: NUM_SUDDEN + 1]
    change = np.log(np.median(after) / np.median(before)) if len(after) else np.inf
    return bool(abs(change) > 0.9 * np.log(ratio))


CHECKS = tuple(
    Check(row.id, (row.role,), row.profiles, partial(judges, row))
    for rows, judges in ((BANDS, _outside), (MOVES, _moved))
    for row in rows
)
