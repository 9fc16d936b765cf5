"""Checks of the run as a whole: its checkpoints, its end, its data, its restarts, how much was
logged.
"""

import numpy as np

from trainer.runtime.text import readable
from trainer.tools.report.analysed_run import AnalysedRun, NotJudged
from trainer.tools.report.anomalies import is_of
from trainer.tools.report.checks import Findings, fail, finding, info, warn
from trainer.tools.report.checks_curves import rise_of
from trainer.tools.report.formatting import counted, listed, number, share
from trainer.tools.report.run_log import Series
from trainer.tools.report.statistics import within

SIZE_SPREAD = 0.1
"""Share by which a checkpoint's size may differ from its siblings'."""
NUM_AFTER = 6
"""Points after a restart in which a jump of the loss is due to it."""
MIN_POINTS, MIN_EPOCHS = 100, 20
"""Points, or epochs of a controller, that a verdict needs."""
UNDONE = ("rollback",)
WARNED = ("guard/severe", "guard/diverging", "guard/dead")
"""Kinds of events: steps that the guard took back, and steps that it warned of."""


@finding("ckpt_complete")
def checkpoints(run: AnalysedRun) -> Findings:
    """Find checkpoints that are damaged or of another size."""
    if not run.log.checkpoints:
        raise NotJudged("the log has no checkpoints next to it")
    usual = np.median([state.size_bytes for state in run.log.checkpoints])
    for state in run.log.checkpoints:
        steps = (state.step, state.step)
        name = f"The checkpoint of step {state.step}"
        if state.faults:
            yield fail(
                f"{name} is not complete.",
                id=f"step-{state.step}",
                steps=steps,
                evidence=(*state.faults, str(state.path)),
                cause="The save was cut off, or files were removed.",
                remedy=("Resume from an older one; delete this directory.",),
            )
        elif abs(state.size_bytes - usual) > SIZE_SPREAD * usual:
            yield fail(
                f"{name} has {readable(state.size_bytes)}, unlike its siblings.",
                id=f"size-{state.step}",
                steps=steps,
                cause="Parts are missing or were written twice.",
                remedy=("Compare its files with those of another checkpoint.",),
            )


@finding("ckpt_complete:tracker")
def tracked_checkpoint(run: AnalysedRun) -> Findings:
    """Find a tracker file that names another checkpoint than the newest."""
    newest = max((state.step for state in run.log.checkpoints if state.is_complete), default=None)
    if run.log.tracker_step is None or newest is None:
        raise NotJudged("there is no tracker file, or no checkpoint")
    if run.log.tracker_step != newest:
        yield fail(
            f"latest_checkpointed_iteration.txt says {run.log.tracker_step}, the newest checkpoint "
            f"is {newest}.",
            cause="The save ended before the file was written, or checkpoints were copied.",
            remedy=(f"Write {newest} into the file, or remove what is newer than it.",),
        )


@finding("ckpt_complete:missing")
def missing_checkpoints(run: AnalysedRun) -> Findings:
    """Find steps at which the configuration foretells a checkpoint that does not exist.

    One that the log says was saved was removed later: by `prune`, or because the run continued from
    a mirror, which keeps few.
    """
    every, existing = run.amount("save"), {state.step for state in run.log.checkpoints}
    if not every or every < 1 or not existing:
        raise NotJudged("the save cadence is not known, or the log has no checkpoints next to it")
    saved = existing | {event.step for event in run.log.events if event.kind == "checkpoint"}
    # a log of every step has no row of one that was skipped
    losses, trained = run.find("loss"), set(range(run.last_step + 1))
    if losses is not None and len(losses) > 1 and np.median(np.diff(losses.steps)) == 1:
        trained = set(losses.steps.tolist())
    # older ones were rotated away
    expected = range(int(every), run.last_step + 1, int(every))
    missing = [at for at in expected if at > min(existing) and at in trained - saved]
    if missing:
        yield fail(
            f"No checkpoint for {listed(f'step {at}' for at in missing)}, where one was to be "
            f"saved.",
            steps=(missing[0], missing[-1]),
            cause="Saving failed, or the checkpoints were deleted.",
            remedy=("Look for errors of saving in the log, and at the free space.",),
        )


@finding("run_complete:steps")
def completeness(run: AnalysedRun) -> Findings:
    """Find planned steps that were not trained; an info where the run still trains or was to stop
    early.
    """
    log, planned = run.log, run.log.total_steps
    if planned is None:
        raise NotJudged("the planned number of steps is not known")
    if run.last_step >= planned:
        return
    stops = [event.message for event in log.events if event.kind == "early_stop"]
    why = " and is still running" if log.is_running else ""
    if stops and log.exit_code == 0:
        why = f", as it was stopped early: {stops[-1]}"
    yield (info if why else warn)(
        f"The run has {run.last_step} of {planned} steps ({share(run.last_step / planned)}){why}.",
        cause="" if why else "It was stopped, or it died.",
        remedy=() if why else ("Start the same command again: it resumes.",),
    )


