"""Files to rows: paths, globs and lists resolved, rows streamed one by one, each an object or a `BadRow`."""

import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.protocols import DataError

SUFFIXES = (".jsonl", ".json", ".parquet")
EXCERPT_CHARS = 200
PARQUET_BATCH_ROWS = 1000


@dataclass(frozen=True)
class Row:
    """One object of a data file; `line` counts from 1 (the row number in parquet, the element in a json array)."""

    file: Path
    line: int
    record: dict[str, Any]


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be trained on; `reason` reads `kind: detail`."""

    file: Path
    line: int
    reason: str
    excerpt: str

    @property
    def kind(self) -> str:
        """The reason without its details: what rows are counted by."""
        return self.reason.split(":", 1)[0]


def resolve_files(spec: str | list[str]) -> list[Path]:
    """The files a path, glob or list of both names, in that order; matches of a glob are sorted.

    Raises `DataError` for an empty match, a missing file, a directory or an unsupported suffix.
    """
    entries = [spec] if isinstance(spec, str) else list(spec)
    if not entries:
        raise DataError("no data files given: set a path, a glob or a list of both")
    return [path for entry in entries for path in _resolve_one(entry)]


def _resolve_one(entry: str) -> list[Path]:
    path = Path(entry).expanduser()
    if entry and path.exists():
        paths = [path]
    elif entry and glob.has_magic(entry):
        paths = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    else:
        paths = []
    if not paths:
        what = "no file matches" if glob.has_magic(entry) else "no such file:"
        raise DataError(f"{what} '{entry}' (current directory: {Path.cwd()}); give an existing path or glob")
    for found in paths:
        if found.is_dir():
            raise DataError(f"'{found}' is a directory: name its files, for example '{found}/*.jsonl'")
        if found.suffix not in SUFFIXES:
            raise DataError(
                f"'{found}' has an unsupported format '{found.suffix}': supported are {', '.join(SUFFIXES)}"
            )
    return paths


def iter_rows(path: Path) -> Iterator[Row | BadRow]:
    """Stream the rows of one file. Raises `DataError` when the file as a whole cannot be read."""
    readers = {".jsonl": _iter_jsonl, ".json": _iter_json, ".parquet": _iter_parquet}
    return readers[path.suffix](path)


def excerpt(value: Any) -> str:
    """The first characters of a row on one line, for messages."""
    if isinstance(value, bytes):
        text = value[: 2 * EXCERPT_CHARS].decode("utf-8", errors="replace")
    else:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    # Lone surrogates can be read from JSON but not written to a file.
    text = " ".join(text[: 2 * EXCERPT_CHARS].split()).encode("utf-8", errors="replace").decode("utf-8")
    return text if len(text) <= EXCERPT_CHARS else text[:EXCERPT_CHARS] + "…"


def _iter_jsonl(path: Path) -> Iterator[Row | BadRow]:
    with _open(path) as file:
        for number, raw in enumerate(file, start=1):
            line = raw.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else raw.strip()
            if line:
                yield _parse_line(path, number, line)


def _parse_line(path: Path, number: int, line: bytes) -> Row | BadRow:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        reason = f"bad UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1}: {error.reason}"
        return BadRow(path, number, reason, excerpt(line))
    except json.JSONDecodeError as error:
        return BadRow(path, number, f"broken JSON: {error.msg} at column {error.colno}", excerpt(line))
    except (ValueError, RecursionError) as error:
        return BadRow(path, number, f"broken JSON: {error}", excerpt(line))
    return _as_row(path, number, record)


def _as_row(path: Path, number: int, record: Any) -> Row | BadRow:
    if not isinstance(record, dict):
        reason = f"not an object: the row is a {type(record).__name__}, expected columns with names"
        return BadRow(path, number, reason, excerpt(record))
    return Row(path, number, record)


def _iter_json(path: Path) -> Iterator[Row | BadRow]:
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


def _iter_parquet(path: Path) -> Iterator[Row | BadRow]:
    number = 0
    try:
        for batch in pq.ParquetFile(path).iter_batches(batch_size=PARQUET_BATCH_ROWS):
            for record in _batch_records(batch):
                number += 1
                if isinstance(record, UnicodeDecodeError):
                    reason = f"bad UTF-8: byte 0x{record.object[record.start]:02x}: {record.reason}"
                    yield BadRow(path, number, reason, excerpt(record.object))
                else:
                    yield Row(path, number, {name: _without_nulls(value) for name, value in record.items()})
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"'{path}' is not a readable parquet file (after row {number}): {error}") from error


def _batch_records(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # raised before the first record: find the rows that are to blame
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield error


def _without_nulls(value: Any) -> Any:
    """Parquet gives every struct of a column the same fields and fills the absent ones with nulls: undo that."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from error
