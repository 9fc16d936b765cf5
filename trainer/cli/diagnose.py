"""The report of one run as JSON on stdout, and its verdict as exit code, for schedulers and scripts (floor 5).

Exit codes: 0 ok (or too little logged to tell), 1 some finding warns, 2 some finding fails, 4 the log cannot be read,
64 wrong usage, 130 interrupted.
"""

import json
import sys
from pathlib import Path

from trainer.cli.arguments import Parser, as_command
from trainer.cli.report_options import CODES, add_options, load
from trainer.config import ConfigError
from trainer.report.result import as_json

EXIT_CODES = {"OK": 0, "INSUFFICIENT": 0, "ATTENTION": 1, "FAIL": 2}
EXIT_WRONG_USAGE = 64
"""Not 2 as elsewhere: a mistyped option must not look like a failed run."""


@as_command(CODES | {ConfigError: EXIT_WRONG_USAGE})
def main(argv: list[str]) -> int:
    parser = Parser("diagnose")
    parser.add_argument("path", metavar="PATH", type=Path, help="a run directory or a log file")
    add_options(parser)
    arguments = parser.parse_args(argv)
    report, _ = load(arguments.path, arguments)
    print(json.dumps(as_json(report), indent=1, allow_nan=False))
    return EXIT_CODES[report.verdict]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
