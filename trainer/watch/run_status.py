"""How a run stands right now, read from its files while it trains (floor 5, no torch)."""

import csv
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint import fsio
from trainer.checkpoint_tools.listing import Listing, is_run, read_run
from trainer.runtime.heartbeat import REPORT_DIRECTORY
from trainer.runtime.json_lines import JsonLines, read_object
from trainer.runtime.live_run import SILENT_S
from trainer.tracking import events_file, histories, metrics_file

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
        self._metrics = JsonLines(run_dir / metrics_file.FILE_NAME)
        self._events = JsonLines(run_dir / events_file.FILE_NAME)
        self._rows: deque[Row] = deque(maxlen=NUM_ROWS)
        self._validations: dict[int, float] = {}
        self._alerts: list[Row] = []
        self._exit_code: int | None = None

    def read(self, *, now_s: float) -> Status:
        """`now_s` in Unix seconds. Raises nothing for files that are missing: a young run has few."""
        for _, row in self._metrics:
            self._take(metrics_file.restored(row))
        for _, event in self._events:
            self._handle(event)
        return Status(
            run_dir=self._run_dir,
            rows=tuple(self._rows),
            validations=dict(self._validations),
            epochs=_epoch_means(self._run_dir / histories.FILE_NAMES["train"]),
            alerts=tuple(self._alerts),
            exit_code=self._exit_code,
            checkpoints=read_run(self._run_dir) if is_run(fsio.list_dir(self._run_dir)) else None,
            silent=() if self._exit_code is not None else _silent_ranks(self._run_dir, now_s),
        )

    def _take(self, row: Row) -> None:
        step, kind = row.get("step"), row.get("kind")
        if not isinstance(step, int):
            return
        if kind in metrics_file.MARKERS:
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


def _epoch_means(path: Path) -> dict[str, tuple[float, ...]]:
    """Of the columns that are there; a value that was not finite is left out, as the file leaves it out."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("epoch")]
    means = {name: tuple(float(row[name]) for row in rows if row.get(name)) for name in BY_EPOCH}
    return {name: values for name, values in means.items() if values}


def _silent_ranks(run_dir: Path, now_s: float) -> tuple[SilentRank, ...]:
    found = []
    for path in (run_dir / REPORT_DIRECTORY).glob("rank_*.json"):
        with suppress(ValueError, KeyError, TypeError):  # nothing to be read from: it is not silent
            beat = read_object(path)
            silent_s = now_s - float(beat["ts"])
            if silent_s > SILENT_S:
                found.append(SilentRank(int(beat["rank"]), int(beat["step"]), str(beat["phase"]), silent_s))
    return tuple(sorted(found, key=lambda one: one.rank))
