"""A storage in memory that fails at chosen operations, and helpers that mirror to it.

The process may be killed there, the storage may refuse, cut a file short, or show it late.
"""

import collections
import io
import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from checkpoint_fakes import commit, files_of, save
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from trainer.checkpoint import choice, layout, retention, rollback
from trainer.checkpoint.choice import NoUsableCheckpointError
from trainer.checkpoint.manifest import MANIFEST, parse_manifest
from trainer.checkpoint.storage import Storage, StorageError
from trainer.config import CheckpointConfig, TrainerConfig
from trainer.errors import ResumableError
from trainer.tools.mirror import __main__ as process
from trainer.tools.mirror import restore, upload

URL = "memory://bucket/run"
KINDS = ("killed before", "killed after", "killed within", "refused", "cut", "late")


class Killed(BaseException):
    """The uploader was killed."""


class FaultyStorage(MemoryFileSystem):
    """Counts operations; operation n fails as `faults[n]` says. Instances share no files.

    killed before, after, within: the process ends, and a write within has written half. No
    operation works until `revive`.
    refused: an error without an effect. cut: a write or a read that reports success, with half of
    the data. late: for `late_by` operations a change is neither listed nor read.
    """

    cachable = False
    mirror_url = URL

    def __init__(
        self,
        at: int = -1,
        kind: str = "",
        *,
        faults: dict[int, str] | None = None,
        late_by: int = 5,
    ) -> None:
        super().__init__(global_store=False)
        self.faults = {at: kind} if faults is None else faults
        self.count = 0
        self.late_by = late_by
        self.struck: collections.Counter[str] = collections.Counter()
        self.answers = threading.Event()
        self._is_dead = self._is_still = False
        self._before: dict[str, tuple[int, bytes | None]] = {}

    def revive(self) -> bool:
        """Start the process again; return whether it was killed."""
        was_dead = self._is_dead
        self._is_dead = False
        return was_dead

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Let the operations of the block neither count nor fail."""
        self._is_still = True
        yield
        self._is_still = False

    def seen(self) -> dict[str, bytes]:
        """Return the files that the storage shows now."""
        found = {name: file.getvalue() for name, file in self.store.items()}
        for name, (until, before) in self._before.items():
            if self.count <= until:
                found.pop(name, None)
                found |= {} if before is None else {name: before}
        return found

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        self._change(
            [path],
            lambda: self._put(path, value),
            lambda: self._put(path, value[: len(value) // 2]),
        )

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def rm_file(self, path: str) -> None:
        self._change([path], lambda: self.store.pop(self._strip_protocol(path), None), lambda: None)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        names = sorted(
            name for name in self.store if name.startswith(self._strip_protocol(path) + "/")
        )
        self._change(names, lambda: self._drop(names), lambda: self._drop(names[::2]))

    def find(self, path: str, **kwargs: Any) -> dict[str, Any]:
        self._strike()
        root = self._strip_protocol(path) + "/"
        return {
            name: {"size": len(data)} for name, data in self.seen().items() if name.startswith(root)
        }

    def cat_file(self, path: str, **kwargs: Any) -> bytes:
        kind = self._strike()
        data = self.seen().get(self._strip_protocol(path))
        if data is None:
            raise FileNotFoundError(path)
        self.struck["cut"] += kind == "cut"
        return data[: len(data) // 2] if kind == "cut" else data

    def _open(self, path: str, *words: Any, **kwargs: Any) -> Any:
        return io.BytesIO(self.cat_file(path))

    def _put(self, path: str, data: bytes) -> None:
        name = self._strip_protocol(path)
        self.store[name] = MemoryFile(self, name, data)

    def _drop(self, names: list[str]) -> None:
        for name in names:
            del self.store[name]

    def _change(self, paths: list[str], action: Callable[[], Any], half: Callable[[], Any]) -> None:
        kind = self._strike()
        self.struck[kind] += 1
        if kind == "late":
            seen = self.seen()
            until = self.count + self.late_by
            self._before |= {
                (name := self._strip_protocol(path)): (until, seen.get(name)) for path in paths
            }
        half() if kind in ("killed within", "cut") else action()
        if kind.startswith("killed"):
            self._is_dead = True
            raise Killed

    def _strike(self) -> str:
        """Count an operation, and return its fault."""
        if self._is_dead:
            raise Killed
        if self._is_still:
            return ""
        self.count += 1
        kind = self.faults.get(self.count, "")
        if kind == "silent":
            self.answers.wait()
        if kind in ("refused", "killed before"):
            self.struck[kind] += 1
        if kind == "refused":
            raise TimeoutError("the storage does not answer")
        if kind == "killed before":
            self._is_dead = True
            raise Killed
        return kind


def trainer_of(run_dir: Path, **settings: Any) -> TrainerConfig:
    return TrainerConfig(
        project_name="toy",
        experiment_name="toy",
        default_local_dir=str(run_dir),
        checkpoint=CheckpointConfig(mirror=URL),
        **settings,
    )


def uploader(run_dir: Path, storage: Any, **settings: Any) -> upload.Uploader:
    return upload.Uploader(trainer_of(run_dir, **settings), Storage(storage.mirror_url, storage))


def restored(run_dir: Path, storage: Any, **settings: Any) -> Path | None:
    """Restore on a new machine, and return its checkpoint. `storage` has a `mirror_url`."""
    restore.prepare(trainer_of(run_dir, **settings), Storage(storage.mirror_url, storage))
    found = list(run_dir.glob("global_step_*"))
    return found[0] if found else None


ROWS = [(1, "train", 3.0), (2, "val", 2.5), (4, "val", 2.7), (6, "val", 2.8)]
"""(step, kind, loss): the best validation is that of step 2."""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    lines = [
        {"step": step, "attempt": 1, "kind": kind, "ts": 1.0, f"{kind}/loss": loss}
        for step, kind, loss in ROWS
    ]
    (path / "run.json").write_text('{"run_ids": {"wandb": "a1"}}')
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each operation the same number in every run, and wait no longer than needed."""
    monkeypatch.setattr(upload, "NUM_STREAMS", 1)
    monkeypatch.setattr(restore, "NUM_STREAMS", 1)
    monkeypatch.setattr(process, "POLL_S", 0.01)
    # power is not lost here, and time is short
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def steps_in(storage: FaultyStorage) -> list[int]:
    """Return the steps with a manifest."""
    names = [name.split("/") for name in list(storage.store) if name.endswith("/manifest.json")]
    return sorted(int(parts[3].removeprefix("global_step_")) for parts in names)


