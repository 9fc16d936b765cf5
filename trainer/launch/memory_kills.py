"""Whether the kernel killed a process for memory, by its own counters (floor 5, no torch)."""

import signal
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
UNLIMITED_BYTES = 1 << 60
"""The first version of control groups writes a number near 2^63 where there is no limit."""


@dataclass(frozen=True)
class _Names:
    """Where a version of the memory controller keeps its files, and what it calls them."""

    mount: str
    events: str
    limit: str
    peak: str


_VERSION_1 = _Names(
    "memory", "memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes"
)
_VERSION_2 = _Names(".", "memory.events", "memory.max", "memory.peak")


class MemoryKills:
    """Counts kills for memory from the moment it is made: in this process's control group, else
    on the machine.
    """

    def __init__(
        self, *, proc: Path = Path("/proc"), mounted_at: Path = Path("/sys/fs/cgroup")
    ) -> None:
        self._proc = proc
        self._names, self._groups = _memory_groups(proc, mounted_at)
        self._num_before = self._count()

    def killer(self, number: int) -> str:
        """The signal that killed a process, with the reason if the kernel sent it."""
        reason = self.explain() if number == signal.SIGKILL else None
        return signal.Signals(number).name + (f", by the kernel: {reason}" if reason else "")

    def limit(self) -> tuple[int, Path]:
        """The smallest in bytes, and the group that it is of; `UNLIMITED_BYTES` or more where
        there is none.
        """
        limits = [
            (limit, group)
            for group in self._groups
            if (limit := _number(group / self._names.limit))
        ]
        return min(limits, default=(UNLIMITED_BYTES, Path()))

    def explain(self) -> str | None:
        """The limit that was met, with its numbers; None when nothing was killed for memory."""
        if self._count() <= self._num_before:
            return None
        limit_bytes, group = self.limit()
        if limit_bytes < UNLIMITED_BYTES:
            peak = _number(group / self._names.peak)
            used = f", {_gib(peak)} were used at most" if peak else ""
            return f"memory ran out: the limit here is {_gib(limit_bytes)}{used} ({group / self._names.limit})"
        memory = _fields(self._proc / "meminfo")
        total, free = (_gib(1024 * memory.get(name, 0)) for name in ("MemTotal:", "MemAvailable:"))
        return f"memory ran out: this machine has {total}, {free} are free now ({self._proc / 'meminfo'})"

    def _count(self) -> int:
        counters = (group / self._names.events for group in self._groups)
        found = next(
            (fields for path in counters if (fields := _fields(path))),
            _fields(self._proc / "vmstat"),
        )
        return found.get("oom_kill", 0)


def _memory_groups(proc: Path, mounted_at: Path) -> tuple[_Names, list[Path]]:
    """The control group of this process and those around it, the innermost first."""
    try:
        lines = [
            line.split(":", 2)
            for line in (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
        ]
    except OSError:
        lines = []
    paths = {controllers: path for _, controllers, path in lines}
    joint = next(
        (path for controllers, path in paths.items() if "memory" in controllers.split(",")), None
    )
    names, path = (_VERSION_2, paths.get("", "/")) if joint is None else (_VERSION_1, joint)
    mount = mounted_at / names.mount
    group = mount / path.lstrip("/")
    # a container may see its own group as the mount itself, while the path is that of the host
    inner = [group, *group.parents] if group.is_dir() else [mount]
    return names, [directory for directory in inner if directory.is_relative_to(mount)]


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number on each line; {} when it cannot be read."""
    try:
        words = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}


def _number(path: Path) -> int | None:
    """The one number a file holds; None when it cannot be read, or says that there is none."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB"
