"""Runs whose output nobody can read any more: they train, save, stop and continue as documented."""

import getpass
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from runs import SMALL, command, curve, environment, processes_of, wait_for_step


@contextmanager
def started(
    cwd: Path, redirection: str, num_ranks: int, *overrides: str
) -> Iterator[subprocess.Popen[str]]:
    """In a process group of its own, gone at the end of the block."""
    shell = ["bash", "-c", f'exec "$@" {redirection}', "bash"]
    with subprocess.Popen(
        [*shell, *command(num_ranks, *SMALL, *overrides)],
        cwd=cwd,
        env=environment(TMPDIR=str(cwd / "tmp")),
        text=True,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    # torch's own cache, one per user
    (tmp_path / "tmp" / f"torchinductor_{getpass.getuser()}").mkdir(parents=True)
    return tmp_path


def test_lost_output_changes_no_exit_code_and_the_run_goes_on(cwd, cache):
    """`run_sft.sh | head -5` and a stop signal, the same command into a full device, the same
    with closed streams.
    """
    run_dir = cwd / "checkpoints" / "e2e" / "quickstart"
    before = sorted((cwd / "tmp").iterdir())
    with started(cwd, "", 2, cache) as headed:
        assert headed.stdout is not None and headed.stderr is not None
        assert all(headed.stdout.readline() for _ in range(5))
        headed.stdout.close()
        wait_for_step(run_dir, 4, headed)
        headed.send_signal(signal.SIGHUP)  # the terminal is closed
        assert headed.wait(timeout=60) == 75
        starting, tokenizing, loss = headed.stderr.read().splitlines()
        assert starting.startswith("start ") and tokenizing.startswith("tokenize ")
        assert (
            loss
            == "stdout can no longer be written (Broken pipe): nothing is shown there from now on"
        )
    assert sorted((cwd / "tmp").iterdir()) == before, "left in TMPDIR"
    with started(cwd, ">/dev/full", 1, cache) as full:
        _, stderr = full.communicate(timeout=120)
        assert full.returncode == 0, stderr
        starting, loss = stderr.splitlines()
        assert starting == "start       1 rank on CPU"
        assert loss == (
            "stdout can no longer be written (No space left on device): nothing is shown there "
            "from now on"
        )
    with started(cwd, ">&- 2>&-", 1, cache) as closed:
        assert closed.wait(timeout=120) == 0
    assert list(curve(run_dir, "train/loss")) == list(range(1, 13))
    assert sorted((cwd / "tmp").iterdir()) == before, "left in TMPDIR"
    assert processes_of(cwd) == []
