"""Report on training runs from their logs alone: on the terminal, as one HTML page, as JSON.

Exit codes: 0 reported, 2 wrong usage, 4 a log cannot be read, 73 a file cannot be written, 130
interrupted. With `--check` the worst verdict decides: 0 OK or too early to say, 1 ATTENTION, 3
FAIL.
"""

import argparse
import json
import sys
from pathlib import Path

from trainer.cli.arguments import Parser, as_command, write_file
from trainer.config import ConfigError
from trainer.errors import EXIT_DONE
from trainer.tools.report.result import Report, as_json
from trainer.tools.report.run_log import RunLog, UnreadableLogError

EXIT_UNREADABLE = 4
CODES: dict[type[Exception], int] = {
    UnreadableLogError: EXIT_UNREADABLE,
    OSError: EXIT_UNREADABLE,
}
EXIT_CODES = {"OK": 0, "INSUFFICIENT": 0, "ATTENTION": 1, "FAIL": 3}
"""Exit code of each verdict with `--check`; 2 stays wrong usage."""
PROFILES = ("auto", "sft", "grpo", "controller", "generic")
Run = tuple[Report, RunLog]


@as_command(CODES)
def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    runs = [_analyse(path, arguments) for path in arguments.paths]
    if arguments.json:
        trees = [as_json(report) for report, _ in runs]
        print(json.dumps(trees[0] if len(trees) == 1 else trees, indent=1, allow_nan=False))
    else:
        _print(runs)
    if arguments.html:
        from trainer.tools.report.page import as_page

        write_file(arguments.html, as_page(runs))
    return max(EXIT_CODES[report.verdict] for report, _ in runs) if arguments.check else EXIT_DONE


def _print(runs: list[Run]) -> None:
    from rich.console import Console

    from trainer.tools.report.side_by_side import side_by_side
    from trainer.tools.report.terminal import print_report, print_section

    console = Console()
    for report, log in runs:
        print_report(console, report, log)
        console.print()
    for section in side_by_side(runs):
        print_section(console, section)


def _analyse(path: Path, options: argparse.Namespace) -> Run:
    """Read and judge a log. Imports are here so that help and usage errors come at once.

    Raises `UnreadableLogError` for the log, `ConfigError` for limits that cannot be read.
    """
    from trainer.tools.report.analyse import analyse
    from trainer.tools.report.limits import read_thresholds
    from trainer.tools.report.readers import read_run

    try:
        thresholds = read_thresholds(options.config) if options.config else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {options.config}: {error}") from error
    log = read_run(path)
    return analyse(log, profile=options.profile, thresholds=thresholds), log


def _parser() -> Parser:
    parser = Parser("report")
    add = parser.add_argument
    about = "run directories or log files, ours or another framework's; several are also shown side by side"
    add("paths", metavar="PATH", nargs="+", type=Path, help=about)
    add("--html", metavar="FILE", type=Path, help="write a page that opens in any browser, offline")
    about = "print JSON instead of text: an object, for several PATHs an array"
    add("--json", action="store_true", help=about)
    about = "exit code 0 for OK or too early to say, 1 for ATTENTION, 3 for FAIL"
    add("--check", action="store_true", help=about)
    about = "which absolute limits apply (default: what the log looks like)"
    add("--profile", choices=PROFILES, default="auto", help=about)
    about = "limits of your own, one `name: number` a line"
    add("--config", metavar="FILE", type=Path, help=about)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
