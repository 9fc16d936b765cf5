"""Our own run directory: `metrics.jsonl`, `events.jsonl`, `run.json`, and the checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.report.readers.aliases import canonical
from trainer.report.readers.checkpoints import find_checkpoints, tracker_step
from trainer.report.readers.frame import Frame
from trainer.report.readers.parsing import (
    Faults,
    as_number,
    as_step,
    first_step,
    flat,
    json_rows,
    parse_number,
)
from trainer.report.run_log import LogEvent, RunLog, Series
from trainer.runtime.json_lines import read_object
from trainer.runtime.live_run import is_live

MARKERS = ("start", "rollback")
"""Kinds of rows that take back what was written before of later steps."""
LEVELS = ("info", "warn", "error")


def is_own_row(row: Mapping[str, Any]) -> bool:
    return row.keys() >= {"step", "attempt", "kind"}


def read_own(path: Path) -> RunLog:
    faults, frame = Faults(), Frame()
    num_attempts = _read_rows(path, frame, faults)
    clock = frame.take("ts")
    resolved = frame.resolve(canonical)
    run_dir = path.parent
    run = read_object(run_dir / "run.json")
    config = run.get("config")
    config = flat(config) if isinstance(config, dict) else {}
    events, exit_code = _read_events(run_dir / "events.jsonl", faults)
    return RunLog(
        path=path,
        source="fsdp-sft",
        series=resolved.series,
        num_rows=frame.num_rows,
        num_unparsed=faults.num_unparsed,
        config=config,
        events=events,
        checkpoints=find_checkpoints(run_dir),
        tracker_step=tracker_step(run_dir),
        total_steps=first_step([run.get("total_steps"), config.get("trainer.total_training_steps")])
        or _foretold(resolved.series.get("progress/pct")),
        num_attempts=num_attempts,
        num_lost_steps=resolved.num_lost_steps,
        num_disordered_rows=resolved.num_disordered_rows,
        span_s=float(clock.max() - clock.min()) if len(clock) > 1 else None,
        exit_code=exit_code,
        is_running=is_live(run_dir),
    )


def _foretold(shares: Series | None) -> int | None:
    """How many steps 100 % are, for runs whose `run.json` does not say it."""
    return round(100 * int(shares.steps[-1]) / shares.values[-1]) if shares and shares.values[-1] > 0 else None


def _read_rows(path: Path, frame: Frame, faults: Faults) -> int:
    """Fill the frame; returns the number of attempts."""
    attempt, num_attempts = None, 1
    for row in json_rows(path, faults):
        step, kind, own_attempt = row.pop("step", None), row.pop("kind", None), row.pop("attempt", None)
        if own_attempt != attempt:
            # A start marker says where the attempt goes on; files from before there were markers leave it open.
            if attempt is not None and kind not in MARKERS:
                frame.restart()
            attempt = own_attempt
            num_attempts = max(num_attempts, min(as_step(attempt) or 1, 10**6))
        if kind in MARKERS:
            number = as_number(step)
            if number is not None and abs(number) < 2**53:
                frame.restart(int(number), rewinds=True)
            continue
        number = as_step(step)
        if number is None:
            faults.num_unparsed += 1
            continue
        if nonfinite := row.pop("nonfinite", None):
            row |= _restored(nonfinite)
        frame.add(number, row)
    return num_attempts


def _restored(nonfinite: Any) -> dict[str, float | None]:
    """The values that JSON could not hold: {"train/loss": "nan"}."""
    items = nonfinite.items() if isinstance(nonfinite, dict) else ()
    return {key: parse_number(value[:32]) if isinstance(value, str) else None for key, value in items}


def _read_events(path: Path, faults: Faults) -> tuple[tuple[LogEvent, ...], int | None]:
    """All events, and how the last attempt ended: None if it started again since."""
    events, exit_code = [], None
    if not path.is_file():
        return (), None
    for row in json_rows(path, faults):
        kind, level = str(row.get("kind", "")), row.get("level")
        if kind == "start":
            exit_code = None
        exit_code = as_step(row.get("exit_code")) if "exit_code" in row else exit_code
        events.append(
            LogEvent(
                step=as_step(row.get("step")) or 0,
                kind=kind,
                message=str(row.get("message", "")),
                level=level if level in LEVELS else "info",
            )
        )
    return tuple(events), exit_code
