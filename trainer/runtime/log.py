"""Plain lines on the terminal: information on stdout from rank 0, warnings and errors on stderr."""

import contextlib
import io
import logging
import os
import sys
import time
import warnings
from typing import IO, Any, TextIO


class SafeStream:
    """A standard stream whose loss costs its text alone: a pipe without reader, a full disk, a
    closed terminal.

    The first write that fails lets the descriptor lead to /dev/null from then on, also for
    libraries and children.
    """

    def __init__(self, stream: IO[str], *, name: str, says_so: bool) -> None:
        self._stream, self._name, self._says_so = stream, name, says_so

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        self._stream.flush()  # what it still holds can go now
        if self._says_so:
            say(
                f"{self._name} can no longer be written ({error.strerror}): nothing is shown there "
                f"from now on\n"
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def escape_unprintable() -> None:
    """Show characters that the terminal's encoding lacks as escapes: a Latin-1 locale has no
    `│`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def keep_streams_safe(*, says_so: bool = True) -> None:
    """Lead closed standard streams to /dev/null, and make broken ones harmless. Call it first in a
    process.

    A file opened later would get the free number, and receive what is meant for the terminal.
    With `says_so` the loss of stdout is told on stderr.
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
            is_told = says_so and name == "stdout"
            stream = SafeStream(stream, name=name, says_so=is_told)
        setattr(sys, name, stream)


def say(text: str) -> None:
    """Straight to stderr, also from a signal handler; if nobody can read it, it is lost."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


LABEL_WIDTH = 12
"""Columns of the labels at the start of a run."""
PROGRESS_INTERVAL_S = 10.0
COLORS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31m"}
RESET = "\x1b[0m"


def labelled(label: str, text: str) -> str:
    """Return a line of the overview that a run prints before its first step."""
    return f"{label:<{LABEL_WIDTH}}{text}"


class ProgressLines:
    """Prints how far slow work has come: at first, then every 10 s. On stderr, so that commands
    whose output is read by programs can do such work.
    """

    def __init__(self, label: str, beginning: str) -> None:
        self._label = label
        self._started_s = self._shown_s = time.monotonic()
        self._print(beginning)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def tell(self, text: str) -> None:
        """Print a line if it is time for one."""
        if time.monotonic() - self._shown_s > PROGRESS_INTERVAL_S:
            self._shown_s = time.monotonic()
            self._print(text)

    def _print(self, text: str) -> None:
        print(labelled(self._label, text), file=sys.stderr, flush=True)


class _Formatter(logging.Formatter):
    """Warnings and errors begin with their level, which a terminal shows in colour."""

    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        if record.levelno < logging.WARNING:
            return message
        color = COLORS.get(record.levelno, "") if sys.stderr.isatty() else ""
        return f"{color}{record.levelname}:{RESET * bool(color)} {message}"


class _Stdout(logging.StreamHandler):
    """Writes to what `sys.stdout` is now: a progress bar replaces it to keep lines above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stdout


def configure(rank: int) -> None:
    """Send `trainer.*` to the terminal. Other ranks than 0 speak only in errors, and say who
    they are.
    """
    prefix = "" if rank == 0 else f"[rank {rank}] "
    out = _Stdout()
    out.addFilter(lambda record: record.levelno < logging.WARNING)
    err = logging.StreamHandler(sys.stderr)
    err.setLevel(logging.WARNING)
    root = logging.getLogger("trainer")
    root.handlers.clear()
    for handler in (out, err):
        handler.setFormatter(_Formatter(prefix + "%(message)s"))
        root.addHandler(handler)
    root.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    root.propagate = False
    # torchdata 0.11 calls this on every start; nobody can act on it
    warnings.filterwarnings("ignore", message=".*set_vital.*")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
