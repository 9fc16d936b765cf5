"""What the ranks of a machine tell their launcher, in files without a name (floor 1, no torch).

Whatever cleans TMPDIR cannot remove them: they are memory of the launcher (memfd). torchrun's agent
closes inherited descriptors, so `SFT_STATUS` holds the paths /proc/<pid of the
launcher>/fd/<descriptor>, which ranks open: first the file of exit codes, then one file for each
rank. A rank's file holds its pid, its heartbeat, and after these the stacks that it appends on
SIGUSR2.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "SFT_STATUS"
LOST_RANK = 70
"""Internal: the exit code of a rank that ends because another rank of its machine is gone; the
agent says why.
"""
ABORTED = 134
"""Internal: the exit code of the agent when SIGABRT ended a rank, and nothing else ended one."""
_PID = struct.Struct("<Q")
_BEAT_AT, _STACKS_AT = _PID.size, 64


class Status:
    """The files of one launcher, seen from the launcher or from a process below it.

    Every method raises `OSError` when the launcher is gone.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._exit_codes, *self._ranks = address.split(":")

    def register(self, number: int, pid: int) -> None:
        _write(self._ranks[number], _PID.pack(pid), at=0)

    def pids(self) -> dict[int, int]:
        """By number on this machine, the ranks that have registered."""
        found = {
            number: _PID.unpack(_read(path)[:_BEAT_AT])[0]
            for number, path in enumerate(self._ranks)
        }
        return {number: pid for number, pid in found.items() if pid}

    def open_beat(self, number: int) -> int:
        """A descriptor for `write_beat`."""
        return os.open(self._ranks[number], os.O_WRONLY | os.O_CLOEXEC)

    def beat(self, number: int) -> bytes:
        """What `write_beat` wrote last; zeros before."""
        return _read(self._ranks[number])[_BEAT_AT:_STACKS_AT]

    def open_stacks(self, number: int) -> int:
        """A descriptor to append to."""
        return os.open(self._ranks[number], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def stacks(self, number: int) -> bytes:
        return _read(self._ranks[number])[_STACKS_AT:]

    def report(self, code: int) -> bool:
        """Append an exit code; whether it is the first."""
        line = f"{code}\n".encode()
        descriptor = os.open(self._exit_codes, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, line)
            return os.lseek(descriptor, 0, os.SEEK_CUR) == len(line)
        finally:
            os.close(descriptor)

    def exit_code(self) -> int | None:
        """The first reported exit code that is a cause; None where there is none."""
        codes = [int(line) for line in _read(self._exit_codes).split()]
        return next((code for code in codes if code != LOST_RANK), None)


def write_beat(descriptor: int, record: bytes) -> None:
    os.pwrite(descriptor, record, _BEAT_AT)


@contextmanager
def new_status(num_ranks: int) -> Iterator[Status]:
    """The files of a launcher that starts `num_ranks` ranks on this machine; they are gone
    after the block.
    """
    descriptors = [os.memfd_create("sft-status") for _ in range(1 + num_ranks)]
    try:
        for descriptor in descriptors[1:]:
            # takes the memory now: a heartbeat cannot fail later
            os.write(descriptor, bytes(_STACKS_AT))
        yield Status(":".join(f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in descriptors))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def launcher_status() -> Status | None:
    """The files of this rank's launcher; None where there is no launcher."""
    address = os.environ.get(VARIABLE)
    return None if address is None else Status(address)


def _write(path: str, content: bytes, *, at: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, content, at)
    finally:
        os.close(descriptor)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
