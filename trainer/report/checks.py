"""How checks are written: a function that looks at a run and yields findings, in plain sentences.

A check names the role whose series it is given, without which it cannot be judged, and the profiles
it applies to. It yields `fail`, `warn`, `note` and `info`. Each row of `bands.py` is a check too. Of
two findings with one id the first counts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from trainer.report.advice import advise
from trainer.report.analysed_run import AnalysedRun, NotJudged
from trainer.report.bands import BANDS, MOVES, Band, Move
from trainer.report.formatting import number, step
from trainer.report.result import Finding
from trainer.report.run_log import Series
from trainer.report.shapes import beyond, shift
from trainer.report.statistics import within

START_STEPS = 100
"""The start of a run, for trends and checklists."""
NUM_ENDS = 10
"""Points whose median stands for the start or the end of a curve."""


def _found(
    level: str,
    title: str,
    *,
    id: str = "",
    metric: str | None = None,
    steps: tuple[int, int] | None = None,
    value: float | None = None,
    limit: float | None = None,
    evidence: Sequence[str] = (),
    cause: str = "",
    remedy: Sequence[str] = (),
) -> Finding:
    """Return a finding whose remedy is still by names of `ADVICE`, which `judged` resolves."""
    value = None if value is None else float(value)
    told = tuple(filter(None, evidence))
    reasons = tuple(remedy)
    return Finding(id, "", level, title, metric, steps, value, limit, told, cause, "", reasons)


fail, warn, note, info = (partial(_found, level) for level in ("fail", "warn", "note", "info"))


@dataclass(frozen=True)
class Check:
    """A check by its name."""

    name: str
    needs: tuple[str, ...]
    profiles: tuple[str, ...]
    function: Callable[..., Iterator[Finding]]


CHECKS: list[Check] = []


def finding(
    name: str, *needs: str, profile: Sequence[str] = ()
) -> Callable[[Callable[..., Iterator[Finding]]], Callable[..., Iterator[Finding]]]:
    """Declare a check, which is called with the run and the series of the roles that it needs."""

    def declared(function: Callable[..., Iterator[Finding]]) -> Callable[..., Iterator[Finding]]:
        CHECKS.append(Check(name, needs, tuple(profile), function))
        return function

    return declared


@dataclass(frozen=True)
class Judged:
    """What one check found."""

    check: Check
    findings: tuple[Finding, ...]
    not_judged: str = ""
    """Why not, or why no further."""


def judged(check: Check, run: AnalysedRun) -> Judged:
    found: dict[str, Finding] = {}
    reason = ""
    try:
        if check.profiles and run.profile not in check.profiles:
            raise NotJudged(f"applies to {' and '.join(check.profiles)} runs")
        for one in check.function(run, *(run.get(role) for role in check.needs)):
            complete = _complete(check, one, run)
            found.setdefault(complete.id, complete)
    except NotJudged as lacking:
        reason = str(lacking)
    return Judged(check, tuple(found.values()), reason)


def _complete(check: Check, found: Finding, run: AnalysedRun) -> Finding:
    """Return a finding with its id, its rule, its metric, and the sentences of its remedy."""
    advice = [advise(run, name) for name in found.reasons]
    return replace(
        found,
        id=f"{check.name}:{found.id}" if found.id else check.name,
        rule=check.name.partition(":")[0],
        metric=found.metric or (run.name(check.needs[0]) if check.needs else None),
        cause=found.cause.strip(),
        remedy=" ".join(sentence for sentence, _ in advice),
        reasons=tuple(why for _, why in advice if why),
    )


def _outside(band: Band, run: AnalysedRun, _: Series) -> Iterator[Finding]:
    """Hold a metric against one row of the bands."""
    series = run.judged(band.role)
    if band.role in ("loss", "val_loss") and not run.is_pretrained:
        raise NotJudged("no usual range for a model trained from random weights")
    # an open side has no limit: a name may be that of another row
    low, high = (
        run.limits[band.limit(side)] if np.isfinite(limit) else limit
        for side, limit in (("low", band.low), ("high", band.high))
    )
    parts = {
        "all": series,
        "start": within(series, 0, START_STEPS),
        "first": series[:NUM_ENDS] if series.steps[0] <= START_STEPS else series[:0],
        "last": series[-1:] if band.role == "val_loss" else series[-NUM_ENDS:],
    }
    part = parts[band.part]
    of = np.mean if band.by == "mean" else np.median
    width = 1 if band.by == "point" else band.width
    if band.part in ("first", "last"):
        width = len(part)
    found = beyond(part, low=low, high=high, width=width, of=of)
    if found is None or len(part) < band.width:
        return
    limit = high if found.is_high else low
    told, where = found.level, f" from step {step(found.steps[0])} on"
    if band.by == "point":
        told = float(part.values.max())
        where = f" at step {step(int(part.steps[np.argmax(part.values)]))}"
    elif band.part in ("first", "last"):
        where = ""
    usual = f"{'at most' if found.is_high else 'at least'} {number(limit)}"
    if np.isfinite([low, high]).all():
        usual = f"{number(low)} to {number(high)}"
    yield _found(
        band.level,
        f"{band.what} is {number(told)}{where}; {usual} is usual.",
        metric=run.name(band.role),
        steps=found.steps,
        value=told,
        limit=limit,
        evidence=[run.facts["max_length"]] if band.role == "truncated" else [],
        cause=band.cause.format_map(run.options),
        remedy=band.remedy,
    )


def _moved(move: Move, run: AnalysedRun, _: Series) -> Iterator[Finding]:
    """Look for one of the moves."""
    points = run.judged(move.role)
    found = shift(points, sign=move.sign, ratio=move.ratio)
    if found is None or not found.is_lasting or len(within(points, *found.steps)) < move.least:
        return
    if move.is_sudden and not _is_sudden(points, found.steps[0], move.ratio):
        return
    yield _found(
        move.level,
        f"{run.name(move.role)} went from {number(found.before)} to {number(found.after)} after "
        f"step {step(found.at)}: {move.what}.",
        steps=(found.at, found.steps[1]),
        value=found.after,
        cause=move.cause,
        remedy=[text.replace("{checkpoint}", run.checkpoint(found.at)) for text in move.remedy],
    )


def _is_sudden(points: Series, onset: int, ratio: float) -> bool:
    """Return whether most of a change by a ratio happens within a few points."""
    at, few = int(np.searchsorted(points.steps, onset)), 5
    before = np.median(points.values[max(0, at - few) : at + 1])
    after = np.median(points.values[min(at + few, len(points) - 1) :][: few + 1])
    return abs(np.log(after / before)) > 0.9 * np.log(ratio)


for band in BANDS:
    CHECKS.append(Check(band.id, (band.role,), band.profiles, partial(_outside, band)))
for move in MOVES:
    CHECKS.append(Check(move.id, (move.role,), move.profiles, partial(_moved, move)))
