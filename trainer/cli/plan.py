"""Whether a run fits in memory and on disk: `bash run_sft.sh plan [N] [key=value ...]` (floor 5).

Needs config.json of the model, no weights, no GPU and no data. Exit codes: 0 fits, 1 does not, 2 wrong usage or
configuration. torch is imported only once the configuration is known to be right.
"""

import sys
from argparse import Namespace

from trainer.cli.arguments import Parser, add_words, as_command, read_words
from trainer.config import QUICKSTART, Config, ConfigError
from trainer.launch.ranks import Arguments, choose_num_ranks, count_gpus
from trainer.model.source import find_architecture
from trainer.runtime.environment import uncollected

EXIT_FITS, EXIT_DOES_NOT_FIT = 0, 1


@as_command()
def main(argv: list[str]) -> int:
    options, asked, config = _parse(argv)
    if config.model.partial_pretrain != QUICKSTART:
        find_architecture(config.model.partial_pretrain)
    num_gpus = 0 if config.trainer.device == "cpu" else count_gpus()
    num_ranks = asked.num_ranks or choose_num_ranks(None, num_gpus=num_gpus)
    with uncollected():
        from trainer.tools.plan.advice import smallest_change
        from trainer.tools.plan.disk import plan_disk
        from trainer.tools.plan.memory import Change, default_memory_gib, planner
        from trainer.tools.plan.table import disk_lines, memory_lines

    limit_gib = options.memory_gib or default_memory_gib(config, num_ranks)
    plan = planner(config)
    now = plan(Change(num_ranks))
    lines = [*memory_lines(now, config), *disk_lines(plan_disk(config, now), config)]
    print("\n".join(lines))
    compared = f"{now.needed_gib:.1f} of {limit_gib:.1f} GiB"
    if now.needed_gib <= limit_gib:
        print(f"fits: {compared}")
        return EXIT_FITS
    change = smallest_change(config, plan, now, limit_gib)
    if change is None:
        print(f"does not fit: {compared}; nor does anything tried")
        return EXIT_DOES_NOT_FIT
    words = list(change.overrides)
    if change.num_ranks != num_ranks:
        words.insert(0, f"on {change.num_ranks} ranks")
    print(f"does not fit: {compared}; this does, with {plan(change).needed_gib:.1f} GiB: {' '.join(words)}")
    return EXIT_DOES_NOT_FIT


def _parse(argv: list[str]) -> tuple[Namespace, Arguments, Config]:
    """Return the options, the run to plan, and its configuration. Raises `ConfigError`."""
    parser = Parser(
        "plan",
        usage="%(prog)s [N] [key=value ...] [--memory-gib X]",
        description="Predict memory and disk of a run, and name the smallest change that fits.",
    )
    add_words(parser, ranks="ranks on all machines together")
    parser.add_argument(
        "--memory-gib",
        type=float,
        metavar="X",
        help="memory of one GPU in GiB (default: that of the local GPU, else 80); with trainer.device=cpu a rank's "
        "share of this machine's, if all were on it",
    )
    known = parser.parse_intermixed_args(argv)
    if known.memory_gib is not None and not known.memory_gib > 0:
        raise ConfigError(f"--memory-gib must be positive, got {known.memory_gib}")
    return known, *read_words(parser, known.words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
