"""MLflow (SQLite or its directory of files) and Trackio (SQLite): the newest run in them."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

from trainer.report.readers.aliases import canonical
from trainer.report.readers.checkpoints import find_checkpoints, tracker_step
from trainer.report.readers.frame import Frame
from trainer.report.readers.parsing import Faults, as_number, as_step, parse_number
from trainer.report.run_log import RunLog, UnreadableLogError

SQLITE_MAGIC = b"SQLite format 3\0"
NAME_TAG = "metric_name/"
"""Run tags in which our MLflow backend keeps the names that MLflow does not allow."""
MLFLOW_EXIT_CODES = {"FINISHED": 0, "FAILED": 1, "KILLED": 75}
"""A status says less than an exit code: these are the ones our own runs end with."""
_FILE_STATUS = {"3": "FINISHED", "4": "FAILED", "5": "KILLED"}

Point = tuple[float, str, float, int]
"""Clock in seconds, name, value, step."""


def read_database(path: Path) -> RunLog:
    """Raises `UnreadableLogError` for a database of something else."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        connection.text_factory = lambda raw: raw.decode(errors="replace")
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables >= {"metrics", "runs", "params", "tags"}:
            return _read_mlflow(path, connection)
        columns = {column[1] for column in connection.execute("PRAGMA table_info(metrics)")}
        if columns >= {"run_name", "step", "metrics"}:
            return _read_trackio(path, connection)
    raise UnreadableLogError(f"{path} is a database of neither MLflow nor Trackio: its tables are {sorted(tables)}")


def _read_mlflow(path: Path, connection: sqlite3.Connection) -> RunLog:
    runs = connection.execute("SELECT run_uuid, status FROM runs ORDER BY start_time DESC").fetchall()
    if not runs:
        raise UnreadableLogError(f"{path} holds no run yet")
    run_id, status = runs[0]
    tags = dict(connection.execute("SELECT key, value FROM tags WHERE run_uuid = ?", (run_id,)))
    params = dict(connection.execute("SELECT key, value FROM params WHERE run_uuid = ?", (run_id,)))
    points = connection.execute(
        "SELECT timestamp, key, value, step, is_nan FROM metrics WHERE run_uuid = ? ORDER BY timestamp, step", (run_id,)
    )
    faults = Faults()
    return _mlflow_log(path, _sql_points(points, faults), faults, tags, params, str(status), len(runs))


def _sql_points(rows: sqlite3.Cursor, faults: Faults) -> Iterator[Point]:
    for clock, key, value, step, is_nan in rows:
        number, place, clock_ms = as_number(value), as_step(step), as_number(clock)
        if number is None or place is None or clock_ms is None:
            faults.num_unparsed += 1
        else:
            yield clock_ms / 1000, str(key), float("nan") if is_nan else number, place


def is_file_store(path: Path) -> bool:
    """Whether a directory is an MLflow store, an experiment in one, or a run."""
    return any(next(path.glob(f"{depth}meta.yaml"), None) for depth in ("", "*/", "*/*/")) and bool(_run_dirs(path))


def read_file_store(path: Path) -> RunLog:
    """The newest run of `mlruns`, of an experiment in it, or the run itself."""
    runs = _run_dirs(path)
    if not runs:
        raise UnreadableLogError(f"{path} holds no MLflow run: give mlruns, an experiment, or a run directory")
    run_dir = max(runs, key=lambda run: (as_number(_meta(run).get("start_time")) or 0.0, run.name))
    faults = Faults()
    points = sorted(_file_points(run_dir / "metrics", faults), key=lambda point: (point[0], point[3]))
    tags, params = (_texts(run_dir / name) for name in ("tags", "params"))
    status = _meta(run_dir).get("status", "")
    return _mlflow_log(run_dir, iter(points), faults, tags, params, _FILE_STATUS.get(status, status), len(runs))


def _run_dirs(path: Path) -> list[Path]:
    return [
        metrics.parent for depth in ("", "*/", "*/*/") for metrics in path.glob(f"{depth}metrics") if metrics.is_dir()
    ]


