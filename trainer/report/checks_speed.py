"""Where the time of a step goes, and what is measured of it: waiting for data, crashes and
memory too.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trainer.report.advice import larger_batch, loading, memory
from trainer.report.analysed_run import MIN_FIRST, MIN_ORDINARY, NUM_COMPILE, AnalysedRun, NotJudged
from trainer.report.checks import Told, fail, finding, in_order, info, note, warn
from trainer.report.formatting import counted, listed, number, share
from trainer.report.result import Throughput
from trainer.report.run_log import Series
from trainer.report.shapes import began, beyond, bursts, shift
from trainer.report.statistics import MIN_PERIODS, NUM_WINDOWS, Slope, finite, period, slope, within

NAMES = ("time/train/{}_s", "time/{}", "timing_s/{}")
"""Of a phase: ours and MLLM-JAX's, ROLL's, verl's."""
PHASES = (
    *("data", "h2d", "shard", "forward", "backward", "optimizer", "update"),
    *("rollout", "reward", "logging", "guard", "advantages", "adv", "ref_log_probs_values_reward"),
    *(
        "old_log_probs_values",
        "gen",
        "old_log_prob",
        "ref",
        "values",
        "update_critic",
        "update_actor",
    ),
)
"""Where the time of a step goes: ours and MLLM-JAX's names, ROLL's and verl's."""
BOTTLENECKS = {
    "data": "the loader is the bottleneck",
    "rollout": "generation is the bottleneck",
    "gen": "generation is the bottleneck",
    "reward": "computing rewards is the bottleneck",
    "h2d": "moving data to the device is the bottleneck",
    "shard": "moving data to the device is the bottleneck",
    "optimizer": "the optimizer is the bottleneck: larger batches amortise it",
}
"""What the longest phase tells."""
WIDTH_OF_USE = 20
"""Points whose mean is the use of a device."""
MIN_LEAK_STEPS = 500
"""What memory grows by in 1000 steps cannot be told from fewer: start-up still fills buffers
and caches.
"""


def throughput(run: AnalysedRun) -> Throughput | None:
    """None where the log has no step times."""
    phases = _phases(run)
    if run.find("time") is None and not phases:
        return None
    parts_s = sum(phases.values())
    times = (
        run.ordinary(run.get("time"))
        if run.find("time")
        else Series(np.zeros(1, np.int64), np.array([parts_s]))
    )
    step_s, whole_s = float(np.median(times.values)), max(float(np.mean(times.values)), parts_s)
    shares = {phase: mean_s / whole_s for phase, mean_s in phases.items()} if whole_s > 0 else {}
    goodput = run.find("goodput")
    return Throughput(
        step_s=step_s,
        shares=shares,
        bottleneck=_sentence(shares),
        tokens_per_s=_median(run, "tokens_per_s"),
        mfu=_median(run, "mfu"),
        goodput=None if goodput is None else float(goodput.values[-1]),
    )


def _phases(run: AnalysedRun) -> dict[str, float]:
    """Phase -> its mean seconds; `update` and `shard` only where their parts are not logged."""
    found: dict[str, float] = {}
    for phase in PHASES:
        series = next(
            (
                run.log.series[key]
                for name in NAMES
                if (key := name.format(phase)) in run.log.series
            ),
            None,
        )
        if series is None or not len(clean := finite(series)):
            continue
        if (phase == "update" and "forward" in found) or (phase == "shard" and "h2d" in found):
            continue
        # means, unlike medians, add up to the whole
        found[phase] = float(
            np.mean(clean.values[NUM_COMPILE:] if len(clean) > NUM_COMPILE else clean.values)
        )
    return found


def _sentence(shares: dict[str, float]) -> str:
    if not shares:
        return "The log does not say where the time of a step goes."
    phase, part = max(shares.items(), key=lambda item: item[1])
    advice = BOTTLENECKS.get(phase, "computing is the bottleneck, as it should be")
    data = (
        f"; waiting for data takes {share(shares['data'])}"
        if "data" in shares and phase != "data"
        else ""
    )
    return f"{phase} takes {share(part)} of a step: {advice}{data}."


def _median(run: AnalysedRun, role: str) -> float | None:
    series = run.find(role)
    return None if series is None else float(np.median(series.values))


