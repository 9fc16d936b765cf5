"""Tables: CSV histories, and the newest run in MLflow (SQLite or its directory of files) or Trackio (SQLite)."""

import csv
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from trainer.report.readers.frame import CLOCK, Frame
from trainer.report.readers.json_logs import step_key
from trainer.report.readers.parsing import as_number, as_step
from trainer.report.run_log import RunLog, UnreadableLogError
from trainer.runtime.json_lines import parsed
from trainer.tracking.mlflow_backend import NAME_TAG

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
        raise UnreadableLogError(f"{path} has no column step or epoch, only {', '.join(header)[:200]}: add one")
    names = _metric_names(path, header, x_axis)
    attempt = None
    for cells in filter(None, rows):
        own = dict(zip(header, cells, strict=False)) if len(cells) == len(header) else {}
        if as_step(own.get(x_axis)) is not None:
            if attempt not in (None, own.get("attempt")):
                frame.restart()
            attempt = own.get("attempt")
        frame.add(own.get(x_axis), {name: own[column] for column, name in names.items() if own.get(column)})
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


SQLITE_MAGIC = b"SQLite format 3\0"
MLFLOW_EXIT_CODES = {"FINISHED": 0, "FAILED": 1, "KILLED": 75, "3": 0, "4": 1, "5": 75}
"""A status says less than an exit code: these are the ones our own runs end with. Files have its number."""
TRACKIO_STEPS = ("train/global_step", "global_step", "step")
"""Trackio counts calls; a trainer's own step is in the row."""

Point = tuple[Any, str, Any, Any]
"""Clock in milliseconds, name, value, step."""


def read_database(path: Path) -> RunLog:
    """Raises `UnreadableLogError` for a database of something else."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        connection.text_factory = lambda raw: raw.decode(errors="replace")
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        columns = {column[1] for column in connection.execute("PRAGMA table_info(metrics)")}
        if tables >= {"metrics", "runs", "params", "tags"}:
            return _read_mlflow(path, connection)
        if columns >= {"run_name", "step", "metrics"}:
            return _read_trackio(path, connection)
    raise UnreadableLogError(f"{path} is a database of neither MLflow nor Trackio: its tables are {sorted(tables)}")


def _read_mlflow(path: Path, connection: sqlite3.Connection) -> RunLog:
    runs = connection.execute("SELECT run_uuid, status FROM runs ORDER BY start_time DESC").fetchall()
    if not runs:
        raise UnreadableLogError(f"{path} holds no run yet")
    run_id, status = runs[0]
    tags, params = (
        dict(connection.execute(f"SELECT key, value FROM {table} WHERE run_uuid = ?", (run_id,)))
        for table in ("tags", "params")
    )
    points = connection.execute(
        "SELECT timestamp, key, CASE is_nan WHEN 1 THEN 'nan' ELSE value END, step FROM metrics "
        "WHERE run_uuid = ? ORDER BY timestamp, step",
        (run_id,),
    )
    return _mlflow_log(path, points, tags, params, str(status), len(runs))


def is_file_store(path: Path) -> bool:
    """Whether a directory is an MLflow store, an experiment in one, or a run."""
    return any(next(path.glob(f"{depth}meta.yaml"), None) for depth in ("", "*/", "*/*/")) and bool(_run_dirs(path))


def read_file_store(path: Path) -> RunLog:
    """The newest run of `mlruns`, of an experiment in it, or the run itself."""
    runs = [(_meta(run), run) for run in _run_dirs(path)]
    meta, run_dir = max(runs, key=lambda run: (as_number(run[0].get("start_time")) or 0.0, run[1].name))
    points = sorted(_file_points(run_dir / "metrics"), key=lambda row: (as_number(row[0]) or 0.0, as_step(row[3]) or 0))
    tags, params = (_texts(run_dir / name) for name in ("tags", "params"))
    return _mlflow_log(run_dir, points, tags, params, meta.get("status", ""), len(runs))


def _run_dirs(path: Path) -> list[Path]:
    return [found.parent for depth in ("", "*/", "*/*/") for found in path.glob(f"{depth}metrics") if found.is_dir()]


def _meta(run_dir: Path) -> dict[str, str]:
    """`meta.yaml` is flat: one `key: value` a line."""
    path = run_dir / "meta.yaml"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return {key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in lines) if colon}


def _texts(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_text(encoding="utf-8", errors="replace") for path in files}


def _file_points(directory: Path) -> Iterator[Point]:
    """Lines `timestamp value step`, one file a metric."""
    for key, text in _texts(directory).items():
        for words in map(str.split, text.splitlines()):
            if words:
                clock, value, step = words if len(words) == 3 else (None, None, None)
                yield clock, key, value, step


def _mlflow_log(
    path: Path,
    points: Iterable[Point],
    tags: Mapping[str, str],
    params: Mapping[str, str],
    status: str,
    num_runs: int,
) -> RunLog:
    frame = Frame()
    names = {tag.removeprefix(NAME_TAG): str(name) for tag, name in tags.items() if tag.startswith(NAME_TAG)}
    for clock, key, value, step in points:
        clock_ms, number = as_number(clock), as_number(value)
        if clock_ms is None or number is None:
            frame.num_unparsed += 1
        else:
            frame.add(step, {CLOCK: clock_ms / 1000, names.get(str(key), str(key)): number})
    return frame.log(
        path,
        "mlflow",
        path.parent.parent if path.parent.name == "mlflow" else path.parent,
        config=params,
        total_steps=as_step(params.get("trainer.total_training_steps")) or None,
        exit_code=MLFLOW_EXIT_CODES.get(status),
        notes=_newest_of(num_runs),
    )


def _newest_of(num_runs: int) -> tuple[str, ...]:
    return (f"the newest of {num_runs} runs",) if num_runs > 1 else ()


def _read_trackio(path: Path, connection: sqlite3.Connection) -> RunLog:
    names = connection.execute("SELECT run_name FROM metrics GROUP BY run_name ORDER BY MAX(rowid)").fetchall()
    if not names:
        raise UnreadableLogError(f"{path} holds no run yet")
    frame = Frame()
    rows = connection.execute(
        "SELECT timestamp, step, metrics FROM metrics WHERE run_name = ? ORDER BY rowid", names[-1]
    )
    for clock, step, text in rows:
        if not isinstance(metrics := parsed(text or ""), dict):
            frame.num_unparsed += 1
            continue
        own_steps = [metrics.pop(key) for key in TRACKIO_STEPS if key in metrics]
        with suppress(TypeError, ValueError, OverflowError):
            metrics[CLOCK] = datetime.fromisoformat(clock).timestamp()
        frame.add([*own_steps, step][0], metrics)
    # a database of many runs has a directory of its own: what lies beside it is of none of them
    return frame.log(path, "trackio", path, notes=_newest_of(len(names)))
