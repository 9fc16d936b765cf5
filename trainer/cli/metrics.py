"""`bash run_sft.sh metrics [KEY...] [--write F]`: what the metrics mean (floor 5, no torch).

Without a key all of them by group; `--write` makes docs/metrics.md. Exit codes: 0 all keys known, 2 wrong usage or an
unknown key, 73 cannot write.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from trainer.cli.arguments import Parser, as_command, write_file
from trainer.config import ConfigError, did_you_mean
from trainer.errors import EXIT_DONE
from trainer.metrics import METRICS
from trainer.metrics.table import ALIASES
from trainer.metrics.words import BETTER, EVERY, GROUPS, OVER_RANKS, PLACEHOLDERS, REDUCERS, Metric, split_reducer
from trainer.report.vocabulary import FOREIGN, Foreign, lookup

INTRODUCTION = """\
# Metrics

What this trainer logs, made from `trainer/metrics/table.tsv` by `bash run_sft.sh metrics --write docs/metrics.md`;
`bash run_sft.sh metrics KEY` tells the same of one key. Any other key can be logged as well. A suffix such as
`@sum` on a logged key says how ranks were reduced and is taken off.
"""
OTHER_NAMES = """\
## Other names

The same values under names that other systems use, only where asked for: `trainer.roll_detail` = checkpoint or step.
ROLL is Alibaba's trainer for reinforcement learning.
"""
FOREIGN_NAMES = """\
## Metrics of other trainers

This trainer computes none of these: they are names that reinforcement learning or other trainers use, for whoever logs
them through `Tracking` and for the report on their logs. `eval/` is read as `val/`.
"""


@as_command()
def main(argv: list[str]) -> int:
    parser = Parser("metrics")
    parser.add_argument("keys", nargs="*", metavar="KEY", help="a key as it is logged (default: all)")
    parser.add_argument("--write", type=Path, metavar="F", help="write the page of all metrics (Markdown) to this file")
    arguments = parser.parse_args(argv)
    found = ["\n".join(details(key)) for key in arguments.keys]
    if arguments.write is not None:
        write_file(arguments.write, page())
    else:
        print("\n\n".join(found) if found else "\n".join(listing()))
    return EXIT_DONE


def listing() -> Iterator[str]:
    """All metrics for a terminal, two lines each, under a heading per group; last those of other trainers."""
    for group, metrics in by_group().items():
        yield f"{group}: {GROUPS[group]}"
        for metric in metrics:
            yield f"  {metric.key:40} {metric.unit:10} {metric.over_ranks:7} {metric.every:11} {metric.better}"
            yield f"      {metric.meaning}"
        yield ""
    yield "other names, where asked for:"
    yield from (f"  {name:40} {alias.of} {alias.note}" for name, alias in ALIASES.items())
    yield "\nmetrics of other trainers:"
    for foreign in FOREIGN:
        yield f"  {foreign.key:40} {foreign.unit:10} {'':19} {foreign.better}"
        yield f"      {foreign.meaning}"
    yield ""
    yield from (f"{placeholder}: {meaning}" for placeholder, (_, meaning) in PLACEHOLDERS.items())


def details(key: str) -> Iterator[str]:
    """All that is known about one metric. Raises `ConfigError` for a key that is not."""
    metric, (_, reducer) = lookup(key), split_reducer(key)
    if metric is None:
        known = [*METRICS, *ALIASES, *(foreign.key for foreign in FOREIGN)]
        hint = did_you_mean(split_reducer(key)[0], known, most=3) or "without a key this command lists all"
        raise ConfigError(f"unknown metric '{key}': {hint}")
    yield metric.key
    facts = {"meaning": metric.meaning, "unit": metric.unit}
    if isinstance(metric, Metric):
        facts |= {"over ranks": OVER_RANKS[metric.over_ranks], "logged": EVERY[metric.every].replace("`", "")}
        facts |= {"configured": ", ".join(metric.config)}
    facts |= {"reduced": REDUCERS[reducer]} if reducer is not None else {}
    facts |= {"good": BETTER[metric.better]}
    facts |= {"status": "of other trainers, known by name only"} if isinstance(metric, Foreign) else {}
    facts |= {name: meaning for name, (_, meaning) in PLACEHOLDERS.items() if name in metric.key}
    yield from (f"  {name:10}  {fact}" for name, fact in facts.items() if fact)


def page() -> str:
    """docs/metrics.md."""
    lines = [INTRODUCTION]
    for group, metrics in by_group().items():
        lines += [f"## {group.capitalize()}", "", f"{GROUPS[group].capitalize()}.", ""]
        lines += ["| key | unit | over ranks | when | good | meaning |", "|---|---|---|---|---|---|"]
        lines += [_row(metric) for metric in metrics]
        lines.append("")
    lines += [OTHER_NAMES, "| key | unit | the same as |", "|---|---|---|"]
    lines += [f"| `{name}` | {alias.unit} | `{alias.of}` {alias.note} |" for name, alias in ALIASES.items()]
    lines += ["", FOREIGN_NAMES, "| key | unit | good | meaning |", "|---|---|---|---|"]
    lines += [f"| `{m.key}` | {m.unit} | {m.better} | {_escaped(m.meaning)} |" for m in FOREIGN]
    lines += ["", "## Words", "", "| word | meaning |", "|---|---|"]
    placeholders = {f"`{name}`": meaning for name, (_, meaning) in PLACEHOLDERS.items()}
    lines += [f"| {word} | {meaning} |" for word, meaning in (OVER_RANKS | EVERY | BETTER | placeholders).items()]
    return "\n".join([*lines, ""])


def _row(metric: Metric) -> str:
    configured = f" Configured by {', '.join(f'`{name}`' for name in metric.config)}." if metric.config else ""
    words = (metric.unit, metric.over_ranks, metric.every, metric.better, _escaped(metric.meaning) + configured)
    return f"| `{metric.key}` | {' | '.join(words)} |"


def _escaped(text: str) -> str:
    return text.replace("<", "\\<").replace("|", "\\|")


def by_group() -> dict[str, list[Metric]]:
    return {group: [metric for metric in METRICS.values() if metric.group == group] for group in GROUPS}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
