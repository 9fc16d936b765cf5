"""Several runs side by side: results, curves at the same steps, and configurations."""

from collections.abc import Mapping, Sequence

import numpy as np

from trainer.report.formatting import MISSING, capitalised, number, step
from trainer.report.names import ROLES
from trainer.report.result import Report
from trainer.report.run_log import RunLog, Series
from trainer.report.sections import Section, table_of
from trainer.report.smoothing import NOTHING, smooth
from trainer.report.statistics import finite

NUM_STEPS = 8
NAMES = {
    "val_reward": "validation reward",
    "val_accuracy": "validation accuracy",
    "reward": "training reward",
    "accuracy": "training accuracy",
    "loss": "training loss",
}
"""Results come first: they say more than the loss of a policy."""
PEAK_MEMORY = ("memory/max_reserved_gib", "memory/max_allocated_gib")

Run = tuple[Report, RunLog]


def side_by_side(runs: Sequence[Run]) -> tuple[Section, ...]:
    """Compare runs with the first one."""
    names = [f"{place}: {report.title}" for place, (report, _) in enumerate(runs, 1)]
    facts = [_facts(report, log) for report, log in runs]
    results = [(name, *(one[name] for one in facts)) for name in facts[0]]
    known = [row for row in results if any(value is not None for value in row[1:])]
    # The loss of a policy is no measure.
    is_policy = any(report.profile in ("grpo", "controller") for report, _ in runs)
    roles = [role for role in NAMES if role != "loss" or not is_policy]
    found = (
        Section("runs", "Runs", table=table_of(("", *names), known)),
        *(_same_steps(names, [_curve(log, role) for _, log in runs], role) for role in roles),
        _configurations(names, [log.config for _, log in runs]),
    )
    return tuple(section for section in found if not section.is_empty)


def _curve(log: RunLog, role: str) -> Series:
    """Return a role's metric, smoothed."""
    key = next((key for key in ROLES[role] if key in log.series), "")
    return smooth(log.series.get(key, NOTHING))


def _facts(report: Report, log: RunLog) -> dict[str, object]:
    best, speed = report.generalisation, report.throughput
    facts: dict[str, object] = {
        "verdict": report.verdict,
        "last step": max((series.ends[1] for series in log.series.values()), default=0),
    }
    for role, name in NAMES.items():
        values = _curve(log, role).values
        facts[f"last {name}, smoothed"] = float(values[-1]) if len(values) else None
    peaks = [finite(log.series[key]).values for key in PEAK_MEMORY if key in log.series]
    return facts | {
        "best validation": f"{number(best.best_value)} @ {step(best.best_step)}" if best else None,
        "measured by": best.metric if best else None,
        "step time in s": speed.step_s if speed else None,
        "tokens per second": speed.tokens_per_s if speed else None,
        "peak memory in GiB": next((float(peak.max()) for peak in peaks if len(peak)), None),
        "anomalies": len(report.anomalies),
    }


def _same_steps(names: list[str], curves: list[Series], role: str) -> Section:
    """Compare a smoothed metric at equal distances, by difference."""
    title = capitalised(NAMES[role])
    first = max((int(one.steps[0]) for one in curves if len(one)), default=0)
    last = min(int(one.steps[-1]) if len(one) else -1 for one in curves)
    if first > last:
        return Section(role, title)
    steps = np.unique(np.linspace(first, last, NUM_STEPS).astype(int))
    base, *others = (
        one.values[np.searchsorted(one.steps, steps, side="right") - 1] for one in curves
    )
    differences = [[f"{value:+.4g}" for value in other - base] for other in others]
    header = ("step", *names, *(f"{place} vs 1" for place in range(2, len(names) + 1)))
    rows = zip(steps, base, *others, *differences, strict=True)
    return Section(f"same-steps-{role}", title, table=table_of(header, rows))


def _configurations(names: list[str], configs: list[Mapping[str, object]]) -> Section:
    keys = sorted(set().union(*configs))
    rows = [(key, *(str(config.get(key, MISSING)) for config in configs)) for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    lead = f"{len(differing)} of {len(keys)} keys differ." if keys else ""
    return Section("configuration", "Configuration", lead, table_of(("key", *names), differing))
