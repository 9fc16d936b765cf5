"""The short form of kills.py: kills and preemptions at random moments of real runs lose, change
and leave nothing.
"""

import os
from pathlib import Path

import kills
import pytest
from kills import Campaign
from processes import run_python
from small_files import read_json
from sweeps import short_or_full

SEED = 7
STRIKES = short_or_full({"kill": 3, "preempt": 2}, full={"kill": 8, "preempt": 4})


@pytest.fixture(scope="module")
def campaign(root):
    return Campaign(root, seed=SEED)


def test_nothing_is_lost_by_kills_and_preemptions(campaign):
    campaign.run_all(STRIKES)
    assert campaign.faults == [], f"seed {SEED}"


def test_nothing_is_lost_by_power_cuts(tmp_path):
    words = [kills.__file__, "--power-cuts", "2", "--seed", "1", "--output"]
    done = run_python(*words, str(tmp_path / "result.json"), timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_json(tmp_path / "result.json")["faults"] == []


CUT_SHORT = """
import os, sys
from pathlib import Path
from lying_disk import cut_power, run_on_lying_disk
if "DISK_ROOT" not in os.environ:
    sys.exit(run_on_lying_disk())
run = Path(os.environ["DISK_ROOT"], "run")
run.mkdir()
for name in ("synced", "lost"):
    file = os.open(run / name, os.O_CREAT | os.O_WRONLY)
    os.write(file, b"x")
    if name == "synced":
        os.fsync(file)
        os.fsync(os.open(run, os.O_RDONLY))
cut_power(run, seed=2)  # of which no unsynced change survives
print(*os.listdir(run))
"""


@pytest.mark.parametrize(("names", "left"), [({}, "synced\n"), ({"DISK_FORGETS_NAMES": "1"}, "\n")])
def test_a_power_cut_takes_what_was_not_synced(tmp_path, names, left):
    (tmp_path / "run.py").write_text(CUT_SHORT)
    environment = {**os.environ, **names, "PYTHONPATH": str(Path(kills.__file__).parent)}
    done = run_python(str(tmp_path / "run.py"), env=environment)
    assert (done.stdout, done.stderr) == (left, "")
