"""Signals reach the ranks, exit codes reach the launcher, and nothing remains."""

import os
import signal
import subprocess
import sys

import pytest
from fake_launch import launched
from processes import wait_until

from trainer import api
from trainer.runtime.processes import is_alive

SLEEPING_AGENT = """
import os, time
from pathlib import Path
Path("agent.pid").write_text(str(os.getpid()))
time.sleep(60)
"""
RANK = """
import os, signal, sys, time
from pathlib import Path
from trainer.runtime.environment import local_rank
from trainer.runtime.signals import heeded_signals
from trainer.runtime.status import Beat, launcher_status, write_beat
received = []
for number in heeded_signals():
    signal.signal(number, lambda number, frame: received.append(signal.Signals(number).name))
status, rank = launcher_status(), local_rank()
write_beat(status.open_rank(rank), Beat(os.getpid(), 1.0, float("inf"), "train"))
Path(f"rank_{rank}.pid").write_text(str(os.getpid()))
def note():
    Path(f"received_{rank}").write_text(" ".join(received))
while not received:
    time.sleep(0.01)
while Path("stay").exists():
    note()
    time.sleep(0.01)
time.sleep(0.5)
note()
status.report(75)
"""
"""Records every signal. Half a second after the first, it exits in order unless it must stay."""


def test_a_killed_agent_is_named(tmp_path):
    with launched(tmp_path, agent="import os; os.kill(os.getpid(), 9)") as run:
        code, stderr = run.end()
    assert code == 1 and "SIGKILL (likely out of host memory)" in stderr


def test_no_thread_can_receive_a_signal_before_the_launcher_blocks_signals():
    """numpy starts threads when it is imported. A signal that one of them receives ends the launcher."""
    code = "import os, trainer.launch.__main__; print(os.listdir('/proc/self/task'), os.getpid())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    tasks, pid = done.stdout.rsplit(maxsplit=1)
    assert tasks == f"['{pid}']"


def test_a_signal_reaches_every_rank_once(tmp_path):
    with launched(tmp_path, rank=RANK) as run:
        run.rank_pids()
        os.killpg(run.process.pid, signal.SIGINT)  # the whole group, as a terminal does
        assert run.end()[0] == 75
        assert [run.read(f"received_{rank}") for rank in range(2)] == ["SIGINT", "SIGINT"]


@pytest.mark.parametrize(("is_asked", "code"), [(True, 75), (False, 1)])
def test_a_rank_lost_beside_an_orderly_stop_is_a_crash_unless_a_signal_asked_for_the_stop(
    is_asked, code, tmp_path
):
    with launched(tmp_path, rank=RANK + "sys.exit(1)\n") as run:
        rank_pids = run.rank_pids()
        for pid in [run.process.pid] if is_asked else rank_pids:
            os.kill(pid, signal.SIGTERM)
        assert run.end()[0] == code


def test_a_second_signal_is_passed_on(tmp_path):
    with launched(tmp_path, rank=RANK) as run:
        run.ask("stay")
        run.rank_pids()
        for name in ("SIGUSR1", "SIGTERM"):
            run.process.send_signal(signal.Signals[name])
            notes = [tmp_path / f"received_{rank}" for rank in range(2)]
            assert wait_until(lambda: all(n.exists() and name in n.read_text() for n in notes))  # noqa: B023
        (tmp_path / "stay").unlink()
        assert run.end()[0] == 75
        assert [note.read_text() for note in notes] == ["SIGUSR1 SIGTERM"] * 2


def test_a_signal_before_any_rank_stops_the_agent(tmp_path):
    with launched(tmp_path, agent=SLEEPING_AGENT) as run:
        agent_pid = run.pid("agent")
        run.process.send_signal(signal.SIGTERM)
        assert run.end()[0] == 75 and not is_alive(agent_pid)


def test_a_stopped_agent_does_not_keep_a_run_whose_ranks_have_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("PEERS_S", "1")
    with launched(tmp_path, rank=RANK) as run:
        run.rank_pids()
        os.kill(run.pid("agent"), signal.SIGSTOP)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == (75, "")


def test_an_interrupted_call_from_python_waits_until_the_run_has_saved(tmp_path, monkeypatch):
    """A notebook interrupts only its own process. The launcher is replaced by a script."""
    saved = tmp_path / "saved"
    script = f"""#!{sys.executable}
import os, signal, time
signal.signal(signal.SIGINT, lambda *_: (time.sleep(1), open("{saved}", "w"), os._exit(75)))
os.kill(os.getppid(), signal.SIGINT)
time.sleep(30)
"""
    (launcher := tmp_path / "launcher").write_text(script)
    launcher.chmod(0o755)
    monkeypatch.setattr(api.sys, "executable", str(launcher))
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist's workers ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            api.train()
    finally:
        signal.signal(signal.SIGINT, usual)
    assert saved.exists()