@finding("run_complete")
def ending(run: AnalysedRun) -> Findings:
    """Find a last attempt that ended badly, or whose end was not written."""
    log = run.log
    if log.exit_code:
        errors = [f"step {one.step}: {one.message}" for one in log.events if one.level == "error"]
        yield warn(
            f"The last attempt ended with exit code {log.exit_code}.",
            id="exit",
            evidence=errors[-3:],
            cause="See the last errors.",
            remedy=("Fix their cause and start the same command again: it resumes.",),
        )
    if log.exit_code is not None:
        return
    is_done = log.total_steps is not None and run.last_step >= log.total_steps
    if is_done and log.source == "fsdp-sft" and not log.is_running:
        yield warn(
            "All steps were trained, but no end was written: the process was killed or is still "
            "finishing.",
            id="end",
            cause="The end of the run is written last.",
            remedy=("Check that the last checkpoint is complete.",),
        )
    raise NotJudged("no end was written")


@finding("serving")
def serving(run: AnalysedRun) -> Findings:
    """Find exports that are not served with the loss of their validation."""
    for proof in run.log.proofs:
        if not proof.is_equal:
            yield fail(
                f"The export of step {proof.step} does not serve what was trained: "
                f"{'; '.join(proof.causes)}.",
                id=str(proof.step),
                steps=(proof.step, proof.step),
                evidence=[
                    f"{proof.engine} serves it with a loss of {number(proof.served_loss)}, "
                    f"val/loss was {number(proof.val_loss)}"
                ],
                cause="The export, or the engine's reading of it, is not the model that was "
                "validated.",
                remedy=("Do not deploy it. Export its checkpoint again and prove that.",),
            )


def too_little(run: AnalysedRun) -> str:
    """Return why the whole run cannot be called healthy; nothing where it can."""
    logged, limit, unit = list(run.log.series.values()), MIN_POINTS, "points"
    if run.profile == "controller":
        logged = [run.levels(role) for role in ("reward", "loss") if run.find(role)]
        limit, unit = MIN_EPOCHS, "epochs"
    longest = max(map(len, logged), default=0)
    return "" if longest >= limit else f"{longest} {unit}, at least {limit} are needed"


@finding("insufficient")
def enough(run: AnalysedRun) -> Findings:
    """Tell that a log is too short for a verdict."""
    if reason := too_little(run):
        remedy = ("Let it run on, or log more often.",)
        yield info(f"Too little was logged: {reason}.", remedy=remedy)


@finding("restarts:jump", "loss")
def restarts(run: AnalysedRun, losses: Series) -> Findings:
    """Find the first restart after which the loss jumps."""
    starts = {event.step for event in run.log.events if event.kind in ("start", "resume")}
    jumps = {anomaly.steps[0] for anomaly in run.anomalies if is_of(anomaly, "loss")}
    if rise := rise_of(losses):
        jumps.add(rise.steps[0])
    for at in sorted(starts.union(_warmed_up_again(run)) - {0}):
        after = jumps.intersection(within(losses, at - 1, np.inf)[:NUM_AFTER].steps.tolist())
        if after:
            yield warn(
                f"The loss jumped at step {min(after)}, right after a restart at step {at}.",
                steps=(at + 1, max(at + 1, *after)),
                cause="The restart did not restore the optimizer or the schedule: first updates "
                "without their moments are too large.",
                remedy=(
                    "Check what the restart loaded: optimizer state, step and learning rate; go "
                    f"back to {run.checkpoint(at)} and resume with all of it.",
                ),
            )
            return


def _warmed_up_again(run: AnalysedRun) -> list[int]:
    """Return the steps after which the rate fell at once, to rise again: a schedule from its
    start.
    """
    rates = run.find("lr")
    if rates is None or len(rates) < 3:
        return []
    before, after, later = rates.values[:-2], rates.values[1:-1], rates.values[2:]
    falls = (before > 0.1 * rates.values.max()) & (after < 0.5 * before) & (later > after)
    return rates.steps[:-2][falls].tolist()


@finding("restarts")
def guarded(run: AnalysedRun) -> Findings:
    """Find steps that the guard undid or warned of."""
    events = [event for event in run.log.events if event.level in ("warn", "error")]
    undone = [event for event in events if event.kind in UNDONE]
    met = undone or [event for event in events if event.kind in WARNED]
    if met:
        yield warn(
            f"The guard {'undid' if undone else 'warned of'} {counted(len(met), 'step')}, the last "
            f"at step {met[-1].step}.",
            id="rollback" if undone else "severe",
            steps=(met[0].step, met[-1].step),
            evidence=[f"step {event.step}: {event.message}" for event in met[-3:]],
            cause="Batches, or a rank, that did harm.",
            remedy=(
                "Look at the samples of these steps in row_losses.jsonl and take bad ones out of the data.",
            ),
        )
