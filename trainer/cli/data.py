"""What is trained, shown: `python -m trainer.cli.data preview|stats|compare [options] [key=value ...]` (floor 5).

The tokens come from the cache of the runs with these overrides, or are put there; no weights are read. Exit codes as
those of a run: 0 done, 2 wrong usage or configuration, 65 bad data, 73 cannot write, 130 interrupted.
"""

import argparse
import sys
from collections.abc import Callable

from trainer.cli.arguments import Parser, answer
from trainer.errors import EXIT_BAD_DATA, EXIT_DONE, DataError
from trainer.run.compose import load_config

DEFAULT_NUM_EACH = 3
PROG = "python -m trainer.cli.data"


def main(argv: list[str]) -> int:
    return answer(lambda: _command(argv), {DataError: EXIT_BAD_DATA})


def _command(argv: list[str]) -> int:
    parser = Parser(prog=PROG, description="What is trained, shown.", epilog="each command has its own --help")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (about, _) in COMMANDS.items():
        commands.add_parser(name, help=about, add_help=False)
    if not argv or argv[0] not in COMMANDS:
        parser.parse_args(argv)
    about, run = COMMANDS[argv[0]]
    return run(Parser(prog=f"{PROG} {argv[0]}", description=about, allow_abbrev=False), argv[1:])


def _with_overrides(parser: Parser, argv: list[str]) -> argparse.Namespace:
    """Options, and as `words` what configures the run."""
    parser.add_argument("words", nargs="*", metavar="key=value", help="the overrides of the run")
    return parser.parse_intermixed_args(argv)


def _preview(parser: Parser, argv: list[str]) -> int:
    about = "of each kind: longest, least supervised, random (default: %(default)s); each source's first comes too"
    parser.add_argument("--samples", metavar="N", type=int, default=DEFAULT_NUM_EACH, help=about)
    parser.add_argument("--ids", action="store_true", help="the token ids too")
    arguments = _with_overrides(parser, argv)
    config = load_config(arguments.words)

    from trainer.data_tools.preview import as_text, pick
    from trainer.run.inputs import prepare_data_alone

    data = prepare_data_alone(config, progress=lambda: None)
    picked = pick(data.train, num_each=arguments.samples, seed=config.trainer.seed)
    print(f"{len(picked)} of {len(data.train.lengths)} samples; random ones by trainer.seed={config.trainer.seed}")
    for block in as_text(data.train, picked, data.tokenizer, has_ids=arguments.ids):
        print(block)
    return EXIT_DONE


COMMANDS: dict[str, tuple[str, Callable[[Parser, list[str]], int]]] = {
    "preview": ("samples as the model sees them, the supervised part marked", _preview),
}
"""A command's line of help, and what runs with its parser and the rest of the words."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
