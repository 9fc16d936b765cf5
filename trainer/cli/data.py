"""What is trained, shown: `bash run_sft.sh data preview|stats|compare|ledger [options] [words ...]` (floor 5).

The tokens come from the cache of the runs with these overrides, or are put there; no weights are read. Exit codes as
those of a run: 0 done, 2 wrong usage or configuration, 65 bad data, 73 cannot write, 130 interrupted; of `compare`
1 for rows that differ.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trainer.cli.arguments import Parser, as_command, read_words, write_file
from trainer.config import Config, ConfigError
from trainer.data_tools.frameworks import FRAMEWORKS
from trainer.errors import EXIT_BAD_DATA, EXIT_DONE, DataError
from trainer.runtime.environment import call

EXIT_DIFFERENT = 1
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
        parser.error(f"what is trained does not depend on the number of ranks: leave out {asked.num_ranks}")
    return arguments, config


def _preview(parser: Parser, argv: list[str]) -> int:
    about = "of each kind: longest, least supervised, random (default: %(default)s); each source's first comes too"
    parser.add_argument("--samples", metavar="N", type=int, default=DEFAULT_NUM_EACH, help=about)
    parser.add_argument("--ids", action="store_true", help="the token ids too")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page for any browser instead, offline")
    arguments, config = _with_overrides(parser, argv)
    if arguments.samples < 0:
        raise ConfigError(f"--samples must be at least 0, got {arguments.samples}")

    from trainer.data_tools.preview import as_page, as_text, pick
    from trainer.run.inputs import prepare_data_alone

    data = prepare_data_alone(config)
    picked = pick(data.train, num_each=arguments.samples, seed=config.trainer.seed)
    num_samples = len(data.train)
    if config.data.val_files and data.validation:
        picked += pick(data.validation, num_each=0, seed=config.trainer.seed, side="validation, ")
        num_samples += len(data.validation)
    title = f"{len(picked)} of {num_samples:,} samples, random ones by trainer.seed={config.trainer.seed}"
    if arguments.html:
        write_file(arguments.html, as_page(title, picked, data.tokenizer, has_ids=arguments.ids))
        return EXIT_DONE
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


def _compare(parser: Parser, argv: list[str]) -> int:
    about = "print the script that makes DUMP there, and end"
    parser.add_argument("--dump-script", metavar="NAME", choices=FRAMEWORKS, help=about)
    parser.add_argument("--with", dest="framework", metavar="NAME", choices=FRAMEWORKS, help=", ".join(FRAMEWORKS))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("dump", metavar="DUMP", nargs="?", type=Path, help="lines of {input_ids, labels or loss_mask}")
    arguments, config = _with_overrides(parser, argv)
    if arguments.dump_script:
        print(FRAMEWORKS[arguments.dump_script].script, end="")
        return EXIT_DONE
    is_word = arguments.dump is not None and "=" in str(arguments.dump) and not arguments.dump.exists()
    if not arguments.framework or not arguments.dump or is_word:
        raise ConfigError(f"--with NAME and DUMP are needed\n{parser.format_usage().rstrip()}")

    from trainer.data_tools.compare import as_lines, compare, read_dump
    from trainer.run.inputs import prepare_data_alone

    dump = read_dump(arguments.dump)
    # all rows of train_files, in their order: the other side holds none back
    data = prepare_data_alone(replace(config, data=replace(config.data, val_files=None, val_ratio=0.0)))
    tree = compare(
        data.train,
        dump,
        data.tokenizer,
        framework=arguments.framework,
        max_length=config.data.max_length,
        is_split=config.data.truncation == "split",
    )
    print(json.dumps(tree, indent=1) if arguments.json else "\n".join(as_lines(tree)))
    return EXIT_DIFFERENT if tree["rules"] else EXIT_DONE


def _ledger(parser: Parser, argv: list[str]) -> int:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="checkpoints/<project_name>/<experiment_name>")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with each row by file:line")
    arguments = parser.parse_args(argv)

    from trainer.data_tools.ledger import as_lines, ledger

    tree = ledger(arguments.run_dir, has_rows=arguments.json)
    print(json.dumps(tree, indent=1) if arguments.json else "\n".join(as_lines(tree)))
    return EXIT_DONE


COMMANDS: dict[str, tuple[str, Callable[[Parser, list[str]], int]]] = {
    "preview": ("samples as the model sees them, the supervised part marked", _preview),
    "stats": ("tokens, supervised share, lengths, turns, what was left out, exact duplicates", _stats),
    "compare": ("ids and masks with those that another framework prepared; exit code 1 if any differ", _compare),
    "ledger": ("how often each row was trained by a run, over kills, growth and rollbacks", _ledger),
}
"""A command's line of help, and what runs with its parser and the rest of the words."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
