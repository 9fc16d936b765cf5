"""What another framework prepared: a JSON object a line, with `input_ids` and labels or a loss mask."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.errors import DataError

IGNORED = -100
MASK_KEYS = ("loss_mask", "assistant_masks", "completion_mask")


@dataclass(frozen=True, eq=False)
class DumpRow:
    """Token ids (int32 [T]) and which are supervised (bool [T])."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


def read_dump(path: Path) -> list[DumpRow]:
    """All rows, in memory. Raises `DataError` as `file:line: reason`."""
    rows = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    rows.append(_row(json.loads(line)))
                except (ValueError, TypeError, OverflowError) as error:
                    raise DataError(f"{path}:{number}: {error}") from error
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from error
    if not rows:
        raise DataError(f"'{path}' has no rows")
    return rows


def _row(record: Any) -> DumpRow:
    if not isinstance(record, dict) or "input_ids" not in record:
        raise ValueError("no object with 'input_ids'; see data compare --dump-script")
    ids = np.array(record["input_ids"], dtype=np.int32)
    key = next((key for key in ("labels", *MASK_KEYS) if record.get(key) is not None), None)
    if key is None:
        raise ValueError(f"neither 'labels' nor a mask ({', '.join(MASK_KEYS)})")
    values = np.array(record[key], dtype=np.int64)
    if ids.ndim != 1 or not len(ids) or values.shape != ids.shape:
        raise ValueError(f"'input_ids' of shape {ids.shape} and '{key}' of shape {values.shape}; one list each")
    if key != "labels":
        return DumpRow(ids, values != 0)
    mask = values != IGNORED
    if not np.array_equal(values[mask], ids[mask]):
        where = int(np.flatnonzero(mask & (values != ids))[0])
        raise ValueError(f"label {values[where]} of token {where} is not its id {ids[where]}: dump labels unshifted")
    return DumpRow(ids, mask)
