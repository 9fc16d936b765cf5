"""A storage in memory that fails at chosen operations, and helpers that mirror to it.

At an operation, the process may be killed, or the storage may refuse, truncate a file, or show it
late.
"""

import io
import itertools
import os
import random
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from checkpoint_fakes import commit, files_of, save
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from small_files import write_lines

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
    """Counts operations; operation n fails as `faults[n]` defines. Instances share no files.

    killed before, after, within: the process ends; a write within has written half. No operation
    works until `revive`. refused: an error without an effect. cut: a write or read that reports
    success with half of the data. late: for `late_by` operations a change is neither listed nor
    read.
    """

    cachable = False

    def __init__(self, faults=None, *, late_by=5):
        super().__init__(global_store=False)
        self.faults = faults or {}
        self.count = 0
        self.late_by = late_by
        self.answers = threading.Event()
        self._is_dead = self._is_still = False
        self._before = {}  # name: (last operation that shows it, content or None)

    def revive(self):
        """Restart the process, and return True if it was killed."""
        was_dead = self._is_dead
        self._is_dead = False
        return was_dead

    def fail_in(self, operations, kind):
        """Let the operation fail that comes after so many, and no other."""
        self.faults = {self.count + operations: kind}

    @contextmanager
    def undisturbed(self):
        """Exclude the operations of the block from counting and failing."""
        self._is_still = True
        yield
        self._is_still = False

    def seen(self):
        """Return the files that the storage currently shows."""
        found = {name: file.getvalue() for name, file in self.store.items()}
        for name, (until, before) in self._before.items():
            if self.count <= until:
                found.pop(name, None)
                found |= {} if before is None else {name: before}
        return found

    def pipe_file(self, path, value, **kwargs):
        self._change(
            [self._strip_protocol(path)],
            lambda: self._put(path, value),
            lambda: self._put(path, value[: len(value) // 2]),
        )

    def put_file(self, lpath, rpath, **kwargs):
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def rm(self, path, recursive=False, maxdepth=None):
        names = sorted(
            name for name in self.store if name.startswith(self._strip_protocol(path) + "/")
        )
        self._change(names, lambda: self._drop(names), lambda: self._drop(names[::2]))

    def find(self, path, **kwargs):
        self._strike()
        root = self._strip_protocol(path) + "/"
        return {
            name: {"size": len(data)} for name, data in self.seen().items() if name.startswith(root)
        }

    def cat_file(self, path, **kwargs):
        kind = self._strike()
        data = self.seen().get(self._strip_protocol(path))
        if data is None:
            raise FileNotFoundError(path)
        return data[: len(data) // 2] if kind == "cut" else data

    def _open(self, path, *words, **kwargs):
        return io.BytesIO(self.cat_file(path))

    def _put(self, path, data):
        name = self._strip_protocol(path)
        self.store[name] = MemoryFile(self, name, data)

    def _drop(self, names):
        for name in names:
            del self.store[name]

    def _change(self, names, action, half):
        kind = self._strike()
        if kind == "late":
            seen = self.seen()
            until = self.count + self.late_by
            self._before |= {name: (until, seen.get(name)) for name in names}
        half() if kind in ("killed within", "cut") else action()
        if kind.startswith("killed"):
            self._is_dead = True
            raise Killed

    def _strike(self):
        """Count an operation, and return its fault."""
        if self._is_dead:
            raise Killed
        if self._is_still:
            return ""
        self.count += 1
        kind = self.faults.get(self.count, "")
        if kind == "silent":
            self.answers.wait()
        if kind == "refused":
            raise TimeoutError("the storage does not answer")
        if kind == "killed before":
            self._is_dead = True
            raise Killed
        return kind


def trainer_of(run_dir, **settings):
    return TrainerConfig(
        project_name="toy",
        experiment_name="toy",
        default_local_dir=str(run_dir),
        checkpoint=CheckpointConfig(mirror=URL),
        **settings,
    )


def uploader(run_dir, storage):
    return upload.Uploader(trainer_of(run_dir), Storage(URL, storage))


def restored(run_dir, storage, **settings):
    """Restore on a new machine, and return its checkpoint."""
    restore.prepare(trainer_of(run_dir, **settings), Storage(URL, storage))
    found = list(run_dir.glob("global_step_*"))
    return found[0] if found else None


@pytest.fixture
def run_dir(tmp_path):
    """Return the directory of a run whose best validation is at step 2."""
    path = tmp_path / "run"
    path.mkdir()
    lines = [
        {"step": step, "attempt": 1, "kind": "val", "ts": 1.0, "val/best_step": 2}
        for step in (2, 4, 6)
    ]
    (path / "run.json").write_text('{"run_ids": {"wandb": "a1"}}')
    write_lines(path / "metrics.jsonl", lines)
    return path


@pytest.fixture(autouse=True)
def in_order(monkeypatch):
    """Give each operation the same number in every run, and keep waits short."""
    monkeypatch.setattr(upload, "NUM_STREAMS", 1)
    monkeypatch.setattr(restore, "NUM_STREAMS", 1)
    monkeypatch.setattr(process, "POLL_S", 0.01)
    # power is not lost here, and time is short
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def steps_in(storage):
    """Return the steps with a manifest."""
    names = [name.split("/") for name in list(storage.store) if name.endswith("/manifest.json")]
    return sorted(int(parts[3].removeprefix("global_step_")) for parts in names)


def mirrored(run_dir, *steps):
    """Save and upload each step, and return the storage."""
    storage = FaultyStorage()
    own = uploader(run_dir, storage)
    for step in steps:
        save(run_dir, step)
        own.sync()
    return storage


def roll_back(run_dir, target):
    """Return to the checkpoint of `target`, as a run does after a spike in the next step."""
    found = layout.inspect(run_dir / layout.step_dir_name(target))
    onset = target + 1
    rollback.decide(run_dir, found, onset=onset, found_step=onset, last_step=100, reason="a spike")


NUM_FAULTS = 10
LAST_FAULT = 120
MAX_TRIES = 60


class Trial:
    """One run drawn by its seed, with the faults of `storage`, by default drawn too.

    Between its saves come rotations, rollbacks and the loss of the machine, after which the run
    continues on another one. Whenever an upload ends, a machine with an empty disk restores from
    what the mirror shows. Its checkpoint must be whole, no older than the last complete upload, not
    rolled back, and the one that an independent reading of the storage chooses.
    """

    def __init__(self, seed, work, storage=None):
        self._rng = random.Random(seed)
        self._storage = storage or self._drawn_storage()
        self._run_dir = work / "run"
        self._machines = (work / f"machine{number}" for number in itertools.count())
        self._run_dir.mkdir(parents=True)
        (self._run_dir / "metrics.jsonl").write_text("{}\n")
        self._saved = {}
        """{nonce: (step, files)}."""
        self._up = 0
        self._undone = set[str]()
        self._num_rollbacks = 0

    def _drawn_storage(self):
        numbers = self._rng.sample(range(1, LAST_FAULT), self._rng.randint(1, NUM_FAULTS))
        late_by = self._rng.randint(1, 25)
        return FaultyStorage({n: self._rng.choice(KINDS) for n in numbers}, late_by=late_by)

    def run(self):
        step = 0
        own = uploader(self._run_dir, self._storage)
        for _ in range(self._rng.randint(3, 5)):
            step += self._rng.randint(1, 2)
            self._save(step)
            own = self._bring_up(own, step)
            event = self._rng.choice(("", "rotate", "roll back", "lose"))
            if event == "rotate":
                retention.rotate(self._run_dir, keep=1)
            elif event == "roll back" and (older := layout.committed(self._run_dir)[:-1]):
                step = self._rng.choice(older).step
                roll_back(self._run_dir, step)
                self._up = min(self._up, step)
                own = self._bring_up(own, step)
            elif event == "lose":
                step = self._lose() or step
                own = uploader(self._run_dir, self._storage)

    def _save(self, step):
        """Save as a run does; no two saves are equal."""
        nonce = f"{len(self._saved):08d}"
        self._saved[nonce] = step, files_of(commit(self._run_dir, step, nonce=nonce))
        layout.publish(self._run_dir, step)

    def _bring_up(self, own, step):
        for _ in range(MAX_TRIES):
            is_up = False
            try:
                own.sync()
                is_up = True
                self._up = step
                entries = rollback.read(self._run_dir).entries
                self._num_rollbacks = len(entries)
                self._undone.update(*(entry.discarded for entry in entries))
            except (StorageError, Killed):
                if self._storage.revive():
                    own = uploader(self._run_dir, self._storage)
            with self._storage.undisturbed():
                expected = self._expected()
                assert self._taken(next(self._machines)) in (None, expected)
            if is_up:
                return own
        raise AssertionError(f"step {step} never goes up")

    def _lose(self):
        """Continue on another machine, whose restore may fail too. Return its step, or None."""
        run_dir = next(self._machines)
        for _ in range(MAX_TRIES):
            try:
                nonce = self._taken(run_dir)
                break
            except (ResumableError, Killed):
                self._storage.revive()
        else:
            raise AssertionError("nothing comes back")
        if nonce is None:
            return None
        self._run_dir = run_dir
        self._up, _ = self._saved[nonce]
        return self._up

    def _taken(self, run_dir):
        """Return the nonce of the checkpoint that a machine restores, which must be a right one."""
        path = None
        with suppress(NoUsableCheckpointError):
            path = restored(run_dir, self._storage)
        if path is None:
            assert not self._up, "what was up is not taken"
            return None
        nonce = parse_manifest((path / MANIFEST).read_bytes()).nonce
        step, files = self._saved[nonce]
        assert step >= self._up and nonce not in self._undone
        assert files_of(path).items() >= files.items()
        assert (run_dir / "metrics.jsonl").exists()
        assert len(rollback.read(run_dir).entries) >= self._num_rollbacks
        chosen = choice.select(run_dir).chosen
        assert chosen.path == path
        return nonce

    def _expected(self):
        """Return the nonce of the checkpoint to restore, from the bytes that the storage shows."""
        root = f"{URL.removeprefix('memory:/')}/"
        shown = {name.removeprefix(root): data for name, data in self._storage.seen().items()}
        whole = {
            step: nonce
            for nonce, (step, files) in self._saved.items()
            if all(shown.get(f"global_step_{step}/{name}") == files[name] for name in files)
        }
        text = shown.get(layout.POINTER, b"").decode()
        pointer = int(text) if text.endswith("\n") else None
        steps = [step for step in whole if pointer is not None and step <= pointer] or list(whole)
        return whole[max(steps)] if steps else None
