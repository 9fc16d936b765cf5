"""What the command line tools share (floor 5)."""

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from trainer.config import ConfigError
from trainer.errors import EXIT_CANNOT_WRITE, EXIT_USAGE, CannotWriteError
from trainer.runtime.atomic_files import atomic_write

EXIT_INTERRUPTED = 128 + signal.SIGINT


class Parser(argparse.ArgumentParser):
    """Raises `ConfigError` with the usage where argparse would end the process, so that one place reports errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}\n{self.format_usage().rstrip()}")


Codes = dict[type[Exception], int]


def answer(command: Callable[[], int], codes: Codes | None = None, *, interrupted: str = "interrupted") -> int:
    """The exit code of `command`; an error that has one goes to stderr as one message.

    `codes` beside, or in place of, 2 for `ConfigError` and 73 for `CannotWriteError`.
    """
    known: Codes = {ConfigError: EXIT_USAGE, CannotWriteError: EXIT_CANNOT_WRITE, **(codes or {})}
    try:
        return command()
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return EXIT_INTERRUPTED
    except tuple(known) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return next(code for kind, code in known.items() if isinstance(error, kind))


def at_least(minimum: int) -> Callable[[str], int]:
    """Of an option: a whole number."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {minimum}, got '{text}'")
        return int(text)

    return number


def write_file(path: Path, text: str) -> None:
    """Whole or not at all. Raises `CannotWriteError`."""
    try:
        atomic_write(path, text)
    except OSError as error:
        raise CannotWriteError(f"cannot write {path}: {error}; choose another place") from error
    print(f"wrote {path}")
