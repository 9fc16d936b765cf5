"""V01, V02, V03, V05, V07 and V08: what the loss should never do, and where it begins and ends."""

import math
from collections.abc import Iterator

import numpy as np

from trainer.report import remedies
from trainer.report.analysed_run import AnalysedRun, NotJudged, steps_of
from trainer.report.anomalies import is_of
from trainer.report.causes import is_led_by_rate
from trainer.report.judge import Rule, found
from trainer.report.result import Anomaly, Finding, Mover
from trainer.report.run_log import Series
from trainer.report.sentence_parts import counted, listed, number, span
from trainer.report.statistics import longest_run, mann_kendall, noise

FIRST, LAST = 10, 10
"""Points whose median stands for the start and the end of a curve."""
MAX_WINDOWS = 20_000
NUM_SIGMA = 4
HIDING = ("transformers", "llama-factory", "ms-swift")
"""Trainers that by default log the running mean in place of a NaN loss."""


def _nonfinite(run: AnalysedRun) -> Iterator[Finding]:
    key = run.name("loss")
    series = run.log.series.get(key)
    if series is None:
        raise NotJudged(f"the log has no {key}")
    steps = series.steps[~np.isfinite(series.values)]
    counter = run.log.series.get("train/nonfinite")
    if counter is not None:
        steps = np.union1d(steps, counter.steps[counter.values > 0])
    gradient = run.log.series.get(run.name("grad"))
    bad_norms = gradient.steps[~np.isfinite(gradient.values)] if gradient is not None else np.array([], np.int64)
    if len(all_steps := np.union1d(steps, bad_norms)) == 0:
        return
    hides = run.log.source in HIDING
    hint = ("This framework may log the running mean in place of a NaN loss: the norm shows it.",) if hides else ()
    yield found(
        "fail",
        f"{counted(len(all_steps), 'step')} with a loss or gradient that is not a number, first at {all_steps[0]}.",
        metric=key if len(steps) else run.name("grad"),
        steps=(int(all_steps[0]), int(all_steps[-1])),
        value=float(len(all_steps)),
        threshold=0.0,
        evidence=(f"steps {listed(str(step) for step in all_steps.tolist())}", *hint),
        cause="Overflow in 16 bit numbers, a learning rate too high, or a sample that breaks the model.",
        remedy=f"{remedies.lower_rate(run)} {remedies.clip(run)} Look at the batch of step {all_steps[0]}.",
    )


def _zero(run: AnalysedRun) -> Iterator[Finding]:
    series = run.get("loss")
    zeros = series.values == 0
    count = int(zeros.sum())
    if count >= run.limits["zero_points"]:
        start, stop = longest_run(zeros)
        if run.profile == "controller":
            cause = "No effective groups: where all rewards of a group are equal, its advantages are 0."
            remedy = f"Check that a group holds several answers to one prompt. {remedies.larger_group(run)}"
        else:
            cause = "No label token in the batches: wrong chat template or mask, or samples cut before the answer."
            remedy = f"Look at the labels of a batch, and at {remedies.option(run, 'max_length')} and the truncation."
        yield found(
            "fail",
            f"The loss is exactly 0 at {counted(count, 'point')}: nothing was learnt there.",
            metric=run.name("loss"),
            steps=steps_of(series, start, stop),
            value=float(count),
            threshold=run.limits["zero_points"],
            evidence=(f"longest stretch: {span(steps_of(series, start, stop))}",),
            cause=cause,
            remedy=remedy,
        )


def _start_high(run: AnalysedRun) -> Iterator[Finding]:
    series = run.get("loss")
    if series.steps[0] > run.limits["first_steps"]:
        raise NotJudged(f"the log begins at step {series.steps[0]}")
    run.require_pretrained()
    level = float(np.median(series.values[:FIRST]))
    low, high, fault = (run.limits[f"loss_start_{name}"] for name in ("low", "high", "fault"))
    if low <= level <= high:
        return
    is_fault = level > fault
    yield found(
        "warn" if is_fault else "note",
        f"The loss starts at {number(level)}; {number(low)} to {number(high)} is usual for a pretrained model.",
        metric=run.name("loss"),
        steps=steps_of(series, 0, min(FIRST, len(series))),
        value=level,
        threshold=fault if is_fault else (high if level > high else low),
        cause="Data and model do not fit: wrong tokenizer or chat template, untrained weights." if is_fault else "",
        remedy="Read a tokenized sample back, and check which weights were loaded." if is_fault else "",
    )


def _diverging(run: AnalysedRun) -> Iterator[Finding]:
    series = run.get("loss")
    episode = _divergence(run, series)
    if episode is not None:
        onset, stop, ratio = episode
        is_over = stop < len(series)
        yield found(
            "warn" if is_over else "fail",
            f"The loss rose to {number(ratio)} times its best level from step {series.steps[onset]}"
            + (
                f" and fell below {number(run.limits['diverging_ratio'])} times it after step {series.steps[stop - 1]}."
                if is_over
                else " and did not come back."
            ),
            metric=run.name("loss"),
            steps=steps_of(series, onset, stop),
            value=ratio,
            threshold=run.limits["diverging_ratio"],
            cause="The updates are too large: learning rate too high, gradient not clipped, or bad data from there on.",
            remedy=f"Go back to {remedies.checkpoint(run, int(series.steps[onset]))}. {remedies.lower_rate(run)} "
            + remedies.clip(run),
        )
    yield from _rising_epochs(run)


