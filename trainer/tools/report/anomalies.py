"""Finds the intervals in which a run left its usual range.

Bursts of single metrics are merged into one interval, together with the metrics that moved at the
same time. A large rise of a loss, a gradient norm or a KL is an anomaly by itself. Lengths, rewards
and policy statistics sometimes jump alone; it is an anomaly only if two of these groups jump
together.
"""

import math
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.tools.report.names import ROLES
from trainer.tools.report.result import Anomaly, Mover
from trainer.tools.report.run_log import RunLog, Series
from trainer.tools.report.shapes import departures
from trainer.tools.report.statistics import Floats, Ints, finite
from trainer.tools.report.vocabulary import meaning

GROUPS = ("kl", "policy", "length", "reward", "gradient", "loss")
"""Groups of metrics, causes first. If several begin to move at the same point, an earlier group is
known to cause the later ones.
"""
EFFECTS = {"loss": (8, 1.5, 0.1), "gradient": (6, 5, 0), "kl": (6, 5, 1.0)}
"""Maps each group that is an anomaly by itself to its limits: a score, a factor and a distance.

A point must exceed all three. Where a metric has values that are not positive, the score and
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
"""The distance from its usual level at which a metric that is not always positive stands out."""
ONSET_Z, METRIC_Z = 4, 6
"""The score from which on a metric counts as moving in an anomaly; and the score from which on a
metric that is not in `EFFECTS` leaves its usual range.
"""
MERGE_POINTS = 3
"""Bursts that are at most this many log points apart form one interval."""
NUM_START = 16
"""The first points of a log are steep, so none of them counts as a burst."""
NUM_AFTER, LEAST_RISE = 16, math.log(1.2)
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

    `levels` and `spread` are in logarithms if `is_log` is true.
    """

    key: str
    group: str
    series: Series
    is_log: bool
    z: NDArray[np.floating]
    levels: Floats
    spread: NDArray[np.floating]
    flagged: Ints
    """Indices of the points that leave the metric's usual range."""

    @property
    def is_effect(self) -> bool:
        return self.group in EFFECTS

    def level(self, mover: Mover) -> float:
        """Return the usual level at the point where the metric began to move.

        Later levels do not serve: a loss that stays high soon becomes the usual level.
        """
        return float(self.levels[np.searchsorted(self.series.steps, mover.onset_step)])


def find_anomalies(log: RunLog, *, is_generating: bool, total_steps: int) -> tuple[Anomaly, ...]:
    """Return all anomalies in chronological order."""
    witnesses = []
    for key, series in log.series.items():
        group, known = group_of(key, is_generating=is_generating), finite(series)
        if group == "loss" and not is_generating:
            known = known[known.values != 0]  # a batch without label tokens has no level
        if group is not None and len(known) >= MIN_POINTS:
            witnesses.append(_witness(key, group, known))
    if not witnesses:
        return ()
    grid = max((w.series.steps for w in witnesses), key=len)
    points = _qualified(witnesses, grid)
    clusters = np.split(points, np.flatnonzero(np.diff(points) > MERGE_POINTS) + 1)
    found = (
        _anomaly(witnesses, grid, int(cluster[0]), int(cluster[-1]), total_steps)
        for cluster in clusters
        if len(cluster)
    )
    has_gradient = any(witness.group == "gradient" for witness in witnesses)
    return tuple(one for one in found if not (has_gradient and _is_hard_batch(one)))


def _witness(key: str, group: str, series: Series) -> Witness:
    """Measure how far each point of a metric is from its usual level."""
    is_log = group in (*EFFECTS, "length") and bool(series.values.min() > 0)
    values = np.log(series.values) if is_log else series.values
    # the floor keeps tiny changes in a quiet stretch from standing out
    floor = 0.05 * (1 + (group == "gradient"))
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
            is_far &= np.exp(values) - np.exp(levels) > rise
        else:
            is_far = (np.abs(z) > score) & (np.abs(values - levels) > POLICY_RISE)
    # float32 halves the memory: a log has many witnesses
    z, spread = z.astype(np.float32), spread.astype(np.float32)
    return Witness(key, group, series, is_log, z, levels, spread, np.flatnonzero(is_far))


