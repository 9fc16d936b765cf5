"""Intervals in which a run left its usual range: departures of single metrics, merged, with what
moved along.

A loss, a gradient norm or a KL that rises far is an anomaly by itself, and so is a learning rate
that jumps. Lengths, rewards and policy statistics jump alone now and then; they make one only where
two of these groups jump together.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.tools.report.learning_rate import is_raised, raised_rates
from trainer.tools.report.result import Anomaly, Mover
from trainer.tools.report.run_log import RunLog, Series
from trainer.tools.report.shapes import departures
from trainer.tools.report.statistics import Floats, Ints, finite, runs
from trainer.tools.report.vocabulary import CHAIN_GROUPS, ROLES, meaning, witness_group

EFFECTS = ("loss", "gradient", "kl")
LEAST = {"loss": (8, 1.5, 0.1), "gradient": (6, 5, 0), "kl": (6, 5, 1.0)}
"""Score, factor (where all values are positive) and distance beyond which a group counts alone."""
POLICY_RISE = 0.18
"""The distance of a loss that changes its sign."""
ONSET_Z, METRIC_Z = 4, 6
"""A departure sets in; a metric that is no effect has left its usual range."""
MERGE_POINTS = 3
"""Departures at most so many log points apart are one interval."""
NUM_START = 16
"""Points of a steep start, in which nothing stands out."""
RATE_SPREAD = 0.05
"""Spread of the logarithm of a learning rate, which has no noise."""
NUM_AFTER, LEAST_RISE = 16, math.log(1.2)
"""Points by which it is judged whether a metric has recovered, and how far above its level a
loss may stay.
"""
MIN_POINTS = 20
HARD_BATCH = 3
"""Times its usual loss that a single hard batch may have."""


@dataclass(frozen=True)
class Witness:
    """One metric on its own points, in logarithms where `is_log`."""

    key: str
    group: str
    series: Series
    is_log: bool
    z: NDArray[np.floating]
    spread: NDArray[np.floating]
    """The usual spread upwards,"""
    levels: Floats
    """and the usual level, of each point."""
    flagged: Ints
    """Indices of points that make an anomaly by themselves or with others."""

    @property
    def is_effect(self) -> bool:
        return self.group in EFFECTS

    @property
    def moved(self) -> NDArray[np.bool_]:
        """Which points count as moving where there is an anomaly: they need not stand out."""
        is_one_sided = self.is_effect and self.is_log
        return np.asarray((self.z if is_one_sided else np.abs(self.z)) > ONSET_Z)

    def level(self, mover: Mover) -> float:
        """Return the usual level where it moved; a loss that stays up soon makes a new one."""
        ends = np.searchsorted(self.series.steps, [mover.onset_step, mover.peak_step]).tolist()
        first, peak = min(ends), ends[1]
        return float(self.levels[first : peak + 1].min() if self.is_effect else self.levels[peak])


def observe(log: RunLog, *, is_generating: bool) -> tuple[Witness, ...]:
    """Return the metrics of a log that can testify: those with enough finite points."""
    found = []
    for key, series in log.series.items():
        group = witness_group(key, is_generating=is_generating)
        known = finite(series)
        if group == "loss" and not is_generating:
            known = known[known.values != 0]  # of no token: no level to rise from
        if group is not None and len(known) >= MIN_POINTS:
            found.append(_rate(key, known) if group == "rate" else _witness(key, group, known))
    return tuple(found)


def _witness(key: str, group: str, series: Series) -> Witness:
    is_log = group in (*EFFECTS, "length") and bool(np.all(series.values > 0))
    values = np.log(series.values) if is_log else series.values
    z, levels, spread = departures(values, _least_spread(key, group, values, is_log=is_log))
    z[: min(NUM_START, len(z) // 4)] = 0
    is_far = np.abs(z) > METRIC_Z
    if group in EFFECTS:
        score, ratio, rise = LEAST[group]
        distance = np.exp(values) - np.exp(levels) if is_log else np.abs(values - levels)
        is_far = (z if is_log else np.abs(z)) > score
        is_far &= distance > (rise if is_log else POLICY_RISE)
        if is_log:
            is_far &= values - levels > math.log(ratio)
    # half the memory: a log has many witnesses
    z, spread = z.astype(np.float32), spread.astype(np.float32)
    return Witness(key, group, series, is_log, z, spread, levels, np.flatnonzero(is_far))


def _least_spread(key: str, group: str, values: Floats, *, is_log: bool) -> float:
    """Return the spread that a quiet stretch has at least: trifles do not stand out.

    Rewards and shares may lie still for long: 2 % of their range, or of a share, is no spread.
    """
    if is_log:
        return 0.10 if group == "gradient" else 0.05
    level = 0.05 * float(np.median(np.abs(values)))
    if group in EFFECTS:
        return max(1e-3, level)
    return max(1e-3, level, 0.02 * float(np.ptp(values)), 0.02 * (meaning(key).unit == "share"))


def _rate(key: str, series: Series) -> Witness:
    """Return a learning rate, which leaves its usual range only where it is raised.

    Where it stays up, only its first point makes an anomaly.
    """
    levels = np.log(np.maximum(series.values, np.finfo(float).tiny))
    z, spread = np.zeros(len(series)), np.full(len(series), RATE_SPREAD)
    flagged: list[int] = []
    for stretch in raised_rates(series):
        inside = np.flatnonzero(is_raised(series, (stretch,)))
        z[inside] = (levels[inside] - math.log(stretch.level)) / RATE_SPREAD
        levels[inside] = math.log(stretch.level)
        flagged += inside.tolist() if stretch.is_over else inside[:1].tolist()
    return Witness(key, "rate", series, True, z, spread, levels, np.array(flagged, np.int64))


def find_anomalies(witnesses: tuple[Witness, ...], *, last_step: int) -> tuple[Anomaly, ...]:
    """Return all intervals in order of time."""
    if not witnesses:
        return ()
    grid = max((w.series.steps for w in witnesses), key=len)
    points = _qualified(witnesses, grid)
    clusters = np.split(points, np.flatnonzero(np.diff(points) > MERGE_POINTS) + 1)
    ends = [(int(cluster[0]), int(cluster[-1])) for cluster in clusters if len(cluster)]
    found = (_anomaly(witnesses, grid, first, last, last_step) for first, last in ends)
    has_gradient = any(witness.group == "gradient" for witness in witnesses)
    return tuple(one for one in found if not (has_gradient and _is_passing(one)))


def _is_passing(anomaly: Anomaly) -> bool:
    """Return whether one hard batch explains an anomaly: the loss of a single point alone, while
    the gradient stayed in its range.
    """
    is_single = anomaly.steps[0] == anomaly.steps[1] and anomaly.has_recovered
    is_far = anomaly.ratio > HARD_BATCH
    return (
        is_single and not is_far and all(mover.metric in ROLES["loss"] for mover in anomaly.movers)
    )


def _qualified(witnesses: tuple[Witness, ...], grid: Ints) -> Ints:
    """Return the grid points that belong to an anomaly: an effect or the rate left its range, or
    two other groups did within a point.
    """
    masks = {witness.group: np.zeros(len(grid), dtype=bool) for witness in witnesses}
    for witness in witnesses:
        places = np.searchsorted(grid, witness.series.steps[witness.flagged])
        masks[witness.group][places.clip(max=len(grid) - 1)] = True
    is_alone, is_other = np.zeros((2, len(grid)), dtype=bool)
    near = np.zeros(len(grid), dtype=np.int8)
    for group, mask in masks.items():
        if group in ("rate", *EFFECTS):
            is_alone |= mask
        else:
            is_other |= mask
            near += mask | np.append(mask[1:], False) | np.append(False, mask[:-1])
    return np.flatnonzero(is_alone | (is_other & (near >= 2)))


def _anomaly(
    witnesses: tuple[Witness, ...], grid: Ints, first: int, last: int, last_step: int
) -> Anomaly:
    # at its ends the grid stands for what other metrics logged before and after it
    low = int(grid[first - MERGE_POINTS]) if first > MERGE_POINTS else 0
    is_last = last + MERGE_POINTS >= len(grid) - 1
    end = max(int(w.series.steps[-1]) for w in witnesses)
    high = end if is_last else int(grid[last + MERGE_POINTS])
    moved = [(w, m) for w in witnesses if (m := _mover(w, low, high)) is not None]
    # of what sets in together, a known cause comes first
    moved.sort(key=lambda pair: (pair[1].onset_step, CHAIN_GROUPS.index(pair[0].group)))
    chain: dict[str, str] = {}
    for witness, mover in moved:
        chain.setdefault(witness.group, mover.metric)
    effects = [pair for pair in moved if pair[0].is_effect] or moved
    witness, leader = max(effects, key=lambda pair: abs(pair[1].z))
    level = math.exp(witness.level(leader)) if witness.is_log else witness.level(leader)
    until = int(grid[last])
    judged = effects if effects[0][0].is_effect else [(witness, leader)]
    return Anomaly(
        steps=(int(grid[first]), until),
        metric=leader.metric,
        peak_step=leader.peak_step,
        peak_value=leader.peak_value,
        z=leader.z,
        ratio=leader.peak_value / level if level * leader.peak_value > 0 else math.nan,
        percent=100 * leader.peak_step / last_step,
        has_recovered=all(_has_recovered(*pair, until) for pair in judged),
        movers=tuple(mover for _, mover in moved),
        chain=tuple(chain.values()),
    )


def _mover(witness: Witness, low: int, high: int) -> Mover | None:
    """Return how a metric moved between two steps; None where it stayed in its range."""
    steps, values = witness.series.steps, witness.series.values
    start, stop = np.searchsorted(steps, [low, high + 1])
    inside = np.flatnonzero(witness.moved[start:stop]) + start
    if len(inside) == 0:
        return None
    outermost = int(inside[np.argmax(np.abs(witness.z[inside]))])
    z = float(witness.z[outermost])
    sign = 1 if z > 0 else -1
    peak = int(start + np.argmax(sign * values[start:stop])) if witness.is_effect else outermost
    starts, stops = runs(sign * witness.z[start:stop] > ONSET_Z)
    onset = int(start + starts[stops + start > inside[0]][0])
    return Mover(witness.key, sign, z, int(steps[onset]), int(steps[peak]), float(values[peak]))


def _has_recovered(witness: Witness, mover: Mover, last_step: int) -> bool:
    """Return whether the next points are where the metric was expected at its peak: within 3
    spreads, a loss within 20 %.
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


def is_of(anomaly: Anomaly, role: str) -> bool:
    """Return whether a metric of this role moved."""
    return any(mover.metric in ROLES[role] for mover in anomaly.movers)
