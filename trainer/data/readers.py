"""Files to rows, streamed: those that cannot be read with the reason."""

import codecs
import io
import json
import marshal
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.rows import Row, UnusableError
from trainer.errors import DataError

BLOCK_ROWS, BLOCK_BYTES = 500, 1 << 20  # a block ends with the first of them that is reached
COMPRESSED = (".gz", ".zst")
BUFFER_BYTES = 1 << 20
ARRAYS = "; a row is one line, or an element of an array in a file that is named .json"


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Rows of one file that stand together, as they were read: any process can take them apart."""

    path: Path
    content: list[tuple[int, Any]] | pa.RecordBatch
    """Lines (bytes) or elements with their numbers; of parquet the columns that are read."""
    first: int = 1
    """Number of the first row of parquet."""
    unread: tuple[str, ...] = ()
    """Columns that parquet has besides."""

    def __len__(self) -> int:
        return len(self.content)

    def head(self, count: int) -> "RowBlock":
        return replace(self, content=self.content[:count])

    def rows(self) -> Iterator[Row]:
        if isinstance(self.content, pa.RecordBatch):
            for number, record in enumerate(_batch_records(self.content), start=self.first):
                if isinstance(record, str):
                    yield Row(self.path, number, "", problem=UnusableError(record))
                else:
                    values = {name: _without_nulls(value) for name, value in record.items()}
                    yield Row(self.path, number, values, self.unread)
        else:
            for number, item in self.content:
                is_line = isinstance(item, bytes)
                yield (
                    _parse_line(self.path, number, item)
                    if is_line
                    else _as_row(self.path, number, item)
                )


def iter_rows(path: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    """Stream the rows of one file, as `iter_blocks` does."""
    return (row for block in iter_blocks(path, columns) for row in block.rows())


def iter_blocks(path: Path, columns: tuple[str, ...]) -> Iterator[RowBlock]:
    """Stream the rows of one file. Raises `DataError` when the file as a whole cannot be read.

    Of a parquet file only `columns` are read, nested ones as `a.b`.
    """
    if path.suffix == ".parquet":
        return _iter_parquet(path, columns)
    return _in_blocks(path, _iter_json(path) if path.suffix == ".json" else _iter_lines(path))


def _in_blocks(path: Path, items: Iterator[tuple[int, Any]]) -> Iterator[RowBlock]:
    content: list[tuple[int, Any]] = []
    num_bytes = 0
    try:
        for item in items:
            content.append(item)
            num_bytes += len(item[1] if isinstance(item[1], bytes) else marshal.dumps(item[1]))
            if len(content) == BLOCK_ROWS or num_bytes >= BLOCK_BYTES:
                yield RowBlock(path, content)
                content, num_bytes = [], 0
    except DataError:  # what stands in front of it was read
        yield RowBlock(path, content)
        raise
    if content:
        yield RowBlock(path, content)


def _iter_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    with _open(path) as file:
        try:
            for number, raw in enumerate(file, start=1):
                line = raw.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else raw.strip()
                if line:
                    yield number, line
        except OSError as error:  # of an archive: torn, damaged, or none
            raise DataError(f"'{path}' cannot be read behind line {number}: {error}") from error


def _parse_line(path: Path, number: int, line: bytes) -> Row:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        reason = f"bad UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1}: {error.reason}"
        if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            reason += (
                f"; the file is UTF-16: iconv -f UTF-16 -t UTF-8 '{path}' > '{path}.utf8.jsonl'"
            )
        return Row(path, number, line, problem=UnusableError(reason))
    except json.JSONDecodeError as error:
        hint = ARRAYS if line in (b"{", b"[") else ""
        reason = f"broken JSON: {error.msg} at column {error.colno}{hint}"
        return Row(path, number, line, problem=UnusableError(reason))
    except (ValueError, RecursionError) as error:
        return Row(path, number, line, problem=UnusableError(f"broken JSON: {error}"))
    return _as_row(path, number, record, ARRAYS if isinstance(record, list) else "")


def _as_row(path: Path, number: int, record: object, hint: str = "") -> Row:
    if not isinstance(record, dict):
        reason = f"not an object: the row is a {type(record).__name__}, expected columns with names{hint}"
        return Row(path, number, record, problem=UnusableError(reason))
    return Row(path, number, record)


def _iter_json(path: Path) -> Iterator[tuple[int, object]]:
    with _open(path) as file:
        raw = file.read()
    try:
        records = json.loads(raw.removeprefix(b"\xef\xbb\xbf").decode("utf-8"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"'{path}' is not UTF-8: {error.reason} in line {line}") from error
    except json.JSONDecodeError as error:
        hint = (
            "; one object per line belongs into a .jsonl file" if error.msg == "Extra data" else ""
        )
        raise DataError(
            f"'{path}' is not JSON: {error.msg} in line {error.lineno} column {error.colno}{hint}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"'{path}' is not JSON: {error}") from error
    if not isinstance(records, list):
        kind, fix = type(records).__name__, _unwrapping(path, records)
        raise DataError(f"'{path}' holds a {kind}: a .json file must be an array of objects{fix}")
    yield from enumerate(records, start=1)


def _unwrapping(path: Path, record: object) -> str:
    """The command that takes the rows out of an object around them."""
    items = record.items() if isinstance(record, dict) else ()
    key = next(
        (
            key
            for key, value in items
            if isinstance(value, list) and value and isinstance(value[0], dict)
        ),
        None,
    )
    if key is None:
        return ""
    return (
        f'; those in {key!r}: python -c "import json; '
        f"json.dump(json.load(open('{path}'))[{key!r}], open('{path}.rows.json', 'w'))\""
    )


def _iter_parquet(path: Path, columns: tuple[str, ...]) -> Iterator[RowBlock]:
    number = 0
    try:
        # else it reads whole groups
        with pq.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
            names = tuple(_column_names(file.schema_arrow))
            read = [column for column in columns if any(_is_part(name, column) for name in names)]
            unread = tuple(
                name for name in names if not any(_is_part(name, column) for column in read)
            )
            _require_distinct(path, [name for name in names if name not in unread])
            for group in range(file.num_row_groups):
                num_rows = _rows_of_a_block(file.metadata.row_group(group), read)
                for batch in file.iter_batches(num_rows, row_groups=[group], columns=read):
                    for part in _small(batch):
                        yield RowBlock(path, part, number + 1, unread)
                        number += len(part)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"'{path}' is not a readable parquet file (after row {number}): {error}"
        ) from error


def _require_distinct(path: Path, names: list[str]) -> None:
    """Raise `DataError` for columns that share a name: nothing tells which of them is meant."""
    for name, count in Counter(names).items():
        if count > 1:
            raise DataError(
                f"'{path}' has {count} columns '{name}', and only one of them could be trained.\n"
                f"Fix: write the file again with a name of its own for each column"
            )


def _rows_of_a_block(group: pq.RowGroupMetaData, columns: list[str]) -> int:
    """How many of a group's rows are about as large as a block, on average."""
    found = (group.column(index) for index in range(group.num_columns))
    num_bytes = sum(
        column.total_uncompressed_size
        for column in found
        if any(_is_part(column.path_in_schema, name) for name in columns)
    )
    return min(BLOCK_ROWS, max(1, BLOCK_BYTES * group.num_rows // max(1, num_bytes)))


def _small(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch in parts that are not larger than a block. They are copies: of a slice all that it
    is cut from would be sent to the process that takes it apart.
    """
    if len(batch) == 1 or batch.nbytes <= BLOCK_BYTES:
        yield batch
    else:
        for rows in np.array_split(np.arange(len(batch)), 2):
            yield from _small(batch.take(rows))


def _column_names(fields: Iterable[pa.Field], prefix: str = "") -> Iterator[str]:
    """Names of columns, those inside structs as `a.b`."""
    for field in fields:
        if pa.types.is_struct(field.type):
            yield from _column_names(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _is_part(name: str, column: str) -> bool:
    return name == column or name.startswith(f"{column}.")


def _batch_records(batch: pa.RecordBatch) -> Iterator[dict[str, object] | str]:
    """Records, or for what Python has no value for (such as a date in the year 20000) the
    reason.
    """
    try:
        yield from batch.to_pylist()
    # raised before the first record: find the rows that are to blame
    except (ValueError, OverflowError):
        for index in range(batch.num_rows):
            yield _record(batch.slice(index, 1))


def _record(row: pa.RecordBatch) -> dict[str, object] | str:
    record: dict[str, object] = {}
    for name, values in zip(row.schema.names, row.columns, strict=True):
        try:
            record[name] = values.to_pylist()[0]
        except UnicodeDecodeError as error:
            return f"bad UTF-8: byte 0x{error.object[error.start]:02x} in column '{name}': {error.reason}"
        except (ValueError, OverflowError) as error:
            return f"unreadable value: column '{name}' ({values.type}): {error}"
    return record


def _without_nulls(value: object) -> object:
    """Parquet gives every struct of a column the same fields and fills the absent ones with
    nulls: undo that.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _open(path: Path) -> BinaryIO:
    """Its bytes, unpacked."""
    try:
        # pyarrow unpacks by that suffix, and no other package here knows zstd
        if path.suffix in COMPRESSED:
            return io.BufferedReader(pa.input_stream(path), BUFFER_BYTES)
        return path.open("rb")
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from error
