"""What killed processes leave behind goes with the next start, and nothing else does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.launch import supervise
from trainer.launch.supervise import status_directory
from trainer.runtime.files import locked, try_lock

ROOT = Path(__file__).parents[2]
LAUNCHER = """
import time
from trainer.launch.supervise import status_directory
with status_directory() as directory:
    print(directory, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (directory := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(supervise.tempfile, "tempdir", str(directory))
    return directory


def test_the_directory_of_a_killed_launcher_is_removed_and_that_of_a_living_one_is_not(temporary: Path) -> None:
    (temporary / "sft-notes").mkdir()  # somebody else's
    env = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    launchers = [
        subprocess.Popen([sys.executable, "-c", LAUNCHER], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    living, killed = [Path(launcher.stdout.readline().strip()) for launcher in launchers]  # type: ignore[union-attr]
    try:
        os.kill(launchers[1].pid, signal.SIGKILL)
        launchers[1].wait()
        (killed / "rank_0.beat").touch()
        with status_directory() as mine:
            assert sorted(temporary.iterdir()) == sorted([living, mine, temporary / "sft-notes"])
    finally:
        launchers[0].kill()
        for launcher in launchers:
            launcher.communicate()
    assert sorted(temporary.iterdir()) == sorted([living, temporary / "sft-notes"])


def test_a_directory_in_the_making_is_not_removed(temporary: Path) -> None:
    """Its launcher has not taken the lock yet, and so not put its mark either."""
    (temporary / "sft-abcdefgh").mkdir()
    with status_directory():
        assert (temporary / "sft-abcdefgh").is_dir()


def test_whoever_waits_for_a_lock_shows_that_it_lives(tmp_path: Path) -> None:
    waits: list[int] = []

    def let_go() -> None:
        waits.append(1)
        if len(waits) == 2:
            holder.close()

    holder = (tmp_path / "lock").open("a")
    assert try_lock(holder.fileno())
    with locked(tmp_path / "lock", on_wait=let_go) as is_locked:
        assert is_locked
    assert waits == [1, 1]
