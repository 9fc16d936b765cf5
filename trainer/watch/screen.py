"""How a run stands, read from its files while it trains, and how `watch` shows it, worst first (floor 5, no torch)."""

import csv
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from trainer.checkpoint import fsio
from trainer.checkpoint_tools.listing import Listing, is_run, read_run
from trainer.report.formatting import MISSING, duration, number, percent, step
from trainer.runtime.heartbeat import REPORT_DIRECTORY, SILENT_S
from trainer.runtime.json_lines import JsonLines, read_object
from trainer.runtime.text import clean
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


MAX_ALERTS, MAX_EPOCHS = 5, 10
COLUMNS = ("train/loss", "train/grad_norm", "train/lr(1e-3)", "train/time(s)", "throughput/train/tokens_per_s")
STYLES = {"error": "bold red", "warn": "bold yellow"}


def lines(status: RunStatus, *, has_rows: bool) -> Iterator[RenderableType]:
    now_s = time.time()
    yield Text(f"{clean(str(status.run_dir))}  {_state(status, now_s)}", style="bold")
    for rank, silent_s, beat in status.silent_ranks(now_s):
        where = f"in {clean(str(beat['phase']))} at step {step(beat['step'])}"
        yield Text(f"rank {rank} is silent for {duration(silent_s)}, {where}", style=STYLES["error"])
    for alert in status.alerts[-MAX_ALERTS:]:
        words = f"step {alert.get('step')}: {clean(str(alert.get('message')))}"
        yield Text.assemble((f"{alert['level']} ", STYLES[alert["level"]]), words)
    if len(status.alerts) > MAX_ALERTS:
        yield Text(f"… and {len(status.alerts) - MAX_ALERTS} earlier alerts of this attempt", style="dim")
    facts = Table.grid(padding=(0, 2, 0, 0))
    for name, words in _facts(status):
        facts.add_row(Text(name, style="dim"), Text(words))
    yield facts
    if has_rows:
        yield _rows(status)


def _state(status: RunStatus, now_s: float) -> str:
    if status.exit_code is not None:
        return f"ended with exit code {status.exit_code}"
    if not status.rows or "ts" not in status.rows[-1]:
        return "starting"
    return f"last row {duration(max(0.0, now_s - status.rows[-1]['ts']))} ago"


def _facts(status: RunStatus) -> Iterator[tuple[str, str]]:
    if status.rows:
        last = status.rows[-1]
        share = last.get("progress/pct", 0.0)
        done = f" of {step(round(100 * last['step'] / share))} ({percent(share)})" if share > 0 else ""
        yield "step", f"{step(last['step'])}{done}"
        yield "loss", number(last.get("train/loss"))
        if status.exit_code is None and "progress/eta_s" in last:
            yield "time left", duration(last["progress/eta_s"])
        if "throughput/train/tokens_per_s" in last:
            yield "tokens/s", number(last["throughput/train/tokens_per_s"])
    if losses := status.validations:
        places = {"": max(losses), "; best ": min(losses, key=losses.__getitem__)}
        yield "validation", "".join(f"{name}{number(losses[at])} at step {step(at)}" for name, at in places.items())
    for name, values in status.epoch_means():
        shown = values[-MAX_EPOCHS:]
        mean = number(sum(shown) / len(shown))
        yield f"{name} by epoch", f"{' '.join(map(number, shown))} (mean {mean}{_trend(shown)})"
    if (listing := status.checkpoints()) is not None:
        steps = ", ".join(step(info.step) for info in listing.checkpoints) or "none yet"
        resume = listing.resume_step
        yield "checkpoints", steps if resume is None else f"{steps}; a resume takes {step(resume)}"


def _trend(values: Sequence[float]) -> str:
    """How often it fell from one epoch to the next: single batches say little."""
    num_falls = sum(after < before for before, after in pairwise(values))
    return f", fell {num_falls} of {len(values) - 1} times" if len(values) > 1 else ""


def _rows(status: RunStatus) -> Table:
    shown = [key for key in COLUMNS if any(key in row for row in status.rows)]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("step", *shown):
        table.add_column(Text(name), justify="right")
    for row in status.rows:
        cells = (number(row[key]) if isinstance(row.get(key), int | float) else MISSING for key in shown)
        table.add_row(step(row["step"]), *cells)
    return table
