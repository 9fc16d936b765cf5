"""The files of our own run directory beside `metrics.jsonl`."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.runtime.evaluations import read_summaries
from trainer.runtime.heartbeat import is_live
from trainer.runtime.json_lines import JsonLines, flat, read_object
from trainer.tools.report.readers.parsing import as_step
from trainer.tools.report.readers.store import Row, Store
from trainer.tools.report.run_log import LogEvent, RunLog, ServingCheck
from trainer.tracking import events_file, row_losses, run_info
from trainer.tracking.row_losses import HardRow, read_hard_rows

NUM_HARD_ROWS = 10


def with_run_directory(store: Store, path: Path, *, num_attempts: int) -> RunLog:
    """Return the log of a run with its configuration, events, evaluations and proofs."""
    run_dir = path.parent
    run = read_object(run_dir / run_info.FILE_NAME)
    config, environment = run.get("config"), run.get("environment")
    lines = JsonLines(run_dir / events_file.FILE_NAME, is_final=True)
    events: list[Row] = []
    evaluations: Mapping[str, Any] = {}
    notes: tuple[str, ...] = ()
    hard_rows: list[HardRow] = []
    hardest: Mapping[int, Any] = {}
    try:
        evaluations = read_summaries(run_dir)
        hard_rows, hardest = read_hard_rows(run_dir / row_losses.FILE_NAME, limit=NUM_HARD_ROWS)
        events = [row for _, row in lines]
    except OSError as error:
        notes = (f"{error.filename} cannot be read: {error.strerror}",)
    store.num_unparsed += lines.num_unparsed
    starts_and_ends = [one for one in events if one.get("kind") == "start" or "exit_code" in one]
    # a start has no exit code: the run was continued since
    exit_code = starts_and_ends[-1].get("exit_code") if starts_and_ends else None
    return store.log(
        path,
        "fsdp-sft",
        run_dir,
        config=flat(config) if isinstance(config, dict) else {},
        environment=flat(environment) if isinstance(environment, dict) else {},
        sample=str(run.get("sample", "")),
        events=tuple(map(_event, events)),
        total_steps=as_step(run.get("total_steps")) or None,
        evaluations=evaluations,
        notes=notes,
        num_attempts=num_attempts,
        exit_code=as_step(exit_code),
        proofs=tuple(sorted(_proofs(run_dir), key=lambda proof: (proof.step, proof.engine))),
        is_running=is_live(run_dir),
        hard_rows=tuple(hard_rows),
        hardest_by_step=hardest,
    )


def _event(row: Row) -> LogEvent:
    level = row.get("level") if row.get("level") in events_file.LEVELS else "info"
    kind, message = str(row.get("kind", "")), str(row.get("message", ""))
    return LogEvent(as_step(row.get("step")) or 0, kind, message, str(level))


def _proofs(run_dir: Path) -> Iterator[ServingCheck]:
    for path in run_dir.glob("proofs/step_*.json"):
        proof = read_object(path)
        with suppress(KeyError, TypeError, ValueError):
            yield ServingCheck(
                step=int(proof["step"]),
                engine=str(proof["engine"]),
                val_loss=_loss(proof["val_loss"]),
                served_loss=_loss(proof["served_loss"]),
                tolerance=_loss(proof["tolerance"]),
                is_equal=bool(proof["is_equal"]),
                causes=tuple(map(str, proof["causes"])),
            )


def _loss(value: Any) -> float:
    return math.nan if value is None else float(value)
