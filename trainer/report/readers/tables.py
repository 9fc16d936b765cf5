"""Tables: CSV histories, and any CSV with a step column."""

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trainer.report.readers.frame import Frame
from trainer.report.readers.json_logs import step_key
from trainer.report.readers.parsing import as_step
from trainer.report.run_log import RunLog, UnreadableLogError

PAIR = {"training_history.csv": "train/", "validation_history.csv": "val/"}
SUFFIXES = (".csv", ".tsv")
EPOCH_NOTE = "one row per epoch: steps are epochs here"
_HISTORY_COLUMNS = {"reward_mean", "accuracy_mean", "latency_mean", "budget_violation_rate"}
_NOT_METRICS = {"attempt", "step", "ts", "timestamp", "kind"}


def read_csv(path: Path) -> RunLog:
    """One table, or both of a pair of histories whichever of them is named."""
    pair = [path.parent / name for name in PAIR] if path.name in PAIR else [path]
    logs = [_read_table(part) for part in pair if part.is_file() and part.stat().st_size > 0]
    if not logs:
        raise UnreadableLogError(f"{path} is empty")
    return replace(
        logs[0],
        path=path,
        series={key: points for log in reversed(logs) for key, points in log.series.items()},
        num_rows=sum(log.num_rows for log in logs),
        num_unparsed=sum(log.num_unparsed for log in logs),
        num_attempts=max(log.num_attempts for log in logs),
        num_lost_steps=max(log.num_lost_steps for log in logs),
        num_disordered_rows=sum(log.num_disordered_rows for log in logs),
        notes=logs[0].notes if all(log.notes for log in logs) else (),
    )


def _read_table(path: Path) -> RunLog:
    frame = Frame()
    rows = _cells(path, frame)
    header = [name.strip() for name in next(rows, [])]
    x_axis = step_key(header)
    if x_axis is None:
        raise UnreadableLogError(
            f"{path} has no column step or epoch, only {', '.join(header)[:200]}: add one"
        )
    names = _metric_names(path, header, x_axis)
    attempt = None
    for cells in filter(None, rows):
        own = dict(zip(header, cells, strict=False)) if len(cells) == len(header) else {}
        if as_step(own.get(x_axis)) is not None:
            if attempt not in (None, own.get("attempt")):
                frame.restart()
            attempt = own.get("attempt")
        frame.add(
            own.get(x_axis),
            {name: own[column] for column, name in names.items() if own.get(column)},
        )
    return frame.log(path, "csv", path.parent, notes=(EPOCH_NOTE,) if x_axis == "epoch" else ())


def _metric_names(path: Path, header: list[str], x_axis: str) -> dict[str, str]:
    """Column -> metric, of those that are one; a history's own names get the prefix of its file."""
    prefix = PAIR.get(path.name, "train/" if _HISTORY_COLUMNS & set(header) else "")
    columns = [name for name in header if name not in _NOT_METRICS | {x_axis} or name == "epoch"]
    return {name: name if "/" in name or name == "epoch" else prefix + name for name in columns}


def _cells(path: Path, frame: Frame) -> Iterator[list[str]]:
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        first = file.readline(2**20)
        file.seek(0)
        reader = csv.reader(file, delimiter=max(",;\t", key=first.count))
        while True:
            try:
                yield next(reader)
            except csv.Error:
                frame.num_unparsed += 1
            except StopIteration:
                return
