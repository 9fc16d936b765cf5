"""Our own run directory: `metrics.jsonl`, `events.jsonl`, `run.json`, and the checkpoints."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.report.readers.frame import Frame
from trainer.report.readers.parsing import Faults, as_number, as_step, json_rows, parse_number
from trainer.report.run_log import LogEvent, RunLog, ServingCheck
from trainer.runtime.evaluations import read_summaries
from trainer.runtime.json_lines import flat, read_object
from trainer.runtime.live_run import is_live

MARKERS = ("start", "rollback")
"""Kinds of rows that take back what was written before of later steps."""
LEVELS = ("info", "warn", "error")


def is_own_row(row: Mapping[str, Any]) -> bool:
    return row.keys() >= {"step", "attempt", "kind"}


def read_own(path: Path) -> RunLog:
    frame, run_dir = Frame(), path.parent
    num_attempts = _read_rows(path, frame)
    events, exit_code = _read_events(run_dir / "events.jsonl", frame.faults)
    log = frame.log(path, "fsdp-sft", run_dir)
    run = read_object(run_dir / "run.json")
    config = run.get("config")
    config = flat(config) if isinstance(config, dict) else {}
    planned = as_step(run.get("total_steps")) or as_step(config.get("trainer.total_training_steps"))
    return replace(
        log,
        config=config,
        events=events,
        total_steps=planned or _foretold(log),
        evaluations=read_summaries(run_dir),
        num_attempts=num_attempts,
        exit_code=exit_code,
        proofs=tuple(sorted(_read_proofs(run_dir), key=lambda proof: (proof.step, proof.engine))),
        is_running=is_live(run_dir),
    )


def _read_proofs(run_dir: Path) -> Iterator[ServingCheck]:
    for path in run_dir.glob("proofs/step_*.json"):
        tree = read_object(path)
        step, causes = as_step(tree.get("step")), tree.get("causes")
        if step is not None and isinstance(tree.get("is_equal"), bool):
            val_loss, served_loss, tolerance = (
                math.nan if (number := as_number(tree.get(key))) is None else number
                for key in ("val_loss", "served_loss", "tolerance")
            )
            told = tuple(map(str, causes)) if isinstance(causes, list) else ()
            engine = str(tree.get("engine", ""))
            yield ServingCheck(step, engine, val_loss, served_loss, tolerance, tree["is_equal"], told)


def _foretold(log: RunLog) -> int | None:
    """How many steps 100 % are, for runs whose `run.json` does not say it."""
    shares = log.series.get("progress/pct")
    return round(100 * int(shares.steps[-1]) / shares.values[-1]) if shares and shares.values[-1] > 0 else None


def _read_rows(path: Path, frame: Frame) -> int:
    """Fill the frame; returns the number of attempts."""
    attempt, num_attempts = None, 1
    for row in json_rows(path, frame.faults):
        step, kind, own_attempt = row.pop("step", None), row.pop("kind", None), row.pop("attempt", None)
        if own_attempt != attempt:
            # A start marker says where the attempt goes on; files from before there were markers leave it open.
            if attempt is not None and kind not in MARKERS:
                frame.restart()
            attempt = own_attempt
            num_attempts = max(num_attempts, min(as_step(attempt) or 1, 10**6))
        number = as_number(step) if kind in MARKERS else as_step(step)
        if kind in MARKERS:
            if number is not None and abs(number) < 2**53:
                frame.restart(int(number), rewinds=True)
        elif number is None:
            frame.faults.num_unparsed += 1
        else:
            if nonfinite := row.pop("nonfinite", None):
                row |= _restored(nonfinite)
            frame.add(int(number), row)
    return num_attempts


def _restored(nonfinite: Any) -> dict[str, float | None]:
    """The values that JSON could not hold: {"train/loss": "nan"}."""
    items = nonfinite.items() if isinstance(nonfinite, dict) else ()
    return {key: parse_number(value[:32]) if isinstance(value, str) else None for key, value in items}


def _read_events(path: Path, faults: Faults) -> tuple[tuple[LogEvent, ...], int | None]:
    """All events, and how the last attempt ended: None if it started again since."""
    events, exit_code = [], None
    for row in json_rows(path, faults) if path.is_file() else ():
        kind, level, step = str(row.get("kind", "")), row.get("level"), as_step(row.get("step")) or 0
        if kind == "start" or "exit_code" in row:
            exit_code = as_step(row.get("exit_code"))
        level = level if level in LEVELS else "info"
        events.append(LogEvent(step=step, kind=kind, message=str(row.get("message", "")), level=level))
    return tuple(events), exit_code
