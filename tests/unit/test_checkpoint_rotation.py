"""Random histories of saves, kills at any system call, damage and restarts: a good checkpoint
is never lost.
"""

import builtins
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from checkpoint_fakes import commit, content_of, is_whole, save
from sweeps import short_or_full

from trainer.checkpoint import choice, layout, retention
from trainer.checkpoint.manifest import verify_files
from trainer.checkpoint.retention import Retention

NUM_HISTORIES = short_or_full(80, full=400)
"""Seeds 0 to this."""
NUM_EVENTS = 12


class Killed(BaseException):
    """Stands for `kill -9`: no `except` of the code under test may catch it, and nothing it
    does later has effect.
    """


@dataclass
class Kernel:
    """Counts the system calls that change the disk and dies before the one asked for. Nothing
    is really synced.
    """

    calls_left: int | None = None

    def call(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.calls_left is not None:
            if self.calls_left <= 0:
                raise Killed
            self.calls_left -= 1
        return real(*args, **kwargs)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    kernel = Kernel()
    monkeypatch.setattr(os, "fsync", lambda fd: kernel.call(lambda: None))
    for name in ("mkdir", "rename", "replace", "unlink", "rmdir"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, _real=real, **k: kernel.call(_real, *a, **k))
    real_open = builtins.open

    def open_counted(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return (
            kernel.call(real_open, path, mode, *args, **kwargs)
            if "x" in mode
            else real_open(path, mode, *args, **kwargs)
        )

    monkeypatch.setattr(builtins, "open", open_counted)
    yield kernel


@dataclass
class Run:
    """A trainer reduced to its checkpoint calls, in the order of the real one."""

    run_dir: Path
    keep: int
    step: int = 0
    acknowledged: list[int] = field(default_factory=list)

    def save(self) -> None:
        self.step += 1
        commit(self.run_dir, self.step)
        layout.publish(self.run_dir, self.step)
        self.acknowledged.append(self.step)
        retention.rotate(self.run_dir, keep=self.keep)

    def restart(self) -> int | None:
        """The step continued from; None = nothing usable."""
        layout.clean_leftovers(self.run_dir)
        try:
            candidates = choice.select(self.run_dir).candidates
        except choice.NoUsableCheckpointError:
            return None
        for info in candidates:
            assert info.manifest is not None
            if problems := verify_files(info.path, info.manifest):
                layout.quarantine(info.path, problems[0])
                continue
            layout.publish(self.run_dir, info.step)
            retention.rotate(self.run_dir, keep=self.keep, protect={info.step})
            self.step = info.step
            return info.step
        return None

    def good_steps(self) -> set[int]:
        return {
            layout.parse_step(p.name) or 0
            for p in self.run_dir.glob("global_step_*")
            if is_whole(p)
        }

    def num_committed(self) -> int:
        return sum(info.status == "committed" for info in layout.checkpoints(self.run_dir))


def damage(run: Run, chance: random.Random) -> None:
    """Bit rot, truncation or loss of a file in one checkpoint, or of the pointer; not in the
    only good one.
    """
    if chance.random() < 0.3:
        (run.run_dir / layout.POINTER).write_text(
            chance.choice(["", "garbage", "-1", "999", "../x"])
        )
        return
    good = sorted(run.good_steps())
    if len(good) < 2:
        return
    path = run.run_dir / layout.step_dir_name(chance.choice(good))
    file = path / chance.choice([*content_of(0), layout.MANIFEST])
    kind = chance.choice(["flip", "truncate", "delete"])
    data = bytearray(file.read_bytes())
    if kind == "flip":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
    elif kind == "truncate":
        file.write_bytes(data[: chance.randrange(len(data))])
    else:
        file.unlink()


def history(run: Run, kernel: Kernel, chance: random.Random) -> None:
    alive, before = True, set[int]()
    for _ in range(NUM_EVENTS):
        event = chance.choice(["save", "save", "save", "damage"]) if alive else "restart"
        if event == "damage":
            damage(run, chance)
            before = run.good_steps()
            alive = False  # whoever damages a running job's disk stops it first
            continue
        kernel.calls_left = chance.randrange(60) if chance.random() < 0.5 else None
        try:
            found = run.save() if event == "save" else run.restart()
        except Killed:
            alive = False
        else:
            alive = True
        kernel.calls_left = None
        if event == "restart" and alive:
            check_restart(run, before, found)
        after = run.good_steps()
        assert after or not before, f"{event} lost the last good checkpoint of {before}"
        assert run.num_committed() <= run.keep + 1, (
            f"{run.num_committed()} checkpoints with keep={run.keep}"
        )
        newest = max((step for step in run.acknowledged if step in before), default=0)
        assert max(after, default=0) >= newest, f"{event} lost the acknowledged step {newest}"
        before = after


def check_restart(run: Run, before: set[int], found: int | None) -> None:
    assert found == max(before, default=None), f"continued from {found}, good were {before}"
    if found is None:
        run.step = 0
        shutil.rmtree(run.run_dir)  # the user begins anew
        run.run_dir.mkdir()
        run.acknowledged.clear()


@pytest.mark.covers("S3.24", "S3.54")
def test_random_histories(memory_dir, kernel):
    for seed in range(NUM_HISTORIES):
        chance = random.Random(seed)
        run = Run(memory_dir / str(seed), keep=chance.randint(1, 5))
        run.run_dir.mkdir()
        try:
            history(run, kernel, chance)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        shutil.rmtree(run.run_dir)


@pytest.mark.parametrize("keep", [1, 2])
def test_every_system_call_of_a_save(memory_dir, kernel, keep):
    """Not by luck: kill before each call in turn, until the save survives."""
    for num_calls in range(200):
        run = Run(memory_dir / str(num_calls), keep=keep)
        run.run_dir.mkdir()
        for _ in range(keep):
            run.save()
        kernel.calls_left = num_calls
        try:
            run.save()
            break
        except Killed:
            kernel.calls_left = None
        assert run.restart() == max(run.good_steps()) in (keep, keep + 1)
        assert run.num_committed() == keep
        assert not [
            name
            for name in os.listdir(run.run_dir)
            if name.startswith((".staging_", ".trash_", ".latest"))
        ]
        run.save()
        assert run.num_committed() == keep and run.restart() == run.step
    assert 30 < num_calls < 199, "the save has too few calls to be real, or never ended"


def test_what_a_pointer_was_moved_back_behind_counts_for_nothing_that_is_kept(
    tmp_path,
):
    save(tmp_path, 10, 20, 30)
    (tmp_path / layout.POINTER).write_text("10")
    for step in (12, 14, 16):
        commit(tmp_path, step)
        retention.settle(tmp_path, step, Retention(keep=2))
    candidates = [info.step for info in choice.select(tmp_path).candidates]
    assert candidates == [16, 14], "a damaged newest one needs another to go back to"
