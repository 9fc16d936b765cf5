"""`training_history.csv` and `validation_history.csv`: for spreadsheets; a repeated step shows its attempt."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.tracking.files import atomic_write, drop_torn_tail
from trainer.tracking.metrics_file import row_kind
from trainer.tracking.run_info import RunInfo

FILE_NAMES = {"train": "training_history.csv", "val": "validation_history.csv"}


class CsvBackend:
    def __init__(self, info: RunInfo) -> None:
        self._attempt = info.attempt
        self._tables = {kind: _Table(info.run_dir / name) for kind, name in FILE_NAMES.items()}

    def open(self) -> None:
        for table in self._tables.values():
            table.open()

    def log(self, data: Mapping[str, float], step: int) -> None:
        self._tables[row_kind(data)].append({"step": step, "attempt": self._attempt, **data})

    def close(self, exit_code: int) -> None:
        """Every row is on disk already."""


class _Table:
    """A CSV file that grows by rows, and by columns through a rewrite."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: list[str] = []

    def open(self) -> None:
        if self._path.exists():
            drop_torn_tail(self._path)
            with self._path.open(newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file), [])

    def append(self, row: Mapping[str, float]) -> None:
        new_columns = [name for name in row if name not in self._columns]
        if new_columns:
            self._widen(new_columns)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            file.write(_line([row.get(name, "") for name in self._columns]))

    def _widen(self, new_columns: list[str]) -> None:
        rows: list[list[str]] = []
        if self._columns:
            with self._path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.reader(file))[1:]
        self._columns = self._columns + new_columns
        padding = [""] * len(new_columns)
        atomic_write(self._path, _line(self._columns) + "".join(_line(row + padding) for row in rows))


def _line(cells: Sequence[str | float]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()
