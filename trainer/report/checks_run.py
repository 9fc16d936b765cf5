"""Checks of the run as a whole: its checkpoints, its end, its data, its restarts, how much was
logged.
"""

from collections.abc import Iterator

import numpy as np

from trainer.report.analysed_run import AnalysedRun, NotJudged
from trainer.report.anomalies import is_of
from trainer.report.checks import fail, finding, info, warn
from trainer.report.checks_curves import rise_of
from trainer.report.formatting import counted, listed, number, share
from trainer.report.result import Finding
from trainer.report.run_log import Series
from trainer.report.statistics import within
from trainer.runtime.text import readable

SIZE_SPREAD = 0.1
"""Share by which a checkpoint's size may differ from its siblings'."""


@finding("ckpt_complete")
def checkpoints(run: AnalysedRun) -> Iterator[Finding]:
    """Find checkpoints that are damaged, of another size, missing, or not the tracked one."""
    states = run.log.checkpoints
    if not states:
        raise NotJudged("no checkpoint lies beside the log")
    usual = float(np.median([state.size_bytes for state in states]))
    for state in states:
        steps = (state.step, state.step)
        if state.faults:
            yield fail(
                f"The checkpoint of step {state.step} is not complete.",
                id=f"step-{state.step}",
                steps=steps,
                evidence=(*state.faults, str(state.path)),
                cause="The save was cut off, or files were removed.",
                remedy=("Resume from an older one; delete this directory.",),
            )
        elif abs(state.size_bytes - usual) > SIZE_SPREAD * usual:
            yield fail(
                f"The checkpoint of step {state.step} has {readable(state.size_bytes)}, unlike its "
                f"siblings.",
                id=f"size-{state.step}",
                steps=steps,
                cause="Parts are missing or were written twice.",
                remedy=("Compare its files with those of another checkpoint.",),
            )
    newest = max((one.step for one in states if one.is_complete), default=None)
    tracked = run.log.tracker_step
    if tracked is not None and newest is not None and tracked != newest:
        yield fail(
            f"latest_checkpointed_iteration.txt says {tracked}, the newest checkpoint is {newest}.",
            id="tracker",
            cause="The save ended before the file was written, or checkpoints were copied.",
            remedy=(f"Write {newest} into the file, or remove what is newer than it.",),
        )
    if missing := _missing_checkpoints(run):
        yield fail(
            f"No checkpoint for {listed(f'step {at}' for at in missing)}, where one was to be "
            f"saved.",
            id="missing",
            steps=(missing[0], missing[-1]),
            cause="Saving failed, or the checkpoints were deleted.",
            remedy=("Look for errors of saving in the log, and at the free space.",),
        )


def _missing_checkpoints(run: AnalysedRun) -> list[int]:
    """Return the steps at which the configuration foretells a checkpoint that does not exist.

    One that the log says was saved was removed later: by `prune`, or because the run went on from a
    mirror, which keeps few.
    """
    every = run.config("trainer.save_freq", "save_steps", "save_freq")
    if not isinstance(every, int | float) or every < 1:
        return []
    existing = {state.step for state in run.log.checkpoints}
    saved = existing | {event.step for event in run.log.events if event.kind == "checkpoint"}
    expected = range(int(every), run.last_step + 1, int(every))
    # older ones were rotated away; a step that was passed over has no row in a log of every step
    losses = run.find("loss")
    is_dense = (
        losses is not None and len(losses) > 1 and bool(np.median(np.diff(losses.steps)) == 1)
    )
    trained = set(losses.steps.tolist()) if losses is not None and is_dense else set(expected)
    return [at for at in expected if at > min(existing) and at in trained - saved]


@finding("run_complete")
def completeness(run: AnalysedRun) -> Iterator[Finding]:
    """Find steps that were planned and not trained, and a last attempt that ended badly."""
    log, planned, trained = run.log, run.log.total_steps, run.last_step
    if planned is None and log.exit_code is None:
        raise NotJudged("the log says neither how long the run was to be nor how it ended")
    if planned is not None and trained < planned:
        yield _short(run, trained, planned)
    elif log.source == "fsdp-sft" and log.exit_code is None and not log.is_running:
        yield warn(
            "All steps were trained, but no end was written: the process was killed or is still "
            "finishing.",
            id="end",
            cause="The end of the run is written last.",
            remedy=("Check that the last checkpoint is complete.",),
        )
    if log.exit_code:
        errors = [f"step {one.step}: {one.message}" for one in log.events if one.level == "error"]
        yield warn(
            f"The last attempt ended with exit code {log.exit_code}.",
            id="exit",
            evidence=errors[-3:],
            cause="See the last errors.",
            remedy=("Fix their cause and start the same command again: it resumes.",),
        )


