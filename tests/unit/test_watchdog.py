"""The watchdog polled by hand: which silence is a hang, what is reported, and that the ranks
die whatever happens.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import wait_until

from trainer.launch import watchdog
from trainer.launch.watchdog import Watchdog
from trainer.runtime.processes import is_alive
from trainer.runtime.status import Beat, Status, new_status, write_beat


class Clock:
    """The launcher's clock, moved by hand; ranks keep the real one."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Bench:
    """A watchdog over processes that only sleep, whose heartbeats the test writes."""

    status: Status
    dog: Watchdog
    agent: subprocess.Popen
    ranks: list[subprocess.Popen]

    def write(self, number: int, at_s: float) -> None:
        descriptor = self.status.open_rank(number)
        write_beat(descriptor, Beat(self.ranks[number].pid, at_s, 10.0, "train"))
        os.close(descriptor)

    def hangs_after(self, clock: Clock, *passed_s: float) -> list[bool]:
        found = []
        for seconds in passed_s:
            clock.now_s += seconds
            found.append(self.dog.finds_hang())
        return found

    def fall_silent(self) -> None:
        """What the launcher sees when both ranks stop moving; the real clock runs on."""
        assert not self.dog.finds_hang()
        for _ in range(3):
            self.dog._polled_at -= 5.0
            self.dog.finds_hang()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Two ranks and an agent; SIGUSR2 does not kill the ranks, and writes nothing."""
    monkeypatch.setattr(watchdog, "STACKS_S", 0.1)
    program = "import signal, time; signal.signal(signal.SIGUSR2, signal.SIG_IGN); print(); time.sleep(60)"
    ready = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(3)
    ]
    with new_status(2) as status:
        for process in ready:
            assert process.stdout is not None and process.stdout.readline() == b"\n"
        dog = Watchdog(status, run_dir=tmp_path / "run", has_peers=False)
        made = Bench(status, dog, ready[2], ready[:2])
        for number in range(2):
            made.write(number, 1)
        yield made
    for process in ready:
        process.kill()
        process.communicate()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> Clock:
    made = Clock()
    monkeypatch.setattr(watchdog, "time", made)
    bench.dog._polled_at = made.now_s
    return made


def test_silence_is_counted_from_the_last_change(bench, clock):
    assert bench.hangs_after(clock, 4, 4, 4) == [False] * 3
    bench.write(0, 2)
    bench.write(1, 2)
    assert bench.hangs_after(clock, 4, 4, 4, 4) == [False, False, False, True]


def test_the_time_a_suspended_launcher_missed_is_not_silence(bench, clock):
    """A machine that was frozen wakes up: the ranks had no chance to beat, and have one now."""
    assert bench.hangs_after(clock, 1, 3600) == [False, False]
    bench.write(0, 2)
    bench.write(1, 2)
    assert bench.hangs_after(clock, 1, 4) == [False, False]


def test_a_rank_that_has_ended_does_not_hang(bench, clock):
    assert bench.hangs_after(clock, 1, 4, 4) == [False] * 3
    for rank in bench.ranks:
        rank.kill()  # not reaped yet: the agent may be slow
    assert wait_until(lambda: not any(is_alive(rank.pid) for rank in bench.ranks))
    assert bench.hangs_after(clock, 4, 4) == [False, False]


def fail_to_write(run_dir: Path, files: dict[str, str]) -> Path:
    raise OSError(28, "No space left on device")


def never_answer(run_dir: Path, files: dict[str, str]) -> Path:
    time.sleep(30)
    return run_dir


@pytest.mark.parametrize(
    ("write", "why"), [(fail_to_write, "No space left"), (never_answer, "no answer within 0.2 s")]
)
def test_stacks_that_cannot_be_kept_are_printed_and_the_ranks_still_die(
    write,
    why,
    bench,
    monkeypatch,
    capsys,
):
    monkeypatch.setattr(watchdog, "_write_hang_dir", write)
    monkeypatch.setattr(watchdog, "COPY_S", 0.2)
    bench.fall_silent()
    bench.dog.end_run(bench.agent)
    stderr = capsys.readouterr().err
    assert stderr.count("\nno stack: ") == 2
    assert (
        f"stacks: above, because nothing can be written to {bench.dog.run_dir}: " in stderr
        and why in stderr
    )
    assert not any(is_alive(process.pid) for process in (*bench.ranks, bench.agent))


def test_ranks_with_peers_on_other_machines_live_until_those_are_found_silent_too(
    bench, monkeypatch
):
    """Otherwise the peers would see a broken connection and leave, without a trace of what they
    did.
    """
    alive: list[bool] = []
    monkeypatch.setattr(watchdog, "PEERS_S", 0.5)
    monkeypatch.setattr(bench.dog, "has_peers", True)
    bench.fall_silent()
    started_s, kill = time.monotonic(), bench.dog.kill
    monkeypatch.setattr(
        bench.dog, "kill", lambda agent: (alive.append(is_alive(agent.pid)), kill(agent))
    )
    bench.dog.end_run(bench.agent)
    assert alive == [True] and time.monotonic() - started_s >= 0.5


@pytest.mark.parametrize("has_peers", [True, False])
def test_an_agent_whose_ranks_ended_in_order_does_not_wait_long_for_machines_that_are_gone(
    has_peers, bench, clock, monkeypatch
):
    monkeypatch.setattr(bench.dog, "has_peers", has_peers)
    bench.dog.finds_hang()
    found = []
    for process in (None, *bench.ranks):
        if process is not None:
            process.kill()
            process.wait()
        for passed_s in (0, watchdog.PEERS_S + 1):
            clock.now_s += passed_s
            found.append(bench.dog.finds_agent_waiting())
    assert found == [False] * 5 + [has_peers]
