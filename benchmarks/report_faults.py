"""How often the report is wrong: faults put into logs and found, from which step; healthy logs that
it complains about.

    python benchmarks/report_faults.py --runs 40

Each run is a log drawn by a seed, written in its trainer's format, read and judged
(tests/report_families.py, tests/report_trials.py). Families "held out" were not looked at while the
rules were made.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from measuring import header, table, write_result

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from report_families import FAMILIES, HELD_OUT
from report_trials import HEALTHY, Outcome, faults_of, trial

FIRST_SEED = 10_000
"""Tests and development of the rules use lower numbers."""
HEALTHY_TIMES = 5
"""Number of healthy logs of a family per log with a fault, because false alarms are rare."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=40, help="of each fault in each family")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    cases = [
        (place, number)
        for place, family in enumerate(FAMILIES)
        for number in range(-1, len(faults_of(family)))
    ]
    with ProcessPoolExecutor(arguments.workers) as pool:
        outcomes = [
            one for many in pool.map(trials, cases, [arguments.runs] * len(cases)) for one in many
        ]
    held_out = {family.name for family in HELD_OUT}
    result = {**header(), "runs_of_each": arguments.runs}
    for name, is_held_out in (("tuned", False), ("held_out", True)):
        chosen = [outcome for outcome in outcomes if (outcome.family in held_out) == is_held_out]
        missed = [row for row in rows_of(chosen) if is_missed(row)]
        result[name] = {"all": rates(chosen), "missed": missed}
    show(result)
    write_result("report_faults", result, arguments.output)


def trials(case: tuple[int, int], num_runs: int) -> list[Outcome]:
    family = FAMILIES[case[0]]
    fault = None if case[1] < 0 else faults_of(family)[case[1]]
    num_runs *= HEALTHY_TIMES if fault is None else 1
    return [trial(family, fault, FIRST_SEED + seed) for seed in range(num_runs)]


def rates(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts, each with its total."""
    healthy = [outcome for outcome in outcomes if outcome.fault == HEALTHY]
    faulty = [outcome for outcome in outcomes if outcome.fault != HEALTHY]
    placed = [outcome.is_placed for outcome in faulty if outcome.is_placed is not None]
    verdicts = {
        verdict.lower(): sum(outcome.verdict == verdict for outcome in healthy)
        for verdict in ("FAIL", "ATTENTION")
    }
    return {
        "healthy": len(healthy),
        **{f"healthy_told_{verdict}": count for verdict, count in verdicts.items()},
        "faulty": len(faulty),
        "found": sum(outcome.is_found for outcome in faulty),
        "shown_first": sum(outcome.is_first for outcome in faulty),
        "with_onset": len(placed),
        "onset_right": sum(placed),
    }


def rows_of(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    groups = groupby(outcomes, key=lambda outcome: (outcome.family, outcome.fault))
    return [
        {"family": family, "fault": fault, **rates(list(found))}
        for (family, fault), found in groups
    ]


def is_missed(row: dict[str, Any]) -> bool:
    """Return True if a fault was missed in some log, or found from a wrong step."""
    return bool(row["found"] < row["faulty"] or row["onset_right"] < row["with_onset"])


def show(result: dict[str, Any]) -> None:
    for name in ("tuned", "held_out"):
        found = result[name]["all"]
        print(f"{name}: {found}\n")
        columns = ("family", "fault", "faulty", "found", "with_onset", "onset_right")
        print(
            table(
                list(columns),
                ([row[column] for column in columns] for row in result[name]["missed"]),
            )
        )


if __name__ == "__main__":
    main()
