"""Finds the intervals in which a run left its usual range.

Bursts of single metrics are merged into one interval, together with the metrics that moved at the
same time. A large rise of a loss, a gradient norm or a KL is an anomaly on its own. Lengths,
rewards and policy statistics sometimes jump alone; these jumps are an anomaly only if two of these
groups jump together.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trainer.tools.report.names import ROLES
from trainer.tools.report.result import Anomaly, Mover
from trainer.tools.report.run_log import RunLog, Series
from trainer.tools.report.shapes import departures
from trainer.tools.report.statistics import Floats, Ints, Mask, finite
from trainer.tools.report.vocabulary import meaning

GROUPS = ("kl", "policy", "length", "reward", "gradient", "loss")
"""Groups of metrics, causes first. If several groups begin to move at the same point, earlier
groups cause the later ones.
"""
EFFECTS = {"loss": (8, 1.5, 0.1), "gradient": (6, 5, 0), "kl": (6, 5, 1.0)}
"""Maps each group that is an anomaly on its own to its limits: a score, a factor and a distance.

A point must exceed all three. For a metric with values that are not positive, the score and
`POLICY_RISE` apply instead.
"""
KEYS = {
    "loss": ROLES["loss"],
    "gradient": ROLES["grad"],
    "kl": (*ROLES["kl"], *ROLES["update_kl"]),
    "policy": (*ROLES["clip_ratio"], *ROLES["entropy"]),
}
_OF_GENERATION = re.compile(
    r"(?P<length>completions/.*|tokens/.*|train/seq_(?!prompt|total).*|.*response_length.*)|"
    r"(?P<reward>(?!.*([_/]std|_min|_max)$)((train/)?(reward|tag_count).*|critic/(score|rewards?)[_/].*"
    r"|(.*/)?(accuracy(_mean)?|budget_violation_rate|latency_mean)))"
)
"""Keys of lengths and rewards. These depend on the model only if it generates its own texts;
otherwise they depend on the batch.
"""
POLICY_RISE = 0.18
"""A metric that is not always positive stands out at this distance from its usual level."""
ONSET_Z = 4
METRIC_Z = 6
"""The minimum score of a metric that counts as moving in an anomaly; and the minimum score at which
a metric that is not in `EFFECTS` leaves its usual range.
"""
MERGE_POINTS = 3
"""Bursts that are at most this many log points apart form one interval."""
NUM_START = 16
"""The first points of a log are steep, so they never count as a burst."""
NUM_AFTER = 16
LEAST_RISE = math.log(1.2)
"""The number of points after an interval that show whether a metric has recovered; and how far
above its usual level the logarithm of a recovered loss may be.
"""
MIN_POINTS = 20
HARD_BATCH = 3
"""A single hard batch may raise the loss to this multiple of its usual level."""


def group_of(key: str, *, is_generating: bool) -> str | None:
    """Return a metric's group if its jumps are informative; None for bookkeeping metrics."""
    group = next((group for group, keys in KEYS.items() if key in keys), None)
    if group is None and not key.startswith(("val/", "eval/")):
        match = _OF_GENERATION.fullmatch(key)
        group = match.lastgroup if match else None
    return group if is_generating or group in EFFECTS else None


@dataclass(frozen=True)
class Witness:
    """One metric at the steps at which it was logged, with its usual level at each of them.

    `values`, `levels` and `spread` are logarithms if `is_log` is true.
    """

    key: str
    group: str
    series: Series
    is_log: bool
    values: Floats
    z: Floats
    """Distance from the usual level, as a multiple of the usual spread."""
    levels: Floats
    spread: Floats
    is_far: Mask
    """The points that leave the metric's usual range."""

    @property
    def is_effect(self) -> bool:
        return self.group in EFFECTS


def find_anomalies(log: RunLog, *, is_generating: bool, total_steps: int) -> tuple[Anomaly, ...]:
    """Return all anomalies in chronological order."""
    witnesses = []
    for key, series in log.series.items():
        group = group_of(key, is_generating=is_generating)
        known = finite(series)
        if group == "loss" and not is_generating:
            known = known[known.values != 0]  # a batch without label tokens has no level
        if group is not None and len(known) >= MIN_POINTS:
            witnesses.append(_witness(key, group, known, is_generating=is_generating))
    if not witnesses:
        return ()
    grid = max((witness.series.steps for witness in witnesses), key=len)
    found = [
        _anomaly(witnesses, grid, first, last, total_steps)
        for first, last in _intervals(witnesses, grid)
    ]
    has_gradient = any(witness.group == "gradient" for witness in witnesses)
    hard = [one for one in found if has_gradient and _is_hard_batch(one)]
    # small spikes next to a large spike of the loss belong to the same fault
    has_spike = any(one not in hard and one.metric in ROLES["loss"] for one in found)
    return tuple(one for one in found if has_spike or one not in hard)


