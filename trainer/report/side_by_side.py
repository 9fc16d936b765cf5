"""Several runs beside each other: results, speed, results at the same steps, and where their configurations differ."""

from collections.abc import Sequence

import numpy as np

from trainer.report.curves import NOTHING, SMOOTHINGS, smooth
from trainer.report.formatting import MISSING, capitalised, number, percent, share, step
from trainer.report.result import Report
from trainer.report.run_log import RunLog, Series
from trainer.report.sections import Section, Table
from trainer.report.statistics import finite
from trainer.report.vocabulary import ROLES

NUM_STEPS = 8
SAME_SPEED = 0.02
"""Difference of tokens per second, as a share, that is not worth a word."""
NAMES = {
    "val_reward": "validation reward",
    "val_accuracy": "validation accuracy",
    "reward": "training reward",
    "accuracy": "training accuracy",
    "loss": "training loss",
}
"""What tells most is first: results say more than the loss of a policy."""
PEAK_MEMORY = ("memory/max_reserved_gib", "memory/max_allocated_gib", "memory(GiB)")

Run = tuple[Report, RunLog]


def side_by_side(runs: Sequence[Run]) -> tuple[Section, ...]:
    """The first run is the one that the others are compared with."""
    names = [f"{place}: {report.title}" for place, (report, _) in enumerate(runs, start=1)]
    is_policy = any(report.profile in ("grpo", "controller") for report, _ in runs)  # whose loss is no measure
    roles = [role for role in NAMES if role != "loss" or not is_policy]
    found = (_results(runs, names), *(_same_steps(runs, names, role) for role in roles), _configs(runs, names))
    return tuple(section for section in found if not section.is_empty)


def _results(runs: Sequence[Run], names: list[str]) -> Section:
    columns = [_facts(report, log) for report, log in runs]
    rows = [(fact, *(column[fact] for column in columns)) for fact in columns[0]]
    known = tuple(row for row in rows if set(row[1:]) != {MISSING})
    return Section("runs", "Runs", table=Table(("", *names), known, frozenset({""})), notes=_speed_notes(runs, names))


def _facts(report: Report, log: RunLog) -> dict[str, str]:
    val, speed = report.generalisation, report.throughput
    peaks = (finite(log.series[key]).values for key in PEAK_MEMORY if key in log.series)
    last_step = max((series.ends[1] for series in log.series.values() if len(series)), default=0)
    lasts = {role: _smoothed(log, role).values[-1:].tolist() for role in NAMES}
    return {
        "verdict": report.verdict,
        "last step": step(last_step),
        **{f"last {NAMES[role]}, smoothed": number(last[0] if last else None) for role, last in lasts.items()},
        "best validation": f"{number(val.best_value)} @ {step(val.best_step)}" if val else MISSING,
        "last validation": number(val.last_value if val else None),
        "measured by": val.metric if val else MISSING,
        "step time in s": number(speed.step_s if speed else None),
        "tokens per second": number(speed.tokens_per_s if speed else None),
        "MFU": share(speed.mfu if speed else None),
        "goodput": share(speed.goodput if speed else None),
        "peak memory in GiB": number(next((float(peak.max()) for peak in peaks if len(peak)), None)),
        "anomalies": str(len(report.anomalies)),
    }


def _speed_notes(runs: Sequence[Run], names: list[str]) -> tuple[str, ...]:
    """Tokens per second where both runs have it; steps of different runs need not be equally long."""
    first, *others = [report.throughput.tokens_per_s if report.throughput else None for report, _ in runs]
    known = [(name, rate / first) for name, rate in zip(names[1:], others, strict=True) if rate and first]
    return tuple(
        f"{name} is as fast as {names[0]}, in tokens per second."
        if abs(factor - 1) < SAME_SPEED
        else f"{name} has {number(factor)} times the tokens per second of {names[0]}."
        for name, factor in known
    )


def _same_steps(runs: Sequence[Run], names: list[str], role: str) -> Section:
    """A smoothed metric where all runs have come, at equal distances; losses by ratio, others by difference."""
    section_id, title = f"same-steps-{role}", capitalised(NAMES[role])
    curves = [_smoothed(log, role) for _, log in runs]
    first = max((int(curve.steps[0]) for curve in curves if len(curve)), default=0)
    last = min(int(curve.steps[-1]) if len(curve) else -1 for curve in curves)
    if first > last:
        return Section(section_id, title)
    steps = np.unique(np.linspace(first, last, NUM_STEPS).astype(int))
    newest = [curve.values[np.searchsorted(curve.steps, steps, side="right") - 1].tolist() for curve in curves]
    compared = _ratio if role == "loss" else _difference
    rows = tuple(
        (step(at), *map(number, values), *(compared(value, values[0]) for value in values[1:]))
        for at, *values in zip(steps.tolist(), *newest, strict=True)
    )
    header = ("step", *names, *(f"{name.split(':')[0]} vs 1" for name in names[1:]))
    return Section(section_id, title, f"{title} at the same steps, smoothed.", Table(header, rows))


def _ratio(value: float, base: float) -> str:
    return percent(100 * (value / base - 1)) if base else MISSING


def _difference(value: float, base: float) -> str:
    return f"{'+' if value > base else ''}{number(value - base)}"


def _configs(runs: Sequence[Run], names: list[str]) -> Section:
    configs = [log.config for _, log in runs]
    keys = sorted(set().union(*configs))
    rows = [(key, *(str(config.get(key, MISSING)) for config in configs)) for key in keys]
    differing = tuple(row for row in rows if len(set(row[1:])) > 1)
    lead = f"{len(differing)} of {len(keys)} keys differ." if differing else f"All {len(keys)} keys are equal."
    shown = Table(("key", *names), differing, frozenset({"key", *names})) if differing else None
    return Section("configuration", "Configuration", lead if keys else "", shown)


def _smoothed(log: RunLog, role: str) -> Series:
    key = next((key for key in ROLES[role] if key in log.series), "")
    return smooth(log.series.get(key, NOTHING), SMOOTHINGS[-1])
