"""Report on training runs from their logs: on the terminal, as one HTML page, or as JSON.

Exit codes: 0 reported, 2 wrong usage, 4 a log cannot be read, 73 a file cannot be written, 130
interrupted. With `--check`, the worst verdict determines the code: 0 OK or too early to say, 1
ATTENTION, 3 FAIL.
"""

import json
from pathlib import Path

from trainer.cli.arguments import Parser, as_command, write_file
from trainer.errors import EXIT_DONE
from trainer.tools.report.result import as_json
from trainer.tools.report.run_log import UnreadableLogError

EXIT_UNREADABLE = 4
CODES: dict[type[Exception], int] = dict.fromkeys((UnreadableLogError, OSError), EXIT_UNREADABLE)
EXIT_CODES = {"OK": 0, "INSUFFICIENT": 0, "ATTENTION": 1, "FAIL": 3}
"""Exit code of each verdict with `--check`; 2 remains the code for wrong usage."""
PROFILES = ("auto", "sft", "grpo", "controller", "generic")


@as_command(CODES)
def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    # imported here so that help and usage errors come at once
    from trainer.tools.report.analyse import analyse
    from trainer.tools.report.readers import read_run

    logs = [read_run(path) for path in options.paths]
    reports = [analyse(log, profile=options.profile) for log in logs]
    runs = list(zip(reports, logs, strict=True))
    if options.json:
        trees = [as_json(report) for report in reports]
        print(json.dumps(trees[0] if len(trees) == 1 else trees, indent=1, allow_nan=False))
    else:
        from trainer.tools.report.terminal import print_reports

        print_reports(runs)
    if options.html:
        from trainer.tools.report.page import as_page

        write_file(options.html, as_page(runs))
    return max(EXIT_CODES[one.verdict] for one in reports) if options.check else EXIT_DONE


def _parser() -> Parser:
    parser = Parser("report")
    add = parser.add_argument
    about = (
        "run directories or log files of any trainer; several runs are also compared side by side"
    )
    add(
        "paths",
        metavar="PATH",
        nargs="+",
        type=Path,
        help=about,
    )
    add(
        "--html",
        metavar="FILE",
        type=Path,
        help="write a page that opens in any browser, offline",
    )
    about = "print JSON instead of text: an object, or an array for several PATHs"
    add("--json", action="store_true", help=about)
    about = "exit with 0 for OK or too early to say, 1 for ATTENTION, 3 for FAIL"
    add("--check", action="store_true", help=about)
    about = "set of absolute limits (default: chosen by the metrics in the log)"
    add(
        "--profile",
        choices=PROFILES,
        default="auto",
        help=about,
    )
    return parser
