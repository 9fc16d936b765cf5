"""Checks of time, crashes and memory, and where the time of a step goes."""

import re

import numpy as np

from trainer.tools.report.analysed_run import MIN_ORDINARY, NUM_COMPILE, AnalysedRun, NotJudged
from trainer.tools.report.checks import START_STEPS, Findings, fail, finding, info, note, warn
from trainer.tools.report.formatting import counted, listed, number, share
from trainer.tools.report.result import Throughput
from trainer.tools.report.run_log import Series
from trainer.tools.report.shapes import began, period
from trainer.tools.report.statistics import finite, slope, within

PHASE = re.compile(
    r"(?:time/train/|time/|timing_s/)"
    r"(data|h2d|shard|forward|backward|optimizer|update|rollout|reward|logging|guard|advantages|adv|"
    r"ref_log_probs_values_reward|gen|ref|old_log_probs_values|old_log_prob|values|update_critic|"
    r"update_actor)(?:_s)?"
)
"""Phases of a step as this trainer, MLLM-JAX, ROLL and verl log them."""
WHOLES = {"update": "forward", "shard": "h2d"}
"""Phases that count only where their parts are not logged."""
GENERATION, MOVING = "generation is the bottleneck", "moving data to the device is the bottleneck"
BOTTLENECKS = {
    "data": "the loader is the bottleneck",
    "rollout": GENERATION,
    "gen": GENERATION,
    "reward": "computing rewards is the bottleneck",
    "h2d": MOVING,
    "shard": MOVING,
    "optimizer": "the optimizer is the bottleneck: larger batches amortise it",
}
"""The bottleneck by the longest phase."""
MIN_LEAK_STEPS = 500
"""In fewer steps memory grows by its start: buffers and caches fill."""
RISING_P = 0.01
"""A rise that raises an alarm is significant below this."""
MAX_EVIDENCE = 10
RESERVED_GROWTH = 0.05
"""Growth over the second half of a run: an allocator that reserves more now and then grows less."""
_CRASH = re.compile(r"nccl|out of memory|\boom\b|gloo|timed? ?out", re.IGNORECASE)
_SILENT = re.compile(r"silent|no heartbeat", re.IGNORECASE)
_MEMORY = re.compile(r"memory|oom", re.IGNORECASE)


def throughput(run: AnalysedRun) -> Throughput | None:
    """Return where the time of a step goes; None where the log has no step times."""
    phases, times = _phases(run), run.find("ordinary_time")
    if times is None and not phases:
        return None
    parts_s = sum(phases.values())
    values = [parts_s] if times is None else times.values
    whole_s = max(float(np.mean(values)), parts_s)
    shares = {phase: mean_s / whole_s for phase, mean_s in phases.items() if whole_s > 0}
    found = {role: run.find(role) for role in ("tokens_per_s", "mfu", "goodput")}
    speed, mfu, goodput = (one.values if one else None for one in found.values())
    return Throughput(
        step_s=float(np.median(values)),
        shares=shares,
        bottleneck=_bottleneck(shares),
        tokens_per_s=None if speed is None else float(np.median(speed)),
        mfu=None if mfu is None else float(np.median(mfu)),
        goodput=None if goodput is None else float(goodput[-1]),
    )


def _phases(run: AnalysedRun) -> dict[str, float]:
    """Return phase -> its mean seconds: means, unlike medians, add up to the whole."""
    means: dict[str, float] = {}
    for key, series in sorted(run.log.series.items()):
        match, values = PHASE.fullmatch(key), finite(series).values
        if match and len(values):
            late = values[NUM_COMPILE:] if len(values) > NUM_COMPILE else values
            means.setdefault(match[1], float(late.mean()))
    return {phase: mean for phase, mean in means.items() if WHOLES.get(phase) not in means}


def _bottleneck(shares: dict[str, float]) -> str:
    if not shares:
        return "The log does not say where the time of a step goes."
    phase = max(shares, key=shares.__getitem__)
    advice = BOTTLENECKS.get(phase, "computing is the bottleneck, as it should be")
    waits = "" if phase == "data" or "data" not in shares else share(shares["data"])
    data = f"; waiting for data takes {waits}" if waits else ""
    return f"{phase} takes {share(shares[phase])} of a step: {advice}{data}."


