"""Checks of the run as a whole: its checkpoints, its end, its data, its attempts, how much was
logged.
"""

from collections.abc import Iterator

import numpy as np

from trainer.report.analysed_run import AnalysedRun, NotJudged
from trainer.report.checks import Told, fail, finding, in_order, info, note, warn
from trainer.report.formatting import counted, listed, number, share
from trainer.report.run_log import CheckpointState, Series
from trainer.report.shapes import beyond
from trainer.report.statistics import NUM_WINDOWS
from trainer.runtime.text import readable

WIDTH_OF_SHARES = 20
"""Batches whose mean is a share of samples."""


@finding("ckpt_complete", "V27")
def checkpoints(run: AnalysedRun) -> Iterator[Told]:
    """Whole, of one size, named by the tracker file, and all there that were to be."""
    states = run.log.checkpoints
    if not states:
        raise NotJudged("no checkpoint lies beside the log")
    usual, limit = (
        float(np.median([state.size_bytes for state in states])),
        run.limits["size_spread"],
    )
    yield in_order("checkpoints_whole", f"{len(states)} complete")
    yield in_order("checkpoint_sizes", f"{readable(usual)} each")
    for state in states:
        if state.faults:
            yield _not_whole(state)
    for state in states:
        if abs(state.size_bytes - usual) > limit * usual:
            yield _of_odd_size(state, limit)
    newest, tracked = (
        max((one.step for one in states if one.is_complete), default=None),
        run.log.tracker_step,
    )
    if tracked is not None and newest is not None:
        yield _tracked(tracked, newest)
    yield from _all_there(run)


def _not_whole(state: CheckpointState) -> Told:
    return fail(
        f"The checkpoint of step {state.step} is not complete.",
        id=f"step-{state.step}",
        steps=(state.step, state.step),
        evidence=(*state.faults, str(state.path)),
        cause="The save was cut off, or files were removed.",
        remedy="Resume from an older one; delete this directory.",
        line="checkpoints_whole",
    )


def _of_odd_size(state: CheckpointState, limit: float) -> Told:
    return fail(
        f"The checkpoint of step {state.step} has {readable(state.size_bytes)}, unlike its "
        f"siblings.",
        id=f"size-{state.step}",
        steps=(state.step, state.step),
        value=state.size_bytes,
        limit=limit,
        cause="Parts are missing or were written twice.",
        remedy="Compare its files with those of another checkpoint.",
        line="checkpoint_sizes",
    )


def _tracked(tracked: int, newest: int) -> Told:
    """Whether the tracker file names the newest complete one."""
    if tracked == newest:
        return in_order("tracker_file", f"step {tracked}")
    return fail(
        f"latest_checkpointed_iteration.txt says {tracked}, the newest checkpoint is {newest}.",
        id="tracker",
        value=tracked,
        limit=newest,
        cause="The save ended before the file was written, or checkpoints were copied.",
        remedy=f"Write {newest} into the file, or remove what is newer than it.",
        line="tracker_file",
    )


def _all_there(run: AnalysedRun) -> Iterator[Told]:
    missing = _missing_checkpoints(run)
    if missing:
        yield fail(
            f"No checkpoint for {listed(f'step {step}' for step in missing)}, where one was to be "
            f"saved.",
            id="missing",
            steps=(missing[0], missing[-1]),
            value=len(missing),
            limit=0,
            cause="Saving failed, or the checkpoints were deleted.",
            remedy="Look for errors of saving in the log, and at the free space.",
            line="all_checkpoints",
        )
    elif run.cadences:
        yield in_order("all_checkpoints", f"{len(run.log.checkpoints)} there")


def _missing_checkpoints(run: AnalysedRun) -> list[int]:
    """Steps at which the configuration foretells a checkpoint that does not exist, rotation
    considered.

    One that the log says was saved was removed later: by `prune`, or the run went on from a mirror,
    which keeps few.
    """
    every = run.config("trainer.save_freq", "save_steps", "save_freq")
    if not isinstance(every, int | float) or every < 1:
        return []
    expected = list(range(int(every), run.last_step + 1, int(every)))
    if run.last_step >= run.total_steps and run.last_step not in expected:
        expected.append(run.last_step)
    limits = ("max_ckpt_to_keep", "save_total_limit")
    keep = run.config(*limits)
    existing = sorted(state.step for state in run.log.checkpoints)
    is_rotated = isinstance(keep, int | float) and 1 <= keep <= len(existing)
    # saves at a stop count too, and move others out
    oldest_kept = existing[-int(keep)] if is_rotated else 0
    if not any(key.rpartition(".")[2] in limits for key in run.log.config):
        # how many are kept is not told: older ones may have been rotated away
        oldest_kept = existing[0]
    there = {*existing, *(event.step for event in run.log.events if event.kind == "checkpoint")}
    return [
        step
        for step in expected
        if step > oldest_kept and step not in there and run.was_trained(step)
    ]


