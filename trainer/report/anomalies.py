"""Intervals in which a run left its usual range: departures of single metrics, merged, with what
moved along.

A loss, a gradient norm or a KL that rises far is an anomaly by itself, and so is a learning rate
that jumps. Lengths, rewards and policy statistics jump alone now and then; they make one only where
two of these groups jump together.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.report.learning_rate import is_raised, raised_rates
from trainer.report.result import Anomaly, Mover
from trainer.report.run_log import RunLog, Series
from trainer.report.statistics import Floats, finite, runs, usual_range
from trainer.report.vocabulary import CHAIN_GROUPS, ROLES, meaning, witness_group

Ints = NDArray[np.int64]
EFFECTS = ("loss", "gradient", "kl")
PRIMARY = ("rate", *EFFECTS)
LEAST = {
    "loss": ("loss_z", "loss_ratio", "loss_rise"),
    "gradient": ("metric_z", "grad_ratio", None),
    "kl": ("metric_z", "kl_ratio", "kl_rise"),
}
"""Limits of score, factor (of what is looked at in logarithms) and distance beyond which a
group counts alone.
"""
LOGARITHMIC = (*EFFECTS, "length")
"""Groups that vary by factors; shares and rewards, which may come near 0, by differences."""
NUM_START = 16
"""Points of a steep start, in which nothing stands out."""
RATE_SPREAD = 0.05
"""Of the logarithm of a learning rate, which has no noise of its own."""
NUM_AFTER, LEAST_RISE = 16, math.log(1.2)
"""Points by which it is judged whether a metric has recovered, and how far above its level a
loss may stay.
"""
MIN_POINTS = 48


@dataclass(frozen=True)
class Witness:
    """One metric on its own points: score per point, and where it has left its range so far
    that it counts.
    """

    key: str
    group: str
    series: Series
    is_log: bool
    """Whether it is looked at in logarithms."""
    z: NDArray[np.floating]
    spread: NDArray[np.floating]
    """The usual spread upwards, in logarithms where `is_log`,"""
    levels: Floats
    """and what was to be expected there, likewise."""
    flagged: Ints
    """Indices into `series` of points that make an anomaly by themselves or with others."""
    moved: Ints
    """Indices of points that count as moving where there is one."""

    def level(self, mover: Mover) -> float:
        """What was to be expected where it moved; a loss that stays up soon is expected to."""
        onset, peak = np.searchsorted(
            self.series.steps, [mover.onset_step, mover.peak_step]
        ).tolist()
        return float(
            self.levels[min(onset, peak) : peak + 1].min()
            if self.group in EFFECTS
            else self.levels[peak]
        )


def observe(
    log: RunLog, limits: Mapping[str, float], *, is_generating: bool
) -> tuple[Witness, ...]:
    """The metrics of a log that can testify: those with at least 48 finite points."""
    found = []
    for key, series in log.series.items():
        group = witness_group(key, is_generating=is_generating)
        if group is None or len(series) < MIN_POINTS:
            continue
        known = finite(series)
        if group == "loss" and not is_generating:
            # of no token: a rule of its own, and no level to rise from
            known = known[known.values != 0]
        if len(known) >= MIN_POINTS:
            found.append(
                _of_rate(key, known, limits)
                if group == "rate"
                else _witness(key, group, known, limits)
            )
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
    return tuple(
        _anomaly(witnesses, grid, int(c[0]), int(c[-1]), limits, last_step) for c in clusters
    )


def _witness(key: str, group: str, series: Series, limits: Mapping[str, float]) -> Witness:
    is_log = group in LOGARITHMIC and bool(np.all(series.values > 0))
    values = np.log(series.values) if is_log else series.values
    floor = (0.10 if group == "gradient" else 0.05) if is_log else _least_spread(key, group, values)
    z, levels, up = usual_range(
        values,
        level_window=int(limits["level_points"]),
        spread_window=int(limits["spread_points"]),
        floor=floor,
        relative_floor=0 if is_log else 0.05,
    )
    z[:NUM_START] = 0
    flagged = _flagged(group, z, values, levels, is_log=is_log, limits=limits)
    # what moves along need not stand out by itself
    moved = np.flatnonzero((z if group in EFFECTS else np.abs(z)) > limits["onset_z"])
    z, up = z.astype(np.float32), up.astype(np.float32)  # half the memory: a log has many witnesses
    return Witness(key, group, series, is_log, z, up, levels, flagged, moved)


def _of_rate(key: str, series: Series, limits: Mapping[str, float]) -> Witness:
    """A rate's usual range is its own schedule: it leaves that only where it was raised, or
    where it stays up.
    """
    levels = np.log(np.maximum(series.values, np.finfo(float).tiny))
    z, up = np.zeros(len(series)), np.full(len(series), RATE_SPREAD)
    flagged: list[int] = []
    for stretch in raised_rates(series, jump=limits["lr_jump"]):
        inside = np.flatnonzero(is_raised(series, (stretch,)))
        z[inside] = (levels[inside] - math.log(stretch.level)) / RATE_SPREAD
        levels[inside] = math.log(stretch.level)
        flagged += inside.tolist() if stretch.is_over else inside[:1].tolist()
    indices = np.array(flagged, dtype=np.int64)
    return Witness(key, "rate", series, True, z, up, levels, indices, indices)


def _least_spread(key: str, group: str, values: Floats) -> float:
    """Rewards and shares may lie still for long: steps of 2 % of all they ever did, or of a
    share, are no spread.
    """
    if group in PRIMARY:
        return 1e-3
    return max(1e-3, 0.02 * float(np.ptp(values)), 0.02 if meaning(key).unit == "share" else 0.0)


def _flagged(
    group: str,
    z: Floats,
    values: Floats,
    levels: Floats,
    *,
    is_log: bool,
    limits: Mapping[str, float],
) -> Ints:
    """Where a metric counts: primary ones only upwards, and by a factor and a distance as well
    as by their score.
    """
    if group not in EFFECTS:
        return np.flatnonzero(np.abs(z) > limits["metric_z"])
    score, ratio, rise = LEAST[group]
    mask = z > limits[score]
    if is_log:
        mask &= values - levels > math.log(limits[ratio])
    if rise is not None:
        mask &= (np.exp(values) - np.exp(levels) if is_log else values - levels) > limits[rise]
    return np.flatnonzero(mask)


def _qualified(witnesses: tuple[Witness, ...], grid: Ints) -> Ints:
    """Grid points that belong to an anomaly: a primary metric left its range, or two other
    groups within a point.
    """
    is_primary, is_other, near = np.zeros((3, len(grid)), dtype=np.int8)
    for group in {witness.group for witness in witnesses}:
        mask = np.zeros(len(grid), dtype=np.int8)
        for witness in (w for w in witnesses if w.group == group):
            mask[
                np.searchsorted(grid, witness.series.steps[witness.flagged]).clip(max=len(grid) - 1)
            ] = 1
        if group in PRIMARY:
            is_primary |= mask
        else:
            is_other |= mask
            near += np.maximum(
                mask, np.maximum(np.append(mask[1:], np.int8(0)), np.append(np.int8(0), mask[:-1]))
            )
    return np.flatnonzero(is_primary | (is_other & (near >= 2)))


def _anomaly(
    witnesses: tuple[Witness, ...],
    grid: Ints,
    first: int,
    last: int,
    limits: Mapping[str, float],
    last_step: int,
) -> Anomaly:
    margin = int(limits["merge_points"])
    # at its ends the grid stands for what other metrics logged before and after it
    low = int(grid[first - margin]) if first > margin else 0
    end = max(int(w.series.steps[-1]) for w in witnesses)
    high = int(grid[last + margin]) if last + margin < len(grid) - 1 else end
    moved = [(w, m) for w in witnesses if (m := _mover(w, low, high, limits)) is not None]
    moved.sort(key=lambda pair: (pair[1].onset_step, _place_in_chain(*pair)))
    chain: dict[str, str] = {}
    for witness, mover in moved:
        chain.setdefault(witness.group, mover.metric)
    effects = [pair for pair in moved if pair[0].group in EFFECTS]
    witness, leader = max(effects or moved, key=lambda pair: abs(pair[1].z))
    level = math.exp(witness.level(leader)) if witness.is_log else witness.level(leader)
    return Anomaly(
        steps=(int(grid[first]), int(grid[last])),
        metric=leader.metric,
        peak_step=leader.peak_step,
        peak_value=leader.peak_value,
        z=leader.z,
        ratio=leader.peak_value / level if level * leader.peak_value > 0 else math.nan,
        percent=100 * leader.peak_step / last_step,
        has_recovered=all(
            _has_recovered(*pair, int(grid[last])) for pair in effects or [(witness, leader)]
        ),
        movers=tuple(mover for _, mover in moved),
        chain=tuple(chain.values()),
    )


def _mover(witness: Witness, low: int, high: int, limits: Mapping[str, float]) -> Mover | None:
    """How a metric moved between two steps; None where it stayed in its range."""
    start, stop = np.searchsorted(witness.series.steps, [low, high + 1])
    inside = witness.moved[(witness.moved >= start) & (witness.moved < stop)]
    if len(inside) == 0:
        return None
    outermost = int(inside[np.argmax(np.abs(witness.z[inside]))])
    z = float(witness.z[outermost])
    sign = 1 if z > 0 else -1
    peak = (
        int(start + np.argmax(witness.series.values[start:stop]))
        if witness.group in EFFECTS
        else outermost
    )
    starts, stops = runs(sign * witness.z[start:stop] > limits["onset_z"])
    onset = next(
        int(a) for a, b in zip(starts + start, stops + start, strict=True) if b > inside[0]
    )
    steps, values = witness.series.steps, witness.series.values
    return Mover(witness.key, sign, z, int(steps[onset]), int(steps[peak]), float(values[peak]))


def _place_in_chain(witness: Witness, mover: Mover) -> tuple[int, bool, float]:
    """Among metrics that set in together: by known cause, the main metric of a group before its
    parts.
    """
    is_part = not any(witness.key in ROLES[role] for role in ("kl", "mean_length", "reward"))
    return CHAIN_GROUPS.index(witness.group), is_part, -abs(mover.z)


def _has_recovered(witness: Witness, mover: Mover, last_step: int) -> bool:
    """Whether what follows lies where the metric was expected at its peak: within 3 spreads, a
    loss within 20 %.
    """
    index = int(np.searchsorted(witness.series.steps, last_step, side="right"))
    after = witness.series.values[index : index + NUM_AFTER]
    if len(after) < 3:
        return False
    level = float(np.median(np.log(after) if witness.is_log else after))
    tolerance = 3 * float(witness.spread[np.searchsorted(witness.series.steps, mover.peak_step)])
    is_log_loss = witness.group == "loss" and witness.is_log
    return level - witness.level(mover) < (min(tolerance, LEAST_RISE) if is_log_loss else tolerance)


def group_of(key: str) -> str | None:
    """The group of a mover's metric, for sentences about chains."""
    return witness_group(key, is_generating=True)


def is_of(anomaly: Anomaly, role: str) -> bool:
    """Whether a metric of this role moved."""
    return any(mover.metric in ROLES[role] for mover in anomaly.movers)
