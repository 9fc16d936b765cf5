"""The same rules over a whole series, for reports: which points stand out, and where a loss diverged."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.detection.divergence import Divergence, DivergenceSettings
from trainer.detection.window import RobustWindow, Scale, Usual

MAX_MEASURES = 20_000
"""A longer series measures its usual level once every few points, so that a million points take seconds."""
RANGE_SHARE = 0.02
"""Floor of the spread of a metric that changes sign, as a share of its range over the whole series."""
LOG_FLOOR = 0.05


@dataclass(frozen=True)
class Scores:
    """For each point of a series its distance from what was usual before it, all of the series' length.

    NaN where the value is not finite or too few came before.
    """

    z: NDArray[np.float64]
    level: NDArray[np.float64]
    """The usual level, in the metric's unit."""
    ratio: NDArray[np.float64]
    """Value over level; NaN also where the level's window has values at or below zero."""

    def is_spike(self, *, z: float = 8.0, ratio: float = 1.0) -> NDArray[np.bool_]:
        """Points beyond `z` spreads, up or down, and, where a ratio is known, at least so many times off."""
        with np.errstate(invalid="ignore", divide="ignore"):
            times = np.where(self.ratio > 0, np.maximum(self.ratio, 1 / self.ratio), np.inf)
            return (np.abs(self.z) > z) & (times >= ratio)


@dataclass(frozen=True)
class Episode:
    """A rise of the loss, as indices into the series."""

    onset: int
    certain: int
    """Where an online watch would have reported it."""
    end: int
    """Last point of it."""


def generic_scale(values: NDArray[np.float64]) -> Scale:
    """For a metric of which nothing is known: both directions count, floors follow from its range."""
    finite = values[np.isfinite(values)]
    spread = float(np.ptp(finite)) if len(finite) else 0.0
    return Scale(log_floor=LOG_FLOOR, raw_floor=max(RANGE_SHARE * spread, np.finfo(np.float64).tiny), is_two_sided=True)


def score(values: NDArray[np.float64], *, scale: Scale | None = None, size: int = 128, min_points: int = 32) -> Scores:
    """Score each point against the window before it; without `scale`, by `generic_scale`."""
    window = RobustWindow(scale or generic_scale(values), size=size, min_points=min_points)
    every = -(-len(values) // MAX_MEASURES)
    z, level, ratio = (np.full(len(values), np.nan) for _ in range(3))
    usual: Usual | None = None
    for index, value in enumerate(values.tolist()):
        if not np.isfinite(value):
            continue
        if usual is None or index % every == 0:
            usual = window.usual
        if usual is not None:
            z[index], level[index] = usual.z(value), usual.level
            if usual.is_log:
                ratio[index] = usual.ratio(value)
        window.push(value, within=usual)
    return Scores(z, level, ratio)


def spikes(values: NDArray[np.float64], *, scale: Scale | None = None, z: float = 8.0) -> NDArray[np.bool_]:
    """Points that stand out from those before them."""
    return score(values, scale=scale).is_spike(z=z)


def intervals(steps: Sequence[int], is_spike: NDArray[np.bool_], *, max_gap: int) -> list[tuple[int, int]]:
    """(first, last) step of each group of spikes; those at most `max_gap` steps apart are one group."""
    found: list[tuple[int, int]] = []
    for step, is_out in zip(steps, is_spike, strict=True):
        if not is_out:
            continue
        if found and step - found[-1][1] <= max_gap:
            found[-1] = (found[-1][0], int(step))
        else:
            found.append((int(step), int(step)))
    return found


def episodes(losses: NDArray[np.float64], settings: DivergenceSettings | None = None) -> list[Episode]:
    """Every stretch in which a loss was diverging; one that goes on ends with the series."""
    watch = Divergence(settings)
    found: list[Episode] = []
    for index, loss in enumerate(losses.tolist()):
        if not np.isfinite(loss):
            continue
        if watch.observe(index, loss):
            found.append(Episode(watch.onset, index, index))
        elif watch.is_diverging:
            found[-1] = Episode(found[-1].onset, found[-1].certain, index)
    return found
