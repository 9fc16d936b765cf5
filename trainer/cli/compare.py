"""Runs side by side: results, speed, loss at the same steps, configuration (floor 5).

Whether two runs are equal in every bit is asked by `checkpoint verify-resume`. Exit codes as those of `report`.
"""

import sys
from pathlib import Path

from rich.console import Console

from trainer.cli.arguments import Parser, as_command
from trainer.cli.report_options import CODES, add_options, load
from trainer.config import ConfigError
from trainer.errors import EXIT_DONE
from trainer.report.side_by_side import side_by_side
from trainer.report.terminal import print_section


@as_command(CODES)
def main(argv: list[str]) -> int:
    parser = Parser("compare")
    parser.add_argument("paths", metavar="PATH", nargs="+", type=Path, help="run directories or log files, two or more")
    add_options(parser)
    arguments = parser.parse_args(argv)
    if len(arguments.paths) < 2:
        raise ConfigError("one run has nothing to be compared with: give two PATHs or more")
    console = Console()
    for section in side_by_side([load(path, arguments) for path in arguments.paths]):
        print_section(console, section)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
