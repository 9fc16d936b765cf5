"""Checks of time, crashes and memory, and where the time of a step goes."""

import re
from collections.abc import Iterator

import numpy as np

from trainer.report.analysed_run import MIN_ORDINARY, NUM_COMPILE, AnalysedRun, NotJudged
from trainer.report.checks import START_STEPS, fail, finding, info, note, warn
from trainer.report.formatting import counted, listed, number, share
from trainer.report.result import Finding, Throughput
from trainer.report.run_log import Series
from trainer.report.shapes import began, period
from trainer.report.statistics import finite, slope, within

NAMES = ("time/train/{}_s", "time/{}", "timing_s/{}")
"""Of a phase: ours and MLLM-JAX's, ROLL's, verl's."""
PHASES = (
    *("data", "h2d", "shard", "forward", "backward", "optimizer", "update", "rollout", "reward"),
    *("logging", "guard", "advantages", "adv", "ref_log_probs_values_reward", "gen", "ref"),
    *("old_log_probs_values", "old_log_prob", "values", "update_critic", "update_actor"),
)
WHOLES = {"update": "forward", "shard": "h2d"}
"""Phases that count only where their parts are not logged."""
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
MIN_LEAK_STEPS = 500
"""In fewer steps memory grows by its start: buffers and caches fill."""
_CRASH = re.compile(r"nccl|out of memory|\boom\b|gloo|timed? ?out", re.IGNORECASE)
_SILENT = re.compile(r"silent|no heartbeat", re.IGNORECASE)
_MEMORY = re.compile(r"memory|oom", re.IGNORECASE)


def throughput(run: AnalysedRun) -> Throughput | None:
    """Return where the time of a step goes; None where the log has no step times."""
    phases = _phases(run)
    times = run.find("ordinary_time")
    if times is None and not phases:
        return None
    parts_s = sum(phases.values())
    values = np.array([parts_s]) if times is None else times.values
    whole_s = max(float(np.mean(values)), parts_s)
    shares = {phase: mean_s / whole_s for phase, mean_s in phases.items()} if whole_s > 0 else {}
    medians = [run.find(role) for role in ("tokens_per_s", "mfu")]
    speed, mfu = (None if one is None else float(np.median(one.values)) for one in medians)
    goodput = run.find("goodput")
    last = None if goodput is None else float(goodput.values[-1])
    return Throughput(float(np.median(values)), shares, _bottleneck(shares), speed, mfu, last)


def _phases(run: AnalysedRun) -> dict[str, float]:
    """Return phase -> its mean seconds: means, unlike medians, add up to the whole."""
    found: dict[str, float] = {}
    for phase in PHASES:
        keys = (name.format(phase) for name in NAMES)
        logged = [finite(run.log.series[key]) for key in keys if key in run.log.series]
        if logged and len(logged[0]) and WHOLES.get(phase) not in found:
            values = logged[0].values
            found[phase] = float(
                np.mean(values[NUM_COMPILE:] if len(values) > NUM_COMPILE else values)
            )
    return found


def _bottleneck(shares: dict[str, float]) -> str:
    if not shares:
        return "The log does not say where the time of a step goes."
    phase, part = max(shares.items(), key=lambda item: item[1])
    advice = BOTTLENECKS.get(phase, "computing is the bottleneck, as it should be")
    is_told = "data" in shares and phase != "data"
    data = f"; waiting for data takes {share(shares['data'])}" if is_told else ""
    return f"{phase} takes {share(part)} of a step: {advice}{data}."


@finding("time_growth", "ordinary_time")
def slowing(run: AnalysedRun, times: Series) -> Iterator[Finding]:
    """Find growth over the run, or in its first steps alone."""
    first = within(times, 0, START_STEPS)
    for part, least in ((times, MIN_ORDINARY), (first, 8)):
        course = slope(part)
        is_slower = course.is_rising(run.limits["rising_p"])
        is_slower = is_slower and course.relative_change > run.limits["time_growth"]
        if len(part) < least or not is_slower:
            continue
        is_start = part is first
        yield (note if is_start else warn)(
            f"Steps get slower, by {share(course.relative_change)} "
            f"{f'in the first {START_STEPS} steps' if is_start else 'over the run'}.",
            id="start" if is_start else "",
            steps=(began(part), part.ends[1]),
            cause="Longer samples later on, a memory leak, a hot device, or a filling disk.",
            remedy=("Compare sequence lengths, memory and device clocks of early and late steps.",),
        )
        return


