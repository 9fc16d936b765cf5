"""Checks of step times and crashes, and the breakdown of a step's time."""

import re

import numpy as np

from trainer.tools.report.analysed_run import NUM_COMPILE, AnalysedRun, NotJudged
from trainer.tools.report.checks import (
    MAX_EVIDENCE,
    Findings,
    fail,
    finding,
    info,
)
from trainer.tools.report.result import Throughput
from trainer.tools.report.run_log import Series
from trainer.tools.report.shapes import period
from trainer.tools.report.statistics import finite

PHASE = re.compile(
    r"(?:time/train/|time/|timing_s/)"
    r"(data|h2d|shard|forward|backward|optimizer|update|rollout|reward|logging|guard|advantages|adv|"
    r"ref_log_probs_values_reward|gen|ref|old_log_probs_values|old_log_prob|values|update_critic|"
    r"update_actor)(?:_s)?"
)
"""Matches the phases of a step in the keys of this trainer, MLLM-JAX, ROLL and verl."""
WHOLES = {"update": "forward", "shard": "h2d"}
"""Maps a phase to a part of it. The phase counts only if the part is not logged."""
REST = "the rest of the step"
BOTTLENECKS = {
    "data": "the loader is the bottleneck",
    "rollout": "generation is the bottleneck",
    "gen": "generation is the bottleneck",
    "reward": "computing rewards is the bottleneck",
    "h2d": "moving data to the device is the bottleneck",
    "shard": "moving data to the device is the bottleneck",
    "optimizer": "the optimizer is the bottleneck: larger batches amortise it",
}
"""Maps the longest phase to a description of the bottleneck."""
CRASH = re.compile(
    r"(?!checkpoint).*(nccl|out of memory|\boom\b|gloo|timed? ?out|silent|no heartbeat)",
    re.IGNORECASE | re.DOTALL,
)
"""Matches the kind and the text of an error that stopped a rank, not only a save."""
MEMORY = re.compile(r"memory|oom", re.IGNORECASE)


def throughput(run: AnalysedRun) -> Throughput | None:
    """Return the breakdown of a step's time; None if the log has no times."""
    # means, unlike medians, add up to the step time
    phases = {name: float(points.values.mean()) for name, points in _phases(run).items()}
    times = run.find("ordinary_time")
    if not times and not phases:
        return None
    parts_s = sum(phases.values())
    values = times.values if times else np.array([parts_s])
    whole_s = max(float(values.mean()), parts_s)
    shares = {phase: mean_s / whole_s for phase, mean_s in phases.items() if whole_s > 0}
    return Throughput(float(np.median(values)), shares, _bottleneck(shares))


def _phases(run: AnalysedRun) -> dict[str, Series]:
    """Return the seconds of each phase, without the first steps, which compile."""
    found: dict[str, Series] = {}
    for key, series in sorted(run.log.series.items()):
        match = PHASE.fullmatch(key)
        points = finite(series)
        if match and points:
            found.setdefault(match[1], points[min(NUM_COMPILE, len(points) - 1) :])
    return {phase: points for phase, points in found.items() if WHOLES.get(phase) not in found}


def slowest_phase(run: AnalysedRun, first: int, last: int) -> str:
    """Return the phase whose time grew most in these steps or, for all steps, the longest phase;
    "data" if the log has no loading times.

    The times of a step's phases may be in the next row. `REST` stands for time outside all phases.
    """

    def growth(points: Series) -> float:
        start, stop = np.searchsorted(points.steps, [first, last + 1])
        inside = points.values[start : stop + 1]
        others = np.delete(points.values, slice(start, stop + 1))
        usual = np.median(others) if len(others) else 0.0
        return float(inside.mean() - usual) if len(inside) else 0.0

    phases = {phase: growth(points) for phase, points in _phases(run).items()}
    if "data" not in phases:
        return "data"
    if times := run.find("time"):
        phases[REST] = growth(times[NUM_COMPILE:]) - sum(phases.values())
    return max(phases, key=phases.__getitem__)


def _bottleneck(shares: dict[str, float]) -> str:
    """Describe the longest phase in a sentence."""
    if not shares:
        return "The log does not show where the time of a step goes."
    phase = max(shares, key=shares.__getitem__)
    advice = BOTTLENECKS.get(phase, "computing is the bottleneck, as it should be")
    return f"{phase} takes {shares[phase]:.1%} of a step: {advice}."


@finding("time_periodic", "time")
def regular_tasks(run: AnalysedRun, times: Series) -> Findings:
    """Find long steps that save or validate, or that occur at regular intervals."""
    late = times[NUM_COMPILE:]
    is_slow = late.values > 1.5 * np.median(times.values)
    slow = late.steps[is_slow]
    every = period(late, is_slow)
    is_work = np.count_nonzero(run.is_busy(slow)) >= 3
    if is_work or every:
        cadence = "when the run saves or validates" if is_work else f"every {every} steps"
        yield info(f"Steps are longer {cadence}: that is normal.", steps=(slow[0], slow[-1]))


@finding("oom_nccl")
def crashes(run: AnalysedRun) -> Findings:
    """Find network errors, memory errors, and ranks that stopped responding."""
    if not run.log.events:
        raise NotJudged("the log has no events")
    errors = [event for event in run.log.events if event.level == "error"]
    met = [event for event in errors if CRASH.match(f"{event.kind} {event.message}")]
    if not met:
        return
    evidence = [str(event) for event in met]
    yield fail(
        f"A rank failed: {evidence[0]}.",
        reason="too_little" if any(map(MEMORY.search, evidence)) else "hanging",
        steps=(met[0].step, met[-1].step),
        evidence=evidence[:MAX_EVIDENCE],
    )
