"""Messages from the ranks of a machine to their launcher, in unnamed files.

The files are in memory (memfd), so no cleanup of TMPDIR can remove them. torchrun's agent closes
inherited descriptors; therefore `SFT_STATUS` holds the paths /proc/<pid of the
launcher>/fd/<descriptor>, which the ranks open. The first file holds exit codes. Each rank has one
more file: it begins with the rank's last heartbeat, which carries its pid, and continues with the
stacks that the rank appends on SIGUSR2.
"""

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
VARIABLE = "SFT_STATUS"
LOST_RANK = 70
"""Internal exit code of a rank that ends because another rank of its machine is gone. The agent
prints the cause.
"""
ABORTED = 134
"""Internal exit code of the agent if SIGABRT was the only cause that ended ranks."""
_RECORD = struct.Struct("<dQd24sd")
"""Time of the beat, pid, allowed silence, phase, and the time again: if the times differ, the
record is half written.
"""


@dataclass(frozen=True)
class Beat:
    """The last heartbeat of a rank. All processes of a machine share the clock of `at_s`.

    The rank may be silent for `limit_s` seconds; infinity means that it is not watched.
    """

    pid: int
    at_s: float
    limit_s: float
    phase: str

    def packed(self) -> bytes:
        return _RECORD.pack(self.at_s, self.pid, self.limit_s, self.phase.encode(), self.at_s)


class Status:
    """The status files of one launcher, opened by the launcher or one of its descendants.

    Every method raises `OSError` if the launcher is gone.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._exit_codes, *self._ranks = map(Path, address.split(":"))

    def open_rank(self, number: int) -> int:
        """Return a descriptor for `write_beat`. Any other write to it appends stacks."""
        descriptor = os.open(self._ranks[number], os.O_WRONLY | os.O_CLOEXEC)
        os.lseek(descriptor, 0, os.SEEK_END)
        return descriptor

    def beats(self) -> dict[int, Beat]:
        """Return {number of a rank on this machine: its last beat}, without half-written ones."""
        found = {}
        for number, path in enumerate(self._ranks):
            at_s, pid, limit_s, phase, again_at_s = _RECORD.unpack_from(path.read_bytes())
            if pid and at_s == again_at_s:
                text = phase.rstrip(b"\0").decode(errors="replace")
                found[number] = Beat(pid, at_s, limit_s, text)
        return found

    def stacks(self, number: int) -> bytes:
        return self._ranks[number].read_bytes()[_RECORD.size :]

    def report(self, code: int) -> bool:
        """Append an exit code. Return True if it is the first."""
        line = f"{code}\n".encode()
        with self._exit_codes.open("ab", buffering=0) as file:
            file.write(line)
            return file.tell() == len(line)

    def exit_code(self) -> int | None:
        """Return the first reported exit code that names a cause; None if there is none."""
        codes = map(int, self._exit_codes.read_bytes().split())
        return next((code for code in codes if code != LOST_RANK), None)


def write_beat(descriptor: int, beat: Beat) -> None:
    os.pwrite(descriptor, beat.packed(), 0)


@contextmanager
def new_status(num_ranks: int) -> Iterator[Status]:
    """Make the files for `num_ranks` ranks on this machine. They are removed when the `with` block ends."""
    descriptors = [os.memfd_create("sft-status") for _ in range(1 + num_ranks)]
    try:
        for descriptor in descriptors[1:]:
            # takes the memory now, so that a heartbeat cannot fail later
            os.write(descriptor, bytes(_RECORD.size))
        yield Status(":".join(f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in descriptors))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def launcher_status() -> Status | None:
    """Return the files of this rank's launcher; None if there is none."""
    address = os.environ.get(VARIABLE)
    return None if address is None else Status(address)


def ask_launcher(question: Callable[[Status], T], *, otherwise: T) -> T:
    """Query the launcher's files. Return `otherwise` if there is no launcher or it is gone."""
    status = launcher_status()
    try:
        return otherwise if status is None else question(status)
    except OSError:
        return otherwise