def _is_hard_batch(anomaly: Anomaly) -> bool:
    """Return whether one hard batch explains an anomaly, in which only the loss moved, at a single
    point.
    """
    is_single = anomaly.steps[0] == anomaly.steps[1] and anomaly.has_recovered
    is_alone = all(mover.metric in ROLES["loss"] for mover in anomaly.movers)
    return is_single and is_alone and not anomaly.ratio > HARD_BATCH


def _qualified(witnesses: list[Witness], grid: Ints) -> Ints:
    """Return the grid points of anomalies.

    At such a point a metric in `EFFECTS` left its range, or metrics of two other groups did so
    at most one point apart.
    """
    alone = np.zeros(len(grid), dtype=bool)
    others: dict[str, NDArray[np.bool_]] = {}
    for witness in witnesses:
        empty = np.zeros_like(alone)
        mask = alone if witness.is_effect else others.setdefault(witness.group, empty)
        places = np.searchsorted(grid, witness.series.steps[witness.flagged])
        mask[places.clip(max=len(grid) - 1)] = True
    near = sum(np.convolve(mask, np.ones(3), "same") > 0 for mask in others.values())
    return np.flatnonzero(
        np.logical_or.reduce([alone, *(m & (near >= 2) for m in others.values())])
    )


def _anomaly(
    witnesses: list[Witness], grid: Ints, first: int, last: int, total_steps: int
) -> Anomaly:
    """Describe the interval between two points of the grid by the metrics that moved in it."""
    # at the ends of the grid, include points that other metrics have before or after the grid
    low = int(grid[first - MERGE_POINTS]) if first > MERGE_POINTS else 0
    is_last = last + MERGE_POINTS >= len(grid) - 1
    high = np.inf if is_last else int(grid[last + MERGE_POINTS])
    moved = [(w, m) for w in witnesses if (m := _mover(w, low, high)) is not None]
    moved.sort(key=lambda pair: (pair[1].onset_step, GROUPS.index(pair[0].group)))
    chain: dict[str, str] = {}
    for witness, mover in moved:
        chain.setdefault(witness.group, mover.metric)
    effects = [pair for pair in moved if pair[0].is_effect]
    witness, leader = max(effects or moved, key=lambda pair: abs(pair[1].z))
    level = math.exp(witness.level(leader)) if witness.is_log else witness.level(leader)
    until = int(grid[last])
    return Anomaly(
        steps=(int(grid[first]), until),
        metric=leader.metric,
        peak_step=leader.peak_step,
        peak_value=leader.peak_value,
        ratio=leader.peak_value / level if level * leader.peak_value > 0 else math.nan,
        percent=100 * leader.peak_step / total_steps,
        has_recovered=all(_has_recovered(*pair, until) for pair in effects or [(witness, leader)]),
        movers=tuple(mover for _, mover in moved),
        chain=tuple(chain.values()),
    )


def _mover(witness: Witness, low: float, high: float) -> Mover | None:
    """Return how a metric moved between two steps; None if it stayed in its range."""
    start, stop = np.searchsorted(witness.series.steps, [low, high + 1])
    steps, values, z = (
        array[start:stop] for array in (witness.series.steps, witness.series.values, witness.z)
    )
    is_one_sided = witness.is_effect and witness.is_log
    sizes = z if is_one_sided else np.abs(z)
    if not (sizes > ONSET_Z).any():
        return None
    outermost = int(np.argmax(sizes))
    sign = 1 if z[outermost] > 0 else -1
    peak = int(np.argmax(sign * values)) if witness.is_effect else outermost
    onset = int(np.argmax(sign * z > ONSET_Z))
    return Mover(
        witness.key,
        sign,
        float(z[outermost]),
        int(steps[onset]),
        int(steps[peak]),
        float(values[peak]),
    )


def _has_recovered(witness: Witness, mover: Mover, last_step: int) -> bool:
    """Return whether the points after an interval are back at the earlier usual level.

    The tolerance is 3 spreads, and at most 20 % for a loss that is always positive.
    """
    index = int(np.searchsorted(witness.series.steps, last_step, side="right"))
    after = witness.series.values[index : index + NUM_AFTER]
    if len(after) < 3:
        return False
    level = float(np.median(np.log(after) if witness.is_log else after))
    tolerance = 3 * float(witness.spread[np.searchsorted(witness.series.steps, mover.peak_step)])
    if witness.group == "loss" and witness.is_log:
        tolerance = min(tolerance, LEAST_RISE)
    return mover.sign * (level - witness.level(mover)) < tolerance
