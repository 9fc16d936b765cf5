"""The short form of kills.py: kills and preemptions at random moments of real runs lose, change
and leave nothing.
"""

import json
import os
import subprocess
import sys

import kills
import pytest
from kills import Campaign
from sweeps import short_or_full

SEED = 7
STRIKES = short_or_full({"kill": 3, "preempt": 2}, full={"kill": 8, "preempt": 4})


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return Campaign(tmp_path_factory.mktemp("campaign"), seed=SEED)


def test_nothing_is_lost_by_kills_and_preemptions(campaign):
    campaign.run_all(STRIKES)
    assert campaign.faults == [], f"seed {SEED}"


@pytest.mark.parametrize("forgets_names", [False, True])
def test_nothing_is_lost_by_power_cuts_unless_the_disk_forgets_names(tmp_path, forgets_names):
    command = [sys.executable, kills.__file__, "--power-cuts", "2", "--seed", "1", "--output"]
    environment = {**os.environ, "DISK_FORGETS_NAMES": "1"} if forgets_names else None
    done = subprocess.run(
        [*command, tmp_path / "result.json"],
        env=environment,
        timeout=200,
        capture_output=True,
        text=True,
    )
    assert done.returncode == int(forgets_names), done.stdout + done.stderr
    faults = json.loads((tmp_path / "result.json").read_text())["faults"]
    assert any("checkpoint" in fault for fault in faults) == forgets_names, faults
