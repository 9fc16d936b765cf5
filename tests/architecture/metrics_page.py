"""Generates docs/metrics.md from the table of metrics: `python tests/architecture/metrics_page.py`."""

from pathlib import Path

from trainer.tracking.metrics import FOREIGN, METRICS

PAGE = Path(__file__).resolve().parents[2] / "docs/metrics.md"
GROUPS = {
    "optimisation": "Loss in training and on held-out data, gradient, learning rate, guard.",
    "length": "Lengths of samples.",
    "data": "Contents of the batches.",
    "timing": "Time of each phase, throughput. The phases, `time/train/<phase>_s`, are those of the "
    "step before\nthis row's; in an attempt's first row they are rank 0's alone.",
    "memory": "Memory of devices and hosts.",
    "state": "Progress, restarts, checkpoints.",
    "other": "Hardware.",
}
INTRODUCTION = """\
# Metrics

Every metric that this trainer logs. Any other key can be logged as well. A suffix such as
`@sum` on a logged key names the reduction over ranks and is removed.

- *Over ranks*: `sum`, `mean`, `max` or `min` over ranks; `slowest`: the rank where it is largest; `skew`:
  largest / median; `global`: of the whole batch or model, equal on every rank; `guard`:
  computed by the guard, equal on every rank; `main`: as rank 0 has it.
- *When*: every `step`; `eval`: every validation (`trainer.test_freq`); `checkpoint`: every save
  (`trainer.save_freq`); `rare`: every 50 steps; `timer`: measured every 10 s, logged every 50 steps;
  `event`: when it happens.
- *Good*: lower (`down`), higher (`up`), a `middle` range, or `none`.
- In a key, `<source>` is a data source, `<block>` a layer block, `<term>` a term of the loss, `<name>` a
  reward function, `<operation>` a part of a step, `<infix>` a cluster and operation such as
  `actor_train/compute_log_probs`, `<end>` names a clipped end or both, and `<device>` is the number of a
  device; `<split>` is `train` or `val`, `<statistic>` is `mean`, `min` or `max`.

"""
FOREIGN_NAMES = """\
## Metrics of other trainers

Reinforcement learning and other trainers use these names. This trainer does not compute them. You can
log them through `Tracking`, and the report explains them in other trainers' logs. `eval/` is read as `val/`.
"""


def page():
    """Return docs/metrics.md."""
    lines = [INTRODUCTION]
    for group, about in GROUPS.items():
        lines += [f"## {group.capitalize()}", "", about, ""]
        lines += [
            "| key | unit | over ranks | when | good | meaning |",
            "|---|---|---|---|---|---|",
        ]
        found = (metric for metric in METRICS.values() if metric.group == group)
        lines += [_row(metric, metric.unit, metric.over_ranks, metric.every) for metric in found]
        lines.append("")
    lines += [FOREIGN_NAMES, "| key | unit | good | meaning |", "|---|---|---|---|"]
    lines += [_row(metric, metric.unit) for metric in FOREIGN.values()]
    return "\n".join([*lines, ""])


def _row(metric, *words):
    meaning = metric.meaning.replace("<", "\\<").replace("|", "\\|")
    return f"| `{metric.key}` | {' | '.join((*words, metric.better, meaning))} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
