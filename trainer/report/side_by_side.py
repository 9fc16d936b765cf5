"""Several runs beside each other: results, speed, loss at the same steps, and where their configurations differ."""

from collections.abc import Sequence

import numpy as np

from trainer.report.curves import NOTHING, SMOOTHINGS, finite, smooth
from trainer.report.formatting import MISSING, clean, number, percent, share, step
from trainer.report.result import Report
from trainer.report.run_log import RunLog, Series
from trainer.report.sections import Section, Table
from trainer.report.vocabulary import ROLES

NUM_STEPS = 8
NAMES = {
    "val_reward": "validation reward",
    "val_accuracy": "validation accuracy",
    "reward": "training reward",
    "accuracy": "training accuracy",
    "loss": "training loss",
}
RESULTS = tuple(role for role in NAMES if role != "loss")
"""Roles of results, which say more than the loss of a policy; what tells most is first."""
PEAK_MEMORY = ("memory/max_reserved_gib", "memory/max_allocated_gib", "memory(GiB)")


Run = tuple[Report, RunLog]


def side_by_side(runs: Sequence[Run]) -> tuple[Section, ...]:
    """The first run is the one that the others are compared with."""
    names = [f"{place}: {clean(report.title)}" for place, (report, _) in enumerate(runs, start=1)]
    is_policy = any(report.profile in ("grpo", "controller") for report, _ in runs)  # whose loss is no measure
    curves = (*RESULTS, *(() if is_policy else ("loss",)))
    found = (_results(runs, names), *(_same_steps(runs, names, role) for role in curves), _configs(runs, names))
    return tuple(section for section in found if section is not None)


def _results(runs: Sequence[Run], names: list[str]) -> Section:
    columns = [_facts(report, log) for report, log in runs]
    rows = [(fact, *(column[fact] for column in columns)) for fact in columns[0]]
    kept = tuple(row for row in rows if set(row[1:]) != {MISSING})
    return Section("runs", "Runs", table=Table(("", *names), kept, frozenset({""})), notes=_speed_notes(runs, names))


def _facts(report: Report, log: RunLog) -> dict[str, str]:
    val = report.generalisation
    speed = report.throughput
    peaks = [finite(log.series[key]).values for key in PEAK_MEMORY if key in log.series]
    last_step = max((int(series.steps[-1]) for series in log.series.values() if len(series)), default=0)
    return {
        "verdict": report.verdict,
        "last step": step(last_step),
        **{f"last {NAMES[role]}, smoothed": number(_last(_smoothed(log, role))) for role in (*RESULTS, "loss")},
        "best validation": MISSING if val is None else f"{number(val.best_value)} @ {step(val.best_step)}",
        "last validation": MISSING if val is None else number(val.last_value),
        "measured by": MISSING if val is None else clean(val.metric),
        "step time in s": number(speed.step_s if speed else None),
        "tokens per second": number(speed.tokens_per_s if speed else None),
        "MFU": share(speed.mfu if speed else None),
        "goodput": share(speed.goodput if speed else None),
        "peak memory in GiB": number(next((float(peak.max()) for peak in peaks if len(peak)), None)),
        "anomalies": str(len(report.anomalies)),
    }


def _speed_notes(runs: Sequence[Run], names: list[str]) -> tuple[str, ...]:
    """Tokens per second where all runs have it; steps of different runs need not be equally long."""
    rates = [report.throughput.tokens_per_s if report.throughput else None for report, _ in runs]
    first, *others = rates
    if not first:
        return ()
    pairs = zip(names[1:], others, strict=True)
    return tuple(
        f"{name} has {number(rate / first)} times the tokens per second of {names[0]}." for name, rate in pairs if rate
    )


def _same_steps(runs: Sequence[Run], names: list[str], role: str) -> Section | None:
    """A smoothed metric where all runs have come, at equal distances; losses by ratio, others by difference."""
    curves = [_smoothed(log, role) for _, log in runs]
    if not all(map(len, curves)):
        return None
    first, last = max(int(curve.steps[0]) for curve in curves), min(int(curve.steps[-1]) for curve in curves)
    if first > last:
        return None
    steps = sorted({int(at) for at in np.linspace(first, last, NUM_STEPS)})
    values = [[_at(curve, at) for curve in curves] for at in steps]
    compare = _ratio if role == "loss" else _difference
    rows = tuple(
        (step(at), *map(number, row), *(compare(value, row[0]) for value in row[1:]))
        for at, row in zip(steps, values, strict=True)
    )
    header = ("step", *names, *(f"{name.split(':')[0]} vs 1" for name in names[1:]))
    name = NAMES[role]
    lead = f"{name[0].upper()}{name[1:]} at the same steps, smoothed."
    return Section(f"same-steps-{role}", name[0].upper() + name[1:], lead, Table(header, rows, frozenset()))


def _configs(runs: Sequence[Run], names: list[str]) -> Section | None:
    configs = [log.config for _, log in runs]
    if not any(configs):
        return None
    keys = sorted({key for config in configs for key in config})
    rows = tuple(
        (clean(key), *values)
        for key in keys
        if len(set(values := [clean(str(config.get(key, MISSING))) for config in configs])) > 1
    )
    lead = f"{len(rows)} of {len(keys)} keys differ." if rows else f"All {len(keys)} keys are equal."
    return Section("configuration", "Configuration", lead, Table(("key", *names), rows, frozenset({"key", *names})))


def _last(series: Series) -> float | None:
    return float(series.values[-1]) if len(series) else None


def _at(series: Series, at: int) -> float:
    """The newest value at a step; before the first the first."""
    return float(series.values[max(0, int(np.searchsorted(series.steps, at, side="right")) - 1)])


def _smoothed(log: RunLog, role: str) -> Series:
    key = next((key for key in ROLES[role] if key in log.series), "")
    return smooth(log.series.get(key, NOTHING), SMOOTHINGS[-1])


def _ratio(value: float, base: float) -> str:
    return percent(100 * (value / base - 1)) if base else MISSING


def _difference(value: float, base: float) -> str:
    return f"{'+' if value > base else ''}{number(value - base)}"
