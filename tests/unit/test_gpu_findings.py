"""The findings of docs/gpu.md: each has tests that exist, and what settles it is in the list of
what is taken out.
"""

import json
import re
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "faults"))
from gpu_safeguards import GPU_SAFEGUARDS  # noqa: E402

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (TESTS.parent / "docs" / "gpu.md").read_text().splitlines()
    if re.match(r"\| ?(\d+|fine print)? ?\| \w|\| \d+ \|", line)
][1:]
NUM_FINDINGS, NUM_FINE_PRINT = 18, 13
KEPT = {"14": "torch's own, said where it is chosen"}
"""Findings without anything to take out."""


def test_every_finding_has_its_row() -> None:
    numbers = [number for number, *_ in ROWS]
    assert numbers == [
        *map(str, range(1, NUM_FINDINGS + 1)),
        "fine print",
        *[""] * (NUM_FINE_PRINT - 1),
    ]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1][:40])
def test_the_tests_of_a_finding_exist(row: list[str]) -> None:
    found = re.findall(r"`([^`:]+)::(\w+)`", row[3])
    assert found
    for file, name in found:
        assert f"def {name}(" in (TESTS / file).read_text(), (file, name)


def test_what_settles_a_finding_is_taken_out_and_seen_to_be_missed() -> None:
    """By a test of its row; benchmarks/results/mutations.json holds what was seen, none missed."""
    by_number = {number: cells[-1] for number, *cells in ROWS if number.isdecimal()}
    fine_print = " ".join(cells[-1] for number, *cells in ROWS if not number.isdecimal())
    results = json.loads((TESTS.parent / "benchmarks" / "results" / "mutations.json").read_text())
    seen = results["failed test by safeguard removed"]
    taken = set()
    for mutation in GPU_SAFEGUARDS:
        number = mutation.name.removeprefix("GPU ").partition(":")[0]
        taken.add(number)
        tests = by_number.get(number, fine_print)
        assert (
            any(test in tests for test in mutation.tests)
            or "snapshot" in mutation.name
            or "thread" in mutation.name
        )
        assert seen[mutation.name] in mutation.tests
    assert set(by_number) - taken == set(KEPT)
