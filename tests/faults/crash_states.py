"""Every directory state that a power loss may leave, derived from a log of file operations.

The model is weaker than any real file system (the idea of ALICE and of LevelDB's fault injection):
- The power fails between any two operations.
- Bytes written to a file since its last fsync are lost, cut short, zeroed or kept.
- A creation, rename or removal since the last fsync of its directory is lost or kept, each for
  itself. A later one may survive an earlier one, and a name may survive without its bytes. A rename
  is one such change.
"""

import itertools
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias
from unittest import mock

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.fsio import Operation

Tree: TypeAlias = "bytes | tuple[tuple[str, Tree], ...]"
"""A file is its bytes; a directory is its entries, sorted by name."""
TimedOperation = tuple[int, Operation]
"""Time in ns on a clock that all processes share, and a copy of the operation."""

WITHOUT_EFFECT = ("close", "phase")
ACKNOWLEDGED = "acknowledged"
"""After this mark, a start must find this step."""
MOVED_BACK = "moved_back"
"""The user pointed back to this step, so newer ones are void."""


@contextmanager
def recording():
    """Collect the file operations of this process, and when a step is acknowledged.

    After `commit`, a step must not be lost; `publish` repeats this promise.
    """
    log = []

    def observe(operation):
        log.append((time.monotonic_ns(), replace(operation, data=bytes(operation.data))))

    def acknowledging(function):
        def call(path, step, **settings):
            result = function(path, step, **settings)
            observe(mark(ACKNOWLEDGED, step))
            return result

        return call

    with (
        mock.patch.object(fsio, "observer", observe),
        mock.patch.object(layout, "commit", acknowledging(layout.commit)),
        mock.patch.object(layout, "publish", acknowledging(layout.publish)),
    ):
        yield log


def mark(kind, step):
    return Operation("phase", Path(f"{kind}.{step}"))


def marked_step(operation, kind):
    """Return the step of a mark of this kind, or None for any other operation."""
    name, _, step = operation.path.name.partition(".")
    return int(step) if (operation.kind, name) == ("phase", kind) else None


def merge(*logs):
    """Return a single log from the logs of several processes, in order of time."""
    return [operation for _, operation in sorted(itertools.chain(*logs), key=lambda item: item[0])]


def coalesced(log):
    """Join the writes to each file until its sync: a cut between them shows hardly more."""
    kept = []
    pending = {}
    for operation in log:
        if operation.kind == "write":
            pending[operation.path] = pending.get(operation.path, b"") + operation.data
            continue
        if operation.path in pending:
            kept.append(Operation("write", operation.path, data=pending.pop(operation.path)))
        kept.append(operation)
    return kept


def read_tree(path):
    """Return the content of the disk. Raises `OSError` for links and devices."""
    if path.is_symlink() or not path.is_dir():
        return fsio.read_bytes(path)
    return tuple((name, read_tree(path / name)) for name in fsio.list_dir(path))


