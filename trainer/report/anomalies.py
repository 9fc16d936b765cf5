"""Intervals in which a run left its usual range: departures of single metrics, merged, with what moved along.

A loss, a gradient norm or a KL that rises far is an anomaly by itself. Lengths, rewards and policy statistics jump
alone now and then; they make one only where two of these groups jump together.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.report.result import Anomaly, Mover
from trainer.report.run_log import RunLog, Series
from trainer.report.statistics import UsualRange, finite, runs, spearman, usual_range
from trainer.report.vocabulary import CHAIN_GROUPS, ROLES, meaning, witness_group

Ints = NDArray[np.int64]
PRIMARY = ("loss", "gradient", "kl")
LOGARITHMIC = (*PRIMARY, "length")
"""Groups that vary by factors; shares and rewards, which may come near 0, by differences."""
NUM_BEFORE = 16
"""A departure must also stand out against this many points before it: a steep start or a new level is none."""
MIN_POINTS = 48
MAX_SAMPLES = 5000


@dataclass(frozen=True)
class Witness:
    """One metric on its own points: score per point, and where it has left its range so far that it counts."""

    key: str
    group: str
    series: Series
    usual: UsualRange
    is_log: bool
    z: NDArray[np.float32]
    flagged: Ints
    """Indices into `series`."""

    def level(self, index: int) -> float:
        centre = self.usual.centre_at(index)
        return math.exp(centre) if self.is_log else centre


def observe(log: RunLog, limits: Mapping[str, float], *, is_generating: bool) -> tuple[Witness, ...]:
    """The metrics of a log that can testify: those with 48 points that do not leave their range all the time."""
    found = []
    for key, series in log.series.items():
        group = witness_group(key, is_generating=is_generating)
        if group and len(series) >= MIN_POINTS and len(clean := finite(series)) >= MIN_POINTS:
            witness = _witness(key, group, clean, limits)
            if group in PRIMARY or len(witness.flagged) <= limits["restless"] * len(clean):
                found.append(witness)
    return tuple(found)


def find_anomalies(
    witnesses: tuple[Witness, ...], limits: Mapping[str, float], *, last_step: int
) -> tuple[Anomaly, ...]:
    """All intervals in order of time."""
    if not witnesses:
        return ()
    grid = max((w.series.steps for w in witnesses), key=len)
    qualified = _qualified(witnesses, grid)
    is_apart = np.diff(qualified) > limits["merge_points"]
    clusters = np.split(qualified, np.flatnonzero(is_apart) + 1) if len(qualified) else []
    return tuple(_anomaly(witnesses, grid, int(c[0]), int(c[-1]), limits, last_step) for c in clusters)


def _witness(key: str, group: str, series: Series, limits: Mapping[str, float]) -> Witness:
    is_log = group in LOGARITHMIC and bool(np.all(series.values > 0))
    values = np.log(series.values) if is_log else series.values
    floor = (0.10 if group == "gradient" else 0.05) if is_log else _least_spread(key, group, values)
    usual = usual_range(
        values,
        level_window=int(limits["level_points"]),
        spread_window=int(limits["spread_points"]),
        floor=floor,
        relative_floor=0 if is_log else 0.05,
    )
    z = _against_the_points_before(values, usual, limits["onset_z"])
    flagged = _flagged(group, z, values, usual, is_log=is_log, limits=limits)
    return Witness(key, group, series, usual, is_log, z.astype(np.float32), flagged)


def _least_spread(key: str, group: str, values: NDArray[np.float64]) -> float:
    """Rewards and shares may lie still for long: steps of 2 % of all they ever did, or of a share, are no spread."""
    if group in PRIMARY:
        return 1e-3
    return max(1e-3, 0.02 * float(np.ptp(values)), 0.02 if meaning(key).unit == "share" else 0.0)


def _against_the_points_before(values: NDArray[np.float64], usual: UsualRange, limit: float) -> NDArray[np.float64]:
    """Scores; where beyond `limit`, the smaller of the two against the window and against the points just before."""
    z = usual.z(values)
    z[:NUM_BEFORE] = 0
    candidates = np.flatnonzero(np.abs(z) > limit)
    before = np.median(values[candidates[:, None] - np.arange(1, NUM_BEFORE + 1)], axis=1)
    sign = np.sign(z[candidates])
    again = sign * (values[candidates] - before) / usual.scale(sign, candidates)
    z[candidates] = sign * np.clip(again, 0, np.abs(z[candidates]))
    return z


def _flagged(
    group: str,
    z: NDArray[np.float64],
    values: NDArray[np.float64],
    usual: UsualRange,
    *,
    is_log: bool,
    limits: Mapping[str, float],
) -> Ints:
    """Where a metric counts: primary ones only upwards, and by a factor as well as by their score."""
    rise = values - usual.centre
    if group == "loss":
        mask = (z > limits["loss_z"]) & (_rise_in_nat(values, usual, is_log=is_log) > limits["loss_rise"])
        mask &= (rise > math.log(limits["loss_ratio"])) if is_log else True
    elif group == "gradient":
        mask = (z > limits["metric_z"]) & ((rise > math.log(limits["grad_ratio"])) if is_log else True)
    elif group == "kl":
        mask = (z > limits["metric_z"]) & (_rise_in_nat(values, usual, is_log=is_log) > limits["kl_rise"])
        mask &= (rise > math.log(limits["kl_ratio"])) if is_log else True
    else:
        mask = np.abs(z) > limits["metric_z"]
    return np.flatnonzero(mask)


def _rise_in_nat(values: NDArray[np.float64], usual: UsualRange, *, is_log: bool) -> NDArray[np.float64]:
    return np.exp(values) - np.exp(usual.centre) if is_log else values - usual.centre


def _qualified(witnesses: tuple[Witness, ...], grid: Ints) -> Ints:
    """Grid points that belong to an anomaly: a primary metric left its range, or two other groups within a point."""
    primary = np.zeros(len(grid), dtype=bool)
    groups: dict[str, NDArray[np.bool_]] = {}
    for witness in witnesses:
        places = np.searchsorted(grid, witness.series.steps[witness.flagged]).clip(max=len(grid) - 1)
        if witness.group in PRIMARY:
            primary[places] = True
        else:
            groups.setdefault(witness.group, np.zeros(len(grid), dtype=bool))[places] = True
    near = sum((_widened(mask).astype(np.int8) for mask in groups.values()), np.zeros(len(grid), dtype=np.int8))
    any_group = np.any(list(groups.values()), axis=0) if groups else np.zeros(len(grid), dtype=bool)
    return np.flatnonzero(primary | (any_group & (near >= 2)))


def _widened(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    wide = mask.copy()
    wide[1:] |= mask[:-1]
    wide[:-1] |= mask[1:]
    return wide


def _anomaly(
    witnesses: tuple[Witness, ...], grid: Ints, first: int, last: int, limits: Mapping[str, float], last_step: int
) -> Anomaly:
    margin = int(limits["merge_points"])
    low, high = int(grid[max(0, first - margin)]), int(grid[min(len(grid) - 1, last + margin)])
    moved = [(w, m) for w in witnesses if (m := _mover(w, low, high, limits)) is not None]
    moved.sort(key=lambda pair: (pair[1].onset_step, _place_in_chain(*pair)))
    leaders = [pair for pair in moved if pair[0].group in PRIMARY] or moved
    witness, leader = max(leaders, key=lambda pair: abs(pair[1].z))
    index = int(np.searchsorted(witness.series.steps, leader.peak_step))
    level = witness.level(index)
    return Anomaly(
        steps=(int(grid[first]), int(grid[last])),
        metric=leader.metric,
        peak_step=leader.peak_step,
        peak_value=leader.peak_value,
        z=leader.z,
        ratio=leader.peak_value / level if level * leader.peak_value > 0 else math.nan,
        percent=100 * leader.peak_step / last_step,
        has_recovered=_has_recovered(witness, int(grid[last])),
        movers=tuple(mover for _, mover in moved),
        chain=_chain([(pair[0].group, pair[1].metric) for pair in moved]),
    )


def _mover(witness: Witness, low: int, high: int, limits: Mapping[str, float]) -> Mover | None:
    """How a metric moved between two steps; None where it stayed in its range."""
    start, stop = np.searchsorted(witness.series.steps, [low, high + 1])
    inside = witness.flagged[(witness.flagged >= start) & (witness.flagged < stop)]
    if len(inside) == 0:
        return None
    peak = int(inside[np.argmax(np.abs(witness.z[inside]))])
    sign = 1 if witness.z[peak] > 0 else -1
    starts, stops = runs(sign * witness.z[start:stop] > limits["onset_z"])
    onset = next(int(a) for a, b in zip(starts + start, stops + start, strict=True) if b > inside[0])
    steps, values = witness.series.steps, witness.series.values
    return Mover(witness.key, sign, float(witness.z[peak]), int(steps[onset]), int(steps[peak]), float(values[peak]))


def _place_in_chain(witness: Witness, mover: Mover) -> tuple[int, bool, float]:
    """Among metrics that set in together: by known cause, the main metric of a group before its parts."""
    is_part = not any(witness.key in ROLES[role] for role in ("kl", "mean_length", "reward"))
    return CHAIN_GROUPS.index(witness.group), is_part, -abs(mover.z)


def _chain(moved: list[tuple[str, str]]) -> tuple[str, ...]:
    """The first metric of each group, in the order of their onsets."""
    chain: dict[str, str] = {}
    for group, key in moved:
        chain.setdefault(group, key)
    return tuple(chain.values())


def _has_recovered(witness: Witness, last_step: int) -> bool:
    """Whether the points after the interval lie where those before it lay, within 3 spreads."""
    index = int(np.searchsorted(witness.series.steps, last_step, side="right"))
    after = witness.series.values[index : index + NUM_BEFORE]
    if len(after) < 3:
        return False
    level = float(np.median(np.log(after) if witness.is_log else after))
    return level - witness.usual.centre_at(index - 1) < 3 * witness.usual.scale_up_at(index - 1)


def correlations(witnesses: tuple[Witness, ...], limits: Mapping[str, float]) -> tuple[tuple[str, str, float], ...]:
    """Pairs of metrics whose deviations from their own course go together, strongest first."""
    residuals = {}
    for witness in witnesses:
        values = np.log(witness.series.values) if witness.is_log else witness.series.values
        stride = -(-len(values) // MAX_SAMPLES)
        residuals[witness.key] = (witness.series.steps[::stride], (values - witness.usual.centre)[::stride])
    pairs = []
    keys = list(residuals)
    for number, left in enumerate(keys):
        for right in keys[number + 1 :]:
            (steps, a), (other_steps, b) = residuals[left], residuals[right]
            _, mine, its = np.intersect1d(steps, other_steps, assume_unique=True, return_indices=True)
            if len(mine) >= MIN_POINTS and abs(rho := spearman(a[mine], b[its])) > limits["correlation"]:
                pairs.append((left, right, rho))
    return tuple(sorted(pairs, key=lambda pair: -abs(pair[2])))


def group_of(key: str) -> str | None:
    """The group of a mover's metric, for sentences about chains."""
    return witness_group(key, is_generating=True)


def is_of(anomaly: Anomaly, role: str) -> bool:
    """Whether a metric of this role moved."""
    return any(mover.metric in ROLES[role] for mover in anomaly.movers)
