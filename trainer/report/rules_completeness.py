"""V27 to V29, V42 and V43: checkpoints, the end of the run, its data, whether there is enough to judge."""

from collections.abc import Iterator

import numpy as np

from trainer.report import remedies
from trainer.report.analysed_run import AnalysedRun, NotJudged
from trainer.report.judge import Rule, found
from trainer.report.result import Finding
from trainer.report.run_log import CheckpointState
from trainer.report.sentence_parts import counted, listed, number, percent


def missing_checkpoints(run: AnalysedRun) -> list[int]:
    """Steps at which the configuration foretells a checkpoint that does not exist, rotation considered."""
    every = run.config("trainer.save_freq", "save_steps", "save_freq")
    if not isinstance(every, int | float) or every < 1:
        return []
    expected = list(range(int(every), run.last_step + 1, int(every)))
    if run.last_step >= run.total_steps and run.last_step not in expected:
        expected.append(run.last_step)
    limits = ("max_ckpt_to_keep", "save_total_limit")
    keep = run.config(*limits)
    existing = sorted(c.step for c in run.log.checkpoints)
    is_rotated = isinstance(keep, int | float) and 1 <= keep <= len(existing)
    oldest_kept = existing[-int(keep)] if is_rotated else 0  # saves at a stop count too, and move others out
    if existing and not any(key.rpartition(".")[2] in limits for key in run.log.config):
        oldest_kept = existing[0]  # how many are kept is not told: older ones may have been rotated away
    return [step for step in expected if step > oldest_kept and step not in existing and run.was_trained(step)]


def odd_sizes(run: AnalysedRun) -> list[CheckpointState]:
    """Checkpoints whose size differs from their siblings' by more than a tenth."""
    sizes = [c.size_bytes for c in run.log.checkpoints]
    if len(sizes) < 2:
        return []
    usual = float(np.median(sizes))
    return [c for c in run.log.checkpoints if abs(c.size_bytes - usual) > run.limits["size_spread"] * usual]


def is_tracker_stale(run: AnalysedRun) -> bool:
    steps = [c.step for c in run.log.checkpoints if c.is_complete]
    return run.log.tracker_step is not None and bool(steps) and run.log.tracker_step != max(steps)


def _checkpoints(run: AnalysedRun) -> Iterator[Finding]:
    if not run.log.checkpoints:
        raise NotJudged("no checkpoint lies beside the log")
    for state in run.log.checkpoints:
        if not state.is_complete or state.faults:
            yield found(
                "fail",
                f"The checkpoint of step {state.step} is not complete.",
                steps=(state.step, state.step),
                evidence=(*state.faults, str(state.path)),
                cause="The save was cut off, or files were removed.",
                remedy="Resume from an older one; delete this directory.",
                suffix=f"step-{state.step}",
            )
    for state in odd_sizes(run):
        yield found(
            "fail",
            f"The checkpoint of step {state.step} has {number(state.size_bytes / 2**30)} GiB, unlike its siblings.",
            steps=(state.step, state.step),
            value=float(state.size_bytes),
            threshold=run.limits["size_spread"],
            cause="Parts are missing or were written twice.",
            remedy="Compare its files with those of another checkpoint.",
            suffix=f"size-{state.step}",
        )
    if is_tracker_stale(run):
        newest = max(c.step for c in run.log.checkpoints if c.is_complete)
        yield found(
            "fail",
            f"latest_checkpointed_iteration.txt says {run.log.tracker_step}, the newest checkpoint is {newest}.",
            value=float(run.log.tracker_step or 0),
            threshold=float(newest),
            cause="The save ended before the file was written, or checkpoints were copied.",
            remedy=f"Write {newest} into the file, or remove what is newer than it.",
            suffix="tracker",
        )
    if missing := missing_checkpoints(run):
        yield found(
            "fail",
            f"No checkpoint for {listed(f'step {step}' for step in missing)}, where one was to be saved.",
            steps=(missing[0], missing[-1]),
            value=float(len(missing)),
            threshold=0.0,
            cause="Saving failed, or the checkpoints were deleted.",
            remedy="Look for errors of saving in the log, and at the free space.",
            suffix="missing",
        )


