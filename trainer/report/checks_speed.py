"""Where the time of a step goes, and what is measured of it: waiting for data, crashes and memory too."""

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from trainer.report.analysed_run import MIN_FIRST, MIN_ORDINARY, NUM_COMPILE, AnalysedRun, NotJudged
from trainer.report.formatting import number, share
from trainer.report.measures import STATISTICS, Measure, lasting_shift
from trainer.report.result import Throughput
from trainer.report.rule_table import table
from trainer.report.run_log import Series
from trainer.report.statistics import MIN_PERIODS, NUM_WINDOWS, finite, period, slope, within

NAMES = ("time/train/{}_s", "time/{}", "timing_s/{}")
"""Of a phase: ours and MLLM-JAX's, ROLL's, verl's."""
MIN_LEAK_STEPS = 500
"""What memory grows by in 1000 steps cannot be told from fewer: start-up still fills buffers and caches."""


def throughput(run: AnalysedRun) -> Throughput | None:
    """None where the log has no step times."""
    phases = _phases(run)
    if run.find("time") is None and not phases:
        return None
    parts_s = sum(phases.values())
    times = run.ordinary(run.get("time")) if run.find("time") else Series(np.zeros(1, np.int64), np.array([parts_s]))
    step_s, whole_s = float(np.median(times.values)), max(float(np.mean(times.values)), parts_s)
    shares = {phase: mean_s / whole_s for phase, mean_s in phases.items()} if whole_s > 0 else {}
    return Throughput(
        step_s=step_s,
        shares=shares,
        bottleneck=_sentence(shares),
        tokens_per_s=_told(run, "tokens_per_s", "median"),
        mfu=_told(run, "mfu", "median"),
        goodput=_told(run, "goodput", "last"),
    )


def _phases(run: AnalysedRun) -> dict[str, float]:
    """Phase -> its mean seconds; `update` and `shard` only where their parts are not logged."""
    found: dict[str, float] = {}
    for phase in table()["phases"]:
        series = next((run.log.series[key] for name in NAMES if (key := name.format(phase)) in run.log.series), None)
        if series is None or not len(clean := finite(series)):
            continue
        if (phase == "update" and "forward" in found) or (phase == "shard" and "h2d" in found):
            continue
        # means, unlike medians, add up to the whole
        found[phase] = float(np.mean(clean.values[NUM_COMPILE:] if len(clean) > NUM_COMPILE else clean.values))
    return found


def _sentence(shares: dict[str, float]) -> str:
    if not shares:
        return "The log does not say where the time of a step goes."
    phase, part = max(shares.items(), key=lambda item: item[1])
    advice = table()["bottlenecks"].get(phase, table()["bottlenecks"]["others"])
    data = f"; waiting for data takes {share(shares['data'])}" if "data" in shares and phase != "data" else ""
    return f"{phase} takes {share(part)} of a step: {advice}{data}."


def _told(run: AnalysedRun, role: str, statistic: str) -> float | None:
    series = run.find(role)
    return None if series is None else STATISTICS[statistic](series)


LASTING = 32
"""Points that a slowdown must last: a shared machine is slower for a moment now and then."""
SPIKE_OF_BUSY_STEP = 1.5
"""A saving step this many times as long as the median shows the period."""
_CRASH = re.compile(r"nccl|out of memory|\boom\b|gloo|timed? ?out", re.IGNORECASE)
_SILENT = re.compile(r"silent|no heartbeat", re.IGNORECASE)
_MEMORY = re.compile(r"memory|oom", re.IGNORECASE)


