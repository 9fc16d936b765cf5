"""The checklists of a run: first 100 steps, each checkpoint, the end. Pass, fail or unknown, with numbers."""

import re
from collections.abc import Callable

import numpy as np

from trainer.report.analysed_run import AnalysedRun, NotJudged
from trainer.report.raised_rate import raised_rates, scheduled
from trainer.report.result import CheckItem, Finding
from trainer.report.rules_completeness import incomplete, is_tracker_stale, missing_checkpoints, odd_sizes
from trainer.report.rules_validation import lasting_rise
from trainer.report.run_log import CheckpointState, Series
from trainer.report.sentence_parts import listed, number, percent
from trainer.report.statistics import bins, slope
from trainer.report.step_time import ordinary_steps

Answer = tuple[bool, str]
"""Whether it passed, and the numbers."""
MIN_POINTS = 8
_CRASH = re.compile(r"nccl|out of memory|\boom\b", re.IGNORECASE)


def _start(run: AnalysedRun, role: str) -> Series:
    series = run.get(role)
    stop = int(np.searchsorted(series.steps, run.limits["first_steps"], side="right"))
    if stop < MIN_POINTS:
        raise NotJudged(f"{stop} points in the first {int(run.limits['first_steps'])} steps")
    return Series(series.steps[:stop], series.values[:stop])


