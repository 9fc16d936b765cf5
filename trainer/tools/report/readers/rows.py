"""Readers of rows: JSON lines, `log_history` of transformers, CSV, console lines of verl and ROLL."""

import csv
import re
from pathlib import Path
from typing import Any

from trainer.runtime.files import open_regular, read_regular
from trainer.runtime.json_lines import (
    MAX_FILE_BYTES,
    MAX_LINE_BYTES,
    JsonLines,
    flat,
    parsed,
    read_object,
)
from trainer.tools.report.readers import own
from trainer.tools.report.readers.checkpoints import STATE
from trainer.tools.report.readers.parsing import as_step, fraction_total, step_key
from trainer.tools.report.readers.store import Row, Store
from trainer.tools.report.run_log import RunLog, UnreadableLogError
from trainer.tracking.metrics_file import MARKERS

NAN_NOTE = (
    "transformers replaces a NaN or infinite loss by the mean of the interval unless "
    "logging_nan_inf_filter is off: a loss of 0 or a grad_norm of NaN are the only traces"
)
MEAN_NOTE = "the loss is the mean over a logging interval, grad_norm and the learning rate are those of its last step"
ELAPSED_NOTE = "train/time(s) is the difference of elapsed_time, which has whole seconds and includes evaluations"
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
            key = step_key(row) or ""
            step = row.get(key) if key == "epoch" else row.pop(key, None)
            total = fraction_total(step) or row.pop("total_steps", total)
            attempt = max(attempt, as_step(row.pop("attempt", 1)) or 1)
            nonfinite = row.pop("nonfinite", None)  # what JSON cannot hold: {"train/loss": "nan"}
            row |= nonfinite if isinstance(nonfinite, dict) else {}
            store.add(step, row.get("data") if source == "verl" else row)
    store.num_unparsed += lines.num_unparsed
    if source == "fsdp-sft":
        return own.with_run_directory(store, path, num_attempts=attempt)
    is_swift = source == "ms-swift"
    return store.log(
        path,
        source,
        path.parent,
        total_steps=as_step(total),
        config=flat(read_object(path.parent / "args.json")) if is_swift else {},
        notes=(MEAN_NOTE, NAN_NOTE, ELAPSED_NOTE) if is_swift else (),
    )


def _source(row: Row) -> str:
    """Tell the trainer by a row."""
    if row.keys() >= {"step", "attempt", "kind"}:
        return "fsdp-sft"
    if fraction_total(row.get("global_step/max_steps")) or fraction_total(row.get("iteration")):
        return "ms-swift"
    return "verl" if isinstance(row.get("data"), dict) and "step" in row else "jsonl"


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
        if not isinstance(row, dict):
            store.num_unparsed += 1
        elif SUMMARY_KEYS.isdisjoint(row):
            store.add(row.pop("step", None), row)
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
NO_METRICS = {"attempt", "step", "ts", "timestamp", "kind"}
MAX_CSV_LINE = 2**16


def read_csv(path: Path) -> RunLog:
    """Read a table with a step or epoch column; of a pair of histories, both."""
    store = Store()
    notes: list[str] = []
    parts = [path.with_name(name) for name in PAIR] if path.name in PAIR else [path]
    for part in parts:
        if part.is_file() and part.stat().st_size > 0:
            notes = _add_table(part, store)
    return store.log(path, "csv", path.parent, notes=tuple(notes))


def _add_table(path: Path, store: Store) -> list[str]:
    """Add the rows of a table; return notes.

    Lines are split one by one: a stray quote of a damaged one must not swallow the next. A
    history's metrics get the prefix of its file. A panel of W&B has columns `run - metric`: the
    first run is read.
    """
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        first = file.readline(MAX_CSV_LINE)
        delimiter = max(",;\t", key=first.count)
        header = _cells(first, delimiter)
        x_axis = step_key(header)
        if x_axis is None:
            shown = ", ".join(header)[:200]
            raise UnreadableLogError(f"{path} has no column step or epoch, only {shown}: add one")
        runs = sorted({column.rpartition(" - ")[0] for column in header} - {""})
        names = [_metric(column, runs, PAIR.get(path.name, "")) for column in header]
        while line := file.readline(MAX_CSV_LINE):
            cells = _cells(line, delimiter)
            if len(cells) == len(header):
                row = dict(zip(names, cells, strict=True))
                row.pop("", None)
                store.add(cells[header.index(x_axis)], row)
            else:
                store.num_unparsed += bool(cells)
    notes = []
    if len(runs) > 1:
        notes.append(f"columns of {len(runs) - 1} other runs than {runs[0]} are left out")
    if x_axis == "epoch":
        notes.append("one row per epoch: steps are epochs here")
    return notes


def _cells(line: str, delimiter: str) -> list[str]:
    cells = next(csv.reader([line], delimiter=delimiter), [])
    return [cell.strip() for cell in cells]


def _metric(column: str, runs: list[str], prefix: str) -> str:
    """Return the metric of a column, empty for one that is no metric or of another run."""
    run, _, name = column.rpartition(" - ")
    is_metric = run in ("", *runs[:1]) and not name.endswith(("__MIN", "__MAX"))
    if not is_metric or name.lower() in NO_METRICS:
        return ""
    return name if "/" in name or name == "epoch" else prefix + name


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
