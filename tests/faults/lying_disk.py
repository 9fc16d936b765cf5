"""A disk that keeps only synced data (shim.c), and the effect of a power cut on a directory on it."""

import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
BLOCK_BYTES = 512


def build_shim(directory):
    library = directory / "shim.so"
    flags = ["-O1", "-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, str(SOURCE), "-o", str(library)], check=True)
    return library


def run_on_lying_disk():
    """Run this program again, with all its child processes, on such a disk. Return its exit code."""
    with tempfile.TemporaryDirectory(prefix="disk-", dir="/dev/shm") as directory:
        root = Path(directory, "root")
        shadow = Path(directory, "shadow")
        root.mkdir()
        shadow.mkdir()
        disk = {"DISK_ROOT": str(root), "DISK_SHADOW": str(shadow)}
        environment = {**os.environ, **disk, "LD_PRELOAD": str(build_shim(shadow))}
        return subprocess.run([sys.executable, *sys.argv], env=environment).returncode


def cut_power(run_dir, seed):
    """Reduce a directory, in which no process is alive, to a state that a power cut may leave.

    Its own name is durable. Each unsynced change of a name, and each unsynced block, survives or
    not.
    """
    chance = random.Random(seed)
    disk = _Disk(run_dir, survives=chance.choice((0.0, 0.1, 0.5, 0.9, 1.0)), chance=chance)
    after = run_dir.with_name(f"{run_dir.name}.after")
    after.mkdir()
    disk.leave(run_dir.stat().st_ino, after)
    shutil.rmtree(run_dir)
    after.rename(run_dir)
    for parent, _, names in os.walk(run_dir):
        for name in (".", *names):
            descriptor = os.open(Path(parent, name), os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


Entry = tuple[int, bool]
"""Return the inode number, and True for a directory."""


class _Disk:
    def __init__(self, run_dir, *, survives, chance):
        self._shadow = Path(os.environ["DISK_SHADOW"])
        self._survives = survives
        self._chance = chance
        self._live = {path.stat().st_ino: path for path in (run_dir, *run_dir.rglob("*"))}

    def leave(self, inode, target):
        """Fill the new directory `target` with the remains of the directory with this inode number."""
        for name, (child, is_dir) in self._names(inode).items():
            if is_dir:
                (target / name).mkdir()
                self.leave(child, target / name)
            else:
                (target / name).write_bytes(self._bytes(child))

    def _names(self, inode):
        """Return synced names, and later names that survived."""
        synced = {}
        for line in self._kept(inode).decode().splitlines():
            child, is_dir, name = line.split(" ", 2)
            synced[name] = int(child), is_dir == "1"
        now = {}
        if directory := self._live.get(inode):
            for path in directory.iterdir():
                now[path.name] = path.stat().st_ino, path.is_dir()
        stay = {entry for name, entry in synced.items() if now.get(name) == entry}
        survivors = {entry for entry in now.values() if entry in stay or self._is_drawn()}
        names = {}
        for name, entry in synced.items():
            is_replaced = now.get(name) in survivors
            is_moved = entry in now.values() and entry not in stay and entry in survivors
            is_removed = entry not in now.values() and name not in now and self._is_drawn()
            if not (is_replaced or is_moved or is_removed) or entry in stay:
                names[name] = entry
        return names | {name: entry for name, entry in now.items() if entry in survivors}

    def _bytes(self, inode):
        """Return each block as it was synced, or as it is now. Unwritten blocks are zero."""
        synced = self._kept(inode)
        now = self._live[inode].read_bytes() if inode in self._live else synced
        if now == synced:
            return now
        num_bytes = self._chance.choice((len(synced), len(now), self._chance.randint(0, len(now))))
        num_bytes = max(num_bytes, min(len(synced), len(now)))
        left = bytearray(synced[:num_bytes].ljust(num_bytes, b"\0"))
        for start in range(0, num_bytes, BLOCK_BYTES):
            if self._is_drawn():
                block = slice(start, min(start + BLOCK_BYTES, num_bytes))
                left[block] = now[block].ljust(block.stop - start, b"\0")
        return bytes(left)

    def _kept(self, inode):
        path = self._shadow / str(inode)
        return path.read_bytes() if path.exists() else b""

    def _is_drawn(self):
        return self._chance.random() < self._survives
