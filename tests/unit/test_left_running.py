"""Tests leave no process behind: the check at the end of the session finds what they do leave."""

import os
import subprocess
import sys

from left_running import describe, left_running

PROGRAM = "import subprocess as s; print(s.Popen(['sleep', '60'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"


def test_a_process_that_lost_its_parent_is_found() -> None:
    started = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    try:
        assert f"{int(started.stdout)}: sleep 60" in map(describe, left_running())
    finally:
        os.kill(int(started.stdout), 9)


def test_a_child_is_found_while_it_runs() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert child.pid in {process.pid for process in left_running()}
        child.kill()
        child.wait()
        assert child.pid not in {process.pid for process in left_running()}
