"""Several runs side by side: results, speed, curves at the same steps, and configurations."""

from collections.abc import Mapping, Sequence

import numpy as np

from trainer.report.formatting import MISSING, capitalised, number, percent, share, step
from trainer.report.names import ROLES
from trainer.report.result import Report
from trainer.report.run_log import RunLog, Series
from trainer.report.sections import Section, table_of
from trainer.report.smoothing import NOTHING, SMOOTHINGS, smooth
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
PEAK_MEMORY = ("memory/max_reserved_gib", "memory/max_allocated_gib", "memory(GiB)")

Run = tuple[Report, RunLog]


def side_by_side(runs: Sequence[Run]) -> tuple[Section, ...]:
    """Compare runs with the first one."""
    names = [f"{place}: {report.title}" for place, (report, _) in enumerate(runs, 1)]
    # The loss of a policy is no measure.
    is_policy = any(report.profile in ("grpo", "controller") for report, _ in runs)
    roles = [role for role in NAMES if role != "loss" or not is_policy]
    found = (
        _results(names, runs),
        *(_same_steps(names, runs, role) for role in roles),
        _configurations(names, [log.config for _, log in runs]),
    )
    return tuple(section for section in found if section.table or section.lead)


def _curve(log: RunLog, role: str) -> Series:
    """Return a role's metric, smoothed."""
    key = next((key for key in ROLES[role] if key in log.series), "")
    return smooth(log.series.get(key, NOTHING), SMOOTHINGS[-1])


def _results(names: list[str], runs: Sequence[Run]) -> Section:
    columns = [_facts(report, log) for report, log in runs]
    rows = [(fact, *(column[fact] for column in columns)) for fact in columns[0]]
    known = [row for row in rows if any(value not in (None, MISSING) for value in row[1:])]
    return Section("runs", "Runs", table=table_of(("", *names), known))


def _facts(report: Report, log: RunLog) -> dict[str, object]:
    best, speed = report.generalisation, report.throughput
    facts: dict[str, object] = {
        "verdict": report.verdict,
        "last step": max((series.ends[1] for series in log.series.values()), default=0),
    }
    for role, name in NAMES.items():
        values = _curve(log, role).values
        facts[f"last {name}, smoothed"] = float(values[-1]) if len(values) else None
    peaks = (finite(log.series[key]).values for key in PEAK_MEMORY if key in log.series)
    return facts | {
        "best validation": f"{number(best.best_value)} @ {step(best.best_step)}" if best else None,
        "last validation": best.last_value if best else None,
        "measured by": best.metric if best else None,
        "step time in s": speed.step_s if speed else None,
        "tokens per second": speed.tokens_per_s if speed else None,
        "MFU": share(speed.mfu) if speed else None,
        "goodput": share(speed.goodput) if speed else None,
        "peak memory in GiB": next((float(peak.max()) for peak in peaks if len(peak)), None),
        "anomalies": len(report.anomalies),
    }


def _same_steps(names: list[str], runs: Sequence[Run], role: str) -> Section:
    """Compare a smoothed metric at equal distances: losses by ratio, others by difference."""
    curves = [_curve(log, role) for _, log in runs]
    title = capitalised(NAMES[role])
    section_id = f"same-steps-{role}"
    if not all(map(len, curves)):
        return Section(section_id, title)
    first, last = max(one.ends[0] for one in curves), min(one.ends[1] for one in curves)
    if first > last:
        return Section(section_id, title)
    steps = np.unique(np.linspace(first, last, NUM_STEPS).astype(int))
    places = (np.searchsorted(curve.steps, steps, side="right") - 1 for curve in curves)
    base, *others = (curve.values[at] for curve, at in zip(curves, places, strict=True))
    header = ["step", *names, *(f"{place} vs 1" for place in range(2, len(runs) + 1))]
    compared = [_compared(role, other, base) for other in others]
    rows = list(zip(steps, base, *others, *compared, strict=True))
    return Section(section_id, title, table=table_of(header, rows))


def _compared(role: str, values: np.ndarray, base: np.ndarray) -> list[str]:
    pairs = zip(values.tolist(), base.tolist(), strict=True)
    if role == "loss":
        return [percent(100 * (value / to - 1)) if to else MISSING for value, to in pairs]
    return [f"{'+' if value > to else ''}{number(value - to)}" for value, to in pairs]


def _configurations(names: list[str], configs: list[Mapping[str, object]]) -> Section:
    keys = sorted(set().union(*configs))
    rows = [(key, *(str(config.get(key, MISSING)) for config in configs)) for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    lead = f"{len(differing)} of {len(keys)} keys differ." if keys else ""
    return Section("configuration", "Configuration", lead, table_of(("key", *names), differing))
