"""How a run stands right now, read from its files while it trains (floor 5, no torch)."""

import csv
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
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


class RunStatus:
    """What the run's files say since they were last read; each line is read once, however often that is.

    Files that are missing are no error: a young run has few.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.rows: deque[Row] = deque(maxlen=NUM_ROWS)
        """The newest training rows."""
        self.validations: dict[int, float] = {}
        self.alerts: list[Row] = []
        """Warnings and errors of the newest attempt, in the order they came."""
        self.exit_code: int | None = None
        """Of the newest attempt; None while it runs, or after it was killed."""
        self._metrics = JsonLines(run_dir / metrics_file.FILE_NAME)
        self._events = JsonLines(run_dir / events_file.FILE_NAME)

    def read(self) -> None:
        for _, row in self._metrics:
            self._take(metrics_file.restored(row))
        for _, event in self._events:
            if event.get("kind") == "start":
                self.alerts, self.exit_code = [], None
            elif event.get("kind") == "end":
                self.exit_code = event.get("exit_code")
            if event.get("level") in ("warn", "error"):
                self.alerts.append(event)

    def checkpoints(self) -> Listing | None:
        return read_run(self.run_dir) if is_run(fsio.list_dir(self.run_dir)) else None

    def silent_ranks(self, now_s: float) -> list[tuple[int, float, Row]]:
        """(rank, seconds, last sign of life); `now_s` in Unix seconds. A file that says nothing is not silent."""
        found = []
        for path in (self.run_dir / REPORT_DIRECTORY).glob("rank_*.json") if self.exit_code is None else ():
            with suppress(ValueError, KeyError, TypeError):
                beat = read_object(path)
                if (silent_s := now_s - float(beat["ts"])) > SILENT_S:
                    found.append((int(beat["rank"]), silent_s, {"step": int(beat["step"]), "phase": beat["phase"]}))
        return sorted(found, key=lambda one: one[0])

    def epoch_means(self) -> Iterator[tuple[str, list[float]]]:
        """Of the columns that are there; a value that was not finite is left out, as the file leaves it out."""
        path = self.run_dir / histories.FILE_NAMES["train"]
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        rows = [row for row in csv.DictReader(lines) if row.get("epoch")]
        for name in BY_EPOCH:
            if values := [float(row[name]) for row in rows if row.get(name)]:
                yield name, values

    def _take(self, row: Row) -> None:
        step, kind = row.get("step"), row.get("kind")
        if not isinstance(step, int):
            return
        if kind in metrics_file.MARKERS:
            self._rewind(step)
        elif kind == "train":
            if self.rows and step <= self.rows[-1]["step"]:
                self._rewind(step - 1)
            self.rows.append(row)
        elif kind == "val" and isinstance(loss := row.get("val/loss"), int | float):
            self.validations[step] = float(loss)

    def _rewind(self, step: int) -> None:
        self.rows = deque((row for row in self.rows if row["step"] <= step), maxlen=NUM_ROWS)
        self.validations = {at: loss for at, loss in self.validations.items() if at <= step}
