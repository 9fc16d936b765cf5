"""Logs of one JSON object a line by others: ms-swift, LLaMA-Factory, verl's file logger, and whatever has a step."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.report.readers.aliases import canonical
from trainer.report.readers.checkpoints import find_checkpoints, tracker_step
from trainer.report.readers.frame import Frame
from trainer.report.readers.parsing import (
    Faults,
    as_number,
    as_step,
    flat,
    fraction_total,
    json_rows,
)
from trainer.report.readers.transformers_state import MEAN_NOTE, NAN_NOTE, read_transformers, state_files
from trainer.report.run_log import RunLog, Series, UnreadableLogError
from trainer.runtime.json_lines import read_object

STEP_KEYS = (
    "step", "global_step", "trainer/step", "trainer/global_step", "_step", "current_steps", "current_iteration",
    "iteration", "iter", "last_step", "steps", "epoch",
)  # fmt: skip
"""Columns that can be the x axis, best first."""
SWIFT_STEPS = ("global_step/max_steps", "iteration")
ELAPSED = "progress/elapsed_s"
STEP_TIME = "train/time(s)"
ELAPSED_NOTE = "train/time(s) is the difference of elapsed_time, which has whole seconds and includes evaluations"


def is_swift_row(row: Mapping[str, Any]) -> bool:
    return any(fraction_total(row.get(key)) is not None for key in SWIFT_STEPS)


def is_verl_row(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("data"), dict) and "step" in row


def is_llama_factory_row(row: Mapping[str, Any]) -> bool:
    return row.keys() >= {"current_steps", "total_steps"}


def step_key(names: Any) -> str | None:
    """The best x axis among the columns of a table."""
    return next((key for key in STEP_KEYS if key in names), None)


def read_swift(path: Path) -> RunLog:
    faults, frame = Faults(), Frame()
    summary: dict[str, Any] = {}
    last_place, clock = None, _ElapsedClock()
    for row in json_rows(path, faults):
        name = next((key for key in SWIFT_STEPS if key in row), None)
        place = row.pop(name) if name else None
        step = as_step(place)
        if step is None or "train_runtime" in row:
            # The last lines sum the run up; they are no rows.
            summary |= {f"summary.{key}": value for key, value in row.items() if isinstance(value, str | int | float)}
            faults.num_unparsed += not row.keys() & {"log_history", "best_model_checkpoint", "train_runtime"}
            continue
        if clock.has_begun_again(row):
            frame.restart()
        last_place = place
        frame.add(step, row)
    log = _finished(path, "ms-swift", frame, faults)
    config = flat(read_object(path.parent / "args.json")) | summary
    log = replace(log, config=config, total_steps=fraction_total(last_place))
    return replace(_with_step_times(log), notes=(MEAN_NOTE, NAN_NOTE, ELAPSED_NOTE))


def read_llama_factory(path: Path) -> RunLog:
    faults, frame = Faults(), Frame()
    total_steps, clock = None, _ElapsedClock()
    for row in json_rows(path, faults):
        step = as_step(row.pop("current_steps", None))
        if step is None:
            faults.num_unparsed += 1
            continue
        total_steps = as_step(row.pop("total_steps", None)) or total_steps
        if clock.has_begun_again(row):
            frame.restart()
        frame.add(step, row)
    log = replace(_finished(path, "llama-factory", frame, faults), total_steps=total_steps)
    log = _with_step_times(_with_state(log))
    return replace(log, notes=(MEAN_NOTE, NAN_NOTE, ELAPSED_NOTE))


def _with_state(log: RunLog) -> RunLog:
    """What only transformers' own state beside the log knows: grad_norm, and the arguments."""
    config = flat(read_object(log.path.parent / "all_results.json"), "summary.")
    for path in state_files(log.path.parent)[:1]:
        try:
            state = read_transformers(path)
        except (UnreadableLogError, OSError):
            continue
        return replace(log, series={**state.series, **log.series}, config={**config, **state.config})
    return replace(log, config=config)


def read_verl(path: Path) -> RunLog:
    faults, frame = Faults(), Frame()
    for row in json_rows(path, faults):
        step, data = as_step(row.get("step")), row.get("data")
        if step is None or not isinstance(data, dict):
            faults.num_unparsed += 1
        else:
            frame.add(step, data)
    return _finished(path, "verl", frame, faults)


def read_generic(path: Path) -> RunLog:
    """Any rows with one of `STEP_KEYS`; the key is chosen row by row, `epoch` only where nothing else is there."""
    faults, frame = Faults(), Frame()
    for row in json_rows(path, faults):
        name = step_key(row)
        step = as_step(row.get(name)) if name else None
        if name is None or step is None:
            faults.num_unparsed += 1
            continue
        if name != "epoch":
            del row[name]
        frame.add(step, row)
    return _finished(path, "jsonl", frame, faults)


class _ElapsedClock:
    """Seconds since the start of the process: a smaller value tells a restart."""

    def __init__(self) -> None:
        self._last_s = 0.0

    def has_begun_again(self, row: dict[str, Any]) -> bool:
        """Leaves the number of seconds in the row."""
        elapsed_s = as_number(row.get("elapsed_time"))
        if elapsed_s is None:
            return False
        row["elapsed_time"] = elapsed_s
        last_s, self._last_s = self._last_s, elapsed_s
        return elapsed_s < last_s


def _finished(path: Path, source: str, frame: Frame, faults: Faults) -> RunLog:
    resolved = frame.resolve(canonical)
    elapsed = resolved.series.get(ELAPSED)
    return RunLog(
        path=path,
        source=source,
        series=resolved.series,
        num_rows=frame.num_rows,
        num_unparsed=faults.num_unparsed,
        checkpoints=find_checkpoints(path.parent),
        tracker_step=tracker_step(path.parent),
        num_attempts=1 + len(frame.restarts),
        num_lost_steps=resolved.num_lost_steps,
        num_disordered_rows=resolved.num_disordered_rows,
        span_s=float(elapsed.values.max() - elapsed.values.min()) if elapsed is not None and len(elapsed) > 1 else None,
    )


def _with_step_times(log: RunLog) -> RunLog:
    """Seconds a step from the differences of the elapsed time; none over a restart, where the clock begins again."""
    elapsed = log.series.get(ELAPSED)
    if elapsed is None or len(elapsed) < 2 or STEP_TIME in log.series:
        return log
    step_s = np.diff(elapsed.values) / np.diff(elapsed.steps)
    is_known = step_s >= 0
    return replace(log, series={**log.series, STEP_TIME: Series(elapsed.steps[1:][is_known], step_s[is_known])})
