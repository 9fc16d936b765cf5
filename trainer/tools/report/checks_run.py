"""Checks of the run as a whole: its checkpoints, its end, its exports, the guard's actions, and the
amount of logged data.
"""

import numpy as np

from trainer.checkpoint.layout import is_export
from trainer.tools.report.analysed_run import AnalysedRun, NotJudged
from trainer.tools.report.checks import Findings, fail, finding, info, note, warn
from trainer.tools.report.formatting import counted, listed, number

MIN_POINTS = 100
MIN_EPOCHS = 20
"""The number of points, or of epochs for a controller, that a verdict needs."""
WARNED = ("guard/severe", "guard/diverging", "guard/dead")
"""Kinds of events in which the guard warns about a step."""


@finding("ckpt_complete")
def checkpoints(run: AnalysedRun) -> Findings:
    """Find damaged checkpoints."""
    if not run.log.checkpoints:
        raise NotJudged("the log has no checkpoints next to it")
    for state in run.log.checkpoints:
        if not state.faults:
            continue
        what = "export" if all(map(is_export, state.faults)) else "checkpoint"
        yield fail(
            f"The {what} of step {state.step} is not complete.",
            reason=f"damaged_{what}",
            id=f"step-{state.step}",
            steps=(state.step, state.step),
            evidence=(*state.faults, str(state.path)),
        )


@finding("ckpt_complete:missing")
def missing_checkpoints(run: AnalysedRun) -> Findings:
    """Find steps whose checkpoint was due but does not exist.

    If the log says that a checkpoint was saved, it does not count as missing: it was removed later,
    by `prune` or because the run continued from a mirror, which keeps only a few. Checkpoints older
    than the oldest existing one were rotated away. The logs of other trainers do not record saves.
    In them, every checkpoint older than the newest may have been rotated away, because rotation may
    keep only the newest and the best.
    """
    every = int(run.amount("save") or 0)
    existing = {state.step for state in run.log.checkpoints}
    if not every or not existing:
        raise NotJudged("the save cadence is not known, or the log has no checkpoints next to it")
    known = existing | {event.step for event in run.log.events if event.kind == "checkpoint"}
    since = min(existing) if run.log.source == "fsdp-sft" else max(existing)
    due = {at for at in range(every, run.last_step + 1, every) if at > since}
    # in a log with a row for every step, a missing row means that the step was skipped
    steps = run.find("loss").steps
    if len(steps) > 1 and np.median(np.diff(steps)) == 1:
        due.intersection_update(steps.tolist())
    if missing := sorted(due - known):
        yield fail(
            f"The run saves every {every} steps, but has no checkpoint of "
            f"{listed(f'step {at}' for at in missing)}.",
            steps=(missing[0], missing[-1]),
            reason="missing",
        )


@finding("run_complete:steps")
def completeness(run: AnalysedRun) -> Findings:
    """Find planned steps that were not trained. The finding is only informational if the run is still
    training or stopped early as configured. The logs of other trainers do not say whether a run has
    ended.
    """
    log = run.log
    planned = log.total_steps
    if planned is None:
        raise NotJudged("the planned number of steps is not known")
    if run.last_step >= planned:
        return
    stops = [event.message for event in log.events if event.kind == "early_stop"]
    why = " and is still running" if log.is_running else ""
    if stops and log.exit_code == 0:
        why = f"because it was stopped early: {stops[-1]}"
    level = warn if log.source == "fsdp-sft" else note
    yield (info if why else level)(
        f"The run has completed {run.last_step} of {planned} steps ({run.last_step / planned:.1%}){why}.",
        steps=(run.last_step, run.last_step),
        reason="none" if why else "unfinished",
    )


@finding("run_complete")
def ending(run: AnalysedRun) -> Findings:
    """Check whether the last attempt ended with an error."""
    log = run.log
    if log.exit_code is None:
        raise NotJudged("the log has no end event")
    if log.exit_code:
        errors = [str(event) for event in log.events if event.level == "error"]
        yield warn(
            f"The last attempt ended with exit code {log.exit_code}.",
            id="exit",
            evidence=errors[-3:],
            reason="failed",
        )


@finding("serving")
def serving(run: AnalysedRun) -> Findings:
    """Find exports whose served loss differs from their validation loss."""
    for proof in run.log.proofs:
        if not proof.is_equal:
            yield fail(
                f"The export of step {proof.step} does not reproduce its validation loss when "
                f"served: "
                f"{'; '.join(proof.causes)}.",
                id=str(proof.step),
                steps=(proof.step, proof.step),
                evidence=[
                    f"{proof.engine} serves it with a loss of {number(proof.served_loss)}, but "
                    f"val/loss was {number(proof.val_loss)}"
                ],
                reason="unequal",
            )


def too_little(run: AnalysedRun) -> str:
    """Return the reason why the log is too short for a verdict; empty if it is long enough."""
    logged = list(run.log.series.values())
    limit = MIN_POINTS
    unit = "points"
    if run.profile == "controller":
        logged = [run.levels(role) for role in ("reward", "loss") if run.find(role)]
        limit = MIN_EPOCHS
        unit = "epochs"
    longest = max(map(len, logged), default=0)
    return "" if longest >= limit else f"{longest} {unit}, but at least {limit} are needed"


@finding("insufficient")
def enough(run: AnalysedRun) -> Findings:
    """Report that a log is too short for a verdict."""
    if reason := too_little(run):
        yield info(f"Too little was logged: {reason}.", reason="short_log")


@finding("restarts")
def guarded(run: AnalysedRun) -> Findings:
    """Find rollbacks by the guard, or else the steps it warned about."""
    undone = [event for event in run.log.events if event.kind == "rollback"]
    met = undone or [event for event in run.log.events if event.kind in WARNED]
    if met:
        count = len({event.step for event in met})
        did = f"warned about {counted(count, 'step')}"
        if undone:
            did = f"rolled the run back {counted(len(undone), 'time')}"
        yield warn(
            f"The guard {did}, the last at step {met[-1].step}.",
            id="rollback" if undone else "severe",
            steps=(met[0].step, met[-1].step),
            evidence=map(str, met[-3:]),
            reason="guarded",
        )
