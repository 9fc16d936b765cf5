"""Logs in JSON: our own run directory, and those of others: an object a line, trainer_state.json, printed lines."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from trainer.report.readers.frame import Frame
from trainer.report.readers.parsing import (
    MAX_LINE_BYTES,
    Faults,
    as_number,
    as_step,
    fraction_total,
    json_rows,
    parse_number,
)
from trainer.report.run_log import LogEvent, RunLog, Series, ServingCheck, UnreadableLogError
from trainer.runtime.evaluations import read_summaries
from trainer.runtime.heartbeat import is_live
from trainer.runtime.json_lines import flat, read_object
from trainer.tracking import events_file, run_info
from trainer.tracking.metrics_file import MARKERS


def is_own_row(row: Mapping[str, Any]) -> bool:
    return row.keys() >= {"step", "attempt", "kind"}


def read_own(path: Path, rows: Iterable[Mapping[str, Any]] | None = None) -> RunLog:
    """`rows`: those of the file that count, where not all do."""
    frame, run_dir = Frame(), path.parent
    num_attempts = _fill(frame, json_rows(path, frame.faults) if rows is None else map(dict, rows))
    events, exit_code = _read_events(run_dir / events_file.FILE_NAME, frame.faults)
    log = frame.log(path, "fsdp-sft", run_dir)
    run = read_object(run_dir / run_info.FILE_NAME)
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


def _fill(frame: Frame, rows: Iterable[dict[str, Any]]) -> int:
    """Takes the rows apart; returns the number of attempts."""
    attempt, num_attempts = None, 1
    for row in rows:
        step, kind, own_attempt = row.pop("step", None), row.pop("kind", None), row.pop("attempt", None)
        if own_attempt != attempt:
            # A start marker says where the attempt goes on; files from before there were markers leave it open.
            if attempt is not None and kind not in MARKERS:
                frame.restart()
            attempt = own_attempt
            num_attempts = max(num_attempts, min(as_step(attempt) or 1, 10**6))
        if kind in MARKERS:
            if (number := as_number(step)) is not None and abs(number) < 2**53:
                frame.restart(int(number), rewinds=True)
        else:
            if nonfinite := row.pop("nonfinite", None):
                row |= _restored(nonfinite)
            frame.add(step, row)
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
        level = level if level in events_file.LEVELS else "info"
        events.append(LogEvent(step=step, kind=kind, message=str(row.get("message", "")), level=level))
    return tuple(events), exit_code


FILE_NAME = "trainer_state.json"
NAN_NOTE = (
    "transformers replaces a NaN or infinite loss by the mean of the interval unless logging_nan_inf_filter is off: "
    "a loss of 0 or a grad_norm of NaN are the only traces"
)
MEAN_NOTE = "the loss is the mean over a logging interval, grad_norm and the learning rate are those of its last step"
SUMMARY = "train_runtime"
"""Only the row that sums the run up has it."""
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,15})")
_HISTORY = re.compile(r'"log_history"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")


def state_files(run_dir: Path) -> list[Path]:
    """The state in the run directory, which the end of the training wrote, then those of checkpoints, newest first."""
    checkpoints = [(int(match[1]), path) for path in run_dir.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))]
    directories = [run_dir, *(path for _, path in sorted(checkpoints, reverse=True))]
    return [directory / FILE_NAME for directory in directories if (directory / FILE_NAME).is_file()]


def read_transformers(path: Path) -> RunLog:
    """Of a file that was cut as much of the history as is whole."""
    frame = Frame()
    history, config = _load(path, frame)
    for row in history:
        if not isinstance(row, dict):
            frame.faults.num_unparsed += 1
        elif SUMMARY in row:
            config |= {f"summary.{key}": value for key, value in row.items() if key != "step"}
        else:
            frame.add(row.pop("step", None), row)
    is_in_checkpoint = _CHECKPOINT.fullmatch(path.parent.name) is not None
    run_dir = path.parent.parent if is_in_checkpoint else path.parent
    late = (f"read from {path.parent.name}: what came after that checkpoint is not in it",) * is_in_checkpoint
    return replace(
        frame.log(path, "transformers", run_dir),
        config=flat(read_object(run_dir / "args.json")) | config,
        total_steps=as_step(config.get("max_steps")) or None,
        notes=(MEAN_NOTE, NAN_NOTE, *late),
    )


def _load(path: Path, frame: Frame) -> tuple[list[Any], dict[str, Any]]:
    """The history and the other facts."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        frame.faults.num_unparsed += 1
        return _salvaged(text), {}
    history = tree.pop("log_history", None) if isinstance(tree, dict) else None
    if not isinstance(history, list):
        raise UnreadableLogError(f"{path} has no log_history: give a {FILE_NAME} that transformers wrote")
    return history, {key: value for key, value in tree.items() if not isinstance(value, dict | list)}


def _salvaged(text: str) -> list[Any]:
    rows: list[Any] = []
    match = _HISTORY.search(text)
    place = match.end() if match else len(text)
    decoder = json.JSONDecoder()
    while (between := _BETWEEN.match(text, place)) and text.startswith("{", between.end()):
        try:
            row, place = decoder.raw_decode(text, between.end())
        except (ValueError, RecursionError):
            break
        rows.append(row)
    return rows


ROLL_MARK = "metrics_tag: {"
_VERL_ROW = re.compile(r"(?:^|[\s\r])step:(\d{1,15}) - (\S.*)")
_METRIC = re.compile(r"\s*(.*):(?:(?:np\.)?[a-z]+\d*\((.*)\)|(.*?))\s*")
"""numpy prints np.float64(0.5)."""


def read_console(path: Path) -> RunLog:
    """Lines of both kinds count; the source is the kind there are more of. Other lines are not counted as unparsed."""
    frame, num_roll = Frame(), 0
    with path.open(encoding="utf-8", errors="replace") as file:
        while line := file.readline(MAX_LINE_BYTES):
            if ROLL_MARK in line:
                num_roll += 1
                frame.add(*_roll_row(line[line.index(ROLL_MARK) + len(ROLL_MARK) - 1 :]))
            elif match := _VERL_ROW.search(line):
                pairs = filter(None, map(_METRIC.fullmatch, match[2].split(" - ")))
                frame.add(match[1], {pair[1]: pair[2] or pair[3] for pair in pairs})
    if not frame.num_rows:
        raise UnreadableLogError(f"{path} holds no line like 'step:1 - train/loss:0.5' or '{ROLL_MARK}...}}'")
    log = frame.log(path, "roll" if 2 * num_roll > frame.num_rows else "verl", path.parent)
    return replace(log, notes=() if num_roll else ("the console prints few digits",))


def _roll_row(text: str) -> tuple[Any, dict[str, Any]]:
    """Step and metrics; neither of a torn one."""
    try:
        row: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None, {}
    metrics = row.get("metrics")
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
