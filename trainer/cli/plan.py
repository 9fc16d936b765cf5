"""Predict the memory and disk space that a run needs: `bash run_sft.sh plan [N] [key=value ...]`.

It needs the model's config.json, but no weights, GPU or data. Exit codes: 0 fits, 1 does not fit, 2
wrong usage or configuration. torch is imported once the configuration is known to be valid.
"""

from argparse import Namespace
from dataclasses import replace

from trainer.cli.arguments import Parser, add_words, as_command, read_words
from trainer.config import AUTO, ConfigError
from trainer.launch.checks import Launch, architecture
from trainer.launch.ranks import choose_num_ranks, gpus_for_run
from trainer.model.source import find_architecture
from trainer.runtime.environment import uncollected

EXIT_FITS = 0
EXIT_DOES_NOT_FIT = 1


@as_command()
def main(argv: list[str]) -> int:
    options = _parse(argv)
    asked, _, config = read_words(options.words)
    find_architecture(config.model.partial_pretrain)
    num_gpus = 0 if config.trainer.device == "cpu" else gpus_for_run(AUTO)
    num_ranks = asked or choose_num_ranks(None, num_gpus=num_gpus)
    with uncollected():
        from trainer.tools.plan.advice import smallest_change
        from trainer.tools.plan.checks import check_disk, check_memory
        from trainer.tools.plan.memory import Change, default_memory_gib, planner, source_of
        from trainer.tools.plan.table import memory_lines

    limit_gib = options.memory_gib or default_memory_gib(config, num_ranks)
    plan = planner(config)
    now = plan(Change(num_ranks))
    print("\n".join(memory_lines(now, config)))
    for found in architecture(Launch(config, num_ranks), source_of(config)):
        print(found.line("architecture"))
    found = check_disk(config, now)
    # the run may be planned for another machine
    level = "warn" if found.level == "fail" else found.level
    print(replace(found, level=level).line("disk"))
    fix = ""
    if now.needed_gib > limit_gib:
        change = smallest_change(config, plan, now, limit_gib)
        fix = "no override that `plan` tries makes it fit"
        if change is not None:
            ranks = [f"on {change.num_ranks} ranks"] if change.num_ranks != num_ranks else []
            words = " ".join([*ranks, *change.overrides])
            fix = f"{words} (needs {plan(change).needed_gib:.1f} GiB)"
    found = check_memory(now, limit_gib, fix=fix)
    print(found.line("memory"))
    return EXIT_DOES_NOT_FIT if found.level == "fail" else EXIT_FITS


def _parse(argv: list[str]) -> Namespace:
    """Return the options. Raises `ConfigError`."""
    parser = Parser(
        "plan",
        usage="%(prog)s [N] [key=value ...] [--memory-gib X]",
        description="Predict the memory and disk space that a run needs, and print the override that makes it fit.",
    )
    add_words(parser, ranks="total number of ranks on all machines")
    parser.add_argument(
        "--memory-gib",
        type=float,
        metavar="X",
        help="memory of one GPU in GiB (default: that of the local GPU, else 80; with "
        "trainer.device=cpu: a rank's share of the host memory)",
    )
    known = parser.parse_intermixed_args(argv)
    if known.memory_gib is not None and not known.memory_gib > 0:
        raise ConfigError(f"--memory-gib must be positive, got {known.memory_gib}")
    return known