LASTING = 32
"""Points that a slowdown must last: a shared machine is slower for a moment now and then."""
SPIKE_OF_BUSY_STEP = 1.5
"""A saving step this many times as long as the median shows the period."""
_CRASH = re.compile(r"nccl|out of memory|\boom\b|gloo|timed? ?out", re.IGNORECASE)
_SILENT = re.compile(r"silent|no heartbeat", re.IGNORECASE)
_MEMORY = re.compile(r"memory|oom", re.IGNORECASE)


@finding("time_growth", "V19")
def slowing(run: AnalysedRun) -> Iterator[Told]:
    """A lasting slowdown with its onset; else growth over the run, or in its first steps alone."""
    times = run.find("time")
    first = None if times is None else within(run.ordinary(times), 0, run.limits["first_steps"])
    start = None if first is None or len(first) < MIN_FIRST else _growth(run, first)
    slow_start = start if start is not None and start.is_slower else None
    line = "time_stable" if slow_start else ""
    if start is not None and not slow_start:
        level, growth = number(start.course.level), share(start.course.relative_change)
        yield in_order("time_stable", f"median {level} s, changed by {growth}")
    if told := _slowdown(run, line):
        yield told
        return
    whole: _Growth | NotJudged
    try:
        whole = _growth(run, run.ordinary_times())
    except NotJudged as lacking:
        whole = lacking
    if isinstance(whole, _Growth) and whole.is_slower:
        yield warn(
            f"Steps get slower: {share(whole.course.relative_change)} over the run.",
            metric=run.name("time"),
            steps=whole.steps,
            value=whole.course.relative_change,
            limit=run.limits["time_growth"],
            evidence=[f"median {number(whole.course.level)} s"],
            cause="Longer samples later on, a memory leak, a hot device, or a filling disk.",
            remedy="Compare sequence lengths, memory and device clocks of early and late steps.",
            line=line,
        )
    elif slow_start:
        yield note(
            f"Steps get slower in the first {number(run.limits['first_steps'])} steps, by "
            f"{share(slow_start.course.relative_change)}, but not later.",
            id="start",
            metric=run.name("time"),
            steps=slow_start.steps,
            value=slow_start.course.relative_change,
            limit=run.limits["time_growth"],
            evidence=[f"median {number(slow_start.course.level)} s"],
            cause="Longer samples, caches that fill, or a device that gets hot.",
            remedy="None needed where later steps take as long.",
            line=line,
        )
    if isinstance(whole, NotJudged):
        raise whole


@dataclass(frozen=True)
class _Growth:
    course: Slope
    steps: tuple[int, int]
    is_slower: bool


def _growth(run: AnalysedRun, times: Series) -> _Growth:
    course = slope(times)
    is_slower = (
        course.is_rising(run.limits["rising_p"])
        and course.relative_change > run.limits["time_growth"]
    )
    return _Growth(course, times.ends, is_slower)


