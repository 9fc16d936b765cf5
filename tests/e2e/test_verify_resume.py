"""`verify_resume` on the real trainer: the quickstart, killed and resumed, is proven equal and leaves nothing."""

import re
import subprocess
import sys
from pathlib import Path

from runs import REPOSITORY, environment, processes_of

RECIPE = ("data.train_max_samples=96", "data.train_batch_size=4", "model.fsdp_config.param_dtype=float32")
EQUAL = "verdict: interrupted equals uninterrupted, bit for bit"


def test_the_quickstart_killed_once_equals_itself(cache: str, tmp_path: Path) -> None:
    """On one rank: what several leave is compared by tests/faults/test_kills.py."""
    command = [sys.executable, "-m", "trainer.cli.verify_resume", "1", "--steps=6", "--kills=1", "--seed=1"]
    env = environment(PYTHONPATH=str(REPOSITORY), TMPDIR=str(tmp_path))
    done = subprocess.run(
        [*command, cache, *RECIPE], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == EQUAL and done.stderr == ""
    kill = re.fullmatch(r"  kill 1 after step (\d), with step (\d) saved: resumed from step (\d)", lines[-2])
    assert kill is not None, lines[-2]
    at_step, saved_step, resumed_from = map(int, kill.groups())
    assert 2 <= at_step <= 6 and 1 <= saved_step <= resumed_from <= at_step
    assert re.match(r"compared resumed with straight: 6 steps, \d{3} tensors .* largest difference 0$", lines[-3])
    digests = {line.split()[-1] for line in lines if line.startswith("final parameters ")}
    assert len(digests) == 1 and re.fullmatch("[0-9a-f]{16}", digests.pop())
    assert processes_of(tmp_path) == []
    assert list((tmp_path / "checkpoints" / "sft").iterdir()) == [], "the work directory is removed"
    assert list(tmp_path.iterdir()) == [tmp_path / "checkpoints"], "temporary files of killed launchers are removed"
