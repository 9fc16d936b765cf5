"""Plain lines on the terminal: information on stdout from rank 0, warnings and errors on stderr (floor 1)."""

import logging
import os
import sys
import warnings
from typing import TextIO


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = super().format(record)
        return message if record.levelno < logging.WARNING else f"{record.levelname}: {message}"


class _Stdout(logging.StreamHandler):
    """Writes to what `sys.stdout` is now: a progress bar replaces it to keep lines above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stdout


def configure(rank: int) -> None:
    """Send `trainer.*` to the terminal. Other ranks than 0 speak only in errors, and say who they are."""
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
