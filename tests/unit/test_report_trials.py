"""Faults injected into logs of many trainers are found, from the right step on; healthy logs cause
no finding.

This is a sample: `python benchmarks/report_faults.py` measures the rates.
"""

from report_families import FAMILIES
from report_trials import faults_of, trial

SEED = 3
EVERY = 2
"""One in this number of pairs of family and fault is tested."""
SLOW_TO_WRITE = ("axolotl tensorboard",)
KNOWN_MISSES = 2


def sample():
    families = [family for family in FAMILIES if family.name not in SLOW_TO_WRITE]
    pairs = [(family, fault) for family in families for fault in faults_of(family)]
    return [trial(family, fault, SEED) for family, fault in pairs[::EVERY]]


def test_faults_of_many_trainers_are_found_and_placed():
    outcomes = sample()
    assert len(outcomes) > 40 and len({outcome.fault for outcome in outcomes}) >= 20
    missed = [
        (one.family, one.fault, one.verdict, one.told) for one in outcomes if not one.is_found
    ]
    displaced = [
        (one.family, one.fault) for one in outcomes if one.is_found and one.is_placed is False
    ]
    assert len(missed) + len(displaced) <= KNOWN_MISSES, (missed, displaced)


def test_healthy_logs_of_many_trainers_are_left_alone():
    healthy = [trial(family, None, SEED) for family in FAMILIES if family.name not in SLOW_TO_WRITE]
    assert {one.family: one.told for one in healthy if one.verdict != "OK"} == {}
