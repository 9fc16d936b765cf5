"""What another framework prepared: a JSON object a line, with `input_ids` and labels or a loss mask."""

from pathlib import Path

from trainer.data.conversation import IDS_KEY, LABELS_KEY, MASK_KEY
from trainer.data.readers import iter_rows
from trainer.data.rows import UnusableError, location
from trainer.data.token_rows import tokens_in
from trainer.data.tokens import Encoded
from trainer.errors import DataError

MASK_KEYS = (LABELS_KEY, MASK_KEY, "assistant_masks", "completion_mask")
"""The first that a row has is taken: a framework's labels say what becomes of its masks."""


def read_dump(path: Path) -> list[Encoded]:
    """All rows, in memory. Raises `DataError` as `file:line: reason`."""
    rows = []
    for row in iter_rows(path, (IDS_KEY, *MASK_KEYS)):
        try:
            if row.problem is not None:
                raise row.problem
            rows.append(tokens_in(row.record, [key for key in MASK_KEYS if row.record.get(key) is not None][:1]))
        except UnusableError as error:
            raise DataError(f"{location(path, row.line)}: {error}; see data compare --dump-script") from error
    if not rows:
        raise DataError(f"'{path}' has no rows")
    return rows
