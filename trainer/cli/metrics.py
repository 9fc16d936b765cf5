"""`python -m trainer.cli.metrics [KEY...] [--write F]`: what the metrics mean (floor 5, no torch).

Without a key all of them by group; `--write` makes docs/metrics.md. Exit codes: 0 all keys known, 2 wrong usage or an
unknown key, 73 cannot write.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from trainer.catalogue import (
    CADENCES,
    CATALOGUE,
    DIRECTIONS,
    DOMAINS,
    GROUPS,
    PLACEHOLDERS,
    REDUCERS,
    STATUS,
    Metric,
    lookup,
    split_reducer,
)
from trainer.cli.arguments import Parser
from trainer.config import ConfigError, did_you_mean
from trainer.errors import EXIT_CANNOT_WRITE, EXIT_DONE, EXIT_USAGE

INTRODUCTION = """\
# Metrics

Made from `trainer/catalogue/metrics.txt` by `python -m trainer.cli.metrics --write docs/metrics.md`;
`python -m trainer.cli.metrics KEY` tells the same of one key. Any other key can be logged as well.

Keys in *italics* are only declared: names that reinforcement learning or other trainers use, for whoever logs them
through `Tracking` and for the report on their logs. All others this trainer computes. `eval/` is read as `val/`. A
suffix such as `@sum` on a logged key names its reducer and is taken off. ROLL is Alibaba's trainer for reinforcement
learning; some keys have the names of its logs.
"""


def main(argv: list[str]) -> int:
    try:
        arguments = _parser().parse_args(argv)
        metrics = [_known(key) for key in arguments.keys]
        if arguments.write is not None:
            arguments.write.write_text(page(), encoding="utf-8")
        elif metrics:
            print("\n\n".join("\n".join(details(metric)) for metric in metrics))
        else:
            print("\n".join(listing()))
    except ConfigError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        print(f"ERROR: cannot write {arguments.write}: {error}", file=sys.stderr)
        return EXIT_CANNOT_WRITE
    return EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m trainer.cli.metrics", description="What the metrics mean.", allow_abbrev=False)
    parser.add_argument("keys", nargs="*", metavar="KEY", help="a key as it is logged (default: all)")
    parser.add_argument("--write", type=Path, metavar="F", help="write the page of all metrics (Markdown) to this file")
    return parser


def _known(key: str) -> Metric:
    metric = lookup(key)
    if metric is None:
        near = did_you_mean(split_reducer(key)[0], (metric.key for metric in CATALOGUE), most=3)
        hint = near or "without a key this command lists all"
        raise ConfigError(f"unknown metric '{key}': {hint}")
    return metric


def listing() -> Iterator[str]:
    """All metrics for a terminal, two lines each, under a heading per group."""
    for group, metrics in by_group().items():
        yield f"{group}: {GROUPS[group]}"
        for metric in metrics:
            status = "" if metric.is_emitted else "declared only"
            words = (metric.unit, metric.reducer, metric.cadence, metric.direction, status)
            yield f"  {metric.key:40} {words[0]:10} {words[1]:5} {words[2]:11} {words[3]:7} {words[4]}".rstrip()
            yield f"      {metric.meaning}"
        yield ""
    yield from (f"{placeholder}: {meaning}" for placeholder, (_, meaning) in PLACEHOLDERS.items())


def details(metric: Metric) -> Iterator[str]:
    """All that is known about one metric."""
    yield metric.key
    facts = {
        "meaning": metric.meaning,
        "unit": metric.unit,
        "reduced": REDUCERS[metric.reducer],
        "logged": CADENCES[metric.cadence],
        "good": DIRECTIONS[metric.direction],
        "used in": DOMAINS[metric.domain],
        "status": STATUS["emitted" if metric.is_emitted else "declared"],
        "configured": ", ".join(metric.config),
        "answers": ", ".join(metric.lines),
    }
    facts |= {name: meaning for name, (_, meaning) in PLACEHOLDERS.items() if name in metric.key}
    yield from (f"  {name:10}  {fact}" for name, fact in facts.items() if fact)


def page() -> str:
    """docs/metrics.md."""
    lines = [INTRODUCTION]
    for group, metrics in by_group().items():
        lines += [f"## {group.capitalize()}", "", f"{GROUPS[group].capitalize()}.", ""]
        lines += ["| key | unit | reduced | when | good | meaning |", "|---|---|---|---|---|---|"]
        lines += [_row(metric) for metric in metrics]
        lines.append("")
    lines += ["## Words", "", "| word | meaning |", "|---|---|"]
    placeholders = {f"`{name}`": meaning for name, (_, meaning) in PLACEHOLDERS.items()}
    lines += [f"| {word} | {meaning} |" for word, meaning in (REDUCERS | CADENCES | DIRECTIONS | placeholders).items()]
    return "\n".join([*lines, ""])


def _row(metric: Metric) -> str:
    key = f"`{metric.key}`" if metric.is_emitted else f"*`{metric.key}`*"
    configured = f" Configured by {', '.join(f'`{name}`' for name in metric.config)}." if metric.config else ""
    meaning = metric.meaning.replace("<", "\\<").replace("|", "\\|") + configured
    return f"| {key} | {metric.unit} | {metric.reducer} | {metric.cadence} | {metric.direction} | {meaning} |"


def by_group() -> dict[str, list[Metric]]:
    """The metrics of each group; first those that this trainer computes."""
    ordered = sorted(CATALOGUE, key=lambda metric: not metric.is_emitted)
    return {group: [metric for metric in ordered if metric.group == group] for group in GROUPS}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
