"""Runs a detector over curves whose truth is known and counts what it says: for tests and the calibration."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from curves import Curve, healthy

from trainer.detection import Detector, Event, Level

FAULT_STEP = 1500
Family = tuple[str, str]


def watch(curve: Curve, *, first: int = 0, detector: Detector | None = None) -> list[Event]:
    """Every event of a run."""
    detector = detector or Detector()
    return [event for step in range(first, len(curve.loss)) for event in detector.observe(step, curve.values(step))]


@dataclass(frozen=True)
class Rates:
    """Events of healthy runs."""

    counts: dict[Level, int]
    num_steps: int

    def per_10k(self, level: Level) -> float:
        return self.counts.get(level, 0) * 10_000 / self.num_steps


def healthy_rates(families: Iterable[Family], seeds: Iterable[int]) -> Rates:
    """Over one run per family and seed."""
    families = list(families)
    curves = [healthy(family, seed=seed) for seed in seeds for family in families]
    counts = Counter(event.level for curve in curves for event in watch(curve))
    return Rates(dict(counts), sum(len(curve.loss) for curve in curves))


@dataclass(frozen=True)
class Found:
    """Of runs with one fault: the share in which a level was reported at or after it, and after how many steps."""

    share: float
    delays: tuple[int, ...]


def found(
    family: Family, fault: Callable[[Curve], Curve], level: Level, *, seeds: Iterable[int], within: int = 300
) -> Found:
    """`fault` strikes at FAULT_STEP. The run ends `within` steps later."""
    seeds = list(seeds)
    delays = []
    for seed in seeds:
        curve = fault(healthy(family, seed=seed, num_steps=FAULT_STEP + within))
        hits = [event.step for event in watch(curve) if event.level is level and event.step >= FAULT_STEP]
        delays += [step - FAULT_STEP for step in hits[:1]]
    return Found(len(delays) / len(seeds), tuple(sorted(delays)))
