"""Every directory state that a power loss may leave, from the log of what a program did to its
files.

The model is weaker than any real file system (the idea of ALICE and of LevelDB's fault injection):
- The power fails between any two operations.
- Bytes written to a file since its last fsync are lost, cut short, zeroed or kept.
- A creation, rename or removal since the last fsync of its directory is lost or kept, each for
  itself: a later one may survive an earlier one, and a name may survive while the bytes behind it
  do not. A rename is one such change.
"""

import itertools
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.fsio import Operation

Tree: TypeAlias = "bytes | tuple[tuple[str, Tree], ...]"
"""A file is its bytes; a directory is its entries, sorted by name."""
TimedOperation = tuple[int, Operation]
"""When it was announced (ns on a clock that all processes of the machine share), and a copy of
it.
"""

PAGE_BYTES = 4096
WITHOUT_EFFECT = ("close", "phase")
ACKNOWLEDGED = "acknowledged"
MOVED_BACK = "moved_back"


@contextmanager
def recording() -> Iterator[list[TimedOperation]]:
    """Collect what this process does through `fsio`, and when `layout.commit` and `layout.publish`
    acknowledge a step.

    From `commit` on a step must not be lost; `publish` repeats it. The list can be pickled.
    """
    log: list[TimedOperation] = []

    def observe(operation: Operation) -> None:
        log.append((time.monotonic_ns(), replace(operation, data=bytes(operation.data))))

    def commit(staging: Path, step: int, **settings: Any) -> Path:
        final = real_commit(staging, step, **settings)
        observe(mark(ACKNOWLEDGED, step))
        return final

    def publish(run_dir: Path, step: int) -> None:
        real_publish(run_dir, step)
        observe(mark(ACKNOWLEDGED, step))

    real_commit, real_publish = layout.commit, layout.publish
    with (
        mock.patch.object(fsio, "observer", observe),
        mock.patch.object(layout, "commit", commit),
        mock.patch.object(layout, "publish", publish),
    ):
        yield log


def mark(kind: str, step: int) -> Operation:
    """ACKNOWLEDGED: from here on `step` must be found. MOVED_BACK: a person pointed back to it,
    newer ones are void.
    """
    return Operation("phase", Path(f"{kind}.{step}"))


def marked_step(operation: Operation, kind: str) -> int | None:
    """The step of a mark of this kind; None for every other operation."""
    name = operation.path.name
    is_mark = operation.kind == "phase" and name.startswith(f"{kind}.")
    return int(name.removeprefix(f"{kind}.")) if is_mark else None


def merge(*logs: Iterable[TimedOperation]) -> list[Operation]:
    """One log out of those of several processes, by time."""
    return [operation for _, operation in sorted(itertools.chain(*logs), key=lambda item: item[0])]


def coalesced(log: Iterable[Operation]) -> list[Operation]:
    """The same log with the writes to a file joined until it is synced: a cut between them
    tells hardly more.
    """
    kept: list[Operation] = []
    pending: dict[Path, bytearray] = {}
    for operation in log:
        if operation.kind == "write":
            pending.setdefault(operation.path, bytearray()).extend(operation.data)
            continue
        if operation.path in pending:
            kept.append(Operation("write", operation.path, data=bytes(pending.pop(operation.path))))
        kept.append(operation)
    return kept


def read_tree(path: Path) -> Tree:
    """What stands on the disk. Raises `OSError` for anything that is neither a file nor a
    directory.
    """
    if path.is_symlink() or not path.is_dir():
        return fsio.read_bytes(path)
    return tuple((name, read_tree(path / name)) for name in fsio.list_dir(path))


