"""Standard streams that are closed, broken or full, each in a process of its own: they cost text and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

from trainer.runtime import log

ROOT = Path(log.__file__).parents[2]
# What a rank writes with: the logger, the console's lines, plain prints; and a file that must not get a free number.
PROGRAM = """
import contextlib, json, logging, os, sys
from trainer.runtime.log import configure, keep_streams_safe
keep_streams_safe()
file = open(sys.argv[1] + "/file", "w")
configure(0)
logger = logging.getLogger("trainer.test")
from pathlib import Path
from trainer.tracking import Tracking
tracking = Tracking("p", "e", "console", {}, run_dir=Path(sys.argv[1]), total_steps=300)
for step in range(1, 301):
    logger.info("line %d of some length, so that a buffer fills, and fills, and fills again", step)
    tracking.log({"train/loss": 1.0}, step=step)
    print("plain")
    with contextlib.suppress(OSError):  # a C library writes past Python, and does not ask whether it was read
        os.write(1, b"from a library\\n")
logger.error("the last words")
tracking.finish(0)
json.dump([os.get_inheritable(number) for number in (0, 1, 2)], file)
"""
LOST = "stdout can no longer be written ({}): nothing is shown there from now on\n"


def run(tmp_path: Path, redirection: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", f'exec "$@" {redirection}', "bash", sys.executable, "-c", PROGRAM, str(tmp_path)]
    return subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("redirection", "stdout", "stderr"),
    [
        ("", "line 1 of", "ERROR: the last words\n"),
        (">/dev/full", "", LOST.format("No space left on device") + "ERROR: the last words\n"),
        ("> >(head -5 >/dev/null)", "", LOST.format("Broken pipe") + "ERROR: the last words\n"),
        (">&-", "", "ERROR: the last words\n"),
        ("2>&-", "line 1 of", ""),
        ("2>/dev/full", "line 1 of", ""),
        ("<&- >&- 2>&-", "", ""),
        (">/dev/full 2>/dev/full", "", ""),
    ],
)
def test_a_stream_that_is_lost_stops_nothing(redirection: str, stdout: str, stderr: str, tmp_path: Path) -> None:
    done = run(tmp_path, redirection)
    assert (done.returncode, done.stderr) == (0, stderr)
    assert done.stdout.startswith(stdout) and bool(done.stdout) == bool(stdout)
    assert (tmp_path / "file").read_text() == "[true, true, true]", "a file got the number of a stream"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) >= 300


def test_a_signal_ends_a_rank_whose_stderr_is_gone_as_documented(tmp_path: Path) -> None:
    program = "import os, signal; from trainer.runtime.signals import StopRequest; StopRequest().install(); "
    program += "os.kill(os.getpid(), signal.SIGTERM)"
    command = ["bash", "-c", 'exec "$@" 2>/dev/full', "bash", sys.executable, "-c", program]
    assert subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, timeout=60).returncode == 75