@finding("run_complete", "V28")
def completeness(run: AnalysedRun) -> Iterator[Told]:
    """Whether all planned steps were trained, and how the last attempt ended."""
    log, planned, trained = run.log, run.log.total_steps, run.last_step
    if planned is None and log.exit_code is None:
        raise NotJudged("the log says neither how long the run was to be nor how it ended")
    if planned is not None and trained >= planned:
        yield in_order("all_steps", f"{trained} of {planned}")
    elif planned is not None:
        yield _short(run, trained, planned)
    is_over = planned is None or trained >= planned
    if is_over and log.source == "fsdp-sft" and log.exit_code is None and not log.is_running:
        yield warn(
            "All steps were trained, but no end was written: the process was killed or is still "
            "finishing.",
            id="end",
            cause="The end of the run is written last.",
            remedy="Check that the last checkpoint is complete.",
        )
    if log.exit_code == 0:
        yield in_order("finished", "exit code 0")
    elif log.exit_code is not None:
        errors = [
            f"step {event.step}: {event.message}" for event in log.events if event.level == "error"
        ]
        yield warn(
            f"The last attempt ended with exit code {log.exit_code}.",
            id="exit",
            value=log.exit_code,
            limit=0,
            evidence=errors[-3:],
            cause="See the last errors.",
            remedy="Fix their cause and start the same command again: it resumes.",
            line="finished",
        )


def _short(run: AnalysedRun, trained: int, planned: int) -> Told:
    """Fewer steps than planned: by intention where it still runs or was stopped early."""
    log = run.log
    ends = [
        event.message for event in log.events if event.kind == "early_stop" and log.exit_code == 0
    ]
    why = (
        " and is still running"
        if log.is_running
        else f", as it was stopped early: {ends[-1]}"
        if ends
        else ""
    )
    return (info if why else warn)(
        f"The run has {trained} of {planned} steps ({share(trained / max(planned, 1))}){why}.",
        id="steps",
        value=trained,
        limit=planned,
        cause="" if why else "It was stopped, or it died.",
        remedy="" if why else "Start the same command again: it resumes.",
        line="all_steps",
    )


@finding("serving", "V46")
def serving(run: AnalysedRun) -> Iterator[Told]:
    """Whether what is exported serves the loss it was validated with, as far as that was proven."""
    for proof in run.log.proofs:
        if proof.is_equal:
            continue
        yield fail(
            f"What is exported of step {proof.step} does not serve what was trained: "
            f"{'; '.join(proof.causes)}.",
            id=str(proof.step),
            steps=(proof.step, proof.step),
            value=abs(proof.served_loss - proof.val_loss),
            limit=proof.tolerance,
            evidence=[
                f"{proof.engine} serves it with a loss of {number(proof.served_loss)}, "
                f"val/loss was {number(proof.val_loss)}"
            ],
            cause="The export, or the engine's reading of it, is not the model that was validated.",
            remedy="Do not deploy it. Export it anew from the shards of its checkpoint and prove "
            "that.",
        )


@finding("truncation", "V29")
def truncation(run: AnalysedRun) -> Iterator[Told]:
    """Samples that are cut or empty, and whether lengths are limited where they are configured."""
    truncated, empty, longest = (
        run.find(role) for role in ("truncated", "empty_label", "total_len_max")
    )
    if truncated is None and empty is None and longest is None:
        raise NotJudged("the log has no data metrics")
    limit, option = run.limits["truncated"], run.options["max_length"]
    if truncated is not None and (
        cut := beyond(truncated, high=limit, width=_width(truncated), of=np.mean)
    ):
        yield warn(
            f"{share(cut.level)} of the samples are cut at the length limit.",
            metric=run.name("truncated"),
            steps=cut.steps,
            value=cut.level,
            limit=limit,
            evidence=[run.facts["max_length"]],
            cause=f"{option} is shorter than the data: answers lose their ends.",
            remedy=f"Raise {option}, or leave long samples out.",
        )
    if empty is not None and (count := float(empty.values.sum())) > 0:
        yield warn(
            f"{number(count)} samples have no label token: they teach nothing.",
            id="empty",
            metric=run.name("empty_label"),
            steps=empty[empty.values > 0].ends,
            value=count,
            limit=0,
            cause="Empty answers, or prompts that fill the length limit.",
            remedy=f"Remove them, or raise {option}.",
        )
    allowed = run.setting("max_length")
    if (
        longest is not None
        and isinstance(allowed, int | float)
        and (top := float(longest.values.max())) > allowed
    ):
        at = int(longest.steps[np.argmax(longest.values > allowed)])
        yield warn(
            f"A sample has {number(top)} tokens, more than {option} = {number(float(allowed))}.",
            id="length",
            metric=run.name("total_len_max"),
            steps=(at, at),
            value=top,
            limit=allowed,
            cause="Lengths are limited elsewhere than where they are configured.",
            remedy=f"Check {option} and the truncation.",
        )


