"""Where the time of a step goes, whether it grows, and what memory does."""

import numpy as np

from trainer.report.analysed_run import AnalysedRun
from trainer.report.formatting import share
from trainer.report.measure import STATISTICS
from trainer.report.result import Throughput
from trainer.report.run_log import Series
from trainer.report.statistics import finite, slope

PHASES = (
    *("data", "h2d", "shard", "forward", "backward", "optimizer", "update", "rollout", "reward", "logging", "guard"),
    *("advantages", "adv", "ref_log_probs_values_reward", "old_log_probs_values"),
    *("gen", "old_log_prob", "ref", "values", "update_critic", "update_actor"),
)
NAMES = ("time/train/{}_s", "time/{}", "timing_s/{}")
"""Of a phase: ours and MLLM-JAX's, ROLL's, verl's."""
NUM_COMPILE = 3
MIN_LEAK_STEPS = 500
"""What memory grows by in 1000 steps cannot be told from fewer: start-up still fills buffers and caches."""
_ADVICE = {
    "data": "the loader is the bottleneck",
    "rollout": "generation is the bottleneck",
    "gen": "generation is the bottleneck",
    "reward": "computing rewards is the bottleneck",
    "h2d": "moving data to the device is the bottleneck",
    "shard": "moving data to the device is the bottleneck",
    "optimizer": "the optimizer is the bottleneck: larger batches amortise it",
}


def ordinary_steps(run: AnalysedRun) -> Series:
    """Step times without the first three, which compile, and without those that save or validate."""
    times = run.get("time")
    keep = ~run.is_busy(times.steps) & (np.arange(len(times)) >= NUM_COMPILE)
    return Series(times.steps[keep], times.values[keep]) if keep.any() else times


def throughput(run: AnalysedRun) -> Throughput | None:
    """None where the log has no step times."""
    phases = _phases(run)
    if run.find("time") is None and not phases:
        return None
    parts_s = sum(phases.values())
    times = ordinary_steps(run) if run.find("time") else Series(np.zeros(1, np.int64), np.array([parts_s]))
    step_s, whole_s = float(np.median(times.values)), max(float(np.mean(times.values)), parts_s)
    shares = {phase: mean_s / whole_s for phase, mean_s in phases.items()} if whole_s > 0 else {}
    return Throughput(
        step_s=step_s,
        shares=shares,
        bottleneck=_sentence(shares),
        tokens_per_s=_told(run, "tokens_per_s", "median"),
        mfu=_told(run, "mfu", "median"),
        drift_percent=100 * slope(times).relative_change,
        leak_gib_per_1000_steps=_leak(run),
        goodput=_told(run, "goodput", "last"),
    )


def _phases(run: AnalysedRun) -> dict[str, float]:
    """Phase -> its mean seconds; `update` and `shard` only where their parts are not logged."""
    found: dict[str, float] = {}
    for phase in PHASES:
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
    advice = _ADVICE.get(phase, "computing is the bottleneck, as it should be")
    data = f"; waiting for data takes {share(shares['data'])}" if "data" in shares and phase != "data" else ""
    return f"{phase} takes {share(part)} of a step: {advice}{data}."


def _leak(run: AnalysedRun) -> float | None:
    """Growth of the process' memory in GiB per 1000 steps; of the device's where that is not logged."""
    if run.last_step < MIN_LEAK_STEPS:
        return None
    series = run.find("rss") or run.find("allocated")
    return 1000 * slope(series).per_step if series is not None else None


def _told(run: AnalysedRun, role: str, statistic: str) -> float | None:
    series = run.find(role)
    return None if series is None else STATISTICS[statistic](series)
