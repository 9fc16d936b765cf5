"""Several runs side by side: results, curves at the same steps, and configurations."""

from collections.abc import Mapping, Sequence

import numpy as np

from trainer.tools.report.analysed_run import AnalysedRun
from trainer.tools.report.formatting import MISSING, capitalised, number, step
from trainer.tools.report.result import Report
from trainer.tools.report.run_log import RunLog, Series
from trainer.tools.report.sections import Section, table_of
from trainer.tools.report.smoothing import NOTHING, smooth

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
    """Compare runs with the first one; a single run has nothing to be compared with."""
    if len(runs) == 1:
        return ()
    names = [f"{place}: {report.title}" for place, (report, _) in enumerate(runs, 1)]
    curves = {role: [_curve(run, role) for run in runs] for role in NAMES}
    facts = [_facts(report) for report, _ in runs]
    rows = [(name, *(one[name] for one in facts)) for name in facts[0]]
    for role, name in NAMES.items():
        values = [one.values[-1] if len(one) else None for one in curves[role]]
        rows.append((f"last {name}, smoothed", *values))
    known = [row for row in rows if any(cell is not None for cell in row[1:])]
    # The loss of a policy is no measure.
    is_policy = any(report.profile in ("grpo", "controller") for report, _ in runs)
    compared = [role for role in NAMES if role != "loss" or not is_policy]
    found = (
        Section("runs", "Runs", table=table_of(("", *names), known)),
        *(_same_steps(names, curves[role], role) for role in compared),
        _configurations(names, [log.config for _, log in runs]),
    )
    return tuple(section for section in found if not section.is_empty)


def _curve(run: Run, role: str) -> Series:
    """Return a role's metric, smoothed."""
    report, log = run
    return smooth(AnalysedRun(log, report.profile, {}).find(role) or NOTHING)


def _facts(report: Report) -> dict[str, object]:
    """Return the results of a run by name."""
    best, speed = report.generalisation, report.throughput
    peaks = (metric.maximum for metric in report.metrics if metric.key in PEAK_MEMORY)
    return {
        "verdict": report.verdict,
        "steps": report.facts.get("steps"),
        "best validation": best and f"{number(best.best_value)} @ {step(best.best_step)}",
        "measured by": best and best.metric,
        "step time in s": speed and speed.step_s,
        "tokens per second": speed and speed.tokens_per_s,
        "peak memory in GiB": max(peaks, default=None),
        "anomalies": len(report.anomalies),
    }


def _same_steps(names: list[str], curves: list[Series], role: str) -> Section:
    """Compare a smoothed metric at equal distances, by difference."""
    first = max((one.ends[0] for one in curves if len(one)), default=0)
    last = min(one.ends[1] if len(one) else -1 for one in curves)
    steps = np.unique(np.linspace(first, last, NUM_STEPS if first <= last else 0).astype(int))
    base, *others = (
        one.values[np.searchsorted(one.steps, steps, side="right") - 1] for one in curves
    )
    differences = [[f"{value:+.4g}" for value in other - base] for other in others]
    header = ("step", *names, *(f"{place} vs 1" for place in range(2, len(names) + 1)))
    table = table_of(header, zip(steps, base, *others, *differences, strict=True))
    return Section(f"same-steps-{role}", capitalised(NAMES[role]), table=table)


def _configurations(names: list[str], configs: list[Mapping[str, object]]) -> Section:
    keys = sorted(set().union(*configs))
    rows = [(key, *(str(config.get(key, MISSING)) for config in configs)) for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    lead = f"{len(differing)} of {len(keys)} keys differ." if keys else ""
    return Section("configuration", "Configuration", lead, table_of(("key", *names), differing))