def _complete(run: AnalysedRun) -> Iterator[Finding]:
    log = run.log
    if log.total_steps is None and log.exit_code is None:
        raise NotJudged("the log says neither how long the run was to be nor how it ended")
    if log.total_steps is not None and run.last_step < log.total_steps:
        words, is_meant = incomplete(run)
        yield found(
            "info" if is_meant else "warn",
            words,
            value=float(run.last_step),
            threshold=float(log.total_steps),
            cause="" if is_meant else "It was stopped, or it died.",
            remedy="" if is_meant else "Start the same command again: it resumes.",
            suffix="steps",
        )
    elif log.source == "fsdp-sft" and log.exit_code is None and not log.is_running:
        yield found(
            "warn",
            "All steps were trained, but no end was written: the process was killed or is still finishing.",
            cause="The end of the run is written last.",
            remedy="Check that the last checkpoint is complete.",
            suffix="end",
        )
    if log.exit_code:
        yield found(
            "warn",
            f"The last attempt ended with exit code {log.exit_code}.",
            value=float(log.exit_code),
            threshold=0.0,
            evidence=tuple(f"step {e.step}: {e.message}" for e in log.events if e.level == "error")[-3:],
            cause="See the last errors.",
            remedy="Fix their cause and start the same command again: it resumes.",
            suffix="exit",
        )


def incomplete(run: AnalysedRun) -> tuple[str, bool]:
    """How many of the planned steps there are, and whether that is as it should be."""
    total_steps, log = run.total_steps, run.log
    words = f"The run has {run.last_step} of {total_steps} steps ({percent(run.last_step / total_steps)})"
    if log.is_running:
        return f"{words} and is still running.", True
    ends = [event.message for event in log.events if event.kind == "early_stop"]
    if ends and log.exit_code == 0:
        return f"{words}, as it was stopped early: {ends[-1]}.", True
    return f"{words}.", False


def _truncation(run: AnalysedRun) -> Iterator[Finding]:
    truncated, empty, longest = (run.find(role) for role in ("truncated", "empty_label", "total_len_max"))
    if truncated is None and empty is None and longest is None:
        raise NotJudged("the log has no data metrics")
    name = remedies.option(run, "max_length")
    if truncated is not None and (share := float(truncated.values.mean())) > run.limits["truncated"]:
        yield found(
            "warn",
            f"{percent(share)} of the samples are cut at the length limit.",
            metric=run.name("truncated"),
            value=share,
            threshold=run.limits["truncated"],
            evidence=(remedies.fact(run, "max_length"),),
            cause=f"{name} is shorter than the data: answers lose their ends.",
            remedy=f"Raise {name}, or leave long samples out.",
        )
    if empty is not None and (count := float(empty.values.sum())) > 0:
        yield found(
            "warn",
            f"{number(count)} samples have no label token: they teach nothing.",
            metric=run.name("empty_label"),
            value=count,
            threshold=0.0,
            cause="Empty answers, or prompts that fill the length limit.",
            remedy=f"Remove them, or raise {name}.",
            suffix="empty",
        )
    limit = remedies.value(run, "max_length")
    if longest is not None and isinstance(limit, int | float) and (top := float(longest.values.max())) > limit:
        yield found(
            "warn",
            f"A sample has {number(top)} tokens, more than {name} = {number(float(limit))}.",
            metric=run.name("total_len_max"),
            value=top,
            threshold=float(limit),
            cause="Lengths are limited elsewhere than where they are configured.",
            remedy=f"Check {name} and the truncation.",
            suffix="length",
        )


def too_little(run: AnalysedRun) -> str:
    """Why the whole run cannot be called healthy; empty where it can."""
    if run.profile == "controller":
        longest = max((len(s) for role in ("reward", "loss") if (s := run.find(role)) is not None), default=0)
        limit = int(run.limits["min_epochs"])
        return f"{longest} epochs, at least {limit} (better 30) are needed to see a trend" if longest < limit else ""
    longest = max((len(series) for series in run.log.series.values()), default=0)
    limit = int(run.limits["min_points"])
    return f"{longest} points, at least {limit} are needed to judge a run" if longest < limit else ""


