"""CSV histories: `training_history.csv` with `validation_history.csv`, and any table with a step or epoch column."""

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trainer.report.readers.frame import Frame
from trainer.report.readers.json_logs import step_key
from trainer.report.readers.parsing import Faults, as_step
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
    rows = _cells(path, frame.faults)
    header = [name.strip() for name in next(rows, [])]
    x_axis = step_key(header)
    if x_axis is None:
        raise UnreadableLogError(f"{path} has no column step or epoch, only {', '.join(header)[:200]}: add one")
    names = _metric_names(path, header, x_axis)
    place, attempt_place = header.index(x_axis), header.index("attempt") if "attempt" in header else None
    attempt = None
    for cells in rows:
        step = as_step(cells[place]) if len(cells) == len(header) else None
        if step is None:
            frame.faults.num_unparsed += bool(cells)
            continue
        if attempt_place is not None and cells[attempt_place] != attempt:
            if attempt is not None:
                frame.restart()
            attempt = cells[attempt_place]
        frame.add(step, {name: cell for name, cell in zip(names, cells, strict=True) if name and cell})
    return replace(frame.log(path, "csv", path.parent), notes=(EPOCH_NOTE,) if x_axis == "epoch" else ())


def _metric_names(path: Path, header: list[str], x_axis: str) -> list[str]:
    """Names of the columns, "" for those that are no metrics; a history's own names get the prefix of its file."""
    prefix = PAIR.get(path.name, "train/" if _HISTORY_COLUMNS & set(header) else "")
    dropped = _NOT_METRICS | ({x_axis} - {"epoch"})
    own = [name if "/" in name or name == "epoch" or not prefix else prefix + name for name in header]
    return ["" if name in dropped else full for name, full in zip(header, own, strict=True)]


def _cells(path: Path, faults: Faults) -> Iterator[list[str]]:
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        first = file.readline(2**20)
        file.seek(0)
        reader = csv.reader(file, delimiter=max(",;\t", key=first.count))
        while True:
            try:
                yield next(reader)
            except csv.Error:
                faults.num_unparsed += 1
            except StopIteration:
                return
