"""Case 22: wrong clocks, dates, time zones and modification times change nothing about what is kept
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import test_checkpoint_rotation as rotation
from checkpoint_fakes import Run
from sweeps import short_or_full

from trainer.checkpoint import layout
from trainer.checkpoint.lock import RunLock
from trainer.config import ConfigError

NUM_HISTORIES = short_or_full(20, full=100)
TIME_ZONES = ("UTC", "Pacific/Kiritimati", "America/Los_Angeles", "XXX+23")
FIRST_S = 0
LAST_S = 4 * 10**9
"""1970 to 2096."""

Scramble = Callable[[Path], None]


@dataclass
class WatchedRun(Run):
    """Records what each event finds. `before_event` may set the clocks."""

    before_event: Scramble = lambda run_dir: None
    seen: list[tuple[Any, ...]] = field(default_factory=list)

    def save(self) -> None:
        self.watch()
        super().save()

    def restart(self) -> int | None:
        self.watch()
        return super().restart()

    def watch(self) -> None:
        pointer = layout.read_pointer(self.run_dir).raw
        self.seen.append((self.step, pointer, sorted(os.listdir(self.run_dir))))
        self.before_event(self.run_dir)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scramble]:
    """Sets every clock and modification time at each call."""
    chance = random.Random(0)

    def any_time_s() -> int:
        return chance.randint(FIRST_S, LAST_S)

    def scramble(run_dir: Path) -> None:
        for path in (run_dir, *run_dir.rglob("*")):
            os.utime(path, (any_time_s(), any_time_s()))
        now_s = any_time_s()
        monkeypatch.setattr(time, "time", lambda: float(now_s))
        monkeypatch.setattr(time, "time_ns", lambda: now_s * 10**9)
        monkeypatch.setenv("TZ", chance.choice(TIME_ZONES))
        time.tzset()

    yield scramble
    monkeypatch.undo()
    time.tzset()


def history_of(seed: int, run_dir: Path, before_event: Scramble) -> list[tuple[Any, ...]]:
    """Equal for equal seeds: the random parts of names are counted."""
    numbers = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "token_hex", lambda size: f"{next(numbers):0{2 * size}x}")
        chance = random.Random(seed)
        run = WatchedRun(run_dir, keep=chance.randint(1, 5), before_event=before_event)
        run_dir.mkdir()
        rotation.live_through(run, chance)
        run.watch()
        shutil.rmtree(run_dir)
    return run.seen


def test_random_histories_are_the_same_under_any_clock(memory_dir, clocks):
    run_dir = memory_dir / "run"
    num_events = 0
    for seed in range(NUM_HISTORIES):
        expected = history_of(seed, run_dir, lambda run_dir: None)
        assert history_of(seed, run_dir, clocks) == expected, f"seed {seed}"
        num_events += len(expected)
    assert num_events > 4 * NUM_HISTORIES


def test_a_lock_does_not_age(memory_dir, clocks):
    with RunLock(memory_dir) as lock:
        for _ in range(5):
            clocks(memory_dir)
            assert lock.is_held()
            with pytest.raises(ConfigError, match=re.escape(f"pid {os.getpid()}")):
                RunLock(memory_dir).acquire(timeout_s=0)
