"""A storage in memory that fails at chosen operations, and helpers that mirror to it.

The process may be killed there, the storage may refuse, cut a file short, or show it late.
"""

import collections
import io
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from checkpoint_fakes import is_whole, save
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from trainer.checkpoint import layout
from trainer.checkpoint.choice import NoUsableCheckpointError
from trainer.checkpoint.storage import Storage, StorageError
from trainer.config import CheckpointConfig, TrainerConfig
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
        self.faults, self.count, self.late_by = {at: kind} if faults is None else faults, 0, late_by
        self.struck: collections.Counter[str] = collections.Counter()
        self.answers = threading.Event()
        self._is_dead = self._is_still = False
        self._before: dict[str, tuple[int, bytes | None]] = {}

    def revive(self) -> bool:
        """Start the process again; return whether it was killed."""
        was_dead, self._is_dead = self._is_dead, False
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
            seen, until = self.seen(), self.count + self.late_by
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
    restore.prepare(
        trainer_of(run_dir, **settings), Storage(storage.mirror_url, storage), retry_after_s=()
    )
    found = list(run_dir.glob("global_step_*"))
    return found[0] if found else None


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each operation the same number in every run."""
    monkeypatch.setattr(upload, "NUM_STREAMS", 1)
    monkeypatch.setattr(restore, "NUM_STREAMS", 1)
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


def roll_back(run_dir: Path, target: int, steps: Sequence[int], discarded: Sequence[str]) -> None:
    """Leave a run directory as a rollback to `target` does. `steps` are its newer checkpoints;
    `discarded` are nonces.
    """
    entry = {"onset": target, "found_step": steps[-1] if steps else target, "target_step": target}
    entry |= {"first_skipped": target + 1, "last_skipped": target + 1, "reason": "a spike"}
    rollbacks = [entry | {"discarded": list(discarded)}]
    (run_dir / "rollbacks.json").write_text(json.dumps({"rollbacks": rollbacks}))
    layout.publish(run_dir, target)
    (run_dir / layout.POINTER).write_text(str(target))
    for step in steps:
        layout.quarantine(run_dir / f"global_step_{step}", "rolled back")


def campaign(at: int, kind: str, work: Path, storage: FaultyStorage) -> Iterator[str]:
    """Save three checkpoints with one fault at operation `at` of their uploads; yield broken promises.

    After each attempt a new machine restores for trial: it must get a whole checkpoint, the last
    one that was complete or a newer one.
    """
    run_dir = work / "run"
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("{}\n")
    own, up = uploader(run_dir, storage), 0
    for step in (2, 4, 6):
        save(run_dir, step)
        for _ in range(5):
            try:
                own.sync()
                is_up = True
            except StorageError:
                is_up = False
            except Killed:
                storage.revive()
                own, is_up = uploader(run_dir, storage), False
            up = step if is_up else up
            taken = None
            # of the first one there is a part
            with storage.undisturbed(), suppress(NoUsableCheckpointError):
                taken = restored(work / f"machine{storage.count}", storage)
            if up and (taken is None or int(taken.name.removeprefix("global_step_")) < up):
                yield f"{kind} at {at}: step {up} was up, {taken} is taken"
            if taken is not None and not is_whole(taken):
                yield f"{kind} at {at}: {taken} is not whole"
            if taken is not None and (taken.parent / "metrics.jsonl").read_text() != "{}\n":
                yield f"{kind} at {at}: the logs of {taken} are not there"
            if is_up:
                break
        else:
            yield f"{kind} at {at}: step {step} never goes up"
    with storage.undisturbed():
        # as the next start, which finds what a removal left that was cut short
        uploader(run_dir, storage).sync()
    names = {name.split("/")[3] for name in storage.store}
    wanted = {"global_step_4", "global_step_6"}
    if {name for name in names if name.startswith("global_step_")} != wanted:
        yield f"{kind} at {at}: {names} are left"
