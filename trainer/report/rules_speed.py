"""V19 to V26: step times, waiting for data, the device, memory."""

import re
from collections.abc import Iterator

import numpy as np

from trainer.report import remedies
from trainer.report.analysed_run import AnalysedRun, NotJudged, steps_of
from trainer.report.collapse import collapse
from trainer.report.judge import Rule, found
from trainer.report.result import Finding
from trainer.report.run_log import Series
from trainer.report.sentence_parts import counted, listed, number, percent
from trainer.report.statistics import Floats, slope
from trainer.report.step_time import MIN_LEAK_STEPS, NUM_COMPILE, ordinary_steps, stall_note

MIN_POINTS = 20
MIN_PERIODS = 3
LASTING = 32
"""Points that a slowdown must last: a shared machine is slower for a moment now and then."""
SPIKE_OF_BUSY_STEP = 1.5
"""A saving step this many times as long as the median shows the period."""
_CRASH = re.compile(r"nccl|out of memory|\boom\b|gloo|timed? ?out", re.IGNORECASE)
_SILENT = re.compile(r"silent|no heartbeat", re.IGNORECASE)


def _times(run: AnalysedRun) -> Series:
    times = ordinary_steps(run)
    if len(times) < MIN_POINTS:
        raise NotJudged(f"{len(times)} ordinary steps with a time, {MIN_POINTS} are needed")
    return times


def _slowdown(run: AnalysedRun) -> Finding | None:
    """A lasting fall of the tokens per second, or rise of the step time, with its onset."""
    for role, sign in (("tokens_per_s", 1.0), ("time", -1.0)):
        if run.find(role) is None:
            continue
        points = _times(run) if role == "time" else run.get(role)
        fall = collapse(Series(points.steps, sign * points.values), run.limits, least_width=LASTING)
        if fall is None or not fall.before or not fall.after:
            continue
        factor = (fall.before / fall.after) ** sign
        if factor > 1 + run.limits["slowdown"]:
            return found(
                "warn",
                f"Training gets {number(factor)} times slower after step {fall.steps[0]}: {run.name(role)} goes from "
                f"{number(abs(fall.before))} to {number(abs(fall.after))}.",
                metric=run.name(role),
                steps=fall.steps,
                value=factor,
                threshold=1 + run.limits["slowdown"],
                cause="A slower or hotter device, another process on it, a slow disk or network, or longer samples.",
                remedy=f"Compare sequence lengths, memory and device clocks before and after step {fall.steps[0]}.",
                suffix="slowdown",
            )
    return None


def _growth(run: AnalysedRun) -> Iterator[Finding]:
    if slowdown := _slowdown(run):
        yield slowdown
        return
    times = _times(run)
    trend = slope(times)
    growth = trend.relative_change
    if trend.is_rising(run.limits["rising_p"]) and growth > run.limits["time_growth"]:
        yield found(
            "warn",
            f"Steps get slower: {percent(growth)} over the run.",
            metric=run.name("time"),
            steps=steps_of(times, 0, len(times)),
            value=growth,
            threshold=run.limits["time_growth"],
            evidence=(f"median {number(trend.level)} s",),
            cause="Longer samples later on, a memory leak, a hot device, or a filling disk.",
            remedy="Compare sequence lengths, memory and device clocks of early and late steps.",
        )


def _slow(run: AnalysedRun) -> Iterator[Finding]:
    times = _times(run)
    median = float(np.median(times.values))
    limit = run.limits["time_high"]
    if median > limit:
        yield found(
            "warn",
            f"A step takes {number(median)} s; above {number(limit)} s input or storage may be the bottleneck.",
            metric=run.name("time"),
            value=median,
            threshold=limit,
            evidence=(stall_note(run, limit),),
            cause="Slow data loading or storage, too little parallelism, or simply a large model.",
            remedy=remedies.loading(run),
        )
    factor = run.limits["time_spike"]
    slow = np.flatnonzero(times.values > factor * median)
    if len(slow) and _period(times.steps[slow]) is None:
        peak = slow[np.argmax(times.values[slow])]
        yield found(
            "warn",
            f"{counted(len(slow), 'step')} took more than {number(factor)} times as long as usual, the longest "
            f"{number(times.values[peak])} s at step {times.steps[peak]}.",
            metric=run.name("time"),
            steps=(int(times.steps[slow[0]]), int(times.steps[slow[-1]])),
            value=float(times.values[peak] / median),
            threshold=factor,
            evidence=(f"steps {listed(str(s) for s in times.steps[slow].tolist())}", "saving and validation left out"),
            cause="Stalls of the loader, the network or the storage.",
            remedy=remedies.loading(run),
            suffix="stalls",
        )


