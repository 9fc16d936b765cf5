"""Case 22: wrong clocks, time zones and modification times change nothing about what is kept
and continued.
"""

import itertools
import os
import random
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import checkpoint_fakes
import pytest
import test_checkpoint_rotation as rotation
from checkpoint_fakes import save
from fake_run import FakeRun
from sweeps import short_or_full

from trainer.checkpoint import choice, layout, retention
from trainer.checkpoint.lock import RunLock
from trainer.config import ConfigError

NUM_HISTORIES = short_or_full(20, full=100)
TIME_ZONES = ("UTC", "Pacific/Kiritimati", "America/Los_Angeles", "XXX+23")
FIRST_S, LAST_S = 0, 4 * 10**9
"""1970 to 2096."""

kernel = rotation.kernel


@dataclass
class WatchedRun(FakeRun):
    """Says after each event what it did and what stands in the directory; `before_event` may
    set the clocks.
    """

    before_event: Callable[[Path], None] = lambda run_dir: None
    seen: list[tuple[Any, ...]] = field(default_factory=list)

    def save(self) -> None:
        self._watch(super().save)

    def restart(self) -> int | None:
        found: int | None = self._watch(super().restart)
        return found

    def _watch(self, event: Callable[[], Any]) -> Any:
        self.before_event(self.run_dir)
        result = "killed"
        try:
            result = event()
        finally:
            pointer = layout.read_pointer(self.run_dir).raw
            self.seen.append(
                (event.__name__, self.step, result, pointer, sorted(os.listdir(self.run_dir)))
            )
        return result


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Sets every clock and modification time anew at each call."""
    chance = random.Random(0)

    def scramble(run_dir: Path) -> None:
        for directory, _, files in os.walk(run_dir):
            for path in (directory, *(os.path.join(directory, name) for name in files)):
                os.utime(path, (chance.randint(FIRST_S, LAST_S), chance.randint(FIRST_S, LAST_S)))
        now_s = float(chance.randint(FIRST_S, LAST_S))
        monkeypatch.setattr(time, "time", lambda: now_s)
        monkeypatch.setattr(time, "time_ns", lambda: int(now_s * 1e9))
        monkeypatch.setenv("TZ", chance.choice(TIME_ZONES))
        time.tzset()

    yield scramble
    monkeypatch.undo()
    time.tzset()


def history_of(
    seed: int, run_dir: Path, kernel: rotation.Kernel, before_event: Callable[[Path], None]
) -> list[tuple[Any, ...]]:
    """The same for the same seed: the random parts of names are counted."""
    numbers = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "token_hex", lambda size: f"{next(numbers):0{2 * size}x}")
        chance = random.Random(seed)
        run = WatchedRun(run_dir, keep=chance.randint(1, 5), before_event=before_event)
        run_dir.mkdir()
        rotation.history(run, kernel, chance)
        shutil.rmtree(run_dir)
    return run.seen


def test_random_histories_are_the_same_under_any_clock(memory_dir, kernel, clocks):
    num_events = 0
    for seed in range(NUM_HISTORIES):
        expected = history_of(seed, memory_dir / "run", kernel, lambda run_dir: None)
        assert history_of(seed, memory_dir / "run", kernel, clocks) == expected, f"seed {seed}"
        num_events += len(expected)
    assert num_events > 4 * NUM_HISTORIES


def test_the_date_in_a_manifest_is_for_people(memory_dir, clocks, monkeypatch):
    intact = checkpoint_fakes.manifest_of
    monkeypatch.setattr(
        checkpoint_fakes,
        "manifest_of",
        lambda step, files: replace(
            intact(step, files), created_utc=f"{2100 - step}-01-01T00:00:00Z"
        ),
    )
    save(memory_dir, 10, 20, 30)
    for _ in range(20):
        clocks(memory_dir)
        (memory_dir / layout.POINTER).unlink(missing_ok=True)
        assert [info.step for info in choice.select(memory_dir).candidates] == [30, 20, 10]
        assert [
            path.name for path in retention.checkpoints_to_delete(memory_dir, keep=2, protect=set())
        ] == ["global_step_10"]


def test_a_lock_does_not_age(memory_dir, clocks):
    with RunLock(memory_dir) as lock:
        for _ in range(5):
            clocks(memory_dir)
            assert lock.is_held()
            with pytest.raises(ConfigError, match=re.escape(f"pid {os.getpid()}")):
                RunLock(memory_dir).acquire(timeout_s=0)
