"""What is measured of a policy: lengths, distance, entropy, rewards, accuracy, latency and budget."""

import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from trainer.report.analysed_run import AnalysedRun, NotJudged
from trainer.report.formatting import interval, listed, number
from trainer.report.measures import Measure, going_wrong
from trainer.report.result import Anomaly, Mover
from trainer.report.statistics import bins, onset, rolling_median, slope
from trainer.report.vocabulary import meaning
from trainer.report.words import moved_along, story

CAP_SHARE = 0.97
"""A longest answer within 3 % of the cap has reached it."""
MIN_HITS = 3
"""Answers that reach the cap by chance are fewer."""
MIN_RISE = 1e-9
NUM_SMOOTH = 3
"""Points whose median stands for the present length of a generating policy."""
BANDS = {"reward": (-0.5, 0.0, 0.3), "accuracy": (0.0, 0.1, 0.2)}
"""What epochs 1-10, 11-20 and 21-30 of a controller reach: rewards about that, accuracies at least."""
MIN_EPOCHS = 8
_FORMAT = re.compile(r"format|tag", re.IGNORECASE)


def length_shift(run: AnalysedRun) -> Iterator[Measure]:
    """The present median against that of the 50 steps before."""
    series = run.get("mean_length")
    width = int(np.searchsorted(series.steps, series.steps[0] + run.limits["length_steps"]))
    smooth = NUM_SMOOTH if run.profile == "grpo" else width
    if width < NUM_SMOOTH or len(series) < 2 * width + smooth:
        raise NotJudged("too few points of length")
    stride = max(1, len(series) // 20_000)
    before = rolling_median(series.values[:-smooth], width, stride)
    after = rolling_median(series.values[width:], smooth, stride)
    change = after / np.maximum(before, MIN_RISE) - 1
    worst = int(np.argmax(np.abs(change)))
    size = float(change[worst])
    if abs(size) > run.limits["length_shift"]:
        at = width + worst * stride
        words = {"size": abs(size), "width": width, "before": before[worst], "after": after[worst]}
        words["at"] = series.steps[at]
        yield Measure("main" if size > 0 else "shorter", size, series[at : at + smooth].ends, words)


def left_reference(run: AnalysedRun) -> Iterator[Measure]:
    """Far from the reference, since it began to move by factors, with the intervals in which the policy left it."""
    series, name = run.get("kl"), run.name("kl")
    above = series[series.values > run.limits["kl_fault"]]
    if not len(above):
        return
    values = series.values[: int(np.searchsorted(series.steps, above.steps[0])) + 1]
    left = onset(np.log(values) if values.min() > 0 else values, 0, len(values))
    bursts = [a for a in run.anomalies if any(m.metric == name for m in a.movers)]
    told = (story(run.anomalies), *(f"{interval(a.steps)} ({a.percent:.1f} %): {moved_along(a)}" for a in bursts[:10]))
    words = {"at": above.steps[np.argmax(above.values)], "times": max(1, len(bursts))}
    steps = int(series.steps[left]), above.ends[1]
    yield Measure(value=float(above.values.max()), steps=steps, words=words, evidence=tuple(filter(None, told)))


def cut_answers(run: AnalysedRun) -> Iterator[Measure]:
    """Answers cut off at the length limit, and the longest that reach it; a limit not told is a length met often."""
    ratios, lengths, cap = run.find("clipped_ratio"), run.find("max_length"), run.setting("completion")
    if ratios is None and lengths is None:
        raise NotJudged("the log has neither lengths nor shares of answers that were cut off")
    if lengths is None:
        return
    if not isinstance(cap, int | float):
        top = lengths.values.max()
        cap = top if np.count_nonzero(lengths.values == top) >= MIN_HITS else np.inf
    is_hit = lengths.values >= CAP_SHARE * cap
    if (count := np.count_nonzero(is_hit)) >= MIN_HITS:
        share = count / len(lengths)
        row = "cap" if share > run.limits["cap_share"] else "cap_at_times"
        steps = lengths.steps[is_hit].tolist()
        words = {"cap": float(cap), "count": count, "first": steps[0], "all": steps}
        yield Measure(row, share, (steps[0], steps[-1]), words)


def reward_drops(run: AnalysedRun) -> Iterator[Measure]:
    """Rewards that more than halved in an interval of instability, with what moved in phase."""
    fallen = {a: [m for m in a.movers if _has_halved(run, m)] for a in run.anomalies}
    drops = {anomaly: movers for anomaly, movers in fallen.items() if movers}
    if not drops:
        return
    anomaly, deepest = min(((a, m) for a, movers in drops.items() for m in movers), key=lambda pair: pair[1].z)
    is_told = bool(anomaly.chain) and meaning(anomaly.chain[0]).group != "reward"
    words = {
        "count": len(drops),
        "metrics": list(dict.fromkeys(mover.metric for movers in drops.values() for mover in movers)),
        "lead": f" It began with {anomaly.chain[0]}." if is_told else "",
    }
    intervals = [a.steps for a in drops]
    steps = intervals[0][0], intervals[-1][1]
    lines = tuple(_drop_line(*drop) for drop in drops.items())[:10]
    yield Measure(value=deepest.peak_value, steps=steps, words=words, evidence=lines, metric=deepest.metric)


def _drop_line(anomaly: Anomaly, fallen: list[Mover]) -> str:
    fell = listed(f"{mover.metric} down to {number(mover.peak_value)}" for mover in fallen)
    rose = listed(mover.metric for mover in anomaly.movers if mover.sign > 0)
    return f"{interval(anomaly.steps)}: {fell}, in phase with {rose}"


def _has_halved(run: AnalysedRun, mover: Mover) -> bool:
    if mover.sign > 0 or meaning(mover.metric).group != "reward":
        return False
    values = run.log.series[mover.metric].values
    usual = float(np.median(values[np.isfinite(values)]))
    return usual > 0 and mover.peak_value < (1 - run.limits["reward_drop"]) * usual


def rewards(run: AnalysedRun) -> Iterator[Measure]:
    """Whether rewards rise from epoch to epoch, have been falling, or never became positive."""
    means = run.epochs("reward")
    if len(means) < MIN_EPOCHS:
        raise NotJudged(f"{len(means)} epochs of reward, {MIN_EPOCHS} are needed")
    yield from going_wrong(run, "reward", "falling", good=1)
    trend, highest = slope(means), float(means.values.max())
    is_rising = trend.is_rising(run.limits["trend_p"])
    yield Measure("flat", trend.p_value, means.ends, {"level": trend.level}, is_fault=not is_rising)
    yield Measure("rising" if is_rising else "negative", highest, is_fault=highest < 0)


def format_hacking(run: AnalysedRun) -> Iterator[Measure]:
    forms = [key for key in run.log.series if _FORMAT.search(key) and "reward" in key.lower()]
    right = run.find("correct") or run.find("accuracy")
    if not forms or right is None:
        raise NotJudged("the log has no format reward beside one for being right")
    p, truth = run.limits["trend_p"], slope(right)
    for key in forms:
        form = slope(run.log.series[key])
        if not truth.is_rising(p) and form.is_rising(p) and form.relative_change > run.limits["reward_flat"]:
            yield Measure(value=form.change, metric=key)


def accuracy(run: AnalysedRun) -> Iterator[Measure]:
    series, limits = run.get("accuracy"), run.limits
    if len(series) >= limits["min_epochs"] and not slope(series).is_rising(limits["trend_p"]):
        yield Measure("flat", float(series.values[-1]), series.ends)
    if below := tuple(_below_the_bands(run)):
        yield Measure("bands", words={"worst": below[0]}, evidence=below)


def _below_the_bands(run: AnalysedRun) -> Iterator[str]:
    """What is lower than usual in epochs 1 to 30: worth a note, not more."""
    for role, levels in BANDS.items():
        series = run.find(role)
        for (first, last), level in zip(pairwise((0, 10, 20, 30)), levels, strict=True):
            part = series.values[(series.steps > first) & (series.steps <= last)] if series is not None else ()
            if len(part) >= 5 and (mean := float(np.mean(part))) < level - 0.25 * (role == "reward"):
                yield f"{run.name(role)} {number(mean)} in epochs {first + 1} to {last}"


def budget(run: AnalysedRun) -> Iterator[Measure]:
    """Answers that miss the latency budget, and the latency at the end."""
    violations, latency, limits = run.find("violation"), run.find("latency"), run.limits
    if violations is None and latency is None:
        raise NotJudged("the log has neither latency nor budget violations")
    if violations is not None:
        last = float(violations.values[-5:].mean())
        if len(violations) >= limits["min_epochs"] and last >= limits["violation_final_note"]:
            is_high, is_falling = (
                last >= limits["violation_final_warn"],
                slope(violations).is_falling(limits["trend_p"]),
            )
            limit = limits["violation_final_warn" if is_high else "violation_final_note"]
            words = {"falling": "; it is falling" if is_falling else ""}
            yield Measure("final" if is_high and not is_falling else "near", last, words=words, limit=limit)
    given = limits["latency_budget"] or run.config("latency_budget", "budget_ms", "latency_budget_ms", "budget")
    if latency is not None and isinstance(given, int | float):
        level = float(bins(latency).values[-10:].mean())
        if level > given:
            yield Measure("latency", level, limit=float(given))