@finding("time_high", "ordinary_time")
def stalls(run: AnalysedRun, times: Series) -> Iterator[Finding]:
    many, median = run.limits["stall"], float(np.median(times.values))
    far = times[times.values > many * median]
    # what comes at regular distances is a task of its own
    if len(times) >= MIN_ORDINARY and len(far) and period(far.steps) is None:
        longest = float(far.values.max())
        yield warn(
            f"{counted(len(far), 'step')} took more than {number(many)} times as long as usual, "
            f"the longest {number(longest)} s at step {far.steps[np.argmax(far.values)]}.",
            id="stalls",
            steps=far.ends,
            evidence=[
                f"steps {listed(map(str, far.steps.tolist()))}; saves and validations left out"
            ],
            cause="Stalls of the loader, the network or the storage.",
            remedy=("loading",),
        )


@finding("time_periodic", "time")
def long_by_nature(run: AnalysedRun, times: Series) -> Iterator[Finding]:
    """Find longer steps that compile, save or validate, or come at regular distances."""
    median = float(np.median(times.values))
    slow = times.steps[times.values > 1.5 * median]
    steps = slow[slow > times.steps[:NUM_COMPILE].max()]
    is_work = np.count_nonzero(run.is_busy(steps)) >= 3
    every = period(steps)
    if is_work or every is not None:
        cadence = f"every {every} steps" if every else "at the steps that save or validate"
        yield info(
            f"Steps are longer {cadence}: that is {'work' if is_work else 'a task'} that comes "
            f"regularly and normal.",
            steps=(int(steps[0]), int(steps[-1])),
        )
    longest = float(times.values[:NUM_COMPILE].max())
    if len(times) >= 10 and longest > 3 * median:
        yield info(
            f"The first steps took up to {number(longest)} s (usually {number(median)} s): start-up "
            "and compilation, left out of all judgements.",
            id="compile",
            steps=times[:NUM_COMPILE].ends,
        )


@finding("oom_nccl")
def crashes(run: AnalysedRun) -> Iterator[Finding]:
    """Find errors of the network and of memory, ranks that fell silent, and what the allocator
    counted.
    """
    texts = {event: f"{event.kind} {event.message}" for event in run.log.events}
    met = [
        event
        for event, text in texts.items()
        if (event.level == "error" and _CRASH.search(text)) or _SILENT.search(text)
    ]
    counters = {run.name(role): run.find(role) for role in ("ooms", "alloc_retries")}
    up = {key: one[one.values > 0] for key, one in counters.items() if one is not None}
    if not texts and not up:
        raise NotJudged("the log has neither events nor counters of the allocator")
    evidence = [f"step {event.step}: {event.message}" for event in met]
    evidence += [f"{key} reached {number(one.values.max())}" for key, one in up.items() if len(one)]
    if evidence:
        errors = " ".join(evidence if any(map(len, up.values())) else texts[met[0]].split())
        is_memory = bool(_MEMORY.search(errors)) or any(map(len, up.values()))
        steps = [event.step for event in met] + [one.ends[0] for one in up.values() if len(one)]
        yield fail(
            f"{'Memory ran short' if is_memory else 'A rank failed or fell silent'}: {evidence[0]}.",
            steps=(min(steps), max(steps)),
            evidence=evidence[:10],
            cause="Too little device memory."
            if is_memory
            else "A rank that hangs or died lets all others wait.",
            remedy=("memory",)
            if is_memory
            else ("Look at the stacks and the log of the rank named there.",),
        )


@finding("memory")
def leaks(run: AnalysedRun) -> Iterator[Finding]:
    """Find growth over the second half: buffers and caches fill in the first."""
    for role in ("rss", "allocated"):
        series = run.find(role)
        if series is None or len(series) < MIN_ORDINARY or run.last_step < MIN_LEAK_STEPS:
            continue
        late = series[len(series) // 2 :]
        course, least = slope(late), run.limits["leak"]
        growth = 1000 * course.per_step / course.level if course.level else 0.0
        is_rising = course.is_rising(run.limits["rising_p"]) and course.relative_change > least
        if is_rising and growth > least:
            yield warn(
                f"{'Host' if role == 'rss' else 'Device'} memory grows by {share(growth)} per 1000 "
                f"steps, to {number(float(late.values[-1]))} GiB.",
                id=f"leak-{role}",
                metric=run.name(role),
                steps=(began(series), series.ends[1]),
                cause="Something is kept that should be freed: a list of losses, a cache, worker "
                "processes.",
                remedy=("Compare with {workers}=0; look for tensors kept over steps.",),
            )
