"""The short form of kills.py: 60 kills and 10 preemptions at random moments of real runs; nothing lost or changed."""

import os
import random
from pathlib import Path

import pytest
from kills import TOTAL_STEPS, Campaign, Trial

from trainer.checkpoint import layout

SEED = int(os.environ.get("KILLS_SEED", "7"))


def test_nothing_is_lost_by_kills_and_preemptions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    campaign = Campaign(tmp_path, seed=SEED)
    plan = ["kill"] * 60 + ["preempt"] * 10
    random.Random(SEED).shuffle(plan)
    number = 0
    for how in plan:
        while not campaign.run_trial(number := number + 1, how):
            pass
        assert campaign.faults == [], f"seed {SEED}"
    with capsys.disabled():
        print(f"\nseed {SEED}: {dict(sorted(campaign.counts.items()))}")
    struck = [name for name in campaign.counts if "while saving" in name or "elsewhere" in name]
    assert len(struck) >= 3, "strikes fell into saves and elsewhere"


@pytest.mark.parametrize("fault", ["diverged", "lost", "damaged"])
def test_the_campaign_can_tell(tmp_path: Path, fault: str) -> None:
    """A finished run with one thing wrong each: the checks of a trial name it."""
    campaign = Campaign(tmp_path, seed=SEED)
    _, world_size = campaign._new_run(1)
    straight = tmp_path / f"straight{world_size}"
    trial = Trial.draw(1, world_size, "kill")
    assert campaign._check(trial, straight, 0, "elsewhere") == []
    newest = straight / layout.step_dir_name(TOTAL_STEPS)
    if fault == "diverged":
        trace = straight / "trace.jsonl"
        trace.write_text(trace.read_text().replace('"step": 3, "loss": "0x1', '"step": 3, "loss": "0x3'))
    elif fault == "lost":
        newest.rename(straight / ".trash_x")
    else:
        (newest / "data.pt").write_bytes((newest / "data.pt").read_bytes()[:-1] + b"?")
    found = campaign._check(trial, straight, 0, "elsewhere")
    named = {"diverged": "step 3 diverged", "lost": f"step {TOTAL_STEPS} was announced", "damaged": "is not whole"}
    assert len(found) == 1 and named[fault] in found[0]
