"""Several runs beside each other: results, speed, results at the same steps, and where their
configurations differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.report.curves import NOTHING, SMOOTHINGS, smooth
from trainer.report.formatting import MISSING, capitalised, number, percent, share, shown, step
from trainer.report.names import ROLES
from trainer.report.result import Report
from trainer.report.run_log import RunLog, Series
from trainer.report.sections import Section, table_of
from trainer.report.statistics import finite

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
SAME_SPEED = 0.02


@dataclass(frozen=True)
class Side:
    """A run with its curves, smoothed, by role."""

    name: str
    report: Report
    log: RunLog
    curves: Mapping[str, Series]

    @property
    def speed(self) -> float | None:
        return self.report.throughput.tokens_per_s if self.report.throughput else None


def side_by_side(runs: Sequence[tuple[Report, RunLog]]) -> tuple[Section, ...]:
    """The first run is the one that the others are compared with."""
    sides = [
        _side(f"{place}: {report.title}", report, log)
        for place, (report, log) in enumerate(runs, 1)
    ]
    # whose loss is no measure
    is_policy = any(report.profile in ("grpo", "controller") for report, _ in runs)
    compared = [_same_steps(sides, role) for role in NAMES if role != "loss" or not is_policy]
    found = (_results(sides), *compared, _configurations(sides))
    return tuple(section for section in found if section is not None)


def _side(name: str, report: Report, log: RunLog) -> Side:
    keys = {role: next((key for key in ROLES[role] if key in log.series), "") for role in NAMES}
    curves = {
        role: smooth(log.series.get(key, NOTHING), SMOOTHINGS[-1]) for role, key in keys.items()
    }
    return Side(name, report, log, curves)


def _facts(side: Side) -> dict[str, str]:
    report, best, speed = side.report, side.report.generalisation, side.report.throughput
    peaks = (finite(side.log.series[key]).values for key in PEAK_MEMORY if key in side.log.series)
    last = {
        f"last {name}, smoothed": float(side.curves[role].values[-1])
        if len(side.curves[role])
        else None
        for role, name in NAMES.items()
    }
    facts = {
        "verdict": report.verdict,
        "last step": max(
            (series.ends[1] for series in side.log.series.values() if len(series)), default=0
        ),
        **last,
        "best validation": f"{number(best.best_value)} @ {step(best.best_step)}" if best else None,
        "last validation": best.last_value if best else None,
        "measured by": best.metric if best else None,
        "step time in s": speed.step_s if speed else None,
        "tokens per second": side.speed,
        "MFU": share(speed.mfu) if speed else None,
        "goodput": share(speed.goodput) if speed else None,
        "peak memory in GiB": next((float(peak.max()) for peak in peaks if len(peak)), None),
        "anomalies": len(report.anomalies),
    }
    return {name: shown(value) for name, value in facts.items()}


def _results(sides: Sequence[Side]) -> Section:
    told = [_facts(side) for side in sides]
    names = [side.name for side in sides]
    rows = [
        (fact, *(one[fact] for one in told))
        for fact in told[0]
        if any(one[fact] != MISSING for one in told)
    ]
    base, notes = sides[0], []
    for side in sides[1:]:
        if not (side.speed and base.speed):
            continue
        factor = side.speed / base.speed
        if abs(factor - 1) < SAME_SPEED:
            notes.append(f"{side.name} is as fast as {base.name}, in tokens per second.")
        else:
            notes.append(
                f"{side.name} has {number(factor)} times the tokens per second of {base.name}."
            )
    return Section(
        "runs", "Runs", table=table_of(("", *names), rows, words=[""]), notes=tuple(notes)
    )


def _same_steps(sides: Sequence[Side], role: str) -> Section | None:
    """A smoothed metric where all runs have come, at equal distances; losses by ratio, others
    by difference.
    """
    curves = {side.name: side.curves[role] for side in sides}
    first = max((int(curve.steps[0]) for curve in curves.values() if len(curve)), default=0)
    last = min(int(curve.steps[-1]) if len(curve) else -1 for curve in curves.values())
    if first > last:
        return None
    steps = np.unique(np.linspace(first, last, NUM_STEPS).astype(int)).tolist()
    columns: dict[str, Sequence[object]] = {
        name: _newest(curve, steps) for name, curve in curves.items()
    }
    base, *others = (_newest(curve, steps) for curve in curves.values())
    compared = _ratio if role == "loss" else _difference
    for place, other in enumerate(others, 2):
        columns[f"{place} vs 1"] = [
            compared(value, to) for value, to in zip(other, base, strict=True)
        ]
    name = capitalised(NAMES[role])
    rows = list(zip(steps, *columns.values(), strict=True))
    table = table_of(("step", *columns), rows)
    return Section(f"same-steps-{role}", name, f"{name} at the same steps, smoothed.", table)


def _newest(curve: Series, steps: list[int]) -> list[float]:
    return list(curve.values[np.searchsorted(curve.steps, steps, side="right") - 1].tolist())


def _ratio(value: float, base: float) -> str:
    return percent(100 * (value / base - 1)) if base else MISSING


def _difference(value: float, base: float) -> str:
    return f"{'+' if value > base else ''}{number(value - base)}"


def _configurations(sides: Sequence[Side]) -> Section | None:
    configs = {side.name: side.log.config for side in sides}
    keys = sorted(set().union(*configs.values()))
    if not keys:
        return None
    differing = [
        key
        for key in keys
        if len({str(config.get(key, MISSING)) for config in configs.values()}) > 1
    ]
    rows = [
        (key, *(str(one[key]) if key in one else None for one in configs.values()))
        for key in differing
    ]
    return Section(
        "configuration",
        "Configuration",
        f"{len(differing)} of {len(keys)} keys differ."
        if differing
        else f"All {len(keys)} keys are equal.",
        table_of(("key", *configs), rows, words=("key", *configs)),
    )