def _meta(run_dir: Path) -> dict[str, str]:
    """`meta.yaml` is flat: one `key: value` a line."""
    try:
        lines = (run_dir / "meta.yaml").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in lines) if colon}


def _texts(directory: Path) -> dict[str, str]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_text(encoding="utf-8", errors="replace") for path in files}


def _file_points(directory: Path, faults: Faults) -> Iterator[Point]:
    """Lines `timestamp value step`, one file a metric."""
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        key = str(path.relative_to(directory))
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            words = line.split()
            numbers = [parse_number(word) for word in words[:3]]
            step = as_step(words[2]) if len(words) == 3 else None
            if len(numbers) < 3 or numbers[0] is None or numbers[1] is None or step is None:
                faults.num_unparsed += bool(words)
            else:
                yield numbers[0] / 1000, key, numbers[1], step


def _mlflow_log(
    path: Path,
    points: Iterator[Point],
    faults: Faults,
    tags: dict[str, Any],
    params: dict[str, Any],
    status: str,
    num_runs: int,
) -> RunLog:
    frame, clocks = Frame(), []
    names = {tag.removeprefix(NAME_TAG): str(name) for tag, name in tags.items() if tag.startswith(NAME_TAG)}
    for clock_s, key, value, step in points:
        clocks.append(clock_s)
        frame.add(step, {names.get(key, key): value})
    resolved = frame.resolve(canonical)
    run_dir = path.parent.parent if path.parent.name == "mlflow" else path.parent
    return RunLog(
        path=path,
        source="mlflow",
        series=resolved.series,
        num_rows=frame.num_rows,
        num_unparsed=faults.num_unparsed,
        config=params,
        checkpoints=find_checkpoints(run_dir),
        tracker_step=tracker_step(run_dir),
        total_steps=as_step(params.get("trainer.total_training_steps")) or None,
        num_disordered_rows=resolved.num_disordered_rows,
        span_s=max(clocks) - min(clocks) if len(clocks) > 1 else None,
        exit_code=MLFLOW_EXIT_CODES.get(status),
        notes=(f"the newest of {num_runs} runs",) if num_runs > 1 else (),
    )


def _read_trackio(path: Path, connection: sqlite3.Connection) -> RunLog:
    names = [
        name for (name,) in connection.execute("SELECT run_name FROM metrics GROUP BY run_name ORDER BY MAX(rowid)")
    ]
    if not names:
        raise UnreadableLogError(f"{path} holds no run yet")
    faults, frame, clocks = Faults(), Frame(), []
    rows = connection.execute(
        "SELECT timestamp, step, metrics FROM metrics WHERE run_name = ? ORDER BY rowid", (names[-1],)
    )
    for clock, step, text in rows:
        try:
            metrics = json.loads(text)
        except (TypeError, ValueError, RecursionError):
            metrics = None
        if not isinstance(metrics, dict):
            faults.num_unparsed += 1
            continue
        # Trackio counts calls; a trainer's own step is in the row.
        place = next((metrics.pop(key) for key in ("train/global_step", "global_step", "step") if key in metrics), step)
        number = as_step(place)
        if number is None:
            faults.num_unparsed += 1
            continue
        frame.add(number, metrics)
        clocks += _clock_s(clock)
    resolved = frame.resolve(canonical)
    return RunLog(
        path=path,
        source="trackio",
        series=resolved.series,
        num_rows=frame.num_rows,
        num_unparsed=faults.num_unparsed,
        num_disordered_rows=resolved.num_disordered_rows,
        span_s=max(clocks) - min(clocks) if len(clocks) > 1 else None,
        notes=(f"the newest of {len(names)} runs",) if len(names) > 1 else (),
    )


def _clock_s(text: Any) -> list[float]:
    try:
        return [datetime.fromisoformat(text).timestamp()]
    except (TypeError, ValueError, OverflowError):
        return []
