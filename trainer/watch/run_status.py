"""How a run stands right now, read from its files while it trains (floor 5, no torch)."""

import csv
import json
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint import fsio
from trainer.checkpoint_tools.listing import Listing, is_run, read_run

METRICS, EVENTS, HISTORY, HEARTBEATS = "metrics.jsonl", "events.jsonl", "training_history.csv", "heartbeat"
HEARTBEAT_S = 30.0
SILENT_BEATS = 3
"""A rank is silent when this many of its signs of life are missing."""
REWINDS = ("start", "rollback")
"""Rows that say from which step on a run continues: what stood after it no longer counts."""
NUM_ROWS = 20
BY_EPOCH = ("loss", "reward_mean", "accuracy_mean")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class SilentRank:
    rank: int
    step: int
    phase: str
    silent_s: float


@dataclass(frozen=True)
class Status:
    """`rows`: the newest training rows, at most `NUM_ROWS`. `epochs`: of each of `BY_EPOCH` the means of the epochs."""

    run_dir: Path
    rows: tuple[Row, ...]
    validations: Mapping[int, float]
    epochs: Mapping[str, tuple[float, ...]]
    alerts: tuple[Row, ...]
    """Warnings and errors of the newest attempt, in the order they came."""
    exit_code: int | None
    """Of the newest attempt; None while it runs, or after it was killed."""
    checkpoints: Listing | None
    silent: tuple[SilentRank, ...]


class RunFollower:
    """Reads each line of the run's files once, however often it is asked."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._metrics, self._events = Tail(run_dir / METRICS), Tail(run_dir / EVENTS)
        self._rows: deque[Row] = deque(maxlen=NUM_ROWS)
        self._validations: dict[int, float] = {}
        self._alerts: list[Row] = []
        self._exit_code: int | None = None

    def read(self, *, now_s: float) -> Status:
        """`now_s` in Unix seconds. Raises nothing for files that are missing: a young run has few."""
        for row in self._metrics.new_rows():
            self._take(row)
        for event in self._events.new_rows():
            self._handle(event)
        return Status(
            run_dir=self._run_dir,
            rows=tuple(self._rows),
            validations=dict(self._validations),
            epochs=_epoch_means(self._run_dir / HISTORY),
            alerts=tuple(self._alerts),
            exit_code=self._exit_code,
            checkpoints=read_run(self._run_dir) if is_run(fsio.list_dir(self._run_dir)) else None,
            silent=() if self._exit_code is not None else _silent_ranks(self._run_dir / HEARTBEATS, now_s),
        )

    def _take(self, row: Row) -> None:
        step, kind = row.get("step"), row.get("kind")
        if not isinstance(step, int):
            return
        if kind in REWINDS:
            self._rewind(step)
        elif kind == "train":
            if self._rows and step <= self._rows[-1]["step"]:
                self._rewind(step - 1)
            self._rows.append(row)
        elif kind == "val" and isinstance(loss := row.get("val/loss"), int | float):
            self._validations[step] = float(loss)

    def _rewind(self, step: int) -> None:
        self._rows = deque((row for row in self._rows if row["step"] <= step), maxlen=NUM_ROWS)
        self._validations = {at: loss for at, loss in self._validations.items() if at <= step}

    def _handle(self, event: Row) -> None:
        kind = event.get("kind")
        if kind == "start":
            self._alerts, self._exit_code = [], None
        elif kind == "end":
            self._exit_code = event.get("exit_code")
        if event.get("level") in ("warn", "error"):
            self._alerts.append(event)


class Tail:
    """The lines that were added to a JSONL file since the last look; a line without its end waits for it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_rows(self) -> Iterator[Row]:
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                with suppress(ValueError):
                    row = json.loads(line)
                    if isinstance(row, dict):
                        yield row | {key: float(value) for key, value in row.get("nonfinite", {}).items()}


def _epoch_means(path: Path) -> dict[str, tuple[float, ...]]:
    """Of the columns that are there; a value that was not finite is left out, as the file leaves it out."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("epoch")]
    means = {name: tuple(float(row[name]) for row in rows if row.get(name)) for name in BY_EPOCH}
    return {name: values for name, values in means.items() if values}


def _silent_ranks(directory: Path, now_s: float) -> tuple[SilentRank, ...]:
    found = []
    for path in sorted(directory.glob("rank*.json")):
        with suppress(OSError, ValueError, KeyError):  # being replaced just now: it is not silent
            beat = json.loads(path.read_text(encoding="utf-8"))
            silent_s = now_s - float(beat["ts"])
            if silent_s > SILENT_BEATS * HEARTBEAT_S:
                rank = int(path.stem.removeprefix("rank").lstrip("_-"))
                found.append(SilentRank(rank, int(beat["step"]), str(beat["phase"]), silent_s))
    return tuple(sorted(found, key=lambda one: one.rank))
