"""Make one clean tracker run from a run directory's `metrics.jsonl`, each step once (floor 5, no torch).

Exit codes: 0 done, 1 the tracker failed, 2 wrong usage, 73 cannot write.
"""

import logging
import sys
from pathlib import Path

from trainer.cli.arguments import Parser, as_command, told_as
from trainer.errors import EXIT_DONE, CannotWriteError
from trainer.tracking.resend import TARGETS, resend


def set_up(argv: list[str]) -> None:
    """Of the process whose command this is."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)


@as_command()
def main(argv: list[str]) -> int:
    about = "Make one clean tracker run from metrics.jsonl, each step once, whatever kills and rollbacks there were."
    parser = Parser("resend", description=about)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument("--to", choices=TARGETS, required=True, help="the tracker; wandb obeys WANDB_MODE")
    where = "a new directory for its files (default: RUN_DIR/resent/TRACKER)"
    parser.add_argument("--output", metavar="DIR", type=Path, help=where)
    arguments = parser.parse_args(argv)
    output = arguments.output or arguments.run_dir / "resent" / arguments.to
    with told_as(arguments.to):
        try:
            where = resend(arguments.run_dir, target=arguments.to, output=output)
        except OSError as error:
            raise CannotWriteError(f"cannot write to {output}: {error}; name another place with --output") from error
    print(f"sent {arguments.run_dir} to {arguments.to}: {where}")
    return EXIT_DONE


if __name__ == "__main__":
    set_up(sys.argv[1:])
    sys.exit(main(sys.argv[1:]))
