"""Readers of rows: JSON lines, `log_history` of transformers, CSV, console lines of verl and ROLL."""

import csv
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.report.readers import own
from trainer.report.readers.checkpoints import STATE
from trainer.report.readers.parsing import as_step, fraction_total, step_key
from trainer.report.readers.store import Row, Store
from trainer.report.run_log import RunLog, Series, UnreadableLogError
from trainer.runtime.files import open_regular, read_regular
from trainer.runtime.json_lines import (
    MAX_FILE_BYTES,
    MAX_LINE_BYTES,
    JsonLines,
    flat,
    parsed,
    read_object,
)
from trainer.tracking.metrics_file import MARKERS

NAN_NOTE = (
    "transformers replaces a NaN or infinite loss by the mean of the interval unless "
    "logging_nan_inf_filter is off: a loss of 0 or a grad_norm of NaN are the only traces"
)
MEAN_NOTE = "the loss is the mean over a logging interval, grad_norm and the learning rate are those of its last step"
ELAPSED, STEP_TIME = "progress/elapsed_s", "train/time(s)"
ELAPSED_NOTE = f"{STEP_TIME} is the difference of elapsed_time, which has whole seconds and includes evaluations"
SUMMARY_KEYS = {"log_history", "best_model_checkpoint", "train_runtime"}
"""Keys of rows that sum the run up."""


def read_json_lines(path: Path) -> RunLog:
    """Read our `metrics.jsonl` and its run directory, or another trainer's JSON objects."""
    store, lines = Store(), JsonLines(path, is_final=True)
    source, attempt = "jsonl", 1
    total: Any = None
    for _, row in lines:
        if source == "jsonl":
            source = _source(row)
        if row.get("kind") in MARKERS and (at := as_step(row.get("step"))) is not None:
            store.rewind(at)
        elif SUMMARY_KEYS.isdisjoint(row):
            key = step_key(row)
            step = row.get(key) if key else None
            total = fraction_total(step) or row.pop("total_steps", total)
            attempt = max(attempt, as_step(row.pop("attempt", 1)) or 1)
            nonfinite = row.pop("nonfinite", None)  # what JSON cannot hold: {"train/loss": "nan"}
            row |= nonfinite if isinstance(nonfinite, dict) else {}
            if key and key != "epoch":
                row.pop(key)
            store.add(step, row.get("data") if source == "verl" else row)
    store.num_unparsed += lines.num_unparsed
    if source == "fsdp-sft":
        return own.with_run_directory(store, path, num_attempts=attempt)
    log = store.log(path, source, path.parent, total_steps=as_step(total))
    return _of_swift(log) if source == "ms-swift" else log


def _source(row: Row) -> str:
    """Tell the trainer by a row."""
    if row.keys() >= {"step", "attempt", "kind"}:
        return "fsdp-sft"
    if fraction_total(row.get("global_step/max_steps")) or fraction_total(row.get("iteration")):
        return "ms-swift"
    return "verl" if isinstance(row.get("data"), dict) and "step" in row else "jsonl"


def _of_swift(log: RunLog) -> RunLog:
    """Add the arguments, and the seconds of a step from differences of the elapsed time."""
    config = flat(read_object(log.path.parent / "args.json"))
    log = replace(log, config=config, notes=(MEAN_NOTE, NAN_NOTE, ELAPSED_NOTE))
    elapsed = log.series.get(ELAPSED)
    if elapsed is None or len(elapsed) < 2 or STEP_TIME in log.series:
        return log
    step_s = np.diff(elapsed.values) / np.diff(elapsed.steps)
    # The clock begins again at a restart.
    times = Series(elapsed.steps[1:], step_s)[step_s >= 0]
    span_s = float(np.ptp(elapsed.values))
    return replace(log, series={**log.series, STEP_TIME: times}, span_s=span_s)


def read_transformers(path: Path) -> RunLog:
    """Read `log_history`; of a file that was cut, the rows that are whole."""
    store, text = Store(), read_regular(path).decode(errors="replace")
    tree = parsed(text)
    if tree is None:
        store.num_unparsed += 1
        _, _, history = text.partition('"log_history"')
        tree = {"log_history": [*map(parsed, re.findall(r"\{[^{}]*\}", history))]}
    rows = tree.get("log_history") if isinstance(tree, dict) else None
    if not isinstance(rows, list):
        raise UnreadableLogError(f"{path} has no log_history: give a {STATE} of transformers")
    for row in rows:
        if isinstance(row, dict) and SUMMARY_KEYS.isdisjoint(row):
            store.add(row.pop("step", None), row)
        store.num_unparsed += not isinstance(row, dict)
    config = {key: value for key, value in tree.items() if not isinstance(value, dict | list)}
    notes, run_dir = [MEAN_NOTE, NAN_NOTE], path.parent
    if run_dir.name.startswith("checkpoint-"):
        notes.append(f"read from {run_dir.name}: rows after that checkpoint are not in it")
        run_dir = run_dir.parent
    return store.log(
        path,
        "transformers",
        run_dir,
        config=flat(read_object(run_dir / "args.json")) | config,
        total_steps=as_step(config.get("max_steps")) or None,
        notes=tuple(notes),
    )