@finding("time_growth", "ordinary_time")
def slowing(run: AnalysedRun, times: Series) -> Findings:
    """Find growth over the run, or in its first steps alone."""
    first = within(times, 0, START_STEPS)
    courses = (
        (times, MIN_ORDINARY, warn, "", "over the run"),
        (first, 8, note, "start", f"in the first {START_STEPS} steps"),
    )
    for part, least, make, id_, when in courses:
        course = slope(part)
        is_large = course.relative_change > run.limits["time_growth"]
        if len(part) >= least and is_large and course.is_rising(RISING_P):
            yield make(
                f"Steps get slower, by {share(course.relative_change)} {when}.",
                id=id_,
                steps=(began(part), part.steps[-1]),
                cause="Longer samples later on, a memory leak, a hot device, or a filling disk.",
                remedy=(
                    "Compare sequence lengths, memory and device clocks of early and late steps.",
                ),
            )
            return


@finding("time_high:stalls", "ordinary_time")
def stalls(run: AnalysedRun, times: Series) -> Findings:
    many = run.limits["stall"]
    far = times[times.values > many * np.median(times.values)]
    # what comes at regular distances is a task of its own
    if len(times) >= MIN_ORDINARY and far and period(far.steps) is None:
        longest = np.argmax(far.values)
        yield warn(
            f"{counted(len(far), 'step')} took more than {number(many)} times as long as usual, "
            f"the longest {number(far.values[longest])} s at step {far.steps[longest]}.",
            steps=far.ends,
            evidence=[f"steps {listed(map(str, far.steps))}; saves and validations left out"],
            cause="Stalls of the loader, the network or the storage.",
            remedy=("loading",),
        )


@finding("time_periodic", "time")
def regular_tasks(run: AnalysedRun, times: Series) -> Findings:
    """Find longer steps that save or validate, or come at regular distances."""
    late = times[NUM_COMPILE:]
    slow = late.steps[late.values > 1.5 * np.median(times.values)]
    is_work = np.count_nonzero(run.is_busy(slow)) >= 3
    if is_work or period(slow):
        cadence = "where the run saves or validates" if is_work else f"every {period(slow)} steps"
        yield info(f"Steps are longer {cadence}: that is normal.", steps=(slow[0], slow[-1]))


@finding("oom_nccl")
def crashes(run: AnalysedRun) -> Findings:
    """Find errors of the network and of memory, ranks that fell silent, and what the allocator
    counted.
    """
    met: dict[str, int] = {}
    for event in run.log.events:
        text = f"{event.kind} {event.message}"
        if _SILENT.search(text) or (event.level == "error" and _CRASH.search(text)):
            met[f"step {event.step}: {event.message}"] = event.step
    counters = [role for role in ("ooms", "alloc_retries") if run.find(role)]
    for role in counters:
        series = run.get(role)
        if series.values.max() > 0:
            counted_up = f"{run.name(role)} reached {number(series.values.max())}"
            met[counted_up] = series.steps[series.values > 0][0]
    if met:
        evidence = list(met)
        is_memory = any(map(_MEMORY.search, evidence))
        cause = "A rank that hangs or died lets all others wait."
        remedy = "Look at the stacks and the log of the rank named there."
        if is_memory:
            cause, remedy = "Too little device memory.", "memory"
        yield fail(
            f"{'Memory ran short' if is_memory else 'A rank failed or fell silent'}: {evidence[0]}.",
            steps=(min(met.values()), max(met.values())),
            evidence=evidence[:MAX_EVIDENCE],
            cause=cause,
            remedy=(remedy,),
        )
    elif not run.log.events:
        raise NotJudged("the log has no events")


@finding("memory:leak")
def leaks(run: AnalysedRun) -> Findings:
    """Find growth over the second half: buffers and caches fill in the first."""
    places = {"rss": "Host", "allocated": "Device", "reserved": "Device"}
    for role, place in places.items():
        is_reserved, series = role == "reserved", run.find(role)
        if series is None or len(series) < MIN_ORDINARY:
            continue
        if run.last_step < MIN_LEAK_STEPS and not is_reserved:
            continue
        late = series[len(series) // 2 :]
        course = slope(late)
        least = RESERVED_GROWTH if is_reserved else run.limits["leak"]
        growth = 1000 * course.per_step / course.level if course.level else 0.0
        if min(growth, course.relative_change) > least and course.is_rising(RISING_P):
            yield warn(
                f"{place} memory grows by {share(growth)} per 1000 steps, to "
                f"{number(late.values[-1])} GiB.",
                id=role,
                metric=run.name(role),
                steps=(began(series), series.steps[-1]),
                cause="Something is kept that should be freed: a list of losses, a cache, worker "
                "processes.",
                remedy=("Compare with {workers}=0; look for tensors kept over steps.",),
            )
