"""Make one clean tracker run from a run directory's `metrics.jsonl`, each step once (floor 5, no torch).

Exit codes: 0 done, 1 the tracker failed, 2 wrong usage, 73 cannot write.
"""

import argparse
import logging
import sys
from pathlib import Path

from trainer.cli.arguments import Parser
from trainer.config import ConfigError
from trainer.errors import EXIT_CANNOT_WRITE, EXIT_CRASH, EXIT_DONE, EXIT_USAGE
from trainer.runtime.program import call
from trainer.tracking.resend import TARGETS, resend


def set_up(argv: list[str]) -> None:
    """Of the process whose command this is."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)


def main(argv: list[str]) -> int:
    try:
        arguments = _parser().parse_args(argv)
        output = arguments.output or arguments.run_dir / "resent" / arguments.to
        where = resend(arguments.run_dir, target=arguments.to, output=output)
    except ConfigError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        print(f"ERROR: cannot write: {error}", file=sys.stderr)
        return EXIT_CANNOT_WRITE
    except Exception as error:  # a tracker's library raises anything
        print(f"ERROR: {arguments.to}: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_CRASH
    print(f"sent {arguments.run_dir} to {arguments.to}: {where}")
    return EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    about = "Make one clean tracker run from metrics.jsonl, each step once, whatever kills and rollbacks there were."
    parser = Parser(prog=call("resend"), description=about)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument("--to", choices=TARGETS, required=True, help="the tracker; wandb obeys WANDB_MODE")
    where = "a new directory for its files (default: RUN_DIR/resent/TRACKER)"
    parser.add_argument("--output", metavar="DIR", type=Path, help=where)
    return parser


if __name__ == "__main__":
    set_up(sys.argv[1:])
    sys.exit(main(sys.argv[1:]))
