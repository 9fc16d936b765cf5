"""Checks before a run: `bash run_sft.sh doctor [N] [--run] [key=value ...]`.

Exit codes: 0 nothing fails (it may warn), 1 something fails, 2 wrong usage or configuration, 73
cannot write, 130 interrupted.
"""

import json
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.cli.arguments import Parser, add_words, as_command, read_words
from trainer.config import ConfigError
from trainer.errors import CannotWriteError
from trainer.launch.checks import Checked, launch_of
from trainer.tools.verify import checks

EXIT_WELL = 0
EXIT_FAILS = 1


@as_command()
def main(argv: list[str]) -> int:
    parser = Parser(
        "doctor",
        usage="%(prog)s [N] [--run] [key=value ...] [--json]",
        description="Check machine, data, model and disk before training. Print ok, warn, fail "
        "or skip for each check, with a fix.",
    )
    add_words(parser)
    parser.add_argument(
        "--run",
        action="store_true",
        help="also train the recipe for a few steps in a temporary directory: check that ranks agree, "
        "that packing changes nothing, that a killed run resumes bit for bit, and that memory use "
        "is as planned; measure the speed",
    )
    parser.add_argument("--json", action="store_true", help="print all findings as JSON at the end")
    options = parser.parse_intermixed_args(argv)
    num_ranks, overrides, config = read_words(options.words)
    launch = launch_of(config, num_ranks)
    if options.run and launch.layout.num_nodes > 1:
        raise ConfigError(
            "doctor --run works on one machine.\n"
            "Fix: unset NNODES, and pass the number of ranks on this machine"
        )
    from trainer.tools.plan.checks import memory_and_disk
    from trainer.tools.plan.memory import plan_memory
    from trainer.tools.verify.runs import Runs
    from trainer.tools.verify.training import NEEDS, RUN_CHECKS

    lines: list[dict[str, Any]] = []
    broken = set[str]()

    def show(found: Iterator[tuple[str, Checked]]) -> None:
        for name, checked in found:
            lines.append({"check": name, **asdict(checked)})
            if not options.json:
                print(checked.line(name), flush=True)

    all_checks = {**checks.CHECKS, "memory and disk": memory_and_disk}
    show(checks.examine(all_checks, launch, checks.NEEDS, broken))
    if options.run:
        needs = {**NEEDS, "training": set(all_checks)}
        with _temporary_directory() as directory:
            runs = Runs(
                overrides,
                launch.num_ranks,
                directory,
                is_on_gpu=launch.num_gpus > 0,
                planned_gib=lambda config, num_ranks: plan_memory(config, num_ranks).needed_gib,
            )
            show(checks.examine(RUN_CHECKS, runs, needs, broken))
    if options.json:
        print(json.dumps({"checks": lines}, indent=1))
    return EXIT_FAILS if broken else EXIT_WELL


@contextmanager
def _temporary_directory() -> Iterator[Path]:
    """Create a directory and remove it at the end, even after SIGTERM or SIGHUP."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        place = tempfile.TemporaryDirectory(prefix="sft-doctor-", ignore_cleanup_errors=True)
    except OSError as error:
        raise CannotWriteError(
            f"cannot create a temporary directory: {error}.\nFix: set TMPDIR"
        ) from error
    with place as directory:
        yield Path(directory)
