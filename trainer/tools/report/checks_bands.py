"""Checks that each judge a single metric, one for every row of `bands.py`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from trainer.tools.report.analysed_run import AnalysedRun, NotJudged
from trainer.tools.report.bands import BANDS, FLAT, GROWTH, MOVES, REASONS, Row
from trainer.tools.report.checks import START_STEPS, Check, Findings, finding_of
from trainer.tools.report.checks_speed import slowest_phase
from trainer.tools.report.formatting import number
from trainer.tools.report.result import Finding
from trainer.tools.report.run_log import Series
from trainer.tools.report.shapes import Move, began, beyond, has_risen, shift
from trainer.tools.report.statistics import slope, within
from trainer.train.detection.window import noise

NUM_ENDS = 10
"""The median of this many last points represents the end of a curve."""
LEAST_PART = 4
"""A part such as `11-20` is judged once its first point and this many later ones are logged."""
LEVELS: dict[str, Callable[..., Any]] = {"mean": np.mean, "max": np.max}
GROWTH_P = 0.01
"""Growth raises an alarm only if its p-value is below this."""
FEW_CUT_OFF = 0.1
"""Share of answers that reach the cap, below which the longest answer says nothing."""
CLIPPED = 0.3
CLIP_RISE = 5
"""A share of clipped ratios up to the first value is a fault only if it is this many times as high as
at the start.
"""
LASTING_SHARE = 0.02
MOST = 0.75
"""A move that passed counts if it lasts for the first share of the points; a fall, if it also takes
the second share of what was gained.
"""
NUM_SUDDEN = 5
"""A move is sudden if it takes at most this many points."""


def _finding(row: Row, run: AnalysedRun, title: str, **fields: Any) -> Finding:
    """Return the finding that a row reports, with its cause and remedies."""
    cause, *remedy = row.reason
    phase = slowest_phase(run, *fields["steps"]) if row.id.startswith("time_high") else None
    if phase not in (None, "data"):
        cause, *remedy = REASONS["computing"]
        fields["evidence"] = [f"the time goes to {phase}"]
    before = run.checkpoint(fields["steps"][0])
    return finding_of(
        row.level,
        title,
        cause=cause.format_map(run.options),
        remedy=[text.replace("{checkpoint}", before) for text in remedy],
        metric=run.name(row.role),
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
    low, high = row.limits
    of = next((LEVELS[word] for word in row.options & LEVELS.keys()), np.median)
    found = beyond(part, low=low, high=high, width=len(part) if is_whole else row.width, of=of)
    if found is None or len(part) < row.width:
        return
    level = float(of(found.values))
    if row.level == "warn" and row.id in EXCUSES and (excuse := EXCUSES[row.id](run, level)):
        raise NotJudged(excuse)
    where = "" if is_whole else f" from step {found.ends[0]} on"
    if row.width == 1:
        peak = np.argmax(part.values)
        level = part.values[peak]
        where = f" at step {part.steps[peak]}"
    usual = f"at least {number(low)}" if np.isinf(high) else f"at most {number(high)}"
    if np.isfinite([low, high]).all():
        usual = f"{number(low)} to {number(high)}"
    title = f"{row.what} is {number(level)}{where}; {usual} is usual."
    limit = high if level > (low + high) / 2 else low
    yield _finding(row, run, title, steps=found.ends, value=level, threshold=limit)


def _may_be_untrained(run: AnalysedRun, _: float) -> str:
    model = run.config("partial_pretrain", "model_name_or_path", "model.path")
    return "" if model else "the model is not known, so its weights may have been random"


def _has_generalised(run: AnalysedRun, level: float) -> str:
    held_out = run.find("val_loss")
    is_low = bool(held_out) and held_out.values[-1] < 2 * level
    return "the validation loss is similarly low, so nothing was memorized" if is_low else ""


def _few_are_cut(run: AnalysedRun, _: float) -> str:
    """In a large batch, the longest answer often reaches the cap although only a few answers do. If
    their share is not known, this is assumed when the usual answer is short.
    """
    shares = run.find("clipped_ratio")
    if shares:
        are_few = float(np.median(shares.values)) < FEW_CUT_OFF
    else:
        lengths = run.find("mean_length").values
        cap = run.find("max_length").values.max()
        are_few = len(lengths) > 0 and np.median(lengths) < cap / 2
    return "few answers are cut off" if are_few else ""


def _was_clipped(run: AnalysedRun, level: float) -> str:
    start = np.median(run.find("clip_ratio").values[:NUM_ENDS])
    may_be = level <= CLIPPED and level < CLIP_RISE * start
    return "the share of clipped ratios was high from the start" if may_be else ""


EXCUSES: dict[str, Callable[[AnalysedRun, float], str]] = {
    "loss_start_high": _may_be_untrained,
    "loss_final": _has_generalised,
    "clipped_ratio:cap": _few_are_cut,
    "clip_ratio": _was_clipped,
}
"""Id of a band -> a function of the run and of the level outside the band. It returns the reason
why the level is no warning, or "".
"""


def _moved(row: Row, run: AnalysedRun, _: Series) -> Findings:
    """Find the move that a row of `MOVES` describes."""
    points = run.levels(row.role)
    factor = float(row.range)
    found = shift(points, sign=1 if factor > 0 else -1, ratio=abs(factor))
    num_moved = len(within(points, *found.steps)) if found else 0
    if found is None or num_moved < row.width:
        return
    is_over = not found.is_lasting
    is_long = num_moved >= LASTING_SHARE * len(points)
    if is_over and not ("passing" in row.options and is_long):
        return
    if _is_return(points, found, abs(factor)):
        return
    if "sudden" in row.options and not _is_sudden(points, found.steps[0], abs(factor)):
        return
    if row.role in ("ordinary_time", "tokens_per_s") and _follows_lengths(run, found):
        return
    back = f" and came back after step {found.steps[1]}" if is_over else ""
    title = (
        f"{run.name(row.role)} went from {number(found.before)} to {number(found.after)} after "
        f"step {found.at}{back}: {row.what}."
    )
    yield _finding(row, run, title, steps=(found.at, found.steps[1]), value=found.after)


def _is_return(points: Series, move: Move, ratio: float) -> bool:
    """Return whether a metric only goes back to where it began.

    After a move by a ratio, it is less than half of the ratio, in logarithms, away from its start.
    A fall that passed leaves a part of the gain, or is hard to tell from noise.
    """
    start = np.median(points.values[: len(points) // 20 + 1])
    if ratio == 1:
        least = max(MOST * (move.before - start), 3 * noise(points.values))
        return not move.is_lasting and bool(move.before - move.after < least)
    away = np.log(move.after / start) * np.sign(move.after - move.before)
    return bool(away < np.log(ratio) / 2)


def _follows_lengths(run: AnalysedRun, move: Move) -> bool:
    """Return whether the lengths of answers changed in the same direction as a speed, by at least
    half as much in logarithms.
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
        yield _finding(row, run, title, steps=(began(points), points.ends[1]))


def _stays(row: Row, run: AnalysedRun, _: Series) -> Findings:
    """Find a result that never improves: it has no rising trend and no rise to a plateau."""
    points = run.levels(row.role)
    if len(points) >= row.width and not has_risen(points):
        title = f"{row.what} does not rise; its level is {number(np.median(points.values))}."
        yield _finding(row, run, title, steps=points.ends)


def _is_sudden(points: Series, onset: int, ratio: float) -> bool:
    """Return whether most of a change, measured as a ratio, happens within a few points."""
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
