"""Finds out what a file or directory is, by its content, and reads it."""

import sqlite3
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from trainer.report.readers import databases, json_logs, own, tables, tensorboard, transformers_state
from trainer.report.readers.console import read_console
from trainer.report.readers.parsing import Faults, as_step, json_rows
from trainer.report.run_log import RunLog, UnreadableLogError

Reader = Callable[[Path], RunLog]

FIX = (
    "give a run directory or one of its files: metrics.jsonl, logging.jsonl, trainer_log.jsonl, trainer_state.json, "
    "training_history.csv, a CSV with a step column, TensorBoard event files, mlruns, mlflow.db, a Trackio database, "
    "JSON lines with a step, or the captured console of verl or ROLL"
)
ROWS_TO_LOOK_AT = 64
MAX_TRIED = 40
"""Files of a directory; one with more is no run directory."""
KNOWN_NAMES = ("metrics.jsonl", "logging.jsonl", "trainer_log.jsonl")
DATABASES = ("mlflow/mlflow.db", "mlflow.db", "mlruns.db")
JSON_SUFFIXES = (".jsonl", ".ndjson")
TEXT_SUFFIXES = (*JSON_SUFFIXES, ".csv", ".tsv", ".db", ".sqlite", ".sqlite3", ".json", ".log", ".txt", ".out")


def read_run(path: Path) -> RunLog:
    """The log at `path`, a file or a run directory, whoever wrote it.

    Damaged parts are passed over and counted. Raises `UnreadableLogError` where nothing can be read.
    """
    tried: list[str] = []
    try:
        for candidate in _candidates(path):
            log = _try(candidate, tried)
            if log is not None:
                return log
    except OSError as error:
        tried.append(str(error))
    what = "; ".join(tried) if tried else "it is empty" if path.exists() else "it does not exist"
    raise UnreadableLogError(f"cannot read {path} as a training log ({what}): {FIX}")


def _try(path: Path, tried: list[str]) -> RunLog | None:
    try:
        log = _read_one(path)
    except (UnreadableLogError, OSError, sqlite3.Error) as error:
        tried.append(f"{path.name}: {error}")
        return None
    if not log.series:
        tried.append(f"{path.name}: no metrics in it ({log.num_unparsed} lines unreadable)")
    return log if log.series else None


def _candidates(path: Path) -> Iterator[Path]:
    """What `path` can mean, best first: the richest log of a run directory before copies of it."""
    if not path.is_dir():
        if path.exists():
            yield path
        return
    yield from (path / name for name in KNOWN_NAMES if (path / name).is_file())
    # ms-swift makes a directory v<N>-<time> for each start.
    versions = [log for log in path.glob("v*-*/logging.jsonl") if log.parent.name[1:].partition("-")[0].isdecimal()]
    yield from sorted(versions, key=lambda log: int(log.parent.name[1:].partition("-")[0]), reverse=True)
    yield from transformers_state.state_files(path)
    yield from [path / name for name in tables.PAIR if (path / name).is_file()][:1]
    yield from (path / name for name in DATABASES if (path / name).is_file())
    yield from (store for store in (path, path / "mlruns") if store.is_dir() and databases.is_file_store(store))
    if tensorboard.event_dir(path):
        yield path
    others = [file for file in path.iterdir() if file.suffix in TEXT_SUFFIXES and file.name not in KNOWN_NAMES]
    yield from sorted(others, key=lambda file: (TEXT_SUFFIXES.index(file.suffix), file.name))[:MAX_TRIED]


def _read_one(path: Path) -> RunLog:
    if path.is_dir():
        return databases.read_file_store(path) if databases.is_file_store(path) else tensorboard.read_tensorboard(path)
    return _reader_of(path)(path)


def _reader_of(path: Path) -> Reader:
    """Decides by content; names count only where the content is free text."""
    if tensorboard.is_event_file(path):
        return tensorboard.read_tensorboard
    with path.open("rb") as file:
        head = file.read(4096)
    if head.startswith(databases.SQLITE_MAGIC):
        return databases.read_database
    if path.suffix in tables.SUFFIXES:
        return tables.read_csv
    if path.suffix == ".json":
        return transformers_state.read_transformers
    return _json_reader_of(path) or read_console


def _json_reader_of(path: Path) -> Reader | None:
    """By the first rows: the first that is surely of one kind decides. A console may print a JSON object, too."""
    faults, num_steps = Faults(), 0
    for row in islice(json_rows(path, faults), ROWS_TO_LOOK_AT):
        if own.is_own_row(row):
            return own.read_own
        if json_logs.is_swift_row(row):
            return json_logs.read_swift
        if json_logs.is_llama_factory_row(row):
            return json_logs.read_llama_factory
        if json_logs.is_verl_row(row):
            return json_logs.read_verl
        name = json_logs.step_key(row)
        num_steps += name is not None and as_step(row[name]) is not None
    is_table = path.suffix in JSON_SUFFIXES or num_steps >= faults.num_unparsed
    return json_logs.read_generic if num_steps > 0 and is_table else None
