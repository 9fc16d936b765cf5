"""Logs of one JSON object a line by others: ms-swift, LLaMA-Factory, verl's file logger, and whatever has a step."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from trainer.report.readers.frame import Frame
from trainer.report.readers.own import is_own_row, read_own
from trainer.report.readers.parsing import Faults, as_number, as_step, fraction_total, json_rows
from trainer.report.readers.transformers_state import MEAN_NOTE, NAN_NOTE, SUMMARY, read_transformers, state_files
from trainer.report.run_log import RunLog, Series, UnreadableLogError
from trainer.runtime.json_lines import flat, read_object

SUFFIXES = (".jsonl", ".ndjson")
ROWS_TO_LOOK_AT = 64
STEP_KEYS = (
    "global_step/max_steps", "step", "global_step", "trainer/step", "trainer/global_step", "_step", "current_steps",
    "current_iteration", "iteration", "iter", "last_step", "steps", "epoch",
)  # fmt: skip
"""Columns that can be the x axis, best first."""
ELAPSED = "progress/elapsed_s"
STEP_TIME = "train/time(s)"
ELAPSED_NOTE = "train/time(s) is the difference of elapsed_time, which has whole seconds and includes evaluations"
ABOUT_THE_END = {"log_history", "best_model_checkpoint", SUMMARY}
"""Keys of the last lines, which sum the run up."""


def step_key(names: Any) -> str | None:
    """The best x axis among the columns of a table."""
    return next((key for key in STEP_KEYS if key in names), None)


def json_source(path: Path) -> str | None:
    """Who wrote a file, by the first row that is surely of one kind; None for what is no table of JSON rows.

    A console may print a JSON object, too.
    """
    faults, num_steps = Faults(), 0
    for row in islice(json_rows(path, faults), ROWS_TO_LOOK_AT):
        if is_own_row(row):
            return "fsdp-sft"
        if any(fraction_total(row.get(key)) is not None for key in ("global_step/max_steps", "iteration")):
            return "ms-swift"
        if row.keys() >= {"current_steps", "total_steps"}:
            return "llama-factory"
        if isinstance(row.get("data"), dict) and "step" in row:
            return "verl"
        name = step_key(row)
        num_steps += name is not None and as_step(row[name]) is not None
    is_table = path.suffix in SUFFIXES or num_steps >= faults.num_unparsed
    return "jsonl" if num_steps > 0 and is_table else None


def read_json_lines(path: Path) -> RunLog:
    """The key of the step is chosen row by row, `epoch` only where nothing else is there."""
    source = json_source(path) or "jsonl"
    if source == "fsdp-sft":
        return read_own(path)
    frame = Frame()
    summary: dict[str, Any] = {}
    place, total_steps, last_s = None, None, 0.0
    for row in json_rows(path, frame.faults):
        if not ABOUT_THE_END.isdisjoint(row):
            summary |= {f"summary.{key}": value for key, value in row.items() if isinstance(value, str | int | float)}
            continue
        name = step_key(row)
        step = as_step(row[name]) if name else None
        metrics = row.get("data") if source == "verl" else row
        if step is None or not isinstance(metrics, dict):
            frame.faults.num_unparsed += 1
            continue
        place = row.pop(name) if name and name != "epoch" else None
        total_steps = row.pop("total_steps", total_steps)
        if "elapsed_time" in row and (elapsed_s := as_number(row["elapsed_time"])) is not None:
            if elapsed_s < last_s:  # since the start of the process
                frame.restart()
            row["elapsed_time"] = last_s = elapsed_s
        frame.add(step, metrics)
    total_steps = fraction_total(place) or as_step(total_steps)
    log = replace(frame.log(path, source, path.parent), total_steps=total_steps, config=summary)
    return _with_files_beside(_with_step_times(log)) if source in ("ms-swift", "llama-factory") else log


def _with_step_times(log: RunLog) -> RunLog:
    """Seconds a step from the differences of the elapsed time; none over a restart, where the clock begins again."""
    elapsed = log.series.get(ELAPSED)
    if elapsed is None or len(elapsed) < 2 or STEP_TIME in log.series:
        return log
    step_s = np.diff(elapsed.values) / np.diff(elapsed.steps)
    is_known = step_s >= 0
    times = Series(elapsed.steps[1:][is_known], step_s[is_known])
    return replace(log, series={**log.series, STEP_TIME: times}, span_s=float(np.ptp(elapsed.values)))


def _with_files_beside(log: RunLog) -> RunLog:
    """The arguments and the summary; what only transformers' own state knows: LLaMA-Factory's grad_norm."""
    directory = log.path.parent
    config = flat(read_object(directory / "args.json")) | flat(read_object(directory / "all_results.json"), "summary.")
    log = replace(log, config={**config, **log.config}, notes=(MEAN_NOTE, NAN_NOTE, ELAPSED_NOTE))
    for path in state_files(directory)[:1] if log.source == "llama-factory" else ():
        try:
            state = read_transformers(path)
        except (UnreadableLogError, OSError):
            continue
        return replace(log, series={**state.series, **log.series}, config={**log.config, **state.config})
    return log