def _short(run: AnalysedRun, trained: int, planned: int) -> Finding:
    """Return that a run is shorter than planned: by intention where it still runs or stopped
    early.
    """
    ends = [event.message for event in run.log.events if event.kind == "early_stop"]
    why = " and is still running" if run.log.is_running else ""
    if ends and run.log.exit_code == 0:
        why = f", as it was stopped early: {ends[-1]}"
    return (info if why else warn)(
        f"The run has {trained} of {planned} steps ({share(trained / max(planned, 1))}){why}.",
        id="steps",
        cause="" if why else "It was stopped, or it died.",
        remedy=() if why else ("Start the same command again: it resumes.",),
    )


@finding("serving")
def serving(run: AnalysedRun) -> Iterator[Finding]:
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


@finding("truncation", "total_len_max")
def long_samples(run: AnalysedRun, longest: Series) -> Iterator[Finding]:
    allowed = run.setting("max_length")
    over = longest[longest.values > allowed] if isinstance(allowed, int | float) else longest[:0]
    if len(over):
        yield warn(
            f"A sample has {number(float(over.values.max()))} tokens, more than "
            f"{run.options['max_length']} = {number(float(allowed))}.",
            id="length",
            steps=over.ends,
            cause="Lengths are limited elsewhere than where they are configured.",
            remedy=("Check {max_length} and the truncation.",),
        )


def too_little(run: AnalysedRun) -> str:
    """Return why the whole run cannot be called healthy; nothing where it can."""
    if run.profile == "controller":
        means = [run.epochs(role) for role in ("reward", "loss") if run.find(role) is not None]
        longest, limit = max(map(len, means), default=0), int(run.limits["min_epochs"])
        told = f"{longest} epochs, at least {limit} (better 30) are needed to see a trend"
    else:
        longest = max((len(series) for series in run.log.series.values()), default=0)
        limit = int(run.limits["min_points"])
        told = f"{longest} points, at least {limit} are needed to judge a run"
    return told if longest < limit else ""


@finding("insufficient")
def enough(run: AnalysedRun) -> Iterator[Finding]:
    if reason := too_little(run):
        yield info(
            f"Too little was logged: {reason}.",
            remedy=("Let it run on, or log more often.",),
        )


@finding("restarts", "loss")
def restarts(run: AnalysedRun, losses: Series) -> Iterator[Finding]:
    """Find a restart after which the loss jumps, and steps that the guard undid or warned of."""
    starts = {event.step for event in run.log.events if event.kind in ("start", "resume")}
    jumps = sorted({*(a.steps[0] for a in run.anomalies if is_of(a, "loss")), *_risen(run, losses)})
    for at in sorted(starts | set(_warmed_up_again(run))):
        near = within(losses, at - 1, np.inf)[:6]
        after = [jump for jump in jumps if at and jump in near.steps]
        if after:
            yield warn(
                f"The loss jumped at step {after[0]}, right after a restart at step {at}.",
                id="jump",
                steps=(at + 1, max(at + 1, after[-1])),
                cause="The restart did not restore the optimizer or the schedule: first updates "
                "without their moments are too large.",
                remedy=(
                    "Check what the restart loaded: optimizer state, step and learning rate; go "
                    f"back to {run.checkpoint(at)} and resume with all of it.",
                ),
            )
            break
    events = [event for event in run.log.events if event.level in ("warn", "error")]
    undone = [event for event in events if event.kind == "rollback"]
    kinds = ("guard/severe", "guard/diverging", "guard/dead")
    met = undone or [event for event in events if event.kind in kinds]
    if met:
        did = "undid" if undone else "warned of"
        yield warn(
            f"The guard {did} {counted(len(met), 'step')}, the last at step {met[-1].step}.",
            id="rollback" if undone else "severe",
            steps=(met[0].step, met[-1].step),
            evidence=[f"step {event.step}: {event.message}" for event in met[-3:]],
            cause="Batches, or a rank, that did harm.",
            remedy=("Look at the samples in evidence/ and take bad ones out of the data.",),
        )


def _warmed_up_again(run: AnalysedRun) -> list[int]:
    """Return the steps before which the rate fell at once, to rise again: a schedule begun anew."""
    rates = run.find("lr")
    if rates is None or len(rates) < 3:
        return []
    values = rates.values / rates.values.max()
    falls = (values[:-1] > 0.1) & (values[1:] < 0.5 * values[:-1])
    falls[:-1] &= values[2:] > values[1:-1]
    falls[-1] = False
    return [int(at) for at in rates.steps[:-1][falls]]


def _risen(run: AnalysedRun, losses: Series) -> list[int]:
    rise = rise_of(run, losses)
    return [rise.steps[0]] if rise else []