PAIR = {"training_history.csv": "train/", "validation_history.csv": "val/"}
HISTORY_COLUMNS = {"reward_mean", "accuracy_mean", "latency_mean", "budget_violation_rate"}
NO_METRICS = {"attempt", "step", "ts", "timestamp", "kind"}
MAX_CSV_LINE = 2**16


def read_csv(path: Path) -> RunLog:
    """Read a table with a step or epoch column; of a pair of histories, both."""
    store = Store()
    notes: tuple[str, ...] = ()
    parts = [path.with_name(name) for name in PAIR] if path.name in PAIR else [path]
    for part in parts:
        if part.is_file() and part.stat().st_size > 0:
            notes = _add_table(part, store)
    return store.log(path, "csv", path.parent, notes=notes)


def _add_table(path: Path, store: Store) -> tuple[str, ...]:
    """Add the rows of a table; return notes.

    Lines are split one by one: a stray quote of a damaged one must not swallow the next.
    """
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        first = file.readline(MAX_CSV_LINE)
        delimiter = max(",;\t", key=first.count)
        header = _cells(first, delimiter)
        x_axis = step_key(header)
        if x_axis is None:
            shown = ", ".join(header)[:200]
            raise UnreadableLogError(f"{path} has no column step or epoch, only {shown}: add one")
        names, runs = _metric_names(path, header)
        while line := file.readline(MAX_CSV_LINE):
            cells = _cells(line, delimiter)
            if cells and len(cells) != len(header):
                store.num_unparsed += 1
            elif cells:
                row = {name: cell for name, cell in zip(names, cells, strict=True) if name}
                store.add(cells[header.index(x_axis)], row)
    others = (
        f"columns of {len(runs) - 1} other runs than {runs[0]} are left out" if runs[1:] else ""
    )
    epochs = "one row per epoch: steps are epochs here" if x_axis == "epoch" else ""
    return tuple(filter(None, (others, epochs)))


def _cells(line: str, delimiter: str) -> list[str]:
    cells = next(csv.reader([line], delimiter=delimiter), [])
    return [cell.strip() for cell in cells]


def _metric_names(path: Path, header: list[str]) -> tuple[list[str], list[str]]:
    """Return the metric of each column, empty for a column that is none, and the runs.

    A history's names get the prefix of its file. A panel of W&B has columns `run - metric`.
    """
    prefix = PAIR.get(path.name, "train/" if HISTORY_COLUMNS & set(header) else "")
    runs = sorted({column.rpartition(" - ")[0] for column in header} - {""})
    names = []
    for column in header:
        run, _, name = column.rpartition(" - ")
        is_metric = run in ("", *runs[:1]) and not name.endswith(("__MIN", "__MAX"))
        if not is_metric or name.lower() in NO_METRICS:
            name = ""
        elif "/" not in name and name != "epoch":
            name = prefix + name
        names.append(name)
    return names, runs


VERL = re.compile(r"(?:^|[\s\r])step:(\d{1,15}) - (\S.*)")
ROLL = re.compile(r"metrics_tag: (\{.*)")
METRIC = re.compile(r"\s*(.*):(?:(?:np\.)?[a-z]+\d*\((.*)\)|(.*?))\s*")
"""numpy prints np.float64(0.5)."""


def read_console(path: Path) -> RunLog:
    """Read the lines of verl and ROLL in a captured console; other lines do not count."""
    store, num_roll = Store(), 0
    with open_regular(path, limit_bytes=MAX_FILE_BYTES) as file:
        while raw := file.readline(MAX_LINE_BYTES):
            line = raw.decode(errors="replace")
            if match := ROLL.search(line):
                num_roll += 1
                found = parsed(match[1])
                row = found if isinstance(found, dict) else {}
                store.add(row.get("step"), row.get("metrics"))
            elif match := VERL.search(line):
                pairs = filter(None, map(METRIC.fullmatch, match[2].split(" - ")))
                store.add(match[1], {pair[1]: pair[2] or pair[3] for pair in pairs})
    if not store.num_rows:
        cause = f"{path} holds no line like 'step:1 - train/loss:0.5' or 'metrics_tag: {{...}}'"
        raise UnreadableLogError(cause)
    source = "roll" if 2 * num_roll > store.num_rows else "verl"
    notes = () if num_roll else ("the console prints few digits",)
    return store.log(path, source, path.parent, notes=notes)
