"""Prepares tokens and loss masks once, and stores them under a hash of everything they depend on.

A directory `<cache_dir>/tokens/<hash>/` is complete, because it is renamed only when it is finished
and synced. The memory used does not grow with the number of rows. The protocol:

1. Hash the data files. Their hashes, the options, the tokenizer and the code name the directory.
2. If the directory exists and matches its checksums, use it.
3. Otherwise lock `<hash>.lock`, and look again: another process may have prepared it meanwhile.
4. Prepare the rows in `<hash>.tmp-<nonce>/`.
5. Hash the data files again, because a change would have mixed old and new rows.
6. Write the checksums, sync everything, and rename. A damaged directory is moved away first.
"""

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path

import tokenizers
import transformers

from trainer.data.chat import RowEncoder
from trainer.data.prepare import BAD_ROWS, write_samples
from trainer.data.rows import PrepareOptions, Summary, location
from trainer.data.samples import CHECKSUMS, SUMMARY, TokenDataset, open_dataset
from trainer.errors import CannotWriteError, DataError
from trainer.runtime.files import locked, publish, try_lock
from trainer.runtime.log import ProgressLines

logger = logging.getLogger(__name__)

HASHED_BYTES = 1 << 24
NUM_SHOWN = 10
"""Maximum number of bad rows in an error message, and of files in a progress line."""
MAX_BAD_FRACTION = 0.5
"""If more rows are bad, the run ends even with `data.on_bad_row=skip`, because probably the columns
or the template are wrong, not individual rows.
"""
TOKEN_MODULES = (
    "chat",
    "formats",
    "masks",
    "prepare",
    "readers",
    "rows",
    "template",
    "tokens",
)
"""The modules of this package that turn files into samples: `prepare` and those that it imports."""


def prepare(
    files: list[Path],
    *,
    tokenizer: transformers.PreTrainedTokenizerBase,
    tokenizer_digest: str,
    options: PrepareOptions,
    cache_dir: Path,
    progress: Callable[[], None] = lambda: None,
) -> TokenDataset:
    """Return the samples of `files` from the cache. The first process prepares them if they are
    missing or damaged.

    `progress` is called repeatedly, even while a different process does the work. Raises
    `DataError` for rows or files that cannot be used for training, and `CannotWriteError`.
    """
    states = [_state_of(path, progress) for path in files]
    directory = cache_dir / "tokens" / _content_hash(files, states, tokenizer_digest, options)

    def fill(staging: Path) -> None:
        try:
            encoder = RowEncoder(tokenizer, options)
            shown = ProgressLines("tokenize", ", ".join(map(str, files[:NUM_SHOWN])))

            def advance(num_samples: int) -> None:
                progress()
                shown.tell(f"{num_samples:,} samples")

            summary = write_samples(staging, encoder, files, options, advance)
        except DataError:
            _require_unchanged(files, states, progress)  # a change may be the cause
            raise
        _require_unchanged(files, states, progress)
        _require_usable(summary, files, options, staging)
        text = json.dumps(summary.as_json(), indent=2)
        (staging / SUMMARY).write_text(text + "\n", encoding="utf-8")

    if not _is_whole(directory):
        try:
            _make_whole(directory, fill, progress)
        except OSError as error:
            raise CannotWriteError(
                f"cannot write prepared tokens to '{directory}': {error}.\n"
                f"Fix: free space, or set data.cache_dir to a writable directory"
            ) from error
    return open_dataset(directory, tuple(files))


# Data files


FileState = tuple[str, int, int, int]
"""The sha256 of a data file, and its size, mtime and ctime before hashing. A program can set the
mtime back, but not the ctime.
"""


def _state_of(path: Path, progress: Callable[[], None]) -> FileState:
    """Hash a file, and read its size and times. Raises `DataError`."""
    try:
        # on NFS, only opening a file fetches its current state from the server
        with path.open("rb") as file:
            # before hashing, so that a write during it is noticed as a change
            status = os.fstat(file.fileno())
        digest = _digest(path, progress)
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from error
    return digest, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _require_unchanged(
    files: list[Path], states: list[FileState], progress: Callable[[], None]
) -> None:
    """Raise `DataError` if a file was written to or replaced since it was hashed.

    The times reveal a file that was changed and changed back. They may be coarse or cached by a
    network file system, so each file is also hashed again.
    """
    for path, state in zip(files, states, strict=True):
        if _state_of(path, progress) != state:
            raise DataError(
                f"'{path}' changed while its rows were prepared, so some may be old and some new.\n"
                f"Fix: rerun once no program writes to this file, or train on a copy"
            )


