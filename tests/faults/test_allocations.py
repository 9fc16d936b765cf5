"""The short form of allocations.py: a run that lacks memory names the cause and harms nothing."""

import json
import subprocess
import sys

from faults import allocations
from sweeps import short_or_full

NUM_CASES = short_or_full(4, full=20)


def test_a_failed_allocation_is_named_and_harms_nothing(tmp_path):
    command = [sys.executable, allocations.__file__, "--cases", str(NUM_CASES), "--seed", "3"]
    done = subprocess.run(
        [*command, "--output", tmp_path / "result.json"],
        timeout=300,
        capture_output=True,
        text=True,
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert done.returncode == 0, result["faults"]
    assert sum(result["counts"].values()) == NUM_CASES
    assert result["counts"]["named the cause"] > 0
