"""Hangs of ranks that register like real ones: which hangs end the run, what is saved, and what
remains.
"""

import os
import signal
import time
from contextlib import ExitStack

import pytest
from fake_launch import launched
from processes import free_port

from trainer.runtime.processes import is_alive

RANK = """
import os, threading, time
from pathlib import Path
from trainer.runtime.environment import local_rank
from trainer.runtime.heartbeat import Heartbeat
from trainer.runtime.signals import join_launcher, report_exit_code
def train_until(name):
    while not Path(name).exists():
        heartbeat.beat()
        time.sleep(0.02)
def wait_for_a_peer():
    time.sleep(60)
def hold_the_interpreter():
    sum(range(10**12))
def work_in_a_thread():
    time.sleep(60)
join_launcher()
heartbeat = Heartbeat()
threading.Thread(target=work_in_a_thread, daemon=True).start()
heartbeat.enter("train", limit_s=2.0)
Path(f"rank_{local_rank()}.pid").write_text(str(os.getpid()))
"""


@pytest.fixture
def start(tmp_path):
    """Starts two ranks that run `RANK` and then `behaviour`, and waits until they train."""
    with ExitStack() as held:

        def start(behaviour):
            run = held.enter_context(launched(tmp_path, rank=RANK + behaviour))
            run.rank_pids()
            return run

        yield start


def end(run):
    """Return (exit code, stderr). No process of the run may be alive then."""
    pids = [*run.rank_pids(), run.pid("third")]
    code, stderr = run.end()
    assert not any(map(is_alive, pids)), stderr
    return code, stderr


@pytest.mark.covers("S3.50:C")
def test_a_rank_stopped_for_too_long_ends_the_run_with_the_stacks_of_the_others(start):
    run = start("train_until('wait' if local_rank() == 0 else 'end')\nwait_for_a_peer()\n")
    first_pid, second_pid = run.rank_pids()
    os.kill(first_pid, signal.SIGUSR2)  # somebody asked for stacks earlier
    time.sleep(0.3)
    run.ask("wait")
    time.sleep(0.3)  # the innocent rank falls silent first
    os.kill(second_pid, signal.SIGSTOP)
    code, stderr = end(run)
    assert code == 75
    waiting = run.read("run/hang_1/rank_0.txt")
    stopped = run.read("run/hang_1/rank_1.txt")
    assert " in wait_for_a_peer" in waiting and " in work_in_a_thread" in waiting
    assert " in train_until" not in waiting
    assert stopped.endswith("\n\nno stack: stopped by a signal\n")
    head, likely, other, place = stderr.splitlines()
    assert head.startswith("ERROR: the run hangs")
    assert likely.startswith(f"  rank 1 (pid {second_pid}): phase 'train', silent for ")
    assert likely.endswith(" s, limit 2 s, stopped by a signal")
    assert other.startswith(f"  rank 0 (pid {first_pid}): phase 'train', silent for ")
    assert place == "  stacks: in run/hang_1"


def test_a_rank_that_holds_the_interpreter_in_c_shows_where(start):
    run = start("hold_the_interpreter() if local_rank() else train_until('end')\n")
    code, stderr = end(run)
    assert code == 75
    text = run.read("run/hang_1/rank_1.txt")
    assert " in hold_the_interpreter" in text and " in work_in_a_thread" in text
    assert " in train_until" in run.read("run/hang_1/rank_0.txt")
    assert stderr.splitlines()[1].startswith("  rank 1")


def test_a_phase_has_its_own_limit(start):
    """One rank has a limit that it does not reach, and one has no limit."""
    run = start(
        "heartbeat.enter('save', limit_s=60 if local_rank() else float('inf'))\ntime.sleep(3)\n"
        "heartbeat.enter('train', limit_s=2.0)\n"
    )
    assert end(run) == (0, "")


def test_a_rank_that_never_joins_ends_the_run_with_the_stacks_of_those_who_wait(start):
    run = start(
        f"""
heartbeat.enter("start", limit_s=float("inf"))
import torch
from trainer.runtime import distributed
os.environ.update(RANK=str(local_rank()), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="{free_port()}")
if local_rank() == 1:
    wait_for_a_peer()
distributed.start(torch.device("cpu"), timeout_s=2, fsdp_size=-1, heartbeat=heartbeat)
"""
    )
    code, stderr = end(run)
    assert code == 75
    assert "): phase 'meet', silent for " in stderr and " s, limit 2 s" in stderr
    assert " in init_process_group" in run.read("run/hang_1/rank_0.txt")
    assert " in wait_for_a_peer" in run.read("run/hang_1/rank_1.txt")
