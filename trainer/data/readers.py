"""Files to rows, streamed one by one: those that cannot be read with the reason."""

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.rows import Row, UnusableError
from trainer.errors import DataError

PARQUET_BATCH_ROWS = 1000
COMPRESSED = (".gz", ".zst")
BUFFER_BYTES = 1 << 20


def iter_rows(path: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    """Stream the rows of one file. Raises `DataError` when the file as a whole cannot be read.

    Of a parquet file only `columns` are read, nested ones as `a.b`.
    """
    if path.suffix == ".parquet":
        return _iter_parquet(path, columns)
    return _iter_json(path) if path.suffix == ".json" else _iter_jsonl(path)


def _iter_jsonl(path: Path) -> Iterator[Row]:
    number = 0
    with _open(path) as file:
        try:
            for number, raw in enumerate(file, start=1):
                line = raw.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else raw.strip()
                if line:
                    yield _parse_line(path, number, line)
        except OSError as error:  # of an archive: torn, damaged, or none
            raise DataError(f"'{path}' cannot be read behind line {number}: {error}") from error


def _parse_line(path: Path, number: int, line: bytes) -> Row:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        reason = f"bad UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1}: {error.reason}"
        return Row(path, number, line, problem=UnusableError(reason))
    except json.JSONDecodeError as error:
        reason = f"broken JSON: {error.msg} at column {error.colno}"
        return Row(path, number, line, problem=UnusableError(reason))
    except (ValueError, RecursionError) as error:
        return Row(path, number, line, problem=UnusableError(f"broken JSON: {error}"))
    return _as_row(path, number, record)


def _as_row(path: Path, number: int, record: object) -> Row:
    if not isinstance(record, dict):
        reason = f"not an object: the row is a {type(record).__name__}, expected columns with names"
        return Row(path, number, record, problem=UnusableError(reason))
    return Row(path, number, record)


def _iter_json(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        raw = file.read()
    try:
        records = json.loads(raw.removeprefix(b"\xef\xbb\xbf").decode("utf-8"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"'{path}' is not UTF-8: {error.reason} in line {line}") from error
    except json.JSONDecodeError as error:
        hint = "; one object per line belongs into a .jsonl file" if error.msg == "Extra data" else ""
        raise DataError(
            f"'{path}' is not JSON: {error.msg} in line {error.lineno} column {error.colno}{hint}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"'{path}' is not JSON: {error}") from error
    if not isinstance(records, list):
        raise DataError(f"'{path}' holds a {type(records).__name__}: a .json file must be an array of objects")
    for number, record in enumerate(records, start=1):
        yield _as_row(path, number, record)


def _iter_parquet(path: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            names = tuple(_column_names(file.schema_arrow))
            read = [column for column in columns if any(_is_part(name, column) for name in names)]
            unread = tuple(name for name in names if not any(_is_part(name, column) for column in read))
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=read):
                for record in _batch_records(batch):
                    number += 1
                    if isinstance(record, str):
                        yield Row(path, number, "", problem=UnusableError(record))
                    else:
                        values = {name: _without_nulls(value) for name, value in record.items()}
                        yield Row(path, number, values, unread)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"'{path}' is not a readable parquet file (after row {number}): {error}") from error


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
    """Records, or for what Python has no value for (such as a date in the year 20000) the reason."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):  # raised before the first record: find the rows that are to blame
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
    """Parquet gives every struct of a column the same fields and fills the absent ones with nulls: undo that."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _open(path: Path) -> BinaryIO:
    """Its bytes, unpacked."""
    try:
        if path.suffix in COMPRESSED:  # pyarrow unpacks by that suffix, and no other package here knows zstd
            return io.BufferedReader(pa.input_stream(path), BUFFER_BYTES)
        return path.open("rb")
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from error
