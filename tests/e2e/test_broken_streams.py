"""Runs whose output nobody can read any more still train, save, stop and continue as documented."""

import getpass
import os
import signal

import pytest
from runs import SMALL, processes_of, started, wait_for_step
from whole_runs import curve

from trainer.runtime import log
from trainer.runtime.processes import begun


@pytest.fixture
def cwd(tmp_path):
    # torch's own cache, one per user
    (tmp_path / "tmp" / f"torchinductor_{getpass.getuser()}").mkdir(parents=True)
    return tmp_path


def test_lost_output_changes_no_exit_code_and_the_run_goes_on(cwd, cache):
    """Run `run_sft.sh | head -5` with a stop signal, then the same command into a full device, and
    with closed streams.
    """
    run_dir = cwd / "checkpoints" / "e2e" / "quickstart"
    before = sorted((cwd / "tmp").iterdir())
    with started(cwd, 2, cache, *SMALL, redirection="", TMPDIR=str(cwd / "tmp")) as headed:
        assert all(headed.stdout.readline() for _ in range(5))
        headed.stdout.close()
        wait_for_step(run_dir, 4, headed)
        headed.send_signal(signal.SIGHUP)  # the terminal is closed
        assert headed.wait(timeout=60) == 75
        assert "cannot write to stdout anymore (Broken pipe)" in headed.stderr.read()
    assert sorted((cwd / "tmp").iterdir()) == before, "left in TMPDIR"
    with started(cwd, 1, cache, *SMALL, redirection=">/dev/full", TMPDIR=str(cwd / "tmp")) as full:
        _, stderr = full.communicate(timeout=120)
        assert full.returncode == 0, stderr
        assert "cannot write to stdout anymore (No space left on device)" in stderr
    with started(cwd, 1, cache, *SMALL, redirection=">&- 2>&-", TMPDIR=str(cwd / "tmp")) as closed:
        assert closed.wait(timeout=120) == 0
    assert list(curve(run_dir)) == list(range(1, 13))
    assert sorted((cwd / "tmp").iterdir()) == before, "left in TMPDIR"
    assert processes_of(cwd) == []


def test_output_that_nobody_reads_is_dropped_until_someone_reads_it(monkeypatch):
    monkeypatch.setattr(log, "PATIENCE_S", 0.1, raising=False)
    reader, writer = os.pipe()
    stream = log.SafeStream(os.fdopen(writer, "w"), reports_loss=False)

    def fill():
        for _ in range(100):
            print("x" * 4000, file=stream, flush=True)

    begun(fill).result(timeout=10)
    os.read(reader, 2**20)
    print("back", file=stream, flush=True)
    assert os.read(reader, 2**20) == b"back\n"
