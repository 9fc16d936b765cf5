"""Show the prepared samples: `bash run_sft.sh data preview|stats [options] [overrides ...]` (floor
5).

The tokens come from the cache of runs with the same overrides, or are put there; no weights are
read. The exit codes are those of a run: 0 done, 2 wrong usage or configuration, 65 bad data, 73
cannot write, 130 interrupted.
"""

import argparse
import json
import sys
from collections.abc import Callable

from trainer.cli.arguments import Parser, as_command, read_words
from trainer.config import Config, ConfigError
from trainer.errors import EXIT_BAD_DATA, EXIT_DONE, DataError
from trainer.runtime.environment import call

DEFAULT_NUM_EACH = 3
PROG = call("data")


@as_command({DataError: EXIT_BAD_DATA})
def main(argv: list[str]) -> int:
    parser = Parser("data", description="What is trained, shown; each command has its own --help.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (about, _) in COMMANDS.items():
        commands.add_parser(name, help=about, add_help=False)
    if not argv or argv[0] not in COMMANDS:
        parser.parse_args(argv)
    about, run = COMMANDS[argv[0]]
    return run(Parser(prog=f"{PROG} {argv[0]}", description=about, allow_abbrev=False), argv[1:])


def _with_overrides(parser: Parser, argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """The options, and the configuration that the rest of the words makes."""
    parser.add_argument("words", nargs="*", metavar="key=value", help="the overrides of the run")
    arguments = parser.parse_intermixed_args(argv)
    asked, config = read_words(parser, arguments.words)
    if asked.num_ranks is not None:
        parser.error(
            f"what is trained does not depend on the number of ranks: leave out {asked.num_ranks}"
        )
    return arguments, config


def _preview(parser: Parser, argv: list[str]) -> int:
    about = "of each kind: longest, least supervised, random (default: %(default)s); each source's first comes too"
    parser.add_argument("--samples", metavar="N", type=int, default=DEFAULT_NUM_EACH, help=about)
    parser.add_argument("--ids", action="store_true", help="the token ids too")
    arguments, config = _with_overrides(parser, argv)
    if arguments.samples < 0:
        raise ConfigError(f"--samples must be at least 0, got {arguments.samples}")

    from trainer.data_tools.preview import as_text, pick
    from trainer.run.inputs import prepare_data_alone

    data = prepare_data_alone(config)
    picked = pick(data.train, num_each=arguments.samples, seed=config.trainer.seed)
    num_samples = len(data.train)
    if config.data.val_files and data.validation:
        picked += pick(data.validation, num_each=0, seed=config.trainer.seed, side="validation, ")
        num_samples += len(data.validation)
    title = f"{len(picked)} of {num_samples:,} samples, random ones by trainer.seed={config.trainer.seed}"
    for block in (title, *as_text(picked, data.tokenizer, has_ids=arguments.ids)):
        print(block)
    return EXIT_DONE


def _stats(parser: Parser, argv: list[str]) -> int:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments, config = _with_overrides(parser, argv)

    from trainer.data_tools.stats import as_lines, as_tree
    from trainer.run.inputs import prepare_data_alone

    tree = as_tree(prepare_data_alone(config))
    print(json.dumps(tree, indent=1) if arguments.json else "\n".join(as_lines(tree)))
    return EXIT_DONE


COMMANDS: dict[str, tuple[str, Callable[[Parser, list[str]], int]]] = {
    "preview": ("samples as the model sees them, the supervised part marked", _preview),
    "stats": (
        "tokens, supervised share, lengths, turns, what was left out, exact duplicates",
        _stats,
    ),
}
"""A command's line of help, and what runs with its parser and the rest of the words."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
