"""Reads CSV files: tables with a step or epoch column, training histories, and W&B panels."""

import csv
from io import TextIOWrapper
from pathlib import Path

from trainer.runtime.files import open_regular
from trainer.runtime.json_lines import MAX_FILE_BYTES
from trainer.tools.report.names import STEP_KEYS
from trainer.tools.report.readers.parsing import step_key
from trainer.tools.report.readers.store import Store
from trainer.tools.report.run_log import UnreadableLogError

HISTORIES = {"training_history.csv": "train/", "validation_history.csv": "val/"}
"""The two tables of one run, each with the prefix for its metrics."""
MAX_LINE_LENGTH = 2**16
RANGES = ("__MIN", "__MAX")
"""Suffixes of the extra columns that W&B exports for each metric of a panel."""


def read_csv(path: Path, store: Store) -> None:
    """Read a table. With a training history, also read the validation history next to it."""
    store.facts["source"] = "csv"
    _read_table(path, store)
    validations = path.with_name("validation_history.csv")
    if path.name == "training_history.csv" and validations.exists():
        _read_table(validations, store)


def _read_table(path: Path, store: Store) -> None:
    """Read a table with a step or epoch column into the store. Damaged lines are counted and
    skipped.

    Raises `UnreadableLogError` if no column can serve as the x axis.
    """
    prefix = HISTORIES.get(path.name, "")
    raw = open_regular(path, limit_bytes=MAX_FILE_BYTES)
    with TextIOWrapper(raw, "utf-8-sig", "replace", newline="") as file:
        first = file.readline(MAX_LINE_LENGTH)
        delimiter = max(",;\t", key=first.count)
        header = _cells(first, delimiter)
        x_axis = step_key(header)
        if header and x_axis is None:
            shown = ", ".join(header)[:200]
            raise UnreadableLogError(
                f"{path} has no column 'step' or 'epoch', only {shown}: add one"
            )
        names = [key if key in STEP_KEYS else prefix + key for key in header]
        # Parse line by line: a stray quote in a damaged line must not swallow the next lines.
        for line in iter(lambda: file.readline(MAX_LINE_LENGTH), ""):
            cells = _cells(line, delimiter)
            row = dict(zip(names, cells, strict=False)) if len(cells) == len(names) else {}
            if cells:
                store.add(row.get(x_axis or ""), {k: row[k] for k in row if not k.endswith(RANGES)})
    if x_axis == "epoch":
        store.facts["notes"] = ("one row per epoch, so steps are epochs",)


def _cells(line: str, delimiter: str) -> list[str]:
    return next(csv.reader([line], delimiter=delimiter, skipinitialspace=True), [])
