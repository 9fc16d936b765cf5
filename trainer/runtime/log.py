"""Prints lines on the terminal: information from rank 0 on stdout, warnings and errors on
stderr.
"""

import contextlib
import io
import logging
import math
import os
import select
import sys
import time
import warnings
from dataclasses import dataclass
from typing import IO, Any, TextIO

LABEL_WIDTH = 12
"""Width, in columns, of the labels at the start of a run."""
PROGRESS_INTERVAL_S = 10.0
PATIENCE_S = 30.0
"""A write waits this long for its reader, such as a terminal that Ctrl-S has stopped."""


@dataclass(eq=False)
class SafeStream:
    """A standard stream whose writes raise no error after a broken pipe, a full disk or a closed
    terminal.

    After the first failed write the descriptor points to /dev/null, for libraries and child
    processes too. If nobody reads a pipe or a terminal, text is dropped until someone does.
    """

    stream: IO[str]
    reports_loss: bool
    _is_stalled: bool = False

    def write(self, text: str) -> int:
        try:
            if self._has_room():
                return self.stream.write(text)
        except OSError as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self._give_up(error)

    def _has_room(self) -> bool:
        """Wait `PATIENCE_S` for room. Until there is room, later calls do not wait again."""
        patience_s = 0.0 if self._is_stalled else PATIENCE_S
        self._is_stalled = not select.select([], [self.stream], [], patience_s)[1]
        return not self._is_stalled

    def _give_up(self, error: OSError) -> None:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), self.stream.fileno())
        self.stream.flush()  # drops the buffered text
        if self.reports_loss:
            say(f"cannot write to stdout anymore ({error.strerror}): further output is discarded\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def escape_unprintable() -> None:
    """Escape characters that the terminal's encoding lacks, such as `│` in Latin-1."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def keep_streams_safe(*, reports_loss: bool = True) -> None:
    """Make broken standard streams harmless and open closed ones on /dev/null.

    Call this first in a process: a file that is opened earlier could get the free descriptor and
    receive output meant for the terminal. `reports_loss`: a message on stderr reports that stdout
    was lost.
    """
    escape_unprintable()
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)
        stream = getattr(sys, name) or open(number, "w" if number else "r", closefd=False)  # noqa: SIM115
        if number:
            stream = SafeStream(stream, reports_loss=reports_loss and name == "stdout")
        setattr(sys, name, stream)


def say(text: str) -> None:
    """Write text to stderr; a signal handler may call this. If stderr cannot be written at once,
    the text is lost.
    """
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, text.encode())


def labelled(label: str, text: str) -> str:
    """Return a line of the overview that a run prints before its first step."""
    return f"{label:<{LABEL_WIDTH}}{text}"


class ProgressLines:
    """Prints the progress of slow work at once and then every 10 s.

    The lines go to stderr, because programs may read the stdout of a command.
    """

    def __init__(self, label: str, beginning: str) -> None:
        self._label = label
        self._shown_s = -math.inf
        self.tell(beginning)

    def tell(self, text: str) -> None:
        """Print a line if enough time has passed since the last one."""
        if time.monotonic() - self._shown_s > PROGRESS_INTERVAL_S:
            self._shown_s = time.monotonic()
            print(labelled(self._label, text), file=sys.stderr, flush=True)


class _StdoutHandler(logging.StreamHandler):
    """Writes to the current `sys.stdout`, because a progress bar replaces it to keep lines above
    the bar.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stdout


def configure(rank: int) -> None:
    """Send `trainer.*` to the terminal. Ranks other than 0 print only errors, with their number."""
    prefix = "" if rank == 0 else f"[rank {rank}] "
    out = _StdoutHandler()
    err = logging.StreamHandler(sys.stderr)
    out.addFilter(lambda record: record.levelno < logging.WARNING)
    err.setLevel(logging.WARNING)
    out.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    err.setFormatter(logging.Formatter(f"%(levelname)s: {prefix}%(message)s"))
    root = logging.getLogger("trainer")
    root.handlers = [out, err]
    root.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    root.propagate = False
    # torchdata 0.11 causes this warning on every start; nobody can act on it
    warnings.filterwarnings("ignore", message=".*set_vital.*")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
