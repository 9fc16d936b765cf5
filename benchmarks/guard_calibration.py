"""How often the guard is wrong: false alarms on healthy curves, faults found or missed.

    python benchmarks/guard_calibration.py --runs 200

Each run is a seeded curve of 3000 steps of loss and gradient norm (tests/curves.py). Families "held
out" were never looked at while the rules were made; their misses are reported, not repaired.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from measuring import header, table, write_result

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from curves import BIMODAL, HELD_OUT, TUNED, healthy
from guard_trials import FAULT_STEP, FAULTS, Family, Outcome, per_10k, precision, recall, trial

from trainer.train.detection import Detector, Level

FIRST_SEED = 10_000
"""Tests use lower numbers."""
SPIKES = ("spike x3, gradient x27", "spike x5, gradient x125")
DRIFT = "drift +0.2% a step"
LEVELS = (Level.WARN, Level.SEVERE, Level.DIVERGING)


def trials(family: Family, num_runs: int) -> list[Outcome]:
    return [trial(family, FIRST_SEED + run) for run in range(num_runs)]


def summary(family: Family, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """False events per 10000 healthy steps, and the shares of faults that were found."""
    found: dict[str, Any] = {"loss": family[0], "gradient": family[1]}
    found["is_held_out"] = family in HELD_OUT
    found |= {str(level): round(per_10k(outcomes, level), 3) for level in LEVELS}
    for fault in FAULTS:
        found[f"{fault}: told"] = recall(outcomes, fault, [Level.WARN, Level.SEVERE])
        found[f"{fault}: severe"] = recall(outcomes, fault, [Level.SEVERE])
        found[f"{fault}: diverging"] = recall(outcomes, fault, [Level.DIVERGING])
        delays = [outcome.delays[fault].get(Level.DIVERGING, 1000) for outcome in outcomes]
        in_time = sum(delay <= 200 for delay in delays)
        found[f"{fault}: within 200 steps"] = in_time / len(delays)
    return found


def microseconds_per_step() -> float:
    """Return the combined cost of `limits` and `observe` on one core."""
    curve = healthy(TUNED[0], seed=0)
    detector = Detector()
    steps = [curve.values(step) for step in range(len(curve.loss))]
    started_s = time.process_time()
    for step, values in enumerate(steps):
        detector.limits()
        detector.observe(step, values)
    return round(1e6 * (time.process_time() - started_s) / len(steps), 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=200, help="of each family")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    families = [*TUNED, *HELD_OUT]
    with ProcessPoolExecutor(arguments.workers) as pool:
        outcomes = list(pool.map(trials, families, [arguments.runs] * len(families)))
    rows = [summary(family, found) for family, found in zip(families, outcomes, strict=True)]
    everything = [outcome for found in outcomes for outcome in found]
    ordinary = [
        outcome
        for family, found in zip(families, outcomes, strict=True)
        if family[0] not in BIMODAL
        for outcome in found
    ]
    columns = ["loss", "gradient", "is_held_out", *map(str, LEVELS)]
    columns += [f"{SPIKES[0]}: severe", f"{DRIFT}: diverging", f"{DRIFT}: within 200 steps"]
    print("False events per 10000 healthy steps; faults struck at step", FAULT_STEP)
    print(table(columns, [[str(row[name]) for name in columns] for row in rows]))
    result = {
        **header(),
        "runs_per_family": arguments.runs,
        "microseconds_per_step": microseconds_per_step(),
        "severe_precision": {
            fault: {"ordinary": precision(ordinary, fault), "all": precision(everything, fault)}
            for fault in SPIKES
        },
        "families": rows,
    }
    print("SEVERE, precision at one true event per 10000 steps:", result["severe_precision"])
    print("microseconds a step:", result["microseconds_per_step"])
    write_result("guard_calibration", result, arguments.output)


if __name__ == "__main__":
    main()
