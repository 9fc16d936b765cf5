"""Runs a detector over curves whose truth is known and counts its events, for tests and the
calibration.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import curves
from curves import Curve, healthy

from trainer.train.detection import Detector, Level

FAULT_STEP = 1500
WATCHED_STEPS = 300
"""A fault counts as missed if it is not found within this many steps."""
Family = tuple[str, str]
Fault = Callable[[Curve], Curve]
FAULTS = {
    "spike x2, gradient x8": partial(curves.spike, at=FAULT_STEP, loss=2, grad=8),
    "spike x3, gradient x27": partial(curves.spike, at=FAULT_STEP, loss=3, grad=27),
    "spike x5, gradient x125": partial(curves.spike, at=FAULT_STEP, loss=5, grad=125),
    "gradient x20": partial(curves.spike, at=FAULT_STEP, grad=20),
    "gradient x100": partial(curves.spike, at=FAULT_STEP, grad=100),
    "x3, fading over 50 steps": partial(curves.decaying, at=FAULT_STEP),
    "drift +0.2% a step": partial(curves.drift, at=FAULT_STEP, rate=0.002),
    "drift +1% a step": partial(curves.drift, at=FAULT_STEP, rate=0.01),
    "drift +5% a step": partial(curves.drift, at=FAULT_STEP, rate=0.05),
    "level +30%": partial(curves.level, at=FAULT_STEP),
}
SINGLE_STEP = tuple(name for name in FAULTS if name.startswith(("spike", "gradient")))


def watch(curve, *, first=0, end=None, detector=None):
    """Return every event of the steps from `first` to before `end`."""
    detector = detector or Detector()
    steps = range(first, len(curve.loss) if end is None else end)
    return [event for step in steps for event in detector.observe(step, curve.values(step))]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one curve: false events while it is healthy, and for each fault the delay of
    each level.
    """

    healthy: Mapping[Level, int]
    num_steps: int
    delays: Mapping[str, Mapping[Level, int]]


def trial(family, seed, faults=FAULTS):
    """The steps before the fault are observed once. Every fault continues from the detector's saved
    state.
    """
    curve = healthy(family, seed=seed)
    detector = Detector()
    events = watch(curve, end=FAULT_STEP, detector=detector)
    state = detector.state_dict()
    events += watch(curve, first=FAULT_STEP, detector=detector)
    delays = {}
    for name, fault in faults.items():
        detector = Detector()
        detector.load_state_dict(state)
        end = FAULT_STEP + (1 if name in SINGLE_STEP else WATCHED_STEPS)
        found = watch(fault(curve), first=FAULT_STEP, end=end, detector=detector)
        delays[name] = {event.level: event.step - FAULT_STEP for event in reversed(found)}
    return Outcome(Counter(event.level for event in events), len(curve.loss), delays)


def per_10k(outcomes, level):
    """Return the number of false events per 10,000 healthy steps."""
    num_events = sum(outcome.healthy.get(level, 0) for outcome in outcomes)
    return 1e4 * num_events / sum(outcome.num_steps for outcome in outcomes)


def recall(outcomes, fault, levels):
    """Return the share of curves in which the fault raised any of the levels."""
    levels = set(levels)
    return sum(not levels.isdisjoint(outcome.delays[fault]) for outcome in outcomes) / len(outcomes)


def precision(outcomes, fault):
    """Return the precision of SEVERE if one step in 10,000 has this fault."""
    found = recall(outcomes, fault, [Level.SEVERE])
    return found / (found + per_10k(outcomes, Level.SEVERE)) if found else 0.0
