"""Checks of time, crashes and memory, and where the time of a step goes."""

import re

import numpy as np

from trainer.tools.report.analysed_run import NUM_COMPILE, AnalysedRun, NotJudged
from trainer.tools.report.checks import (
    MAX_EVIDENCE,
    START_STEPS,
    Findings,
    fail,
    finding,
    info,
    note,
    warn,
)
from trainer.tools.report.formatting import number, share
from trainer.tools.report.result import Throughput
from trainer.tools.report.run_log import LogEvent, Series
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
BOTTLENECKS = {
    "data": "the loader is the bottleneck",
    "rollout": "generation is the bottleneck",
    "gen": "generation is the bottleneck",
    "reward": "computing rewards is the bottleneck",
    "h2d": "moving data to the device is the bottleneck",
    "shard": "moving data to the device is the bottleneck",
    "optimizer": "the optimizer is the bottleneck: larger batches amortise it",
}
"""The bottleneck by the longest phase."""
MIN_POINTS = 20
"""Points that step times and memory are judged by."""
MIN_LEAK_STEPS = 500
"""In fewer steps memory grows by its start: buffers and caches fill."""
RISING_P = 0.01
"""A rise that raises an alarm is significant below this."""
TIME_GROWTH = 0.1
"""Share by which steps get slower over a run."""
GROWTH = {"rss": ("Host", 0.01), "allocated": ("Device", 0.01), "reserved": ("Device", 0.05)}
"""Role -> memory, and its growth per 1000 steps in the second half of a run that is a leak: an
allocator reserves a little more now and then.
"""
_CRASH = re.compile(r"nccl|out of memory|\boom\b|gloo|timed? ?out", re.IGNORECASE)
_SILENT = re.compile(r"silent|no heartbeat", re.IGNORECASE)
_MEMORY = re.compile(r"memory|oom", re.IGNORECASE)


def throughput(run: AnalysedRun) -> Throughput | None:
    """Return where the time of a step goes; None where the log has no step times."""
    phases, times = _phases(run), run.find("ordinary_time")
    if times is None and not phases:
        return None
    parts_s = sum(phases.values())
    values = times.values if times else np.array([parts_s])
    whole_s = max(float(values.mean()), parts_s)
    shares = {phase: mean_s / whole_s for phase, mean_s in phases.items() if whole_s > 0}
    usual = {
        role: float(np.median(series.values))
        for role in ("tokens_per_s", "mfu")
        if (series := run.find(role))
    }
    goodput = run.find("goodput")
    return Throughput(
        step_s=float(np.median(values)),
        shares=shares,
        bottleneck=_bottleneck(shares),
        tokens_per_s=usual.get("tokens_per_s"),
        mfu=usual.get("mfu"),
        goodput=float(goodput.values[-1]) if goodput else None,
    )


def _phases(run: AnalysedRun) -> dict[str, float]:
    """Return phase -> its mean seconds: means, unlike medians, add up to the whole."""
    means: dict[str, float] = {}
    for key, series in sorted(run.log.series.items()):
        match, values = PHASE.fullmatch(key), finite(series).values
        if match and len(values):
            late = values[min(NUM_COMPILE, len(values) - 1) :]
            means.setdefault(match[1], float(late.mean()))
    return {phase: mean for phase, mean in means.items() if WHOLES.get(phase) not in means}


def _bottleneck(shares: dict[str, float]) -> str:
    """Return a sentence about the longest phase."""
    if not shares:
        return "The log does not say where the time of a step goes."
    phase = max(shares, key=shares.__getitem__)
    advice = BOTTLENECKS.get(phase, "computing is the bottleneck, as it should be")
    has_data = phase != "data" and "data" in shares
    data = f"; waiting for data takes {share(shares['data'])}" if has_data else ""
    return f"{phase} takes {share(shares[phase])} of a step: {advice}{data}."


@finding("time_growth", "ordinary_time")
def slowing(run: AnalysedRun, times: Series) -> Findings:
    """Find growth over the run, or in its first steps alone."""
    first = within(times, 0, START_STEPS)
    courses = (
        (times, MIN_POINTS, warn, "", "over the run"),
        (first, 8, note, "start", f"in the first {START_STEPS} steps"),
    )
    for part, least, make, id_, when in courses:
        course = slope(part)
        is_large = course.relative_change > TIME_GROWTH
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
    """Find errors of the network and of memory, and ranks that fell silent."""
    met = [event for event in run.log.events if _is_crash(event)]
    if not met:
        if not run.log.events:
            raise NotJudged("the log has no events")
        return
    evidence = [f"step {event.step}: {event.message}" for event in met]
    what, cause = "A rank failed or fell silent", "A rank that hangs or died lets all others wait."
    remedy = "Look at the stacks and the log of the rank named there."
    if any(map(_MEMORY.search, evidence)):
        what, cause, remedy = "Memory ran short", "Too little device memory.", "memory"
    yield fail(
        f"{what}: {evidence[0]}.",
        steps=(met[0].step, met[-1].step),
        evidence=evidence[:MAX_EVIDENCE],
        cause=cause,
        remedy=(remedy,),
    )


def _is_crash(event: LogEvent) -> bool:
    """Return whether an event is an error of network or memory, or a silent rank."""
    text = f"{event.kind} {event.message}"
    is_error = event.level == "error" and _CRASH.search(text)
    return bool(is_error or _SILENT.search(text))


@finding("memory:leak")
def leaks(run: AnalysedRun) -> Findings:
    """Find growth over the second half: buffers and caches fill in the first."""
    for role, (place, least) in GROWTH.items():
        series = run.find(role)
        is_short = run.last_step < MIN_LEAK_STEPS and role != "reserved"
        if series is None or len(series) < MIN_POINTS or is_short:
            continue
        late = series[len(series) // 2 :]
        course = slope(late)
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