def _witness(
    key: str,
    group: str,
    series: Series,
    *,
    is_generating: bool,
) -> Witness:
    """Measure how far each point of a metric is from its usual level."""
    is_log = group in (*EFFECTS, "length") and bool(series.values.min() > 0)
    values = np.log(series.values) if is_log else series.values
    # the floor keeps tiny changes in a quiet stretch from standing out
    floor = 0.1 if group == "gradient" else 0.05
    if not is_log:
        floor = max(1e-3, 0.05 * float(np.median(np.abs(values))))
        if group not in EFFECTS:  # rewards and shares may stay constant for a long time
            floor = max(floor, 0.02 * float(np.ptp(values)), 0.02 * (meaning(key).unit == "share"))
    z, levels, spread = departures(values, floor)
    z[: min(NUM_START, len(z) // 4)] = 0
    is_far = np.abs(z) > METRIC_Z
    if group in EFFECTS:
        score, ratio, rise = EFFECTS[group]
        if is_log:
            is_far = (z > score) & (values - levels > math.log(ratio))
            usual = np.exp(levels)
            # a policy's loss is noise around 0; a low loss of other models is a level
            least_rise = rise if is_generating else np.minimum(rise, usual)
            is_far &= series.values - usual > least_rise
        else:
            is_far = (np.abs(z) > score) & (np.abs(values - levels) > POLICY_RISE)
    return Witness(key, group, series, is_log, values, z, levels, spread, is_far)


def _is_hard_batch(anomaly: Anomaly) -> bool:
    """Return True if one hard batch explains an anomaly: only the loss moved, and only at one step."""
    is_single = anomaly.steps[0] == anomaly.steps[1] and anomaly.has_recovered
    is_alone = all(mover.metric in ROLES["loss"] for mover in anomaly.movers)
    return is_single and is_alone and not anomaly.ratio > HARD_BATCH


def _intervals(witnesses: list[Witness], grid: Ints) -> Iterator[tuple[int, int]]:
    """Yield the first and the last grid point of each burst in which a metric in `EFFECTS`, or
    metrics of two other groups, left their range.
    """
    masks = np.zeros((len(GROUPS), len(grid)), dtype=bool)
    for one in witnesses:
        places = np.searchsorted(grid, one.series.steps[one.is_far])
        masks[GROUPS.index(one.group), places.clip(max=len(grid) - 1)] = True
    points = np.flatnonzero(masks.any(axis=0))
    for burst in np.split(points, np.flatnonzero(np.diff(points) > MERGE_POINTS) + 1):
        groups = {GROUPS[place] for place in np.flatnonzero(masks[:, burst].any(axis=1))}
        if not groups.isdisjoint(EFFECTS) or len(groups) > 1:
            yield int(burst[0]), int(burst[-1])


def _anomaly(
    witnesses: list[Witness],
    grid: Ints,
    first: int,
    last: int,
    total_steps: int,
) -> Anomaly:
    """Describe the interval between two points of the grid by the metrics that moved in it."""
    # at the ends of the grid, include points that other metrics have before or after the grid
    low = grid[first - MERGE_POINTS] if first > MERGE_POINTS else 0
    high = grid[last + MERGE_POINTS] if last + MERGE_POINTS < len(grid) - 1 else np.inf
    until = int(grid[last])
    moves = [move for one in witnesses if (move := _move(one, low, high, until)) is not None]
    moves.sort(key=lambda move: (move.mover.onset_step, GROUPS.index(move.witness.group)))
    chain: dict[str, str] = {}
    for move in moves:
        chain.setdefault(move.witness.group, move.mover.metric)
    effects = [move for move in moves if move.witness.is_effect]
    leading = max(effects or moves, key=lambda move: abs(move.mover.z))
    leader = leading.mover
    level = leading.level
    return Anomaly(
        steps=(int(grid[first]), until),
        metric=leader.metric,
        peak_step=leader.peak_step,
        peak_value=leader.peak_value,
        ratio=leader.peak_value / level if level * leader.peak_value > 0 else math.nan,
        percent=100 * leader.peak_step / total_steps,
        has_recovered=all(move.has_recovered for move in effects or [leading]),
        movers=tuple(move.mover for move in moves),
        chain=tuple(chain.values()),
    )


class _Move(NamedTuple):
    """The move of a metric in an interval."""

    witness: Witness
    mover: Mover
    level: float
    """The usual level when the metric began to move. Later levels are useless here, because a loss
    that stays high soon becomes the usual level.
    """
    has_recovered: bool
    """True if the points after the interval are back at that level. The tolerance is 3 spreads, and
    at most 20 % for a loss that is always positive.
    """


def _move(
    witness: Witness,
    low: float,
    high: float,
    until: int,
) -> _Move | None:
    """Return how a metric moved between two steps; None if it stayed in its range."""
    steps = witness.series.steps
    logged = witness.series.values
    start, stop = np.searchsorted(steps, [low, high + 1])
    z = witness.z[start:stop]
    sizes = z if witness.is_effect and witness.is_log else np.abs(z)
    if not (sizes > ONSET_Z).any():
        return None
    outermost = int(np.argmax(sizes))
    sign = 1 if z[outermost] > 0 else -1
    peak = start + (np.argmax(sign * logged[start:stop]) if witness.is_effect else outermost)
    onset = start + np.argmax(sign * z > ONSET_Z)
    level = float(witness.levels[onset])
    after = witness.values[np.searchsorted(steps, until, side="right") :][:NUM_AFTER]
    tolerance = 3 * witness.spread[peak]
    if witness.group == "loss" and witness.is_log:
        tolerance = min(tolerance, LEAST_RISE)
    return _Move(
        witness,
        Mover(
            witness.key,
            sign,
            float(z[outermost]),
            int(steps[onset]),
            int(steps[peak]),
            float(logged[peak]),
        ),
        math.exp(level) if witness.is_log else level,
        len(after) >= 3 and bool(sign * (np.median(after) - level) < tolerance),
    )
