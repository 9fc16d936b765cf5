"""Several runs beside each other: results, speed, results at the same steps, and where their configurations differ."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainer.report.curves import NOTHING, SMOOTHINGS, smooth
from trainer.report.formatting import MISSING, number, percent, shown
from trainer.report.result import Report
from trainer.report.run_log import RunLog, Series
from trainer.report.sections import Section, build, evaluate, specs
from trainer.report.statistics import finite
from trainer.report.vocabulary import ROLES

NUM_STEPS = 8
NAMES = {
    "val_reward": "validation reward",
    "val_accuracy": "validation accuracy",
    "reward": "training reward",
    "accuracy": "training accuracy",
    "loss": "training loss",
}
"""What tells most is first: results say more than the loss of a policy."""
PEAK_MEMORY = ("memory/max_reserved_gib", "memory/max_allocated_gib", "memory(GiB)")

Known = Mapping[str, Any]


def side_by_side(runs: Sequence[tuple[Report, RunLog]]) -> tuple[Section, ...]:
    """The first run is the one that the others are compared with."""
    sides = [_side(f"{place}: {report.title}", report, log) for place, (report, log) in enumerate(runs, 1)]
    is_policy = any(report.profile in ("grpo", "controller") for report, _ in runs)  # whose loss is no measure
    compared = [_same_steps(sides, role) for role in NAMES if role != "loss" or not is_policy]
    known = [("runs", _results(sides)), *(("same_steps", one) for one in compared), ("configuration", _configs(sides))]
    found = (build(specs()["compare"][name], one) for name, one in known)
    return tuple(section for section in found if not section.is_empty)


def _side(name: str, report: Report, log: RunLog) -> Known:
    keys = {role: next((key for key in ROLES[role] if key in log.series), "") for role in NAMES}
    curves = {role: smooth(log.series.get(key, NOTHING), SMOOTHINGS[-1]) for role, key in keys.items()}
    peaks = (finite(log.series[key]).values for key in PEAK_MEMORY if key in log.series)
    return {
        **vars(report),
        "name": name,
        "config": log.config,
        "curves": curves,
        "last": {role: float(curve.values[-1]) if len(curve) else None for role, curve in curves.items()},
        "last_step": max((series.ends[1] for series in log.series.values() if len(series)), default=0),
        "speed": report.throughput and report.throughput.tokens_per_s,
        "peak_gib": next((float(peak.max()) for peak in peaks if len(peak)), None),
    }


def _results(sides: Sequence[Known]) -> Known:
    told = {side["name"]: {fact: shown(evaluate(of, side)) for fact, of in specs()["facts"].items()} for side in sides}
    facts = [fact for fact in specs()["facts"] if any(one[fact] != MISSING for one in told.values())]
    return {"runs": sides, "names": list(told), "told": told, "facts": facts}


def _same_steps(sides: Sequence[Known], role: str) -> Known:
    """A smoothed metric where all runs have come, at equal distances; losses by ratio, others by difference."""
    curves = {side["name"]: side["curves"][role] for side in sides}
    first = max((int(curve.steps[0]) for curve in curves.values() if len(curve)), default=0)
    last = min(int(curve.steps[-1]) if len(curve) else -1 for curve in curves.values())
    steps = np.unique(np.linspace(first, last, NUM_STEPS).astype(int)).tolist() if first <= last else []
    values = {name: dict(zip(steps, _newest(curve, steps), strict=True)) for name, curve in curves.items()}
    base, *others = values.values()
    compared = _ratio if role == "loss" else _difference
    for place, other in enumerate(others, 2):
        values[f"{place} vs 1"] = {at: compared(other[at], base[at]) for at in steps}
    return {"role": role, "named": NAMES[role], "steps": steps, "values": values}


def _newest(curve: Series, steps: list[int]) -> list[float]:
    return list(curve.values[np.searchsorted(curve.steps, steps, side="right") - 1].tolist()) if steps else []


def _ratio(value: float, base: float) -> str:
    return percent(100 * (value / base - 1)) if base else MISSING


def _difference(value: float, base: float) -> str:
    return f"{'+' if value > base else ''}{number(value - base)}"


def _configs(sides: Sequence[Known]) -> Known:
    configs = {side["name"]: side["config"] for side in sides}
    keys = sorted(set().union(*configs.values()))
    differing = [key for key in keys if len({str(config.get(key, MISSING)) for config in configs.values()}) > 1]
    return {"configs": configs, "keys": keys, "differing": differing}
