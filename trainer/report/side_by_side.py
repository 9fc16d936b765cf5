"""Several runs beside each other: results, speed, loss at the same steps, and where their configurations differ."""

from collections.abc import Sequence

import numpy as np

from trainer.report.curves import NOTHING, SMOOTHINGS, finite, smooth
from trainer.report.result import Report
from trainer.report.run_log import RunLog, Series
from trainer.report.sections import Section, Table
from trainer.report.wording import MISSING, clean, number, percent, share, step

NUM_STEPS = 8
PEAK_MEMORY = ("memory/max_reserved_gib", "memory/max_allocated_gib", "memory(GiB)")


Run = tuple[Report, RunLog]


def side_by_side(runs: Sequence[Run]) -> tuple[Section, ...]:
    """The first run is the one that the others are compared with."""
    names = [f"{place}: {clean(report.title)}" for place, (report, _) in enumerate(runs, start=1)]
    found = (_results(runs, names), _same_steps(runs, names), _configs(runs, names))
    return tuple(section for section in found if section is not None)


def _results(runs: Sequence[Run], names: list[str]) -> Section:
    columns = [_facts(report, log) for report, log in runs]
    rows = [(fact, *(column[fact] for column in columns)) for fact in columns[0]]
    kept = tuple(row for row in rows if set(row[1:]) != {MISSING})
    return Section("runs", "Runs", table=Table(("", *names), kept, frozenset({""})), notes=_speed_notes(runs, names))


def _facts(report: Report, log: RunLog) -> dict[str, str]:
    val = finite(log.series.get("val/loss", NOTHING))
    best = int(val.values.argmin()) if len(val) else None
    speed = report.throughput
    peaks = [finite(log.series[key]).values for key in PEAK_MEMORY if key in log.series]
    last_step = max((int(series.steps[-1]) for series in log.series.values() if len(series)), default=0)
    return {
        "verdict": report.verdict,
        "last step": step(last_step),
        "last training loss, smoothed": number(_last(smooth(log.series.get("train/loss", NOTHING), SMOOTHINGS[-1]))),
        "best validation loss": MISSING
        if best is None
        else f"{number(val.values[best])} @ {step(int(val.steps[best]))}",
        "last validation loss": number(_last(val)),
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


def _same_steps(runs: Sequence[Run], names: list[str]) -> Section | None:
    """Smoothed training losses where all runs have come, at equal distances."""
    curves = [smooth(log.series.get("train/loss", NOTHING), SMOOTHINGS[-1]) for _, log in runs]
    if not all(map(len, curves)):
        return None
    first, last = max(int(curve.steps[0]) for curve in curves), min(int(curve.steps[-1]) for curve in curves)
    if first > last:
        return None
    steps = sorted({int(at) for at in np.linspace(first, last, NUM_STEPS)})
    losses = [[_at(curve, at) for curve in curves] for at in steps]
    rows = tuple(
        (step(at), *map(number, row), *(_gap(loss, row[0]) for loss in row[1:]))
        for at, row in zip(steps, losses, strict=True)
    )
    header = ("step", *names, *(f"{name.split(':')[0]} vs 1" for name in names[1:]))
    lead = "Training loss at the same steps, smoothed."
    return Section("same-steps", "Loss", lead, Table(header, rows, frozenset()))


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


def _gap(loss: float, base: float) -> str:
    return percent(100 * (loss / base - 1)) if base else MISSING