def _period(steps: np.ndarray) -> int | None:
    """The common distance of steps, if nearly all are that far apart."""
    gaps = np.diff(steps)
    if len(gaps) < MIN_PERIODS:
        return None
    common = int(np.median(gaps))
    return common if common > 1 and float((np.abs(gaps - common) <= 1).mean()) >= 0.8 else None


def _periodic(run: AnalysedRun) -> Iterator[Finding]:
    times = run.get("time")
    median = float(np.median(times.values))
    keep = np.arange(len(times)) >= NUM_COMPILE
    slow = np.flatnonzero(keep & (times.values > SPIKE_OF_BUSY_STEP * median))
    at_work = slow[run.is_busy(times.steps[slow])]
    period = _period(times.steps[slow])
    if len(at_work) < MIN_PERIODS and period is None:
        return
    known = len(at_work) >= MIN_PERIODS
    cadence = f"every {period} steps" if period else "at the steps that save or validate"
    yield found(
        "info",
        f"Steps are longer {cadence}: that is {'saving and validation' if known else 'a regular task'} and normal.",
        metric=run.name("time"),
        steps=(int(times.steps[slow[0]]), int(times.steps[slow[-1]])),
        value=float(period) if period else None,
    )


def _data_bound(run: AnalysedRun) -> Iterator[Finding]:
    waits, step_s = run.get("data_time"), float(np.median(ordinary_steps(run).values))
    share = float(np.median(waits.values[NUM_COMPILE:])) / step_s if len(waits) > NUM_COMPILE and step_s else 0.0
    if share <= run.limits["data_warn"]:
        return
    is_fail = share > run.limits["data_fail"]
    yield found(
        "fail" if is_fail else "warn",
        f"{percent(share)} of each step waits for data.",
        metric=run.name("data_time"),
        value=share,
        threshold=run.limits["data_fail" if is_fail else "data_warn"],
        cause="Loading and preparing samples is slower than training on them.",
        remedy=remedies.loading(run),
    )


def _compile_first(run: AnalysedRun) -> Iterator[Finding]:
    times = run.get("time")
    if len(times) < MIN_POINTS:
        raise NotJudged(f"{len(times)} points, {MIN_POINTS} are needed")
    median = float(np.median(times.values))
    slow = np.flatnonzero(times.values[:NUM_COMPILE] > run.limits["compile_ratio"] * median)
    if len(slow):
        yield found(
            "info",
            f"The first steps took up to {number(times.values[slow].max())} s (usually {number(median)} s): start-up "
            "and compilation, left out of all judgements.",
            metric=run.name("time"),
            steps=(int(times.steps[0]), int(times.steps[slow[-1]])),
            value=float(times.values[slow].max() / median),
            threshold=run.limits["compile_ratio"],
        )


def _gpu_util(run: AnalysedRun) -> Iterator[Finding]:
    series = run.get("gpu_util")
    late = series.values[series.steps > 20]
    if len(late) == 0:
        raise NotJudged("no sample after step 20")
    if (mean := float(late.mean())) < run.limits["gpu_util"]:
        yield found(
            "warn",
            f"The devices are busy {number(mean)} % of the time; above {number(run.limits['gpu_util'])} % is expected.",
            metric=run.name("gpu_util"),
            value=mean,
            threshold=run.limits["gpu_util"],
            cause="Batches too small, waiting for data, or waiting for other ranks.",
            remedy=f"{remedies.larger_batch(run)} {remedies.loading(run)}",
        )