def mirrored(run_dir: Path, *steps: int) -> FaultyStorage:
    """Save and upload each step, and return the storage."""
    storage = FaultyStorage()
    own = uploader(run_dir, storage)
    for step in steps:
        save(run_dir, step)
        own.sync()
    return storage


def roll_back(run_dir: Path, target: int) -> None:
    """Return to the checkpoint of `target`, as a run does after a spike in the next step."""
    found = layout.inspect(run_dir / layout.step_dir_name(target))
    onset = target + 1
    rollback.decide(run_dir, found, onset=onset, found_step=onset, last_step=100, reason="a spike")


NUM_FAULTS = 10
LAST_FAULT = 120
MAX_TRIES = 60


class Trial:
    """One run drawn by its seed. `faults` lists broken promises."""

    def __init__(self, seed: int, work: Path, storage: Any = None) -> None:
        self._rng = random.Random(seed)
        self._work = work
        self._seed = seed
        self.storage = storage or self._drawn_storage()
        self._run_dir = work / "run"
        self._num_machines = 0
        self._run_dir.mkdir(parents=True)
        (self._run_dir / "metrics.jsonl").write_text("{}\n")
        self._saved: dict[str, dict[str, bytes]] = {}
        self._steps: dict[str, int] = {}
        self._up = 0
        self._undone = set[str]()
        self._num_rollbacks = 0
        self.faults: list[str] = []

    def _drawn_storage(self) -> Any:
        numbers = self._rng.sample(range(1, LAST_FAULT), self._rng.randint(1, NUM_FAULTS))
        late_by = self._rng.randint(1, 25)
        return FaultyStorage(faults={n: self._rng.choice(KINDS) for n in numbers}, late_by=late_by)

    def run(self) -> None:
        step = 0
        own = uploader(self._run_dir, self.storage)
        for _ in range(self._rng.randint(3, 5)):
            step += self._rng.randint(1, 2)
            self._save(step)
            own = self._bring_up(own, step)
            event = self._rng.choice(("", "rotate", "roll back", "lose"))
            if event == "rotate":
                retention.rotate(self._run_dir, keep=1)
            elif event == "roll back" and (
                steps := [info.step for info in layout.committed(self._run_dir)[:-1]]
            ):
                step = self._roll_back(self._rng.choice(steps))
                own = self._bring_up(own, step)
            elif event == "lose":
                step = self._lose() or step
                own = uploader(self._run_dir, self.storage)

    def _save(self, step: int) -> None:
        """Save as a run does; no two saves are equal."""
        nonce = f"{len(self._saved):08d}"
        self._saved[nonce] = files_of(commit(self._run_dir, step, nonce=nonce))
        self._steps[nonce] = step
        layout.publish(self._run_dir, step)

    def _bring_up(self, own: upload.Uploader, step: int) -> upload.Uploader:
        for _ in range(MAX_TRIES):
            try:
                own.sync()
                self._up = step
                entries = rollback.read(self._run_dir).entries
                self._num_rollbacks = len(entries)
                for entry in entries:
                    self._undone |= set(entry.discarded)
                self._lose_for_trial()
                return own
            except (StorageError, Killed):
                if self.storage.revive():
                    own = uploader(self._run_dir, self.storage)
            self._lose_for_trial()
        self._tell(f"step {step} never goes up")
        return own

    def _lose_for_trial(self) -> None:
        with self.storage.undisturbed():
            expected = self._expected()
            taken = self._taken(self._machine())
        if taken is not None and taken[1] != expected:
            self._tell(f"{taken} is taken, the storage shows {expected}")
        self._judge(taken)

    def _lose(self) -> int | None:
        """Continue on another machine, whose restore may fail too. Return its step, or None."""
        run_dir = self._machine()
        for _ in range(MAX_TRIES):
            try:
                taken = self._taken(run_dir)
                break
            except (ResumableError, Killed):
                self.storage.revive()
        else:
            self._tell("nothing comes back")
            return None
        self._judge(taken)
        if taken is None:
            return None
        self._run_dir = run_dir
        self._up = taken[0]
        return taken[0]

    def _machine(self) -> Path:
        self._num_machines += 1
        return self._work / f"machine{self._num_machines}"

    def _taken(self, run_dir: Path) -> tuple[int, str] | None:
        """Return step and nonce of the checkpoint that a machine restores."""
        with suppress(NoUsableCheckpointError):
            path = restored(run_dir, self.storage)
            if path is None:
                return None
            nonce = parse_manifest((path / MANIFEST).read_bytes()).nonce
            found = {name: (path / name).read_bytes() for name in self._saved[nonce]}
            if found != self._saved[nonce] or not (run_dir / "metrics.jsonl").exists():
                self._tell(f"{path} is not whole")
            if len(rollback.read(run_dir).entries) < self._num_rollbacks:
                self._tell(f"{path} lacks a rollback")
            chosen = choice.select(run_dir).chosen
            if chosen is None or chosen.path != path:
                self._tell(f"{path} is there, the run goes on from {chosen}")
            return layout.inspect(path).step, nonce
        return None

    def _judge(self, taken: tuple[int, str] | None) -> None:
        if self._up and taken is None:
            self._tell(f"step {self._up} was up, nothing is taken")
        elif taken is not None and taken[0] < self._up:
            self._tell(f"step {self._up} was up, {taken} is taken")
        elif taken is not None and taken[1] in self._undone:
            self._tell(f"{taken} was undone")

    def _expected(self) -> str | None:
        """Return the nonce of the checkpoint to restore, from the bytes that the storage shows."""
        root = self.storage.mirror_url.partition(":/")[2].replace("//", "/")
        shown = {name.removeprefix(f"{root}/"): data for name, data in self.storage.seen().items()}
        whole = {
            self._steps[nonce]: nonce
            for nonce, files in self._saved.items()
            if all(
                shown.get(f"global_step_{self._steps[nonce]}/{name}") == data
                for name, data in files.items()
            )
        }
        text = shown.get(layout.POINTER, b"").decode()
        pointer = int(text) if text.endswith("\n") else None
        steps = [step for step in whole if pointer is not None and step <= pointer] or list(whole)
        return whole[max(steps)] if steps else None

    def _roll_back(self, target: int) -> int:
        roll_back(self._run_dir, target)
        self._up = min(self._up, target)
        return target

    def _tell(self, fault: str) -> None:
        self.faults.append(f"seed {self._seed}: {fault}")