def _insufficient(run: AnalysedRun) -> Iterator[Finding]:
    if reason := too_little(run):
        yield found(
            "info",
            f"Too little was logged: {reason}.",
            threshold=run.limits["min_epochs" if run.profile == "controller" else "min_points"],
            remedy="Let it run on, or log more often.",
        )


def _told_by_the_guard(run: AnalysedRun) -> Iterator[Finding]:
    """What the run itself found wrong while it trained; the rows of steps it went back from no longer count."""
    events = [event for event in run.log.events if event.level in ("warn", "error")]
    rollbacks = [event for event in events if event.kind == "rollback"]
    severe = [event for event in events if event.kind in ("guard/severe", "guard/diverging", "guard/dead")]
    if rollbacks:
        yield found(
            "warn",
            f"The run was rolled back {'once' if len(rollbacks) == 1 else f'{len(rollbacks)} times'}, "
            f"at {listed(f'step {event.step}' for event in rollbacks)}.",
            steps=(rollbacks[0].step, rollbacks[-1].step),
            value=float(len(rollbacks)),
            threshold=0.0,
            evidence=tuple(f"step {event.step}: {event.message}" for event in rollbacks[-3:]),
            cause="Batches, or a rank, that did harm: they were found, undone and passed over.",
            remedy="Look at the samples in evidence/ and take bad ones out of the data.",
            suffix="rollback",
        )
    elif severe:
        yield found(
            "warn",
            f"The guard found {counted(len(severe), 'severe step')}, the last at step {severe[-1].step}.",
            steps=(severe[0].step, severe[-1].step),
            value=float(len(severe)),
            threshold=0.0,
            evidence=tuple(f"step {event.step}: {event.message}" for event in severe[-3:]),
            cause="A step far from the run's own past; training went on.",
            remedy="Look at the samples in evidence/; trainer.guard.on_severe=rollback or skip answers the next one.",
            suffix="severe",
        )


def _restarts(run: AnalysedRun) -> Iterator[Finding]:
    log = run.log
    yield from _told_by_the_guard(run)
    share = log.num_lost_steps / run.last_step if run.last_step else 0.0
    if share > run.limits["lost_steps"]:
        yield found(
            "note",
            f"{counted(log.num_lost_steps, 'step')} ({percent(share)}) had to be trained again.",
            value=share,
            threshold=run.limits["lost_steps"],
            evidence=(counted(log.num_attempts, "attempt"),),
            cause="Restarts or rollbacks far from the last checkpoint.",
            remedy=f"Save more often: lower {remedies.option(run, 'save')}.",
        )
    goodput = run.find("goodput")
    if goodput is not None and (last := float(goodput.values[-1])) < run.limits["goodput"]:
        yield found(
            "note",
            f"Goodput {percent(last)}: the rest of the time went into restarts, saving or waiting.",
            metric=run.name("goodput"),
            value=last,
            threshold=run.limits["goodput"],
            cause="Restarts, slow saving or slow starts.",
            remedy=f"Look at the attempts; save asynchronously; lower {remedies.option(run, 'save')}.",
            suffix="goodput",
        )
    if log.num_disordered_rows:
        yield found(
            "note",
            f"{log.num_disordered_rows} rows repeat a step or go back without a restart.",
            value=float(log.num_disordered_rows),
            threshold=0.0,
            cause="Two processes write one log, or logs were joined.",
            remedy="Give each run its own directory.",
            suffix="rows",
        )


RULES = (
    Rule("V27", "ckpt_complete", _checkpoints),
    Rule("V28", "run_complete", _complete),
    Rule("V29", "truncation", _truncation),
    Rule("V42", "insufficient", _insufficient),
    Rule("V43", "restarts", _restarts),
)
