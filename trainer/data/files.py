"""The files that a path, glob, address of the Hub or list of these names.

It imports neither torch nor pyarrow, so that a wrong path fails before anything slow starts.
"""

import glob
import re
import stat
from pathlib import Path

from trainer.data.hub import dataset_files
from trainer.data.rows import SUFFIXES
from trainer.errors import DataError

FIXES = {
    ".csv": 'convert it: python -c "from pyarrow import csv, parquet; '
    "parquet.write_table(csv.read_csv('{path}'), '{path}.parquet')\"",
    ".gz": "unpack it: gunzip '{path}'",
    ".zst": "unpack it: unzstd '{path}'",
    ".arrow": "load it with datasets and save it with to_parquet",
}
KINDS = (
    (stat.S_ISDIR, "a directory: name its files, for example '{path}/*.jsonl'"),
    (stat.S_ISFIFO, "a pipe, but data is read more than once: write it to a file first"),
    (stat.S_ISSOCK, "a socket: name a file"),
    (stat.S_ISCHR, "a device: name a file"),
    (stat.S_ISBLK, "a device: name a file"),
)
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def resolve_files(spec: str | list[str]) -> list[Path]:
    """The files a path, glob, address of the Hub or list of these names, in that order; matches are sorted.

    Raises `DataError` for an empty match, a missing file, anything but a regular file, or an unsupported suffix.
    """
    entries = [spec] if isinstance(spec, str) else list(spec)
    if not entries:
        raise DataError("no data files given: set a path, a glob or a list of both")
    return [path for entry in entries for path in _resolve_one(entry)]


def _resolve_one(entry: str) -> list[Path]:
    if entry.startswith("hf://"):
        return dataset_files(entry)
    path = Path(entry).expanduser()
    if entry and path.exists():
        paths = [path]
    elif entry and glob.has_magic(entry):
        paths = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    else:
        paths = []
    if not paths:
        what = "no file matches" if glob.has_magic(entry) else "no such file:"
        fix = "give an existing path or glob"
        if HUB_ID.fullmatch(entry) and not entry.endswith(SUFFIXES):
            fix += f"; a dataset of the Hub is written hf://{entry}:train"
        raise DataError(f"{what} '{entry}' (current directory: {Path.cwd()}); {fix}")
    for found in paths:
        _check_file(found)
    return paths


def _check_file(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from error
    for is_kind, what in KINDS:
        if is_kind(mode):
            raise DataError(f"'{path}' is {what.format(path=path)}")
    if not path.name.endswith(SUFFIXES):
        fix = FIXES.get(path.suffix, "").format(path=path)
        supported = f"supported are {', '.join(SUFFIXES)}"
        raise DataError(f"'{path}' has an unsupported format '{path.suffix}': {supported}{fix and '; ' + fix}")
