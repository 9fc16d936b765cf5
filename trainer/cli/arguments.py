"""Parsers, exit codes and output files of the commands."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainer.cli.commands import COMMANDS
from trainer.config import ConfigError
from trainer.errors import CannotWriteError
from trainer.runtime.environment import call
from trainer.runtime.exit_codes import DOCUMENTED, code_of
from trainer.runtime.files import atomic_write

if TYPE_CHECKING:
    from trainer.config import Config

EXIT_INTERRUPTED = 128 + signal.SIGINT
ENGINES = ("transformers", "vllm")


class Parser(argparse.ArgumentParser):
    """The parser of a command. Name, description and example come from `COMMANDS`; `settings` may
    replace them.

    It raises `ConfigError` with the usage when argparse would end the process.
    """

    def __init__(self, command: str | None = None, **settings: Any) -> None:
        if command is not None:
            about, example = COMMANDS[command]
            settings.setdefault("prog", call(command))
            settings.setdefault("description", f"{about[0].upper()}{about[1:]}.")
            settings["epilog"] = f"example:\n  {call(f'{command} {example}')}"
            settings["allow_abbrev"] = False
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}\n{self.format_usage().rstrip()}")


def add_words(parser: Parser, *, ranks: str = "ranks on this machine") -> None:
    """Add the arguments of a training command as `words`. `ranks` describes N."""
    about = f"N: {ranks} (default: the number of GPUs, else 2); then any key of conf/sft.yaml"
    parser.add_argument(
        "words",
        nargs="*",
        metavar="N, key=value",
        help=about,
    )


def add_engine(parser: Parser) -> None:
    """Add the arguments that choose the engine for an export."""
    about = "engine that serves the export (default: %(default)s)"
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help=about,
    )
    about = "Python interpreter that has vLLM"
    parser.add_argument(
        "--python",
        metavar="PYTHON",
        default=sys.executable,
        help=about,
    )


def read_words(words: list[str]) -> tuple[int | None, list[str], "Config"]:
    """Return the number of ranks, if given, the overrides, and their configuration, from the
    arguments that `add_words` collected. Raises `ConfigError`.
    """
    from trainer.launch.ranks import parse_arguments
    from trainer.train.start.compose import load_config

    num_ranks, overrides = parse_arguments(words)
    return num_ranks, overrides, load_config(overrides)


Main = Callable[[list[str]], int]
"""A command takes its arguments and returns its exit code."""


def as_command(codes: dict[type[Exception], int] | None = None) -> Callable[[Main], Main]:
    """Print an error that has an exit code on stderr, and return the code.

    `codes` extend the exit codes of a run.
    """
    known = {**DOCUMENTED, **(codes or {})}

    def decorate(command: Main) -> Main:
        @wraps(command)
        def main(argv: list[str]) -> int:
            try:
                return command(argv)
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                return EXIT_INTERRUPTED
            except tuple(known) as error:
                print(f"ERROR: {error}", file=sys.stderr)
                return code_of(error, known)

        return main

    return decorate


def at_least(minimum: int) -> Callable[[str], int]:
    """Return an option type for whole numbers of at least `minimum`."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {minimum}, got '{text}'"
            )
        return int(text)

    return number


def named_path(text: str) -> Path:
    """Return a path whose last part is a name, because the names of directories identify their
    contents.
    """
    return Path(text) if Path(text).name not in ("", "..") else Path(os.path.abspath(text))


def write_file(path: Path, text: str) -> None:
    """Write a file completely or not at all, and never replace a device or a pipe. Raises
    `CannotWriteError`.
    """
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is not a regular file")
        atomic_write(path, text)
    except OSError as error:
        raise CannotWriteError(
            f"cannot write {path}: {error}. Fix: choose a different path"
        ) from error
    print(f"wrote {path}")