class File:
    """`durable` bytes, and the `pending` ones that no fsync has covered yet."""

    def __init__(self, durable: bytes) -> None:
        self.durable, self.pending = durable, b""

    def fsync(self) -> None:
        self.durable, self.pending = self.durable + self.pending, b""

    def variants(self) -> list[bytes]:
        """What may be read after a crash: the pending bytes lost, cut, zeroed, with a hole, or
        (last) whole.
        """
        if not self.pending:
            return [self.durable]
        data, size = self.pending, len(self.pending)
        found = [b"", data[: size // 2], bytes(size)]
        if size > 2 * PAGE_BYTES:
            middle = size // 2
            found.append(data[:middle] + bytes(PAGE_BYTES) + data[middle + PAGE_BYTES :])
        return list(dict.fromkeys(self.durable + end for end in [*found, data]))


@dataclass(frozen=True, eq=False)
class Change:
    """One change of a directory's entries: the name that goes, and the one that comes with what
    it names.
    """

    removed: str | None = None
    added: "tuple[str, Node] | None" = None

    def apply(self, entries: "dict[str, Node]") -> None:
        if self.removed is not None:
            entries.pop(self.removed, None)
        if self.added is not None:
            entries[self.added[0]] = self.added[1]


class Directory:
    """`durable` entries, the `pending` changes that no fsync has covered yet, and the entries a
    process sees `now`.
    """

    def __init__(self, entries: "dict[str, Node]") -> None:
        self.durable, self.now = dict(entries), dict(entries)
        self.pending: list[Change] = []

    def change(self, change: Change) -> None:
        change.apply(self.now)
        self.pending.append(change)

    def fsync(self) -> None:
        self.durable, self.pending = dict(self.now), []

    def reachable(self) -> "list[Node]":
        """Everything that an entry may name after a crash."""
        nodes = [
            *self.durable.values(),
            *(change.added[1] for change in self.pending if change.added),
        ]
        return list(dict.fromkeys(nodes))

    def after(self, kept: Iterable[bool]) -> "dict[str, Node]":
        """The entries if of the pending changes only those `kept` reach the disk."""
        entries = dict(self.durable)
        for change, is_kept in zip(self.pending, kept, strict=True):
            if is_kept:
                change.apply(entries)
        return dict(sorted(entries.items()))


Node = File | Directory


class Disk:
    """A directory on a disk that forgets: replays operations, and says what a power loss may
    leave of them.
    """

    def __init__(self, start: Tree, root: Path) -> None:
        """`start` is durable; `root` is the directory that the paths of the operations lie in."""
        node = _node(start)
        assert isinstance(node, Directory), "a disk starts with a directory"
        self._root, self._path = node, root

    def apply(self, operation: Operation) -> None:
        """Raises `KeyError` or `ValueError` for what could not have happened: the log is not
        complete.
        """
        path, kind = operation.path, operation.kind
        if kind in WITHOUT_EFFECT or not self._is_inside(path, kind):
            return
        if kind in ("write", "fsync"):
            file = self._node(path)
            assert isinstance(file, File), f"{kind} on the directory {path}"
            if kind == "write":
                file.pending += bytes(operation.data)
            else:
                file.fsync()
        elif kind == "fsync_dir":
            self._directory(path).fsync()
        else:
            self._directory(path.parent).change(self._change(operation))

    def _is_inside(self, path: Path, kind: str) -> bool:
        """Entries of the root and what lies below; the root itself only where it is synced."""
        return path.is_relative_to(self._path) and (path != self._path or kind == "fsync_dir")

    def _change(self, operation: Operation) -> Change:
        path, target, entries = (
            operation.path,
            operation.target,
            self._directory(operation.path.parent).now,
        )
        match operation.kind:
            case "create" | "mkdir":
                if path.name in entries:
                    raise ValueError(f"{path} exists already")
                return Change(
                    added=(path.name, File(b"") if operation.kind == "create" else Directory({}))
                )
            case "unlink" | "rmdir":
                return Change(removed=path.name if path.name in entries else _missing(path))
            case "rename":
                if target is None or target.parent != path.parent:
                    raise ValueError(
                        f"{path} -> {target}: only renames within one directory are modelled"
                    )
                return Change(path.name, (target.name, entries[path.name]))
        raise ValueError(f"unknown operation {operation.kind}")

    def _node(self, path: Path) -> Node:
        node: Node = self._root
        for name in path.relative_to(self._path).parts:
            assert isinstance(node, Directory), f"{path}: {name} lies below a file"
            node = node.now[name]
        return node

    def _directory(self, path: Path) -> Directory:
        node = self._node(path)
        assert isinstance(node, Directory), f"{path} is a file"
        return node

    def now(self, path: Path) -> Tree:
        """What a process sees at `path`, synced or not."""
        return _now(self._node(path))

    def num_combinations(self) -> int:
        return _num_combinations(self._root)

    def states(self) -> Iterator[Tree]:
        """Every state after a power loss now, some more than once."""
        return _states(self._root, {})

    def sample(self, count: int, chance: random.Random) -> Iterator[Tree]:
        """`count` states of many: nearly all lost, nearly all kept, and anything between."""
        for _ in range(count):
            yield _pick(self._root, chance, keep=chance.choice((0.1, 0.5, 0.9)))


def _missing(path: Path) -> str:
    raise KeyError(f"{path} does not exist")


def _node(tree: Tree) -> Node:
    return (
        File(tree)
        if isinstance(tree, bytes)
        else Directory({name: _node(child) for name, child in tree})
    )


def _now(node: Node) -> Tree:
    if isinstance(node, File):
        return node.durable + node.pending
    return tuple((name, _now(child)) for name, child in sorted(node.now.items()))


def _num_combinations(node: Node) -> int:
    if isinstance(node, File):
        return len(node.variants())
    count = 2 ** len(node.pending)
    for child in node.reachable():
        count *= _num_combinations(child)
    return count


def _states(node: Node, known: dict[Node, list[Tree]]) -> Iterator[Tree]:
    """`known`: the states of what lies below, found once for all entries that may name it."""
    if isinstance(node, File):
        yield from node.variants()
        return
    subsets = itertools.product((False, True), repeat=len(node.pending))
    for entries in map(dict, dict.fromkeys(tuple(node.after(kept).items()) for kept in subsets)):
        for child in entries.values():
            if child not in known:
                known[child] = list(dict.fromkeys(_states(child, known)))
        for contents in itertools.product(*(known[child] for child in entries.values())):
            yield tuple(zip(entries, contents, strict=True))


def _pick(node: Node, chance: random.Random, keep: float) -> Tree:
    if isinstance(node, File):
        variants = node.variants()
        return variants[-1] if chance.random() < keep else chance.choice(variants)
    entries = node.after([chance.random() < keep for _ in node.pending])
    return tuple((name, _pick(child, chance, keep)) for name, child in entries.items())