def _slowdown(run: AnalysedRun, line: str) -> Told | None:
    """Of tokens per second, else of step times."""
    factor = 1 + run.limits["slowdown"]
    for role, sign in (("tokens_per_s", -1), ("time", 1)):
        if run.key(role) is None:
            continue
        series = run.get(role) if role == "tokens_per_s" else run.ordinary_times()
        width = max(LASTING, len(series) // NUM_WINDOWS)
        if move := shift(run, role, sign=sign, ratio=factor**sign, width=width, series=series):
            return warn(
                f"Training gets {number(move.times**sign)} times slower after step {move.at}: "
                f"{move.metric} goes from {number(move.before)} to {number(move.after)}.",
                id="slowdown",
                metric=move.metric,
                steps=move.steps,
                value=move.times**sign,
                limit=factor,
                cause="A slower or hotter device, another process on it, a slow disk or network, "
                "or longer samples.",
                remedy=f"Compare sequence lengths, memory and device clocks before and after step "
                f"{move.at}.",
                line=line,
            )
    return None


@finding("time_high", "V20", "time")
def long_steps(run: AnalysedRun, _: Series) -> Iterator[Told]:
    """Steps that take long all the time, and single ones that stall."""
    times, limit, many = run.ordinary_times(), run.limits["time_high"], run.limits["time_spike"]
    median = float(np.median(times.values))
    if run.profile == "sft" and (slow := beyond(times, high=limit)):
        yield warn(
            f"A step takes {number(slow.level)} s from step {slow.steps[0]} on; above "
            f"{number(limit)} s input or "
            "storage may be the bottleneck.",
            steps=slow.steps,
            value=slow.level,
            limit=limit,
            evidence=[
                f"median step {number(slow.level)} s; 2 to 5 s is usual for 7B on 8 A100 at 4096 "
                f"tokens"
            ],
            cause="Slow data loading or storage, too little parallelism, or simply a large model.",
            remedy=[loading(run)],
        )
    stalls = bursts(times, high=many * median)
    # what comes at regular distances is a task of its own
    if len(stalls) and period(stalls.steps) is None:
        longest = float(stalls.values.max())
        yield warn(
            f"{counted(len(stalls), 'step')} took more than {number(many)} times as long as usual, "
            f"the longest {number(longest)} s at step {stalls.steps[np.argmax(stalls.values)]}.",
            id="stalls",
            steps=stalls.ends,
            value=longest / median if median else 0.0,
            limit=many,
            evidence=[
                f"steps {listed(map(str, stalls.steps.tolist()))}",
                "saving and validation left out",
            ],
            cause="Stalls of the loader, the network or the storage.",
            remedy=[loading(run)],
        )


@finding("time_periodic", "V21", "time")
def periodic_steps(run: AnalysedRun, times: Series) -> Iterator[Told]:
    """Longer steps that save or validate, or come at regular distances."""
    is_slow = times.values > SPIKE_OF_BUSY_STEP * float(np.median(times.values))
    steps = times.steps[is_slow & (np.arange(len(times)) >= NUM_COMPILE)]
    is_work = np.count_nonzero(run.is_busy(steps)) >= MIN_PERIODS
    every = period(steps)
    if is_work or every is not None:
        cadence = f"every {every} steps" if every else "at the steps that save or validate"
        task = "saving and validation" if is_work else "a regular task"
        yield info(
            f"Steps are longer {cadence}: that is {task} and normal.",
            value=every,
            steps=(int(steps[0]), int(steps[-1])),
        )


@finding("data_bound", "V22", "time", "data_time")
def data_wait(run: AnalysedRun, times: Series, waits: Series) -> Iterator[Told]:
    step_s, waited = float(np.median(run.ordinary(times).values)), waits.values[NUM_COMPILE:]
    part = float(np.median(waited)) / step_s if len(waited) and step_s else 0.0
    is_most = part > run.limits["data_fail"]
    if part > run.limits["data_warn"]:
        yield (fail if is_most else warn)(
            f"{share(part)} of each step waits for data.",
            metric=run.name("data_time"),
            value=part,
            limit=run.limits["data_fail" if is_most else "data_warn"],
            cause="Loading and preparing samples is slower than training on them.",
            remedy=[loading(run)],
        )


@finding("compile_first", "V23", "time")
def compiling(run: AnalysedRun, times: Series) -> Iterator[Told]:
    if len(times) < MIN_ORDINARY // 2:
        raise NotJudged(f"{len(times)} points of step time, {MIN_ORDINARY // 2} are needed")
    median, limit = float(np.median(times.values)), run.limits["compile_ratio"]
    slow = bursts(times[:NUM_COMPILE], high=limit * median)
    if len(slow):
        longest = float(slow.values.max())
        yield info(
            f"The first steps took up to {number(longest)} s (usually {number(median)} s): "
            "start-up and compilation, left out of all judgements.",
            steps=slow.ends,
            value=longest / median if median else 0.0,
            limit=limit,
        )


@finding("gpu_util", "V24", "gpu_util")
def idle_devices(run: AnalysedRun, busy: Series) -> Iterator[Told]:
    warm, limit = run.warm(busy), run.limits["gpu_util"]
    width = max(WIDTH_OF_USE, len(warm) // NUM_WINDOWS)
    if idle := beyond(warm, low=limit, width=width, of=np.mean):
        yield warn(
            f"The devices are busy {number(idle.level)} % of the time from step {idle.steps[0]} "
            f"on; above {number(limit)} % is expected.",
            steps=idle.steps,
            value=idle.level,
            limit=limit,
            cause="Batches too small, waiting for data, or waiting for other ranks.",
            remedy=[larger_batch(run), loading(run)],
            line="device_busy",
            detail=f"{number(float(warm.values.mean()))} %",
        )
    else:
        yield in_order("device_busy", f"{number(float(warm.values.mean()))} %")


@finding("oom_nccl", "V25")
def crashes(run: AnalysedRun) -> Iterator[Told]:
    """Errors of the network and of memory, ranks that fell silent, and what the allocator
    counted.
    """
    texts = {event: f"{event.kind} {event.message}" for event in run.log.events}
    met = [event for event, text in texts.items() if event.level == "error" and _CRASH.search(text)]
    met += [event for event, text in texts.items() if _SILENT.search(text)]
    counters = {run.name(role): run.find(role) for role in ("ooms", "alloc_retries")}
    counted_up = {
        key: float(series.values.max()) for key, series in counters.items() if series is not None
    }
    if not texts and not counted_up:
        raise NotJudged("the log has neither events nor counters of the allocator")
    faults = {key: value for key, value in counted_up.items() if value > 0}
    evidence = [f"step {event.step}: {event.message}" for event in met]
    evidence += [f"{key} reached {number(value)}" for key, value in faults.items()]
    is_memory = bool(faults) or any(
        event.level == "error" and _MEMORY.search(event.message) for event in met
    )
    if evidence:
        yield fail(
            f"{'Memory ran short' if is_memory else 'A rank failed or fell silent'}: {evidence[0]}.",
            metric=next(iter(faults), None),
            steps=(min(event.step for event in met), max(event.step for event in met))
            if met
            else None,
            value=next(iter(faults.values()), None),
            limit=0,
            evidence=evidence[:10],
            cause="Too little device memory."
            if is_memory
            else "A rank that hangs or died lets all others wait.",
            remedy=[memory(run)]
            if is_memory
            else "Look at the stacks and the log of the rank named there.",
            line="no_crash",
            detail="none",  # in the phase asked for
        )
    elif texts:
        yield in_order("no_crash", "none")


@finding("memory", "V26")
def memory_use(run: AnalysedRun) -> Iterator[Told]:
    """Headroom of the device; growth over the second half: buffers and caches fill in the first."""
    reserved, limit = run.find("reserved_share"), run.limits["memory_high"]
    sizes = {role: run.find(role) for role in ("rss", "allocated")}
    long = {
        role: series
        for role, series in sizes.items()
        if series is not None and len(series) >= MIN_ORDINARY
    }
    if reserved is None and not long:
        raise NotJudged("the log has no memory metrics")
    if reserved is not None and (full := beyond(reserved, high=limit, width=1)):
        yield warn(
            f"Device memory was {share(reserved.values.max())} full, above {share(limit)} from "
            f"step {full.steps[0]} "
            "on: one longer sample may not fit.",
            id="headroom",
            metric=run.name("reserved_share"),
            steps=full.steps,
            value=reserved.values.max(),
            limit=limit,
            cause="No headroom for fragmentation or longer batches.",
            remedy=[memory(run)],
        )
    for role, series in long.items() if run.last_step >= MIN_LEAK_STEPS else ():
        yield from _leak(run, role, series)


def _leak(run: AnalysedRun, role: str, series: Series) -> Iterator[Told]:
    late = series[len(series) // 2 :]
    course, quarter, least = slope(late), len(late) // 4, run.limits["leak"]
    growth = 1000 * course.per_step / course.level if course.level else 0.0
    first, last = np.median(late.values[:quarter]), np.median(late.values[-quarter:])
    is_lasting = bool(first) and last / first - 1 > least
    if course.is_rising(run.limits["rising_p"]) and growth > least and is_lasting:
        yield warn(
            f"{'Host' if role == 'rss' else 'Device'} memory grows by {share(growth)} per 1000 "
            f"steps.",
            id=f"leak-{role}",
            metric=run.name(role),
            steps=(began(series), series.ends[1]),
            value=growth,
            limit=least,
            evidence=[
                f"from {number(float(late.values[0]))} to {number(float(late.values[-1]))} GiB"
            ],
            cause="Something is kept that should be freed: a list of losses, a cache, worker "
            "processes.",
            remedy=f"Compare with {run.options['workers']}=0; look for tensors kept over steps.",
        )
