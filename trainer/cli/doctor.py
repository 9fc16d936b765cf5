"""Checks before a run: `bash run_sft.sh doctor [N] [--run] [key=value ...]` (floor 5).

Exit codes: 0 nothing fails (it may warn), 1 something fails, 2 wrong usage or configuration, 73
cannot write, 130 interrupted.
"""

import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType

from trainer.cli.arguments import Parser, add_words, as_command, read_words
from trainer.config import Config, ConfigError
from trainer.errors import CannotWriteError
from trainer.launch.checks import Checked, Launch, launch_of
from trainer.tools.verify.checks import CHECKS, examine

EXIT_WELL, EXIT_FAILS = 0, 1
Found = Iterator[tuple[str, Checked | None]]
"""Name of a check and a finding; None for a check that waits until others are mended."""


@as_command()
def main(argv: list[str]) -> int:
    parser = Parser(
        "doctor",
        usage="%(prog)s [N] [--run] [key=value ...] [--python PYTHON] [--json]",
        description="Check machine, data, model and disk before training: each line ok, warn or "
        "fail, with its fix.",
    )
    add_words(parser)
    parser.add_argument(
        "--run",
        action="store_true",
        help="then train the recipe for a few steps in a temporary directory: do ranks agree, do "
        "packed documents, does a killed run resume bit for bit, is memory as planned, how fast is "
        "it",
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON, at the end")
    about = "an interpreter with vLLM, whose list of architectures is read (default: this one)"
    parser.add_argument("--python", metavar="PYTHON", default=sys.executable, help=about)
    options = parser.parse_intermixed_args(argv)
    asked, config = read_words(parser, options.words)
    launch = replace(launch_of(config, asked.num_ranks), vllm_python=options.python)
    if options.run and launch.layout.num_nodes > 1:
        raise ConfigError(
            "doctor --run works on one machine. Fix: unset NNODES, and give the ranks of this "
            "machine"
        )
    from trainer.tools.plan.checks import memory_and_disk

    said, waiting = _collect(
        examine({**CHECKS, "memory and disk": memory_and_disk}, launch), options.json
    )
    if options.run:
        has_failed = any(one["level"] == "fail" for one in said)
        more, still_waiting = _collect(
            _trained(launch, asked.overrides, is_possible=not has_failed), options.json
        )
        said += more
        waiting += still_waiting
    if options.json:
        print(json.dumps({"checks": said, "not_checked": waiting}, indent=1))
    elif waiting:
        print(f"not checked before that is mended: {', '.join(waiting)}")
    return EXIT_FAILS if any(one["level"] == "fail" for one in said) else EXIT_WELL


def _collect(found: Found, is_json: bool) -> tuple[list[dict[str, str]], list[str]]:
    """Findings and the names of checks that wait; printed one by one unless they become JSON."""
    said, waiting = [], []
    for name, checked in found:
        if checked is None:
            waiting.append(name)
            continue
        said.append({"check": name, **asdict(checked)})
        if not is_json:
            print(checked.line(name), flush=True)
    return said, waiting


def _trained(launch: Launch, overrides: list[str], *, is_possible: bool) -> Found:
    """Checks that train, in a temporary directory that is removed."""
    from trainer.tools.plan.memory import plan_memory
    from trainer.tools.verify.runs import RunFailedError, Runs
    from trainer.tools.verify.training import run_checks

    def planned_gib(config: Config, num_ranks: int) -> float:
        return plan_memory(config, num_ranks).needed_gib

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        place = tempfile.TemporaryDirectory(prefix="sft-doctor-", ignore_cleanup_errors=True)
    except OSError as error:
        raise CannotWriteError(
            f"cannot make a temporary directory: {error}. Fix: set TMPDIR"
        ) from error
    with place as directory:
        runs = Runs(overrides, launch.num_ranks, Path(directory), is_on_gpu=launch.num_gpus > 0)
        for name, check in run_checks(planned_gib).items():
            if not is_possible:
                yield name, None
                continue
            try:
                yield name, check(runs)
            except RunFailedError as error:
                print(error, file=sys.stderr)
                yield (
                    name,
                    Checked("fail", str(error).splitlines()[0], "the end of its log is above"),
                )
                is_possible = name != "training"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
