"""What happened in a training run, from its log alone: on the terminal, as one HTML page, as JSON (floor 5).

Exit codes: 0 reported, whatever the verdict (`diagnose` tells that by its code), 2 wrong usage, 4 a log cannot be
read, 73 a file cannot be written, 130 interrupted.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from trainer.cli.arguments import Parser, as_command, write_file
from trainer.cli.report_options import CODES, add_options, load, load_log
from trainer.config import ConfigError
from trainer.errors import EXIT_DONE, CannotWriteError
from trainer.report.page import as_page
from trainer.report.result import Report, as_json
from trainer.report.run_log import RunLog
from trainer.report.sections import around
from trainer.report.terminal import print_report, print_section

OURS = "fsdp-sft"


@as_command(CODES)
def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.around is not None:
        if arguments.html or arguments.json:
            raise ConfigError("--around prints rows only: leave out --html and --json")
        for path in arguments.paths:
            print_section(Console(), around(load_log(path), at=arguments.around, window=arguments.window))
        return EXIT_DONE
    if arguments.every and not arguments.html:
        raise ConfigError("--every says how often the page is written anew: add --html FILE")
    _follow(arguments)
    return EXIT_DONE


def _follow(arguments: argparse.Namespace) -> None:
    """Once, or until no log grows any more. While a page cannot be written the old one stays, which is said once."""
    console, has_written, has_warned = Console(), False, False
    while True:
        runs = [load(path, arguments) for path in arguments.paths]
        refresh_s = arguments.every if any(map(_may_grow, (log for _, log in runs))) else 0
        if refresh_s:
            console.clear()
        for report, _ in runs:
            print_report(console, report)
            console.print()
        try:
            _write(arguments, runs, refresh_s)
            has_written, has_warned = True, False
        except CannotWriteError as error:
            if not refresh_s or not has_written:
                raise
            if not has_warned:
                print(f"WARNING: {error}, or make room: the old one stays, and it is tried again", file=sys.stderr)
            has_warned = True
        if not refresh_s:
            return
        time.sleep(refresh_s)


def _write(arguments: argparse.Namespace, runs: Sequence[tuple[Report, RunLog]], refresh_s: int) -> None:
    if arguments.html:
        write_file(arguments.html, as_page(runs, refresh_s=refresh_s))
    if arguments.json:
        trees = [as_json(report) for report, _ in runs]
        write_file(arguments.json, json.dumps(trees[0] if len(trees) == 1 else trees, indent=1, allow_nan=False) + "\n")


def _may_grow(log: RunLog) -> bool:
    """Nobody knows of others' logs."""
    return log.is_running if log.source == OURS else True


def _parser() -> Parser:
    parser = Parser("report", description="What happened in training runs, from their logs.")
    where = "a run directory or a log file, ours or another framework's"
    parser.add_argument("paths", metavar="PATH", nargs="+", type=Path, help=where)
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page that opens in any browser, offline")
    about = "write the page anew, and let it reload itself, until the run ends (a log that is not ours: until Ctrl-C)"
    parser.add_argument("--every", metavar="SECONDS", type=_seconds, default=0, help=about)
    about = "write the report for programs: an object, for several PATHs an array"
    parser.add_argument("--json", metavar="FILE", type=Path, help=about)
    parser.add_argument("--around", metavar="STEP", type=int, help="only print the rows around a step, of what moved")
    about = "steps on each side of --around (default: %(default)s)"
    parser.add_argument("--window", metavar="N", type=int, default=20, help=about)
    add_options(parser)
    return parser


def _seconds(text: str) -> int:
    if not (number := text.removesuffix("s")).isdecimal() or int(number) == 0:
        raise argparse.ArgumentTypeError(f"must be whole seconds, such as 30s, got '{text}'")
    return int(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
