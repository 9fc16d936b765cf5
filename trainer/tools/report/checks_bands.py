"""Checks of one metric each: the rows of `bands.py`."""

from functools import partial

import numpy as np

from trainer.tools.report.analysed_run import AnalysedRun, NotJudged
from trainer.tools.report.bands import BANDS, MOVES, Band, Move
from trainer.tools.report.checks import START_STEPS, Check, Findings, fail, info, note, warn
from trainer.tools.report.formatting import number, step
from trainer.tools.report.result import LEVELS
from trainer.tools.report.run_log import Series
from trainer.tools.report.shapes import beyond, shift
from trainer.tools.report.statistics import within

NUM_ENDS = 10
"""Points whose median stands for the start or the end of a curve."""
NUM_SUDDEN = 5
"""A sudden move takes no more points."""
MAKE = dict(zip(LEVELS, (fail, warn, note, info), strict=True))


def _outside(band: Band, run: AnalysedRun, _: Series) -> Findings:
    """Hold a metric against the range of one row."""
    if band.role in ("loss", "val_loss") and not run.is_pretrained:
        raise NotJudged("no usual range for a model trained from random weights")
    part, width = _part(band, run.levels(band.role))
    # an open side has no limit: a name may be that of another row
    low, high = (
        run.limits[band.limit(side)] if np.isfinite(limit) else limit
        for side, limit in (("low", band.low), ("high", band.high))
    )
    of = np.mean if band.by == "mean" else np.median
    found = beyond(part, low=low, high=high, width=width, of=of)
    if found is None or len(part) < band.width:
        return
    level, where = found.level, f" from step {step(found.steps[0])} on"
    if band.by == "point":
        peak = np.argmax(part.values)
        level, where = part.values[peak], f" at step {step(part.steps[peak])}"
    elif band.part in ("first", "last"):
        where = ""
    limit = high if found.is_high else low
    usual = f"{'at most' if found.is_high else 'at least'} {number(limit)}"
    if np.isfinite([low, high]).all():
        usual = f"{number(low)} to {number(high)}"
    yield MAKE[band.level](
        f"{band.what} is {number(level)}{where}; {usual} is usual.",
        metric=run.name(band.role),
        steps=found.steps,
        value=level,
        threshold=limit,
        evidence=[run.quoted("max_length")] if band.role == "truncated" else [],
        cause=band.cause.format_map(run.options),
        remedy=band.remedy,
    )


def _part(band: Band, series: Series) -> tuple[Series, int]:
    """Return the points that a row judges, and how many of them make a level."""
    if band.part == "start":
        series = within(series, 0, START_STEPS)
    if band.part == "first":
        first = series[:NUM_ENDS] if series.steps[0] <= START_STEPS else series[:0]
        return first, len(first)
    if band.part == "last":
        last = series[-1:] if band.role == "val_loss" else series[-NUM_ENDS:]
        return last, len(last)
    return series, 1 if band.by == "point" else band.width


def _moved(move: Move, run: AnalysedRun, _: Series) -> Findings:
    """Look for the move of one row."""
    points = run.levels(move.role)
    found = shift(points, sign=move.sign, ratio=move.ratio)
    if found is None or not found.is_lasting or len(within(points, *found.steps)) < move.least:
        return
    if move.is_sudden and not _is_sudden(points, found.steps[0], move.ratio):
        return
    yield MAKE[move.level](
        f"{run.name(move.role)} went from {number(found.before)} to {number(found.after)} after "
        f"step {step(found.at)}: {move.what}.",
        steps=(found.at, found.steps[1]),
        value=found.after,
        cause=move.cause,
        remedy=[text.replace("{checkpoint}", run.checkpoint(found.at)) for text in move.remedy],
    )


def _is_sudden(points: Series, onset: int, ratio: float) -> bool:
    """Return whether most of a change by a ratio happens within a few points."""
    at = int(np.searchsorted(points.steps, onset))
    last = min(at + NUM_SUDDEN, len(points) - 1)
    before = np.median(points.values[max(0, at - NUM_SUDDEN) : at + 1])
    after = np.median(points.values[last : last + NUM_SUDDEN + 1])
    return bool(abs(np.log(after / before)) > 0.9 * np.log(ratio))


CHECKS = (
    *(Check(row.id, (row.role,), row.profiles, partial(_outside, row)) for row in BANDS),
    *(Check(row.id, (row.role,), row.profiles, partial(_moved, row)) for row in MOVES),
)