def _loss_falls(run: AnalysedRun) -> Answer:
    series = _start(run, "loss")
    trend = slope(bins(series, 20))
    quarter = max(1, len(series) // 4)
    first, last = float(np.median(series.values[:quarter])), float(np.median(series.values[-quarter:]))
    return trend.change < 0 and last < first, f"{number(first)} to {number(last)}, p = {number(trend.p_value)}"


def _rate_rises(run: AnalysedRun) -> Answer:
    series = scheduled(run.get("lr"), raised_rates(run.get("lr"), jump=run.limits["lr_jump"]))
    peak = int(np.argmax(series.values >= series.values.max() * (1 - 1e-6)))
    if peak == 0:
        raise NotJudged("there was no warm-up")
    rises = np.diff(series.values[: peak + 1])
    return bool(
        np.all(rises >= 0)
    ), f"{number(series.values[0])} to {number(series.values[peak])} at {series.steps[peak]}"


def _gradient_in_range(run: AnalysedRun) -> Answer:
    series = _start(run, "grad")
    low, high = run.limits["grad_low"], run.limits["grad_high"]
    share = float(((series.values >= low) & (series.values <= high)).mean())
    return share >= run.limits["grad_share"], f"{percent(share)} between {number(low)} and {number(high)}"


def _time_stable(run: AnalysedRun) -> Answer:
    times = ordinary_steps(run)
    early = Series(times.steps[times.steps <= 100], times.values[times.steps <= 100])
    if len(early) < MIN_POINTS:
        raise NotJudged(f"{len(early)} step times in the first 100 steps")
    trend = slope(early)
    grows = trend.is_rising(run.limits["rising_p"]) and trend.relative_change > run.limits["time_growth"]
    return not grows, f"median {number(trend.level)} s, {trend.relative_change:+.1%}"


def _device_busy(run: AnalysedRun) -> Answer:
    mean = float(run.get("gpu_util").values.mean())
    return mean > run.limits["gpu_util"], f"{number(mean)} %"


def _no_crash(run: AnalysedRun) -> Answer:
    if not run.log.events:
        raise NotJudged("the log has no events")
    early = [e for e in run.log.events if e.step <= run.limits["first_steps"]]
    faults = [e.message for e in early if e.level == "error" and _CRASH.search(f"{e.kind} {e.message}")]
    return not faults, listed(faults, 3) or "none"


def _val_not_rising(run: AnalysedRun) -> Answer:
    start, stop = lasting_rise(run)
    return start == stop, f"{stop - start} rises in a row" if stop > start else "no rise beyond noise"


def _export_complete(run: AnalysedRun) -> Answer:
    incomplete = [str(c.step) for c in _checkpoints(run) if not c.is_complete or c.faults]
    return not incomplete, f"incomplete: {listed(incomplete)}" if incomplete else f"{len(run.log.checkpoints)} complete"


def _sizes(run: AnalysedRun) -> Answer:
    sizes = [c.size_bytes / 2**30 for c in _checkpoints(run)]
    odd = [str(c.step) for c in odd_sizes(run)]
    return not odd, f"{number(float(np.median(sizes)))} GiB each" + (f", odd: {listed(odd)}" if odd else "")


def _tracker(run: AnalysedRun) -> Answer:
    if run.log.tracker_step is None:
        raise NotJudged("there is no tracker file")
    return not is_tracker_stale(run), f"step {run.log.tracker_step}"


def _all_steps(run: AnalysedRun) -> Answer:
    if run.log.total_steps is None:
        raise NotJudged("the planned number of steps is not known")
    if run.last_step >= run.log.total_steps:
        return True, f"{run.last_step} of {run.log.total_steps}"
    words, is_meant = incomplete(run)
    if is_meant:
        raise NotJudged(words)
    return False, words


def _final_loss(run: AnalysedRun) -> Answer:
    run.require_pretrained()
    level = float(np.median(run.get("loss").values[-10:]))
    low, high = run.limits["loss_final_low"], run.limits["loss_final_high"]
    return low <= level <= high, f"{number(level)}, usual {number(low)} to {number(high)}"


def _all_checkpoints(run: AnalysedRun) -> Answer:
    if not run.cadences or not _checkpoints(run):
        raise NotJudged("how often to save is not known")
    missing = missing_checkpoints(run)
    return not missing, f"missing: {listed(map(str, missing))}" if missing else f"{len(run.log.checkpoints)} there"


def _finished(run: AnalysedRun) -> Answer:
    if run.log.exit_code is None:
        raise NotJudged("no end was written")
    return run.log.exit_code == 0, f"exit code {run.log.exit_code}"


def _checkpoints(run: AnalysedRun) -> tuple[CheckpointState, ...]:
    if not run.log.checkpoints:
        raise NotJudged("no checkpoint lies beside the log")
    return run.log.checkpoints


_ITEMS: tuple[tuple[str, tuple[str, str, str, Callable[[AnalysedRun], Answer]]], ...] = (
    ("V04", ("loss_falls", "start", "The training loss falls", _loss_falls)),
    ("V14", ("rate_rises", "start", "The learning rate rises in its warm-up", _rate_rises)),
    ("V10", ("gradient_in_range", "start", "The gradient norm is between 0.1 and 10", _gradient_in_range)),
    ("V19", ("time_stable", "start", "The step time is stable", _time_stable)),
    ("V24", ("device_busy", "start", "The devices are busy more than 80 % of the time", _device_busy)),
    ("V25", ("no_crash", "start", "No NCCL timeout, not out of memory", _no_crash)),
    ("V16", ("val_not_rising", "checkpoint", "The validation loss does not keep rising", _val_not_rising)),
    ("V27", ("checkpoints_whole", "checkpoint", "All files are there, the export among them", _export_complete)),
    ("V27", ("checkpoint_sizes", "checkpoint", "Sizes are plausible", _sizes)),
    ("V27", ("tracker_file", "checkpoint", "The tracker file names the newest", _tracker)),
    ("V28", ("all_steps", "end", "All planned steps were trained", _all_steps)),
    ("V08", ("final_loss", "end", "The final training loss is in the usual range", _final_loss)),
    ("V27", ("all_checkpoints", "end", "All expected checkpoints were saved", _all_checkpoints)),
    ("V28", ("finished", "end", "The run ended as finished", _finished)),
)
"""The rule that judges it; then id, phase, text and check."""


def checklist(run: AnalysedRun, findings: tuple[Finding, ...]) -> tuple[CheckItem, ...]:
    """All fourteen lines. One that its rule finds no fault in does not fail: what is merely unusual is a note."""
    faulty = {finding.rule for finding in findings if finding.level in ("warn", "fail")}
    return tuple(_item(run, *entry, is_fault=rule in faulty) for rule, entry in _ITEMS)


def _item(
    run: AnalysedRun, id_: str, phase: str, text: str, check: Callable[[AnalysedRun], Answer], *, is_fault: bool
) -> CheckItem:
    if check in (_gradient_in_range, _final_loss) and run.profile != "sft":
        return CheckItem(id_, phase, text, "unknown", f"no usual range for a {run.profile} run")
    try:
        has_passed, detail = check(run)
    except NotJudged as reason:
        return CheckItem(id_, phase, text, "unknown", str(reason))
    return CheckItem(id_, phase, text, "pass" if has_passed else "fail" if is_fault else "note", detail)