def _digest(path: Path, progress: Callable[[], None] = lambda: None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(HASHED_BYTES):
            digest.update(piece)
            progress()
    return digest.hexdigest()


def _content_hash(
    files: list[Path],
    states: list[FileState],
    tokenizer_digest: str,
    options: PrepareOptions,
) -> str:
    versions = tokenizers.__version__, transformers.__version__
    contents = [(path.suffix, state[0]) for path, state in zip(files, states, strict=True)]
    parts = [_code_digest(), *versions, tokenizer_digest, dataclasses.asdict(options), contents]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


@cache
def _code_digest() -> str:
    """Return a sha256 of the source of `TOKEN_MODULES`, because changed code may change tokens."""
    digest = hashlib.sha256()
    for name in TOKEN_MODULES:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()


# Prepared directories


def _make_whole(
    directory: Path, fill: Callable[[Path], None], progress: Callable[[], None]
) -> None:
    """Call `fill` to prepare a missing or damaged directory. On a file system without locks, several
    processes may do the work, and the first rename wins.
    """
    with locked(directory.with_name(f"{directory.name}.lock"), on_wait=progress) as is_alone:
        if _is_whole(directory):
            return
        if directory.is_dir():
            # logged as an error, because ranks other than the main one log only errors
            logger.error("prepared tokens in %s are damaged: preparing them again", directory)
        if is_alone:
            _remove_leftovers(directory)
        staging = directory.with_name(f"{directory.name}.tmp-{uuid.uuid4().hex}")
        staging.mkdir()
        try:
            fill(staging)
            # users can check the files with `sha256sum -c SHA256SUMS`
            (staging / CHECKSUMS).write_text(_checksum_lines(staging), encoding="utf-8")
            if not publish(staging, directory) and not _is_whole(directory):
                # moved away first, so that the new directory can take its name
                damaged = staging.with_name(f"{staging.name}-damaged")
                directory.rename(damaged)
                publish(staging, directory)
                shutil.rmtree(damaged, ignore_errors=True)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _remove_leftovers(directory: Path) -> None:
    """Remove the leftovers of killed processes in this directory (whose lock is held) and in other
    directories that no process is preparing.
    """
    for leftover in directory.parent.glob("*.tmp-*"):
        lock = leftover.with_name(f"{leftover.name.partition('.tmp-')[0]}.lock")
        with suppress(OSError), lock.open("a", encoding="utf-8") as file:
            if lock.stem == directory.name or try_lock(file.fileno()):
                shutil.rmtree(leftover, ignore_errors=True)


def _is_whole(directory: Path) -> bool:
    """Return True if the directory contains exactly the files in its list of checksums, unchanged."""
    try:
        listed = (directory / CHECKSUMS).read_text(encoding="utf-8")
        return listed == _checksum_lines(directory)
    except (OSError, UnicodeDecodeError):
        return False


def _checksum_lines(directory: Path) -> str:
    """Return the content of `SHA256SUMS`: a line for each other file in the directory."""
    return "".join(
        f"{_digest(path)}  {path.name}\n"
        for path in sorted(directory.iterdir())
        if path.name != CHECKSUMS and not path.name.startswith(".")
    )


# Rows that cannot be used for training


def _require_usable(
    summary: Summary,
    files: list[Path],
    options: PrepareOptions,
    staging: Path,
) -> None:
    """Raise a `DataError` that shows the first bad rows, unless enough rows are usable."""
    is_strict = options.on_bad_row == "error"
    num_bad = summary.num_bad_rows
    num_rows = summary.num_rows
    if not num_rows:
        raise DataError(
            f"there are no rows in {', '.join(map(str, files))}.\n"
            f"Fix: use files with at least one row"
        )
    if summary.num_samples and num_bad <= (0 if is_strict else MAX_BAD_FRACTION * num_rows):
        return
    if num_bad == 0:
        raise DataError(
            f"no rows are left to train on: {summary.num_dropped} of {num_rows} rows were dropped "
            f"(data.truncation) because they exceed data.max_length={options.max_length}.\n"
            f"Fix: raise data.max_length"
        )
    listed = staging.parents[1] / f"bad_rows_{staging.name[:8]}.jsonl"
    shutil.copyfile(staging / BAD_ROWS, listed)
    fixes = ["repair the rows"]
    if "over-long" in summary.bad_rows_by_kind:
        fixes.append("raise data.max_length or set data.truncation for over-long rows")
    if not is_strict:
        fixes[0] += f" (data.on_bad_row=skip accepts bad rows up to {MAX_BAD_FRACTION:.0%})"
    elif summary.num_samples:
        fixes.append("skip them with data.on_bad_row=skip")
    stopped = "; reading stopped there" if is_strict and num_bad == num_rows else ""
    kinds = ", ".join(f"{count} {kind}" for kind, count in summary.bad_rows_by_kind.most_common())
    with listed.open(encoding="utf-8") as file:
        first = list(map(json.loads, islice(file, NUM_SHOWN)))
    lines = [
        f"{num_bad} of {num_rows} rows cannot be used for training ({summary.num_samples} can): "
        f"{kinds}"
        f"{stopped}",
        *(f"  {location(Path(row['file']), row['line'])}: {row['reason']}" for row in first),
        f"Fix: {', or '.join(fixes)}; all bad rows are listed in {listed}",
    ]
    raise DataError("\n".join(lines))
