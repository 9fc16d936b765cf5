"""Checks of a single metric, one for each row of `bands.py`."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from trainer.tools.report.analysed_run import AnalysedRun, NotJudged
from trainer.tools.report.bands import BANDS, FLAT, GROWTH, MOVES, Row
from trainer.tools.report.checks import START_STEPS, Check, Findings, finding_of
from trainer.tools.report.checks_speed import slowest_phase
from trainer.tools.report.formatting import number
from trainer.tools.report.result import Finding
from trainer.tools.report.run_log import Series
from trainer.tools.report.shapes import Move, began, beyond, has_risen, shift
from trainer.tools.report.statistics import is_falling, is_rising, slope, within
from trainer.train.detection.window import noise

NUM_ENDS = 10
"""The median of this many last points represents the end of a curve."""
LEAST_PART = 4
"""A part such as `11-20` is judged once its first point and this many later ones are logged."""
LEVELS: dict[str, Callable[..., Any]] = {"mean": np.mean, "max": np.max}
GROWTH_P = 0.01
"""Growth raises an alarm only if its p-value is below this."""
FEW_CUT_OFF = 0.1
"""Below this share of answers that reach the cap, the longest answer is not informative."""
CLIPPED = 0.3
CLIP_RISE = 5
"""A share of clipped ratios up to the first value is a fault only if it is at least the second
value times its share at the start.
"""
MIN_RATES = 20
ZERO_SHARE = 0.05
"""In a log with at least the first number of learning rates, the rate may be 0 in at most the
second share of the points, because a schedule ends at 0.
"""
DECAYED_SHARE = 0.1
DECAYED_ZERO_SHARE = 0.2
"""Below the first share of its peak, a rate may be printed as 0 in at most the second share of the
points.
"""
LASTING_SHARE = 0.02
MOST = 0.75
"""A move that reversed counts if it lasts for the first share of the points; a fall counts only if
it also loses the second share of the gain.
"""
NUM_SUDDEN = 5
"""A move is sudden if it takes at most this many points."""


def _finding(
    row: Row,
    run: AnalysedRun,
    title: str,
    steps: tuple[int, int],
    **fields: Any,
) -> Finding:
    """Return the finding that a row reports, with its cause and remedies."""
    reason = row.reason
    evidence = []
    if row.id.startswith("time_high"):
        phase = slowest_phase(run, *steps)
        if phase != "data":
            reason = "computing"
            evidence = [f"the extra time is spent in {phase}"]
    return finding_of(
        row.level,
        title,
        reason=reason,
        steps=steps,
        evidence=evidence,
        **fields,
    )


def _part(row: Row, points: Series) -> Series:
    """Return the points that a row of `BANDS` judges."""
    for word in row.options:
        first, dash, last = word.partition("-")
        if dash:
            is_start = len(points) >= int(first) + LEAST_PART and points.steps[0] <= START_STEPS
            return points[int(first) - 1 : int(last)] if is_start else points[:0]
    if "last" in row.options:
        return points[-1 if row.role == "val_loss" else -NUM_ENDS :]
    return points


def _outside(row: Row, run: AnalysedRun, _: Series) -> Findings:
    """Find a metric outside the range that its row allows."""
    if row.role in ("loss", "val_loss") and not run.is_pretrained:
        raise NotJudged("no usual range for a model trained from random weights")
    points = run.levels(row.role)
    part = _part(row, points)
    is_whole = len(part) < len(points) or bool(row.options & {"all", "max", "last"})
    low, high = row.range.split("..")
    least = float(low or -math.inf)
    most = float(high or math.inf)
    of = next((LEVELS[word] for word in row.options & LEVELS.keys()), np.median)
    width = len(part) if is_whole else row.width
    found = beyond(
        part,
        low=least,
        high=most,
        width=width,
        of=of,
    )
    if found is None or len(part) < row.width:
        return
    excuse = EXCUSES.get(row.id) if row.level == "warn" else None
    if excuse and (reason := excuse(run, found)):
        raise NotJudged(reason)
    level = float(of(found.values))
    where = "" if is_whole else f" from step {found.ends[0]} on"
    if row.width == 1:
        peak = np.argmax(part.values)
        level = part.values[peak]
        where = f" at step {part.steps[peak]}"
    usual = f"at least {low}" if low else f"at most {high}"
    if low and high:
        usual = f"{low} to {high}"
    title = f"{row.what} is {number(level)}{where}; usually it is {usual}."
    limit = most if level > (least + most) / 2 else least
    yield _finding(row, run, title, found.ends, value=level, threshold=limit)


def _may_be_untrained(run: AnalysedRun, _: Series) -> str:
    model = run.config("partial_pretrain", "model_name_or_path", "model.path")
    return "" if model else "the model is unknown, so its weights may have been random"


def _has_generalised(run: AnalysedRun, low: Series) -> str:
    held_out = run.find("val_loss")
    is_low = bool(held_out) and held_out.values[-1] < 2 * np.median(low.values)
    return "the validation loss is similarly low, so nothing was memorized" if is_low else ""


def _few_are_cut(run: AnalysedRun, _: Series) -> str:
    """In a large batch, the longest answer often reaches the cap although only a few answers do. If
    their share is not known, this is assumed when the usual answer is short.
    """
    measured = run.find("clipped_ratio")
    few = FEW_CUT_OFF
    if not measured:
        measured = run.find("mean_length")
        few = run.find("max_length").values.max() / 2
    are_few = bool(measured) and np.median(measured.values) < few
    return "few answers are cut off" if are_few else ""


def _was_clipped(run: AnalysedRun, high: Series) -> str:
    start = np.median(run.find("clip_ratio").values[:NUM_ENDS])
    is_usual = np.median(high.values) < min(CLIPPED, CLIP_RISE * start)
    return "the share of clipped ratios was high from the start" if is_usual else ""


def _gets_better(run: AnalysedRun, swings: Series) -> str:
    losses = within(run.find("loss"), *swings.ends)
    return "the loss falls in spite of its swings" if is_falling(losses) else ""


def _is_rounded(run: AnalysedRun, zeros: Series) -> str:
    """Some logs print only a few digits of a rate. If all rates are 0 in a run that improves, they
    are rounded. Otherwise, zeros are rounded if they are few or follow a low rate.
    """
    rates = run.find("lr")
    share = len(zeros) / len(rates)
    before = within(rates, 0, zeros.steps[0] - 1).values
    is_decayed = len(before) > 0 and before[-1] < DECAYED_SHARE * rates.values.max()
    is_rounded = share < (DECAYED_ZERO_SHARE if is_decayed else ZERO_SHARE)
    if len(rates) < MIN_RATES:
        is_rounded = True  # a warm-up may begin at 0
    elif share == 1:
        is_rounded = is_falling(run.find("loss")) or is_rising(run.find("reward"))
    return "the log prints only a few digits of the rate" if is_rounded else ""


EXCUSES: dict[str, Callable[[AnalysedRun, Series], str]] = {
    "loss_start_high": _may_be_untrained,
    "loss_final": _has_generalised,
    "loss_oscillating": _gets_better,
    "lr_schedule:zero": _is_rounded,
    "clipped_ratio:cap": _few_are_cut,
    "clip_ratio": _was_clipped,
}
"""Id of a band -> a function of the run and the points outside the band. It returns the reason why
they are not a warning, or "".
"""


def _moved(row: Row, run: AnalysedRun, _: Series) -> Findings:
    """Find the move that a row of `MOVES` describes."""
    points = run.levels(row.role)
    factor = float(row.range)
    found = shift(points, sign=1 if factor > 0 else -1, ratio=abs(factor))
    if found is None:
        return
    may_pass = "passing" in row.options
    least = LASTING_SHARE * len(points) if may_pass else row.width
    is_long = (found.is_lasting or may_pass) and len(within(points, *found.steps)) >= least
    is_gradual = "sudden" in row.options and not _is_sudden(points, found.steps[0], abs(factor))
    is_speed = row.role in ("ordinary_time", "tokens_per_s")
    is_expected = is_gradual or (is_speed and _follows_lengths(run, found))
    if not is_long or is_expected or _is_return(points, found, abs(factor)):
        return
    back = "" if found.is_lasting else f" and came back after step {found.steps[1]}"
    title = (
        f"{run.name(row.role)} went from {number(found.before)} to {number(found.after)} after "
        f"step {found.at}{back}: {row.what}."
    )
    yield _finding(row, run, title, (found.at, found.steps[1]), value=found.after)


def _is_return(points: Series, move: Move, ratio: float) -> bool:
    """Return True if a metric only returns to its start.

    After a move by a ratio, the metric must be within half of the ratio, in logarithms, of its
    start. After a fall that reversed, a part of the gain must remain, or the fall must be hard to
    tell from noise.
    """
    start = np.median(points.values[: len(points) // 20 + 1])
    if ratio == 1:
        least = max(MOST * (move.before - start), 3 * noise(points.values))
        return not move.is_lasting and bool(move.before - move.after < least)
    away = np.log(move.after / start) * np.sign(move.after - move.before)
    return bool(away < np.log(ratio) / 2)


def _follows_lengths(run: AnalysedRun, move: Move) -> bool:
    """Return True if answer lengths changed in the same direction as a speed, by at least half as
    much in logarithms.
    """
    lengths = run.find("mean_length")
    before = within(lengths, 0, move.at).values
    after = within(lengths, *move.steps).values
    if not len(before) or not len(after):
        return False
    growth = np.median(after) / max(np.median(before), 1.0)
    return bool(2 * np.log(growth) / np.log(move.after / move.before) >= 1)


def _grows(row: Row, run: AnalysedRun, _: Series) -> Findings:
    """Find the steady growth that a row of `GROWTH` describes."""
    points = run.levels(row.role)
    if "start" in row.options:
        points = within(points, 0, START_STEPS)
    late = points[len(points) // 2 :] if "late" in row.options else points
    course = slope(late)
    is_growing = course.p_value < GROWTH_P and course.relative_change > float(row.range)
    if row.role == "ordinary_time":  # longer answers take longer
        is_growing &= slope(run.find("mean_length")).relative_change < course.relative_change / 2
    if is_growing and points.ends[1] >= row.width:
        title = f"{row.what}, by {course.relative_change:.1%} to {number(late.values[-1])}."
        yield _finding(row, run, title, (began(points), points.ends[1]))


def _stays(row: Row, run: AnalysedRun, _: Series) -> Findings:
    """Find a result that never improves: it has no rising trend and no rise to a plateau."""
    points = run.levels(row.role)
    if len(points) >= row.width and not has_risen(points):
        title = f"{row.what} does not rise; its level is {number(np.median(points.values))}."
        yield _finding(row, run, title, points.ends)


def _is_sudden(points: Series, onset: int, ratio: float) -> bool:
    """Return True if most of a change, measured as a ratio, happens within a few points."""
    at = int(np.searchsorted(points.steps, onset))
    before = points.values[max(0, at - NUM_SUDDEN) : at + 1]
    after = points.values[at + NUM_SUDDEN :][: NUM_SUDDEN + 1]
    change = np.log(np.median(after) / np.median(before)) if len(after) else np.inf
    return bool(abs(change) > 0.9 * np.log(ratio))


CHECKS = tuple(
    Check(row.id, (row.role,), row.profiles, partial(judges, row))
    for rows, judges in ((BANDS, _outside), (MOVES, _moved), (GROWTH, _grows), (FLAT, _stays))
    for row in rows
)
