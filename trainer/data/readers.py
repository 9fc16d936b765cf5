"""Streams the rows of data files."""

import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.rows import Row, UnusableError
from trainer.errors import DataError

BLOCK_ROWS, BLOCK_BYTES = 250, 1 << 20  # a block ends at the first limit that it reaches
COMPRESSED = (".gz", ".zst")
BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Consecutive rows of one file. They are parsed later, by the process that prepares them."""

    path: Path
    content: list[tuple[int, Any]] | pa.RecordBatch
    """Numbered lines (bytes) or array elements; for parquet, the columns that are read."""
    first: int = 1
    """Number of the first row; only for parquet."""
    unread: tuple[str, ...] = ()
    """Columns that are not read; only for parquet."""

    def __len__(self) -> int:
        return len(self.content)

    def head(self, count: int) -> "RowBlock":
        return replace(self, content=self.content[:count])

    def rows(self) -> Iterator[Row]:
        """Yield the rows. An unreadable row has a `problem`."""
        content: Iterable[tuple[int, Any]] = self.content
        if isinstance(content, pa.RecordBatch):
            content = enumerate(_records(content), start=self.first)
        for number, item in content:
            record = "" if isinstance(item, UnusableError) else item
            problem = None
            try:
                record = _parsed(item)
            except UnusableError as error:
                problem = error
            yield Row(self.path, number, record, self.unread, problem)


def iter_rows(path: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    """Stream the rows of one file. Raises `DataError` as `iter_blocks` does."""
    return (row for block in iter_blocks(path, columns) for row in block.rows())


def iter_blocks(path: Path, columns: tuple[str, ...]) -> Iterator[RowBlock]:
    """Stream the rows of one file in blocks. Raises `DataError` for a file that cannot be read.

    Only `columns` of a parquet file are read. A nested column is named `a.b`.
    """
    if path.suffix == ".parquet":
        yield from _iter_parquet(path, columns)
        return
    content: list[tuple[int, Any]] = []
    num_bytes = 0
    for number, item in _iter_json(path) if path.suffix == ".json" else _iter_lines(path):
        content.append((number, item))
        num_bytes += len(item) if isinstance(item, bytes) else 0
        if len(content) == BLOCK_ROWS or num_bytes >= BLOCK_BYTES:
            yield RowBlock(path, content)
            content = []
            num_bytes = 0
    if content:
        yield RowBlock(path, content)


# Lines and arrays


def _iter_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, content) of each line that is not empty. Raises `DataError`."""
    number = 0
    with _open(path) as file:
        try:
            for number, raw in enumerate(file, start=1):
                line = raw.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else raw.strip()
                if line:
                    yield number, line
        except OSError as error:  # a truncated or damaged archive
            raise DataError(f"'{path}' cannot be read after line {number}: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises `ValueError` for a repeated key, because only its last value
    would be kept.
    """
    record = dict(pairs)
    if len(record) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has several values for the key {key!r}")
    return record


DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def _parsed(item: object) -> dict[str, Any]:
    """Return the record of a row, which may be a line with JSON. Raises `UnusableError`."""
    try:
        record = DECODER.decode(item.decode("utf-8")) if isinstance(item, bytes) else item
    except UnicodeDecodeError as error:
        raise UnusableError(f"bad UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:
        reason = f"broken JSON: {error}; each line must be one JSON object"
        raise UnusableError(reason) from error
    if isinstance(record, UnusableError):
        raise record
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise UnusableError(f"not an object: the row is a {kind}; each row must be an object")
    return record


def _iter_json(path: Path) -> Iterator[tuple[int, object]]:
    """Yield (position from 1, record) of an array in a JSON file. Raises `DataError`."""
    with _open(path) as file:
        raw = file.read()
    try:
        records = DECODER.decode(raw.removeprefix(b"\xef\xbb\xbf").decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"'{path}' is not valid JSON: {error}.\n"
            f"Fix: repair it; if it has one object per line, rename it to .jsonl"
        ) from error
    if not isinstance(records, list):
        raise DataError(
            f"'{path}' is not an array of objects.\n"
            f"Fix: make it an array, or write one object per line into a .jsonl file"
        )
    yield from enumerate(records, start=1)


def _open(path: Path) -> BinaryIO:
    """Open a file to read its bytes, decompressed if necessary. Raises `DataError`."""
    try:
        # pyarrow infers the format from the suffix, and is the only dependency that reads zstd
        if path.suffix in COMPRESSED:
            return io.BufferedReader(pa.input_stream(path), BUFFER_BYTES)
        return path.open("rb")
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from error


# Parquet


def _iter_parquet(path: Path, columns: tuple[str, ...]) -> Iterator[RowBlock]:
    """Yield blocks of at most `BLOCK_ROWS` rows with the columns that the run reads.

    Raises `DataError` for a damaged file and for repeated column names.
    """
    number = 0
    try:
        # with `pre_buffer`, pyarrow would read whole row groups into memory
        with pq.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
            names = _column_names(file.schema_arrow)
            read = [column for column in columns if any(_is_part(name, column) for name in names)]
            kept = [name for name in names if any(_is_part(name, column) for column in read)]
            if len(set(kept)) < len(kept):
                raise DataError(
                    f"'{path}' has several columns with the same name: {', '.join(kept)}.\n"
                    f"Fix: rename them in the file"
                )
            unread = tuple(name for name in names if name not in kept)
            for index in range(file.num_row_groups):
                group = file.metadata.row_group(index)
                if group.num_rows < 0:  # pyarrow would abort the process
                    raise pa.ArrowInvalid(f"row group {index} has {group.num_rows} rows")
                rows_per_block = BLOCK_BYTES * group.num_rows // max(1, group.total_byte_size)
                num_rows = min(BLOCK_ROWS, max(1, rows_per_block))
                for batch in file.iter_batches(num_rows, row_groups=[index], columns=read):
                    yield RowBlock(path, batch, number + 1, unread)
                    number += len(batch)
    # UnicodeDecodeError: pyarrow decodes the column names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"'{path}' cannot be read as parquet after row {number}: {error}"
        ) from error


def _column_names(schema: pa.Schema) -> list[str]:
    """Return the column names. A column inside a struct is named `a.b`."""
    table = schema.empty_table()
    while any(pa.types.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    return list(table.column_names)


def _is_part(name: str, column: str) -> bool:
    return name == column or name.startswith(f"{column}.")


def _records(batch: pa.RecordBatch) -> list[object]:
    """Return the records of a batch. A row with a value that Python cannot represent, such as a
    date in the year 20000, becomes an `UnusableError`.
    """
    try:
        return list(map(_without_nulls, batch.to_pylist()))
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            return [UnusableError(f"unreadable value: {error}")]
        rows = [_records(batch.slice(index, 1)) for index in range(batch.num_rows)]
        return [record for records in rows for record in records]


def _without_nulls(value: object) -> object:
    """Remove the nulls that parquet adds so that all structs of a column have the same fields."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
