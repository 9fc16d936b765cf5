"""What the report commands share: options, reading and analysing runs, and how errors end (floor 5).

Exit code 4: a log cannot be read. The readers are imported when they are needed: help and usage errors come at once.
"""

import argparse
from pathlib import Path

from trainer.config import ConfigError
from trainer.report.result import Report
from trainer.report.run_log import RunLog, UnreadableLogError

EXIT_UNREADABLE = 4
CODES: dict[type[Exception], int] = {UnreadableLogError: EXIT_UNREADABLE, OSError: EXIT_UNREADABLE}
PROFILES = ("auto", "sft", "grpo", "controller", "generic")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that decide how a run is judged."""
    about = "which absolute limits apply (default: what the log looks like)"
    parser.add_argument("--profile", choices=PROFILES, default="auto", help=about)
    about = "limits of your own, one `name: number` a line; the page's section Limits names all"
    parser.add_argument("--config", metavar="FILE", type=Path, help=about)
    about = "a result from outside, higher is better: it decides which checkpoint is best (repeatable)"
    parser.add_argument("--external", metavar="STEP=VALUE", type=_external, action="append", default=[], help=about)


def load(path: Path, options: argparse.Namespace) -> tuple[Report, RunLog]:
    """The run at `path` with its report, judged after `options` of `add_options`.

    Raises `UnreadableLogError` for a log, `ConfigError` for limits that cannot be read.
    """
    from trainer.report.analyse import analyse
    from trainer.report.rule_table import read_thresholds

    try:
        thresholds = read_thresholds(options.config) if options.config else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {options.config}: {error}") from error
    log = load_log(path)
    return analyse(log, profile=options.profile, thresholds=thresholds, external=dict(options.external) or None), log


def load_log(path: Path) -> RunLog:
    from trainer.report.readers import read_run

    return read_run(path)


def _external(text: str) -> tuple[int, float]:
    step, _, value = text.partition("=")
    try:
        return int(step), float(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be STEP=VALUE, such as 1000=0.72, got '{text}'") from error