def _divergence(run: AnalysedRun, series: Series) -> tuple[int, int, float] | None:
    """(onset, end, ratio) of the longest stretch in which the recent median lies far above the best one so far."""
    if len(series) < 128 or np.median(series.values) <= 0:
        return None
    stride = max(1, len(series) // MAX_WINDOWS)
    recent = _rolling_median(series.values, 32, stride)
    best = np.minimum.accumulate(_rolling_median(series.values, 64, stride))
    ends = np.arange(len(recent)) * stride + 32
    best_before = best[((ends - 96) // stride).clip(min=0)]
    is_high = (recent > run.limits["diverging_ratio"] * best_before) & (ends >= 96) & (best_before > 0)
    chance = NUM_SIGMA * 1.25 * noise(series) / math.sqrt(32)  # a median of 32 points strays by this without any cause
    is_high &= recent - best_before > max(run.limits["diverging_rise"], chance)
    start, stop = longest_run(is_high)
    if (stop - start) * stride < run.limits["diverging_points"]:
        return None
    is_to_the_end = stop == len(recent)
    ratio = float((recent[start:stop] / best_before[start:stop]).max())
    # the last window at the best level: a rise is certain only long after it has begun
    at_best = np.flatnonzero(recent[: start + 1] <= best_before[start] + chance / NUM_SIGMA)
    onset = int(ends[at_best[-1]]) - 32 if len(at_best) else int(ends[start]) - 32
    return onset, len(series) if is_to_the_end else int(ends[stop - 1]), ratio


def _rolling_median(values: np.ndarray, width: int, stride: int) -> np.ndarray:
    windows = np.lib.stride_tricks.sliding_window_view(values, width)[::stride]
    return np.asarray(np.median(windows, axis=1))


def _rising_epochs(run: AnalysedRun) -> Iterator[Finding]:
    """The stop rule on epoch means (S1.34)."""
    if run.profile != "controller" and run.find("epoch") is None:
        return
    means = run.epochs("loss")
    needed = int(run.limits["rising_epochs"]) + 1
    if len(means) < needed or (run.profile != "controller" and len(means) == 50):
        return
    last = Series(means.steps[-needed:], means.values[-needed:])
    z, p = mann_kendall(last.values)
    rise = float(last.values[-1] - last.values[0])
    if z > 0 and p < run.limits["rising_p"] and rise > 3 * noise(means) / math.sqrt(2):
        yield found(
            "fail",
            f"The loss has been rising for more than {needed - 1} epochs, by {number(rise)}: stop or change course.",
            metric=run.name("loss"),
            steps=steps_of(last, 0, len(last)),
            value=rise,
            threshold=run.limits["rising_epochs"],
            cause="Training diverges.",
            remedy=f"Stop, go back to {remedies.checkpoint(run, int(last.steps[0]))}. {remedies.lower_rate(run)}",
            suffix="epochs",
        )


def _spike(run: AnalysedRun) -> Iterator[Finding]:
    spikes = [a for a in run.anomalies if is_of(a, "loss")]
    if not spikes:
        return
    worst = max(spikes, key=lambda a: _mover_of_loss(a).peak_value)
    peak = _mover_of_loss(worst)
    level = abs(float(np.median(run.get("loss").values)))
    is_extreme = level > 0 and peak.peak_value > run.limits["loss_extreme"] * level
    recovered = sum(a.has_recovered for a in spikes)
    is_led = all(is_led_by_rate(a) for a in spikes)
    yield found(
        "warn",
        f"{counted(len(spikes), 'loss spike')}, the highest {number(peak.peak_value)} at step {peak.peak_step}"
        + (f", {number(peak.peak_value / level)} times the usual loss." if is_extreme else "."),
        metric=run.name("loss"),
        steps=(spikes[0].steps[0], spikes[-1].steps[1]),
        value=peak.z,
        threshold=run.limits["loss_z" if peak.z > run.limits["loss_z"] else "metric_z"],
        evidence=(
            f"at {listed(f'{a.peak_step} ({a.percent:.1f} %)' for a in spikes)}",
            f"{recovered} of {len(spikes)} went back to the usual level",
        ),
        cause="The learning rate jumped first."
        if is_led
        else "Updates or batches that throw the model off; see what moved along.",
        remedy=remedies.watch(run)
        if is_led
        else f"{remedies.clip(run)} {remedies.larger_batch(run)} {remedies.watch(run)}",
    )


def _mover_of_loss(anomaly: Anomaly) -> Mover:
    return next(mover for mover in anomaly.movers if mover.metric in ("train/loss", "loss"))


def _final(run: AnalysedRun) -> Iterator[Finding]:
    series = run.get("loss")
    run.require_pretrained()
    level = float(np.median(series.values[-LAST:]))
    low, high, memorised = (run.limits[f"loss_final_{name}"] for name in ("low", "high", "memorised"))
    if low <= level <= high:
        return
    is_memorised = level < memorised
    yield found(
        "warn" if is_memorised else "note",
        f"The loss ends at {number(level)}: the samples are probably known by heart."
        if is_memorised
        else f"The loss ends at {number(level)}; {number(low)} to {number(high)} is usual.",
        metric=run.name("loss"),
        steps=steps_of(series, max(0, len(series) - LAST), len(series)),
        value=level,
        threshold=memorised if is_memorised else (high if level > high else low),
        cause="Too many passes over too few samples." if is_memorised else "",
        remedy=f"Fewer {remedies.option(run, 'epochs')}, more data, an earlier checkpoint." if is_memorised else "",
    )


RULES = (
    Rule("V01", "loss_nonfinite", _nonfinite),
    Rule("V02", "loss_zero", _zero, ("loss",), ("sft", "controller")),
    Rule("V03", "loss_start_high", _start_high, ("loss",), ("sft",)),
    Rule("V05", "loss_diverging", _diverging, ("loss",)),
    Rule("V07", "loss_spike", _spike, ("loss",)),
    Rule("V08", "loss_final", _final, ("loss",), ("sft",)),
)
