"""Checks of a policy: its KL to the reference, drops of its rewards, and format hacking."""

import re
from collections.abc import Mapping

import numpy as np

from trainer.tools.report.analysed_run import AnalysedRun, NotJudged
from trainer.tools.report.checks import (
    MAX_EVIDENCE,
    Findings,
    fail,
    finding,
    warn,
)
from trainer.tools.report.formatting import counted, interval, listed, number
from trainer.tools.report.result import Mover
from trainer.tools.report.run_log import Series
from trainer.tools.report.shapes import began, has_risen, onset, shift
from trainer.tools.report.statistics import finite, rolling, slope
from trainer.tools.report.vocabulary import meaning
from trainer.tools.report.words import how_common, moved_along, story, why_recovered

KL_FAR = 10
KL_EXPLODED = 1
EXPLOSION = 20
"""A KL above the first value is too high. A KL that has grown by the third value since half as many
steps is too high above the second value.
"""
_FORMAT = re.compile(r"(?!.*std$)((format|tag).*reward|reward.*(format|tag))", re.IGNORECASE)

_PART = re.compile(r"(train/)?(rewards/.+|reward_.+)(?<!std)")
_SILENT = re.compile(
    "total|chosen|rejected|margin|format|tag|len|brev|concis|penalty|repet", re.IGNORECASE
)
"""Parts of a reward, and parts whose fall is not a fault: sums, preferences, forms and lengths."""


@finding("kl", "kl")
def left_reference(run: AnalysedRun, kl: Series) -> Findings:
    """Find a KL far above the healthy range. The finding starts at the step where the KL began to leave its trend."""
    # a healthy KL grows with the steps, so it shows early if a small one explodes
    levels = np.median(rolling(np.pad(kl.values, 1, mode="edge"), 3, 1), axis=1)
    halfway = np.interp(kl.steps / 2, kl.steps, levels)
    has_exploded = levels > np.maximum(EXPLOSION * halfway, KL_EXPLODED)
    far = kl[(kl.values > KL_FAR) | has_exploded]
    if not far:
        return
    met = list(run.moved("kl"))
    # the few points after the first far one distinguish a jump from a ramp
    values = kl.values[: int(np.searchsorted(kl.steps, far.steps[0])) + 5]
    # a healthy KL grows fast in the first steps
    first = int(np.searchsorted(kl.steps, far.steps[0] / 4))
    start = onset(np.log(values) if values.min() > 0 else values, first=first)
    peak = np.argmax(far.values)
    yield fail(
        f"The policy left its reference {counted(max(1, len(met)), 'time')}: KL up to "
        f"{number(far.values[peak])} at step {far.steps[peak]}; 0.01 to 5 is healthy.",
        steps=(kl.steps[start], far.steps[-1]),
        evidence=[
            story(run.anomalies),
            *(f"{interval(a.steps)}: {moved_along(a)}" for a in met[:MAX_EVIDENCE]),
            f"median {number(np.median(kl.values))}; {run.quoted('beta')}",
        ],
        cause="The policy has moved far from its reference. Its texts change, and lengths, format, "
        f"gradient and loss follow. {why_recovered(run)} {how_common(run)}",
        reason="left",
    )


@finding("reward_drop", "reward", profiles="grpo")
def reward_drops(run: AnalysedRun, _: Series) -> Findings:
    """Find rewards that more than halved in an anomaly, and the metrics that moved with them."""
    fallen = {
        mover: anomaly
        for anomaly in run.anomalies
        for mover in anomaly.movers
        if meaning(mover.metric).group == "reward" and _has_halved(run.log.series, mover)
    }
    if not fallen:
        return
    drops = list(dict.fromkeys(fallen.values()))
    yield warn(
        f"Rewards fell by more than half in {counted(len(drops), 'interval')}: "
        f"{listed(dict.fromkeys(mover.metric for mover in fallen))}.",
        metric=min(fallen, key=lambda mover: mover.z).metric,
        steps=(drops[0].steps[0], drops[-1].steps[1]),
        evidence=[
            f"{interval(one.steps)}, in phase: {moved_along(one)}" for one in drops[:MAX_EVIDENCE]
        ],
        reason="broken",
    )


def _has_halved(series: Mapping[str, Series], mover: Mover) -> bool:
    """Return True if a metric fell below half its usual level."""
    usual = float(np.nanmedian(series[mover.metric].values))
    return mover.sign < 0 < usual and mover.peak_value < 0.5 * usual


@finding("reward_hacking")
def format_hacking(run: AnalysedRun) -> Findings:
    """Find a format reward that rises while the share of correct answers does not."""
    forms = [key for key in run.log.series if _FORMAT.search(key)]
    right = run.find("correct") or run.find("accuracy")
    if not forms or not right:
        raise NotJudged("the log lacks a format reward or the share of correct answers")
    for key in forms:
        values = finite(run.log.series[key])
        form = slope(values)
        if form.sign > 0 and form.relative_change > 0.05 and not has_risen(right):
            yield warn(
                f"{key} rises by {number(form.change)} while the share of correct answers does not.",
                id=key,
                metric=key,
                steps=(began(values), values.steps[-1]),
                reason="hacking",
            )


@finding("reward_hacking:part", "reward", profiles="grpo")
def lost_parts(run: AnalysedRun, rewards: Series) -> Findings:
    """Find parts of the reward that fall permanently while the reward does not."""
    whole = shift(rewards, sign=-1)
    if whole and whole.is_lasting:
        return
    for key, series in run.log.series.items():
        is_part = _PART.fullmatch(key) and not _SILENT.search(key)
        fall = shift(finite(series), sign=-1) if is_part else None
        if fall and fall.is_lasting:
            yield warn(
                f"{key} went from {number(fall.before)} to {number(fall.after)} after step "
                f"{fall.at}, while the reward did not fall.",
                id=key,
                metric=key,
                steps=fall.steps,
                reason="unrewarded",
            )
