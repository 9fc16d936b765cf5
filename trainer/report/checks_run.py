"""What is measured of the run as a whole: its checkpoints, its end, its data, its attempts, how much was logged."""

from collections.abc import Iterator

import numpy as np

from trainer.report.analysed_run import AnalysedRun, NotJudged
from trainer.report.formatting import listed
from trainer.report.measures import Measure
from trainer.runtime.text import readable


def checkpoints(run: AnalysedRun) -> Iterator[Measure]:
    """Whole, of one size, named by the tracker file, and all there that were to be."""
    states = run.log.checkpoints
    if not states:
        raise NotJudged("no checkpoint lies beside the log")
    words = {"count": len(states)}
    usual = float(np.median([state.size_bytes for state in states]))
    yield Measure("whole", words=words, is_fault=False)
    yield Measure("size", words={"size": readable(usual)}, is_fault=False)
    for state in states:
        told, steps = {"step": state.step, "size": readable(state.size_bytes)}, (state.step, state.step)
        if state.faults:
            yield Measure("whole", None, steps, told, (*state.faults, str(state.path)))
        is_odd = abs(state.size_bytes - usual) > run.limits["size_spread"] * usual
        yield Measure("size", float(state.size_bytes), steps, told, is_fault=is_odd)
    newest, tracked = max((one.step for one in states if one.is_complete), default=None), run.log.tracker_step
    if tracked is not None and newest is not None:
        told, is_stale = {"step": tracked, "newest": newest}, tracked != newest
        yield Measure("tracker", float(tracked), words=told, limit=float(newest), is_fault=is_stale)
    missing = _missing_checkpoints(run)
    if run.cadences or missing:
        absent = {**words, "missing": [f"step {step}" for step in missing]}
        places = (missing[0], missing[-1]) if missing else None
        yield Measure("missing", float(len(missing)), places, absent, is_fault=bool(missing))


def _missing_checkpoints(run: AnalysedRun) -> list[int]:
    """Steps at which the configuration foretells a checkpoint that does not exist, rotation considered.

    One that the log says was saved was removed later: by `prune`, or the run went on from a mirror, which keeps few.
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
    oldest_kept = existing[-int(keep)] if is_rotated else 0  # saves at a stop count too, and move others out
    if not any(key.rpartition(".")[2] in limits for key in run.log.config):
        oldest_kept = existing[0]  # how many are kept is not told: older ones may have been rotated away
    there = {*existing, *(event.step for event in run.log.events if event.kind == "checkpoint")}
    return [step for step in expected if step > oldest_kept and step not in there and run.was_trained(step)]


def completeness(run: AnalysedRun) -> Iterator[Measure]:
    """Whether all planned steps were trained, and how the last attempt ended."""
    log, planned, trained = run.log, run.log.total_steps, run.last_step
    if planned is None and log.exit_code is None:
        raise NotJudged("the log says neither how long the run was to be nor how it ended")
    if planned is not None:
        ends = [event.message for event in log.events if event.kind == "early_stop" and log.exit_code == 0]
        why = " and is still running" if log.is_running else f", as it was stopped early: {ends[-1]}" if ends else ""
        words = {"share": trained / max(planned, 1), "why": why, "trained": trained, "planned": planned}
        row, is_short = "meant" if why else "steps", trained < planned
        yield Measure(
            row if is_short else "steps", float(trained), None, words, limit=float(planned), is_fault=is_short
        )
    is_over = planned is None or trained >= planned
    if is_over and log.source == "fsdp-sft" and log.exit_code is None and not log.is_running:
        yield Measure("end")
    if log.exit_code is not None:
        errors = tuple(f"step {event.step}: {event.message}" for event in log.events if event.level == "error")[-3:]
        words = {"code": log.exit_code}
        yield Measure("exit", float(log.exit_code), words=words, evidence=errors, is_fault=bool(log.exit_code))


def serving(run: AnalysedRun) -> Iterator[Measure]:
    """Whether what is exported serves the loss it was validated with, as far as that was proven."""
    for proof in run.log.proofs:
        apart, why = abs(proof.served_loss - proof.val_loss), "; ".join(proof.causes)
        words = {"step": proof.step, "engine": proof.engine, "why": why, "served": proof.served_loss}
        words["val"] = proof.val_loss
        steps = proof.step, proof.step
        yield Measure("main", apart, steps, words, limit=proof.tolerance, is_fault=not proof.is_equal)


def longest_sample(run: AnalysedRun) -> Iterator[Measure]:
    """Whether lengths are limited where they are configured."""
    if all(run.find(role) is None for role in ("truncated", "empty_label", "total_len_max")):
        raise NotJudged("the log has no data metrics")
    longest, limit = run.find("total_len_max"), run.setting("max_length")
    if longest is not None and isinstance(limit, int | float) and (top := float(longest.values.max())) > limit:
        yield Measure("length", top, limit=float(limit))


def too_little(run: AnalysedRun) -> str:
    """Why the whole run cannot be called healthy; empty where it can."""
    if run.profile == "controller":
        longest = max((len(s) for role in ("reward", "loss") if (s := run.find(role)) is not None), default=0)
        limit = int(run.limits["min_epochs"])
        return f"{longest} epochs, at least {limit} (better 30) are needed to see a trend" if longest < limit else ""
    longest = max((len(series) for series in run.log.series.values()), default=0)
    limit = int(run.limits["min_points"])
    return f"{longest} points, at least {limit} are needed to judge a run" if longest < limit else ""


def enough(run: AnalysedRun) -> Iterator[Measure]:
    if reason := too_little(run):
        limit = run.limits["min_epochs" if run.profile == "controller" else "min_points"]
        yield Measure(words={"reason": reason}, limit=limit)


def restarts(run: AnalysedRun) -> Iterator[Measure]:
    """What the guard found and undid while it trained, what was trained again, rows out of order."""
    log = run.log
    events = [event for event in log.events if event.level in ("warn", "error")]
    kinds = {"rollback": ("rollback",), "severe": ("guard/severe", "guard/diverging", "guard/dead")}
    for row, names in kinds.items():
        if met := [event for event in events if event.kind in names]:
            often = "once" if len(met) == 1 else f"{len(met)} times"
            places = listed(f"step {event.step}" for event in met)
            words = {"often": often, "places": places, "count": len(met), "last": met[-1].step}
            evidence = tuple(f"step {event.step}: {event.message}" for event in met[-3:])
            yield Measure(row, float(len(met)), (met[0].step, met[-1].step), words, evidence)
    share = log.num_lost_steps / run.last_step if run.last_step else 0.0
    if share > run.limits["lost_steps"]:
        yield Measure(value=share, words={"count": log.num_lost_steps, "attempts": log.num_attempts})
    if count := log.num_disordered_rows:
        yield Measure("rows", float(count), words={"count": count})
