"""docs/metrics.md, made from the table of metrics: `python tests/architecture/metrics_page.py`
writes it.
"""

from pathlib import Path

from trainer.metrics import METRICS
from trainer.metrics.words import BETTER, EVERY, GROUPS, OVER_RANKS, PLACEHOLDERS, Metric
from trainer.report.vocabulary import FOREIGN

PAGE = Path(__file__).resolve().parents[2] / "docs/metrics.md"
INTRODUCTION = """\
# Metrics

Every metric that this trainer logs. Any other key can be logged as well. A suffix such as
`@sum` on a logged key says how ranks were reduced and is taken off.
"""
FOREIGN_NAMES = """\
## Metrics of other trainers

This trainer computes none of these: they are names that reinforcement learning or other trainers use, for whoever logs
them through `Tracking` and for the report on their logs. `eval/` is read as `val/`.
"""


def page() -> str:
    """docs/metrics.md."""
    lines = [INTRODUCTION]
    for group, metrics in by_group().items():
        lines += [f"## {group.capitalize()}", "", f"{GROUPS[group].capitalize()}.", ""]
        lines += [
            "| key | unit | over ranks | when | good | meaning |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_row(metric) for metric in metrics]
        lines.append("")
    lines += [FOREIGN_NAMES, "| key | unit | good | meaning |", "|---|---|---|---|"]
    lines += [f"| `{m.key}` | {m.unit} | {m.better} | {_escaped(m.meaning)} |" for m in FOREIGN]
    lines += ["", "## Words", "", "| word | meaning |", "|---|---|"]
    placeholders = {f"`{name}`": meaning for name, (_, meaning) in PLACEHOLDERS.items()}
    lines += [
        f"| {word} | {meaning} |"
        for word, meaning in (OVER_RANKS | EVERY | BETTER | placeholders).items()
    ]
    return "\n".join([*lines, ""])


def _row(metric: Metric) -> str:
    configured = (
        f" Configured by {', '.join(f'`{name}`' for name in metric.config)}."
        if metric.config
        else ""
    )
    words = (
        metric.unit,
        metric.over_ranks,
        metric.every,
        metric.better,
        _escaped(metric.meaning) + configured,
    )
    return f"| `{metric.key}` | {' | '.join(words)} |"


def _escaped(text: str) -> str:
    return text.replace("<", "\\<").replace("|", "\\|")


def by_group() -> dict[str, list[Metric]]:
    return {
        group: [metric for metric in METRICS.values() if metric.group == group] for group in GROUPS
    }


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