def _crashes(run: AnalysedRun) -> Iterator[Finding]:
    errors = [e for e in run.log.events if e.level == "error" and _CRASH.search(f"{e.kind} {e.message}")]
    silent = [e for e in run.log.events if _SILENT.search(f"{e.kind} {e.message}")]
    counts = {role: run.find(role) for role in ("ooms", "alloc_retries")}
    counted_faults = {run.name(role): float(s.values.max()) for role, s in counts.items() if s is not None}
    faults = {key: value for key, value in counted_faults.items() if value > 0}
    if not run.log.events and not counted_faults:
        raise NotJudged("the log has neither events nor counters of the allocator")
    evidence = [f"step {event.step}: {event.message}" for event in (*errors, *silent)]
    evidence += [f"{key} reached {number(value)}" for key, value in faults.items()]
    if not evidence:
        return
    is_memory = bool(faults) or any("memory" in e.message.lower() or "oom" in e.message.lower() for e in errors)
    yield found(
        "fail",
        f"{'Memory ran short' if is_memory else 'A rank failed or fell silent'}: {evidence[0]}.",
        metric=next(iter(faults), None),
        value=next(iter(faults.values()), None),
        threshold=0.0,
        evidence=tuple(evidence[:10]),
        cause="Too little device memory." if is_memory else "A rank that hangs or died lets all others wait.",
        remedy=remedies.memory(run) if is_memory else "Look at the stacks and the log of the rank named there.",
    )


def _headroom(run: AnalysedRun) -> Iterator[Finding]:
    shares = run.find("reserved_share")
    if shares is not None and (peak := float(shares.values.max())) > run.limits["memory_high"]:
        yield found(
            "warn",
            f"Device memory was {percent(peak)} full: one longer sample may not fit.",
            metric=run.name("reserved_share"),
            value=peak,
            threshold=run.limits["memory_high"],
            cause="No headroom for fragmentation or longer batches.",
            remedy=remedies.memory(run),
            suffix="headroom",
        )
    sizes = [(role, run.find(role)) for role in ("rss", "allocated")]
    present = [(role, series) for role, series in sizes if series is not None and len(series) >= MIN_POINTS]
    if shares is None and not present:
        raise NotJudged("the log has no memory metrics")
    if run.last_step < MIN_LEAK_STEPS:
        return
    for role, series in present:
        yield from _leak(run, role, series)


def _leak(run: AnalysedRun, role: str, series: Series) -> Iterator[Finding]:
    """Over the second half: buffers and caches fill in the first."""
    late = Series(series.steps[len(series) // 2 :], series.values[len(series) // 2 :])
    trend = slope(late)
    growth = 1000 * trend.per_step / trend.level if trend.level else 0.0
    total = _relative_rise(late.values)
    if trend.is_rising(run.limits["rising_p"]) and growth > run.limits["leak"] and total > run.limits["leak"]:
        yield found(
            "warn",
            f"{'Host' if role == 'rss' else 'Device'} memory grows by {percent(growth)} per 1000 steps.",
            metric=run.name(role),
            steps=steps_of(late, 0, len(late)),
            value=growth,
            threshold=run.limits["leak"],
            evidence=(f"from {number(float(late.values[0]))} to {number(float(late.values[-1]))} GiB",),
            cause="Something is kept that should be freed: a list of losses, a cache, worker processes.",
            remedy=f"Compare with {remedies.option(run, 'workers')}=0; look for tensors kept over steps.",
            suffix=f"leak-{role}",
        )


def _relative_rise(values: Floats) -> float:
    quarter = max(1, len(values) // 4)
    first, last = float(np.median(values[:quarter])), float(np.median(values[-quarter:]))
    return last / first - 1 if first else 0.0


RULES = (
    Rule("V19", "time_growth", _growth),
    Rule("V20", "time_high", _slow, ("time",)),
    Rule("V21", "time_periodic", _periodic, ("time",)),
    Rule("V22", "data_bound", _data_bound, ("time", "data_time")),
    Rule("V23", "compile_first", _compile_first, ("time",)),
    Rule("V24", "gpu_util", _gpu_util, ("gpu_util",)),
    Rule("V25", "oom_nccl", _crashes),
    Rule("V26", "memory", _headroom),
)
