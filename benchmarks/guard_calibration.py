"""How often the guard is wrong: false alarms on healthy curves, faults found or missed.

    python benchmarks/guard_calibration.py --runs 200

Each run is a seeded curve of 3000 steps of loss and gradient norm (tests/curves.py). Families "held
out" were never looked at while the rules were made; their misses are reported, not repaired.
Validation curves have 20 validations.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from measuring import header, table, write_result

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from curves import BIMODAL, HELD_OUT, TUNED, healthy, held_out_val_curve, val_curve
from guard_trials import FAULT_STEP, FAULTS, Family, Outcome, per_10k, precision, recall, trial

from trainer.detection import Detector, Level
from trainer.detection.watches import ValidationWatch

FIRST_SEED = 10_000
"""Tests use lower ones."""
SPIKE = "spike x3, gradient x27"
SPIKES = (SPIKE, "spike x5, gradient x125")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=200, help="of each family")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result = {
        **header(),
        "runs_per_family": arguments.runs,
        "microseconds_per_step": microseconds_per_step(),
    }
    families = [*TUNED, *HELD_OUT]
    with ProcessPoolExecutor(arguments.workers) as pool:
        outcomes = list(pool.map(trials, families, [arguments.runs] * len(families)))
    rows = [summary(family, found) for family, found in zip(families, outcomes, strict=True)]
    ordinary = [
        outcome
        for row, found in zip(rows, outcomes, strict=True)
        if row["is_ordinary"]
        for outcome in found
    ]
    everything = [outcome for found in outcomes for outcome in found]
    result |= {
        "severe_precision": {
            fault: {"ordinary": precision(ordinary, fault), "all": precision(everything, fault)}
            for fault in SPIKES
        },
        "families": rows,
        "overfit": [overfit_summary(arguments.runs, *case) for case in OVERFIT_CASES],
    }
    show(result)
    result["lowest_recall"] = {
        "tuned": lowest_recall([row for row in rows if not row["is_held_out"]]),
        "held_out": lowest_recall([row for row in rows if row["is_held_out"]]),
    }
    result["families"] = [{key: row[key] for key in row if key != "faults"} for row in rows]
    write_result("guard_calibration", result, arguments.output)


def trials(family: Family, num_runs: int) -> list[Outcome]:
    return [trial(family, FIRST_SEED + run) for run in range(num_runs)]


def summary(family: Family, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "loss": family[0],
        "gradient": family[1],
        "is_held_out": family in HELD_OUT,
        "is_ordinary": family[0] not in BIMODAL,
        "false_per_10k_steps": {str(level): round(per_10k(outcomes, level), 3) for level in Level},
        "runs_with_advisories": {
            str(count): sum(outcome.healthy.get(Level.ADVISORY, 0) == count for outcome in outcomes)
            for count in sorted({outcome.healthy.get(Level.ADVISORY, 0) for outcome in outcomes})
        },
        "faults": {fault: fault_summary(outcomes, fault) for fault in FAULTS},
    }


def fault_summary(outcomes: Sequence[Outcome], fault: str) -> dict[str, Any]:
    delays = sorted(
        outcome.delays[fault][Level.DIVERGING]
        for outcome in outcomes
        if Level.DIVERGING in outcome.delays[fault]
    )
    found: dict[str, Any] = {
        "warn_or_severe": recall(outcomes, fault, [Level.WARN, Level.SEVERE]),
        "severe": recall(outcomes, fault, [Level.SEVERE]),
        "diverging": recall(outcomes, fault, [Level.DIVERGING]),
    }
    if delays:
        found["diverging_delay"] = {"median": median(delays), "max": delays[-1]}
        found["diverging_within_200"] = sum(delay <= 200 for delay in delays) / len(outcomes)
    return found


def lowest_recall(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By fault, the smallest share of runs in which it was found, over the families."""
    kinds = ("warn_or_severe", "severe", "diverging", "diverging_within_200")
    return {
        fault: {kind: min(row["faults"][fault].get(kind, 0.0) for row in rows) for kind in kinds}
        for fault in FAULTS
    }


OVERFIT_CASES = [(held_out, noise) for held_out in (False, True) for noise in (0.002, 0.005, 0.01)]


def overfit_summary(num_runs: int, is_held_out: bool, noise: float) -> dict[str, Any]:
    """Healthy curves never turn; the others turn half way."""
    rng = np.random.default_rng(FIRST_SEED)
    curve = held_out_val_curve if is_held_out else val_curve
    good = [is_overfit(*curve(rng, noise=noise, turn=1.0)) for _ in range(num_runs)]
    bad = [is_overfit(*curve(rng, noise=noise, turn=0.5)) for _ in range(num_runs)]
    return {
        "is_held_out": is_held_out,
        "noise": noise,
        "false_overfit": sum(good) / num_runs,
        "recall": sum(bad) / num_runs,
    }


def is_overfit(val_losses: Sequence[float], train_losses: Sequence[float]) -> bool:
    judge = ValidationWatch()
    losses = enumerate(zip(val_losses, train_losses, strict=True))
    return any(
        judge.observe(step, val_loss=float(val), train_loss=float(train))
        for step, (val, train) in losses
    )


def microseconds_per_step() -> float:
    """`limits` and `observe` together, on one core."""
    curve, detector = healthy(TUNED[0], seed=0), Detector()
    steps = [curve.values(step) for step in range(len(curve.loss))]
    started = time.process_time()
    for step, values in enumerate(steps):
        detector.limits()
        detector.observe(step, values)
    return round(1e6 * (time.process_time() - started) / len(steps), 1)


def show(result: dict[str, Any]) -> None:
    columns = ["loss", "gradient", "held out", "WARN", "SEVERE", "DIVERGING", "advisories a run"]
    columns += ["x3 found", "+0.2% found", "within 200"]
    lines = []
    for row in result["families"]:
        rates, spike, drift = (
            row["false_per_10k_steps"],
            row["faults"][SPIKE],
            row["faults"]["drift +0.2% a step"],
        )
        lines.append(
            [
                row["loss"],
                row["gradient"],
                "yes" if row["is_held_out"] else "",
                *(
                    f"{rates[str(level)]:.2f}"
                    for level in (Level.WARN, Level.SEVERE, Level.DIVERGING)
                ),
                ", ".join(
                    f"{count}: {runs}" for count, runs in row["runs_with_advisories"].items()
                ),
                f"{spike['severe']:.1%}",
                f"{drift['diverging']:.1%}",
                f"{drift.get('diverging_within_200', 0.0):.1%}",
            ]
        )
    print("False events per 10000 healthy steps; faults struck at step", FAULT_STEP)
    print(table(columns, lines))
    print("SEVERE, precision at one true event per 10000 steps:", result["severe_precision"])
    print(table([*result["overfit"][0]], [row.values() for row in result["overfit"]]))
    print("microseconds a step:", result["microseconds_per_step"])


if __name__ == "__main__":
    main()