def _width(shares: Series) -> int:
    return max(WIDTH_OF_SHARES, len(shares) // NUM_WINDOWS)


def too_little(run: AnalysedRun) -> str:
    """Why the whole run cannot be called healthy; empty where it can."""
    if run.profile == "controller":
        longest = max(
            (len(run.epochs(role)) for role in ("reward", "loss") if run.find(role) is not None),
            default=0,
        )
        limit = int(run.limits["min_epochs"])
        return (
            f"{longest} epochs, at least {limit} (better 30) are needed to see a trend"
            if longest < limit
            else ""
        )
    longest = max((len(series) for series in run.log.series.values()), default=0)
    limit = int(run.limits["min_points"])
    return (
        f"{longest} points, at least {limit} are needed to judge a run" if longest < limit else ""
    )


@finding("insufficient", "V42")
def enough(run: AnalysedRun) -> Iterator[Told]:
    if reason := too_little(run):
        limit = run.limits["min_epochs" if run.profile == "controller" else "min_points"]
        yield info(
            f"Too little was logged: {reason}.",
            limit=limit,
            remedy="Let it run on, or log more often.",
        )


@finding("restarts", "V43")
def restarts(run: AnalysedRun) -> Iterator[Told]:
    """What the guard found and undid while it trained, what was trained again, rows out of
    order.
    """
    log = run.log
    yield from _guarded(run)
    lost = log.num_lost_steps / run.last_step if run.last_step else 0.0
    if lost > run.limits["lost_steps"]:
        yield note(
            f"{counted(log.num_lost_steps, 'step')} ({share(lost)}) had to be trained again.",
            value=lost,
            limit=run.limits["lost_steps"],
            evidence=[counted(log.num_attempts, "attempt")],
            cause="Restarts or rollbacks far from the last checkpoint.",
            remedy=f"Save more often: lower {run.options['save']}.",
        )
    goodput = run.find("goodput")
    if goodput is not None and goodput.values[-1] < run.limits["goodput"]:
        yield note(
            f"Goodput {share(goodput.values[-1])}: the rest of the time went into restarts, saving "
            f"or waiting.",
            id="goodput",
            metric=run.name("goodput"),
            value=goodput.values[-1],
            limit=run.limits["goodput"],
            cause="Restarts, slow saving or slow starts.",
            remedy=f"Look at the attempts; save asynchronously; lower {run.options['save']}.",
        )
    if count := log.num_disordered_rows:
        yield note(
            f"{count} rows repeat a step or go back without a restart.",
            id="rows",
            value=count,
            limit=0,
            cause="Two processes write one log, or logs were joined.",
            remedy="Give each run its own directory.",
        )


def _guarded(run: AnalysedRun) -> Iterator[Told]:
    """Steps that the guard undid, else those that it warned of."""
    events = [event for event in run.log.events if event.level in ("warn", "error")]
    undone = [event for event in events if event.kind == "rollback"]
    severe = [
        event for event in events if event.kind in ("guard/severe", "guard/diverging", "guard/dead")
    ]
    met = undone or severe
    if not met:
        return
    often = "once" if len(undone) == 1 else f"{len(undone)} times"
    yield warn(
        f"The run was rolled back {often}, at {listed(f'step {event.step}' for event in undone)}."
        if undone
        else f"The guard found {counted(len(severe), 'severe step')}, the last at step "
        f"{severe[-1].step}.",
        id="rollback" if undone else "severe",
        steps=(met[0].step, met[-1].step),
        value=len(met),
        limit=0,
        evidence=[f"step {event.step}: {event.message}" for event in met[-3:]],
        cause="Batches, or a rank, that did harm: they were found, undone and passed over."
        if undone
        else "A step far from the run's own past; training went on.",
        remedy="Look at the samples in evidence/ and take bad ones out of the data."
        if undone
        else "Look at the samples in evidence/; trainer.guard.on_severe=rollback or skip answers "
        "the next one.",
    )