class File:
    """`durable` bytes, and `pending` bytes that are not synced yet."""

    def __init__(self, durable):
        self.durable = durable
        self.pending = b""

    def fsync(self):
        self.durable = self.durable + self.pending
        self.pending = b""

    def variants(self):
        """Return possible contents after a crash: pending bytes lost, cut, zeroed, or (last)
        complete.
        """
        if not self.pending:
            return [self.durable]
        data = self.pending
        size = len(self.pending)
        ends = (b"", data[: size // 2], bytes(size), data)
        return list(dict.fromkeys(self.durable + end for end in ends))


@dataclass(frozen=True, eq=False)
class Change:
    """A change of a directory: the name that disappears, and the entry that appears."""

    removed: str | None = None
    added: "tuple[str, Node] | None" = None

    def apply(self, entries):
        if self.removed is not None:
            entries.pop(self.removed, None)
        if self.added is not None:
            entries[self.added[0]] = self.added[1]


class Directory:
    """`durable` entries, `pending` changes that are not synced yet, and the entries `now`."""

    def __init__(self, entries):
        self.durable = dict(entries)
        self.now = dict(entries)
        self.pending = []

    def change(self, change):
        change.apply(self.now)
        self.pending.append(change)

    def fsync(self):
        self.durable = dict(self.now)
        self.pending = []

    def after(self, kept):
        """Return the entries if only the `kept` pending changes reach the disk."""
        entries = dict(self.durable)
        for change, is_kept in zip(self.pending, kept, strict=True):
            if is_kept:
                change.apply(entries)
        return dict(sorted(entries.items()))


Node = File | Directory


class Disk:
    """A directory on a disk that forgets unsynced data. It replays operations and lists states
    after a power loss.
    """

    def __init__(self, start, root):
        """`start` is durable; `root`: the directory in the paths of the operations."""
        self._root = _node(start)
        self._path = root

    def apply(self, operation):
        """Raises `KeyError` or `ValueError` for an impossible operation: the log is not complete."""
        path = operation.path
        kind = operation.kind
        is_inside = path.is_relative_to(self._path) and (path != self._path or kind == "fsync_dir")
        if kind in WITHOUT_EFFECT or not is_inside:
            return
        node = self._node(path if kind in ("write", "fsync", "fsync_dir") else path.parent)
        if isinstance(node, Directory) and kind != "fsync_dir":
            node.change(self._change(operation, node.now))
        elif isinstance(node, File) and kind == "write":
            node.pending += bytes(operation.data)
        else:
            node.fsync()

    def _change(self, operation, entries):
        path = operation.path
        target = operation.target
        if (path.name in entries) == (operation.kind in ("create", "mkdir")):
            raise KeyError(f"{operation.kind} {path}")
        match operation.kind:
            case "create":
                return Change(added=(path.name, File(b"")))
            case "mkdir":
                return Change(added=(path.name, Directory({})))
            case "unlink" | "rmdir":
                return Change(removed=path.name)
            case "rename" if target is not None and target.parent == path.parent:
                return Change(path.name, (target.name, entries[path.name]))
        raise ValueError(f"{operation.kind} {path} -> {target} is not in the model")

    def _node(self, path):
        node = self._root
        for name in path.relative_to(self._path).parts:
            node = node.now[name]
        return node

    def now(self, path):
        """Return the content that a process sees at `path`, synced or not."""
        return _now(self._node(path))

    def num_combinations(self):
        return _num_combinations(self._root)

    def states(self):
        """Yield every state after a power loss at this moment, some of them repeatedly."""
        return _states(self._root, {})

    def sample(self, count, chance):
        """Yield `count` of the states: nearly all changes lost, nearly all kept, or in between."""
        for _ in range(count):
            yield _pick(self._root, chance, keep=chance.choice((0.1, 0.5, 0.9)))


def _node(tree):
    if isinstance(tree, bytes):
        return File(tree)
    return Directory({name: _node(child) for name, child in tree})


def _now(node):
    if isinstance(node, File):
        return node.durable + node.pending
    return tuple((name, _now(child)) for name, child in sorted(node.now.items()))


def _num_combinations(node):
    """Count the combinations, including entries that only some of them have."""
    if isinstance(node, File):
        return len(node.variants())
    count = 2 ** len(node.pending)
    added = [change.added[1] for change in node.pending if change.added]
    for child in dict.fromkeys([*node.durable.values(), *added]):
        count *= _num_combinations(child)
    return count


def _states(node, known):
    """`known`: states of entries, found once for all names that may survive for them."""
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


def _pick(node, chance, keep):
    if isinstance(node, File):
        variants = node.variants()
        return variants[-1] if chance.random() < keep else chance.choice(variants)
    entries = node.after([chance.random() < keep for _ in node.pending])
    return tuple((name, _pick(child, chance, keep)) for name, child in entries.items())
