"""The watchdog, polled by hand: which silence is a hang, what is reported, and that ranks die."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field

import pytest

from trainer.launch import watchdog
from trainer.launch.watchdog import PEERS_S, Watchdog
from trainer.runtime.processes import is_alive
from trainer.runtime.status import Beat, Status, new_status, write_beat

SLEEPS = (
    "import signal, time; signal.signal(signal.SIGUSR2, signal.SIG_IGN); print(); time.sleep(60)"
)


@dataclass
class Bench:
    """A watchdog over two ranks and an agent that only sleep. The test writes their heartbeats and
    controls the launcher's clock.
    """

    status: Status
    dog: Watchdog
    ranks: list[subprocess.Popen]
    agent: subprocess.Popen
    now_s: float = 1000.0
    slept_s: list[float] = field(default_factory=list)

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        self.slept_s.append(seconds)

    def beat(self, at_s):
        for number, rank in enumerate(self.ranks):
            descriptor = self.status.open_rank(number)
            write_beat(descriptor, Beat(rank.pid, at_s, 10.0, "train"))
            os.close(descriptor)

    def hangs_after(self, *passed_s):
        found = []
        for seconds in passed_s:
            self.now_s += seconds
            found.append(self.dog.finds_hang())
        return found


@pytest.fixture
def bench(tmp_path, monkeypatch):
    processes = [
        subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE) for _ in range(3)
    ]
    with new_status(2) as status:
        for process in processes:
            assert process.stdout.readline() == b"\n"
        dog = Watchdog(status, run_dir=tmp_path / "run", has_peers=False)
        bench = Bench(status, dog, processes[:2], processes[2])
        monkeypatch.setattr(watchdog, "time", bench)
        dog._polled_at = bench.now_s
        bench.beat(1)
        yield bench
    for process in processes:
        process.kill()
        process.communicate()


def test_silence_is_counted_from_the_last_change(bench):
    assert bench.hangs_after(4, 4, 4) == [False] * 3
    bench.beat(2)
    assert bench.hangs_after(4, 4, 4, 4) == [False, False, False, True]


def test_the_time_a_suspended_launcher_missed_is_not_silence(bench):
    """After a suspended machine resumes, the ranks had no chance to beat, and get one now."""
    assert bench.hangs_after(1, 3600) == [False, False]
    bench.beat(2)
    assert bench.hangs_after(1, 4) == [False, False]


def fail_to_write(run_dir, files):
    raise OSError(28, "No space left on device")


def never_answer(run_dir, files):
    time.sleep(30)
    return run_dir


@pytest.mark.parametrize(
    ("write", "why"), [(fail_to_write, "No space left"), (never_answer, "no response within 0.2 s")]
)
def test_stacks_that_cannot_be_kept_are_printed_and_the_ranks_still_die(
    write, why, bench, monkeypatch, capsys
):
    monkeypatch.setattr(watchdog, "_write_hang_dir", write)
    monkeypatch.setattr(watchdog, "COPY_S", 0.2)
    bench.hangs_after(4, 4, 4, 4)
    bench.dog.end_run(bench.agent)
    stderr = capsys.readouterr().err
    assert stderr.count("\nno stack: ") == 2
    assert f"nothing can be written to {bench.dog.run_dir}: " in stderr and why in stderr
    assert not any(is_alive(process.pid) for process in (*bench.ranks, bench.agent))


def test_ranks_with_peers_on_other_machines_live_until_those_are_found_silent_too(bench):
    """Otherwise the peers would see a broken connection and exit without a trace of the hang."""
    bench.dog.has_peers = True
    bench.hangs_after(4, 4, 4, 4)
    bench.dog.end_run(bench.agent)
    assert sum(bench.slept_s) == PEERS_S
    assert not any(is_alive(process.pid) for process in (*bench.ranks, bench.agent))
