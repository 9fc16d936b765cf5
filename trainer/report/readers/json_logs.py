"""Logs in JSON: our own run directory, and those of others: an object a line,
trainer_state.json, printed lines.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from trainer.report.readers.frame import Frame
from trainer.report.readers.parsing import as_number, as_step, fraction_total
from trainer.report.run_log import LogEvent, RunLog, Series, ServingCheck, UnreadableLogError
from trainer.runtime.evaluations import FILE_NAME as EVALUATIONS
from trainer.runtime.evaluations import read_summaries
from trainer.runtime.files import open_regular, read_regular
from trainer.runtime.heartbeat import is_live
from trainer.runtime.json_lines import (
    MAX_FILE_BYTES,
    MAX_LINE_BYTES,
    JsonLines,
    flat,
    parsed,
    read_object,
)
from trainer.tracking import events_file, run_info
from trainer.tracking.metrics_file import MARKERS

Row = dict[str, Any]


def read_own(path: Path) -> RunLog:
    """The `metrics.jsonl` of our own run, and what lies beside it."""
    frame, run_dir = Frame(), path.parent
    num_attempts = _fill(frame, frame.lines(path))
    events: list[Row] = []
    evaluations: Mapping[str, Any] = {}
    notes: list[str] = []
    try:
        events = list(frame.lines(run_dir / events_file.FILE_NAME))
    except OSError as error:
        notes.append(f"{events_file.FILE_NAME} cannot be read: {error.strerror or error}")
    try:
        evaluations = read_summaries(run_dir)
    except OSError as error:
        notes.append(f"{EVALUATIONS} cannot be read: {error.strerror or error}")
    ends = [
        event.get("exit_code")
        for event in events
        if event.get("kind") == "start" or "exit_code" in event
    ]
    run = read_object(run_dir / run_info.FILE_NAME)
    config = run.get("config")
    config = flat(config) if isinstance(config, dict) else {}
    log = frame.log(
        path,
        "fsdp-sft",
        run_dir,
        config=config,
        events=tuple(map(_event, events)),
        total_steps=as_step(run.get("total_steps"))
        or as_step(config.get("trainer.total_training_steps"))
        or None,
        evaluations=evaluations,
        notes=tuple(notes),
        num_attempts=num_attempts,
        exit_code=as_step(ends[-1]) if ends else None,  # None if it started again since
        proofs=tuple(sorted(_proofs(run_dir), key=lambda proof: (proof.step, proof.engine))),
        is_running=is_live(run_dir),
    )
    return log if log.total_steps else replace(log, total_steps=_foretold(log))


def _fill(frame: Frame, rows: Iterable[Row]) -> int:
    """Takes the rows apart; returns the number of attempts."""
    attempt, num_attempts = None, 1
    for row in rows:
        step, kind, own_attempt = (
            row.pop("step", None),
            row.pop("kind", None),
            row.pop("attempt", None),
        )
        if own_attempt != attempt:
            # A start marker says where the attempt goes on; files from before there were markers
            # leave it open.
            if attempt is not None and kind not in MARKERS:
                frame.restart()
            attempt = own_attempt
            num_attempts = max(num_attempts, min(as_step(attempt) or 1, 10**6))
        if kind not in MARKERS:
            if isinstance(nonfinite := row.pop("nonfinite", None), dict):
                row |= nonfinite  # what JSON cannot hold: {"train/loss": "nan"}
            frame.add(step, row)
        elif (at := as_step(step)) is not None:
            frame.restart(at, rewinds=True)
    return num_attempts


def _event(row: Row) -> LogEvent:
    level = row.get("level") if row.get("level") in events_file.LEVELS else "info"
    return LogEvent(
        as_step(row.get("step")) or 0,
        str(row.get("kind", "")),
        str(row.get("message", "")),
        str(level),
    )


def _proofs(run_dir: Path) -> Iterator[ServingCheck]:
    for path in run_dir.glob("proofs/step_*.json"):
        proof = read_object(path)
        losses = (proof.get(name) for name in ("val_loss", "served_loss", "tolerance"))
        with suppress(KeyError, TypeError, ValueError):
            val_loss, served_loss, tolerance = (
                math.nan if loss is None else float(loss) for loss in losses
            )
            step, engine, causes = (
                int(proof["step"]),
                str(proof["engine"]),
                tuple(map(str, proof["causes"])),
            )
            yield ServingCheck(
                step, engine, val_loss, served_loss, tolerance, bool(proof["is_equal"]), causes
            )


def _foretold(log: RunLog) -> int | None:
    """How many steps 100 % are, for runs whose `run.json` does not say it."""
    shares = log.series.get("progress/pct")
    return (
        round(100 * int(shares.steps[-1]) / shares.values[-1])
        if shares and shares.values[-1] > 0
        else None
    )


FILE_NAME = "trainer_state.json"
NAN_NOTE = (
    "transformers replaces a NaN or infinite loss by the mean of the interval unless "
    "logging_nan_inf_filter is off: a loss of 0 or a grad_norm of NaN are the only traces"
)
MEAN_NOTE = "the loss is the mean over a logging interval, grad_norm and the learning rate are those of its last step"
SUMMARY = "train_runtime"
"""Only the row that sums the run up has it."""
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,15})")
_HISTORY = re.compile(r'"log_history"\s*:\s*\[([^]]*)')


def state_files(run_dir: Path) -> list[Path]:
    """The state in the run directory, which the end of the training wrote, then those of
    checkpoints, newest first.
    """
    checkpoints = [
        (int(match[1]), path)
        for path in run_dir.iterdir()
        if (match := _CHECKPOINT.fullmatch(path.name))
    ]
    directories = [run_dir, *(path for _, path in sorted(checkpoints, reverse=True))]
    return [directory / FILE_NAME for directory in directories if (directory / FILE_NAME).is_file()]


def read_transformers(path: Path) -> RunLog:
    """Of a file that was cut as much of the history as is whole."""
    frame, text = Frame(), read_regular(path).decode(errors="replace")
    if (tree := parsed(text)) is None:
        frame.num_unparsed += 1
        history = _HISTORY.search(text)
        tree = {
            "log_history": [*map(parsed, re.findall(r"\{[^{}]*\}", history[1]))] if history else []
        }
    if not isinstance(tree, dict) or not isinstance(tree.get("log_history"), list):
        raise UnreadableLogError(
            f"{path} has no log_history: give a {FILE_NAME} that transformers wrote"
        )
    config = {key: value for key, value in tree.items() if not isinstance(value, dict | list)}
    for row in tree["log_history"]:
        if not isinstance(row, dict):
            frame.num_unparsed += 1
        elif SUMMARY in row:
            config |= {f"summary.{key}": value for key, value in row.items() if key != "step"}
        else:
            frame.add(row.pop("step", None), row)
    is_in_checkpoint = _CHECKPOINT.fullmatch(path.parent.name) is not None
    run_dir = path.parent.parent if is_in_checkpoint else path.parent
    late = (
        f"read from {path.parent.name}: what came after that checkpoint is not in it",
    ) * is_in_checkpoint
    return frame.log(
        path,
        "transformers",
        run_dir,
        config=flat(read_object(run_dir / "args.json")) | config,
        total_steps=as_step(config.get("max_steps")) or None,
        notes=(MEAN_NOTE, NAN_NOTE, *late),
    )


ROLL_MARK = "metrics_tag: {"
_VERL_ROW = re.compile(r"(?:^|[\s\r])step:(\d{1,15}) - (\S.*)")
_METRIC = re.compile(r"\s*(.*):(?:(?:np\.)?[a-z]+\d*\((.*)\)|(.*?))\s*")
"""numpy prints np.float64(0.5)."""


def read_console(path: Path) -> RunLog:
    """Lines of both kinds count; the source is the kind there are more of. Other lines are not
    counted as unparsed.
    """
    frame, num_roll = Frame(), 0
    with open_regular(path, limit_bytes=MAX_FILE_BYTES) as file:
        while raw := file.readline(MAX_LINE_BYTES):
            line = raw.decode(errors="replace")
            if ROLL_MARK in line:
                num_roll += 1
                frame.add(*_roll_row(line[line.index(ROLL_MARK) + len(ROLL_MARK) - 1 :]))
            elif match := _VERL_ROW.search(line):
                pairs = filter(None, map(_METRIC.fullmatch, match[2].split(" - ")))
                frame.add(match[1], {pair[1]: pair[2] or pair[3] for pair in pairs})
    if not frame.num_rows:
        raise UnreadableLogError(
            f"{path} holds no line like 'step:1 - train/loss:0.5' or '{ROLL_MARK}...}}'"
        )
    source, notes = (
        ("roll" if 2 * num_roll > frame.num_rows else "verl"),
        ("the console prints few digits",),
    )
    return frame.log(path, source, path.parent, notes=() if num_roll else notes)


def _roll_row(text: str) -> tuple[Any, Row]:
    """Step and metrics; neither of a torn one."""
    row = parsed(text)
    metrics = row.get("metrics") if isinstance(row, dict) else None
    return (row.get("step"), metrics) if isinstance(metrics, dict) else (None, {})


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


KINDS: Mapping[str, Callable[[Row], bool]] = {
    "fsdp-sft": lambda row: row.keys() >= {"step", "attempt", "kind"},
    "ms-swift": lambda row: any(
        fraction_total(row.get(key)) for key in ("global_step/max_steps", "iteration")
    ),
    "verl": lambda row: isinstance(row.get("data"), dict) and "step" in row,
}
"""Who wrote a file -> how a row of it is told."""


def json_source(path: Path) -> str | None:
    """Who wrote a file, by the first row that is surely of one kind; None for what is no table of
    JSON rows.

    A console may print a JSON object, too.
    """
    lines, num_steps = JsonLines(path, is_final=True), 0
    for _, row in islice(lines, ROWS_TO_LOOK_AT):
        if found := next((name for name, is_of in KINDS.items() if is_of(row)), None):
            return found
        name = step_key(row)
        num_steps += name is not None and as_step(row[name]) is not None
    is_table = path.suffix in SUFFIXES or num_steps >= lines.num_unparsed
    return "jsonl" if num_steps > 0 and is_table else None


def read_json_lines(path: Path) -> RunLog:
    """The key of the step is chosen row by row, `epoch` only where nothing else is there."""
    source = json_source(path) or "jsonl"
    if source == "fsdp-sft":
        return read_own(path)
    frame = Frame()
    summary: Row = {}
    place, total_steps, last_s = None, None, 0.0
    for row in frame.lines(path):
        if not ABOUT_THE_END.isdisjoint(row):
            summary |= {
                f"summary.{key}": value
                for key, value in row.items()
                if isinstance(value, str | int | float)
            }
            continue
        name = step_key(row)
        step = as_step(row[name]) if name else None
        metrics = row.get("data") if source == "verl" else row
        if step is None or not isinstance(metrics, dict):
            frame.num_unparsed += 1
            continue
        place = row.pop(name) if name and name != "epoch" else None
        total_steps = row.pop("total_steps", total_steps)
        if (elapsed_s := as_number(row.get("elapsed_time"))) is not None:
            if elapsed_s < last_s:  # since the start of the process
                frame.restart()
            row["elapsed_time"] = last_s = elapsed_s
        frame.add(step, metrics)
    total_steps = fraction_total(place) or as_step(total_steps)
    log = frame.log(path, source, path.parent, total_steps=total_steps, config=summary)
    return _with_files_beside(_with_step_times(log)) if source == "ms-swift" else log


def _with_step_times(log: RunLog) -> RunLog:
    """Seconds a step from the differences of the elapsed time; none over a restart, where the
    clock begins again.
    """
    elapsed = log.series.get(ELAPSED)
    if elapsed is None or len(elapsed) < 2 or STEP_TIME in log.series:
        return log
    step_s = np.diff(elapsed.values) / np.diff(elapsed.steps)
    times = Series(elapsed.steps[1:], step_s)[step_s >= 0]
    return replace(
        log, series={**log.series, STEP_TIME: times}, span_s=float(np.ptp(elapsed.values))
    )


def _with_files_beside(log: RunLog) -> RunLog:
    """The arguments and the summary."""
    directory = log.path.parent
    beside = flat(read_object(directory / "args.json")) | flat(
        read_object(directory / "all_results.json"), "summary."
    )
    return replace(log, config={**beside, **log.config}, notes=(MEAN_NOTE, NAN_NOTE, ELAPSED_NOTE))