def slowing(run: AnalysedRun) -> Iterator[Measure]:
    """A lasting slowdown with its onset; else growth over the run, or in its first steps alone."""
    if (times := run.find("time")) is not None:
        first = within(run.ordinary(times), 0, run.limits["first_steps"])
        if len(first) >= MIN_FIRST:
            yield _growth(run, "start", first)
    factor = 1 + run.limits["slowdown"]
    for role, sign in (("tokens_per_s", -1), ("time:ordinary", 1)):
        if run.key(role) is not None:
            width = max(LASTING, len(run.get(role)) // NUM_WINDOWS)
            for found in lasting_shift(run, role, "slowdown", sign=sign, ratio=factor**sign, width=width):
                yield replace(found, value=found.words["times"] ** sign, limit=factor)
                return
    yield _growth(run, "main", run.get("time:ordinary"))


def _growth(run: AnalysedRun, row: str, times: Series) -> Measure:
    trend, limits = slope(times), run.limits
    growth = trend.relative_change
    is_slower = trend.is_rising(limits["rising_p"]) and growth > limits["time_growth"]
    return Measure(row, growth, times.ends, {"level": trend.level}, is_fault=is_slower)


def periodic_steps(run: AnalysedRun) -> Iterator[Measure]:
    """Longer steps that save or validate, or come at regular distances."""
    times = run.get("time")
    is_slow = times.values > SPIKE_OF_BUSY_STEP * float(np.median(times.values))
    steps = times.steps[is_slow & (np.arange(len(times)) >= NUM_COMPILE)]
    is_work = np.count_nonzero(run.is_busy(steps)) >= MIN_PERIODS
    every = period(steps)
    if is_work or every is not None:
        cadence = f"every {every} steps" if every else "at the steps that save or validate"
        row = "main" if is_work else "regular"
        yield Measure(row, float(every) if every else None, (int(steps[0]), int(steps[-1])), {"cadence": cadence})


def data_wait(run: AnalysedRun) -> Iterator[Measure]:
    waits, step_s = run.get("data_time").values[NUM_COMPILE:], float(np.median(run.ordinary(run.get("time")).values))
    share = float(np.median(waits)) / step_s if len(waits) and step_s else 0.0
    row = "most" if share > run.limits["data_fail"] else "main"
    yield Measure(row, share, is_fault=share > run.limits["data_warn"])


def crashes(run: AnalysedRun) -> Iterator[Measure]:
    """Errors of the network and of memory, ranks that fell silent, and what the allocator counted."""
    texts = {event: f"{event.kind} {event.message}" for event in run.log.events}
    met = [event for event, text in texts.items() if event.level == "error" and _CRASH.search(text)]
    met += [event for event, text in texts.items() if _SILENT.search(text)]
    counters = {run.name(role): run.find(role) for role in ("ooms", "alloc_retries")}
    counted = {key: float(series.values.max()) for key, series in counters.items() if series is not None}
    if not texts and not counted:
        raise NotJudged("the log has neither events nor counters of the allocator")
    faults = {key: value for key, value in counted.items() if value > 0}
    evidence = [f"step {event.step}: {event.message}" for event in met]
    evidence += [f"{key} reached {number(value)}" for key, value in faults.items()]
    is_memory = bool(faults) or any(event.level == "error" and _MEMORY.search(event.message) for event in met)
    if evidence or texts:
        yield Measure(
            "memory" if is_memory else "main",
            next(iter(faults.values()), None),
            (min(event.step for event in met), max(event.step for event in met)) if met else None,
            {"worst": evidence[0] if evidence else ""},
            tuple(evidence[:10]),
            metric=next(iter(faults), None),
            is_fault=bool(evidence),
        )


def leaks(run: AnalysedRun) -> Iterator[Measure]:
    """Growth over the second half: buffers and caches fill in the first."""
    sizes = {role: run.find(role) for role in ("rss", "allocated")}
    long = {role: series for role, series in sizes.items() if series is not None and len(series) >= MIN_ORDINARY}
    if run.find("reserved_share") is None and not long:
        raise NotJudged("the log has no memory metrics")
    for role, series in long.items() if run.last_step >= MIN_LEAK_STEPS else ():
        late, least = series[len(series) // 2 :], run.limits["leak"]
        trend, quarter = slope(late), len(late) // 4
        growth = 1000 * trend.per_step / trend.level if trend.level else 0.0
        first, last = np.median(late.values[:quarter]), np.median(late.values[-quarter:])
        is_lasting = bool(first) and last / first - 1 > least
        if trend.is_rising(run.limits["rising_p"]) and growth > least and is_lasting:
            words = {"role": role, "whose": "Host" if role == "rss" else "Device"}
            told = {**words, "before": late.values[0], "after": late.values[-1]}
            yield Measure("leak", growth, late.ends, told, metric=run.name(role))
