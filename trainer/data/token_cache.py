"""Tokens and loss masks prepared once, under a content hash, and memory-mapped by every process.

`<cache_dir>/tokens/<hash>/` appears by one rename of a finished, synced directory; what a killed preparation leaves
behind is never read. The memory used does not grow with the number of rows.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import psutil
import tokenizers
import transformers

from trainer.data.bad_rows import BadRows
from trainer.data.chat import ChatEncoder
from trainer.data.checksums import find_damage, write_checksums
from trainer.data.sample_writer import BAD_ROWS, PrepareOptions, SampleWriter, Summary, write_samples
from trainer.data.samples import TokenDataset, open_dataset
from trainer.errors import CannotWriteError, DataError
from trainer.runtime.atomic_files import atomic_write, publish
from trainer.runtime.file_lock import POLL_S, locked

logger = logging.getLogger(__name__)

HASHED_BYTES = 1 << 24


def prepare(
    files: list[Path],
    *,
    tokenizer: transformers.PreTrainedTokenizerBase,
    tokenizer_digest: str,
    options: PrepareOptions,
    cache_dir: Path,
    wait: bool,
    progress: Callable[[], None] = lambda: None,
) -> TokenDataset:
    """The samples of `files`, prepared unless the cache has them.

    With `wait` this process leaves the work to another one and polls for its result. `progress` is called with every
    row and with every poll: who polls is not hung, and who works is watched by itself. Raises `DataError` for rows or
    files that cannot be trained on, `CannotWriteError` when the cache cannot be written.
    """
    directory = cache_dir / "tokens" / _content_hash(files, tokenizer_digest, options, progress)
    if wait:
        _wait_for(directory, progress)
    else:
        try:
            _make_whole(directory, partial(_fill, files, tokenizer, options, progress), progress)
        except OSError as error:
            fix = "free space or point data.cache_dir to a writable directory"
            raise CannotWriteError(f"cannot write prepared tokens to '{directory}': {error}; {fix}") from error
    return open_dataset(directory, tuple(files))


def _content_hash(
    files: list[Path], tokenizer_digest: str, options: PrepareOptions, progress: Callable[[], None]
) -> str:
    parts = [
        _code_digest(),
        tokenizers.__version__,
        transformers.__version__,
        tokenizer_digest,
        dataclasses.asdict(options),
    ]
    for path in files:
        try:
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while piece := file.read(HASHED_BYTES):
                    digest.update(piece)
                    progress()
            parts.append([path.suffix, digest.hexdigest()])
        except OSError as error:
            raise DataError(f"cannot read '{path}': {error.strerror}") from error
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


@cache
def _code_digest() -> str:
    """sha256 over the source of this package: with other code the same input may give other tokens."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _make_whole(directory: Path, fill: Callable[[Path], None], progress: Callable[[], None]) -> None:
    """Let `fill` make what is not there or no longer what was written, and tell those who wait."""
    try:
        if not directory.is_dir() or find_damage(directory):
            with locked(directory.with_name(f"{directory.name}.lock"), on_wait=progress) as is_locked:
                damage = find_damage(directory) if directory.is_dir() else None
                if damage:
                    logger.warning("prepared tokens in %s are damaged (%s): preparing them again", directory, damage)
                if damage or not directory.is_dir():
                    _make(directory, fill, is_alone=is_locked)
    except DataError as error:
        _tell(directory, error=str(error))
        raise
    _tell(directory, error=None)


def _tell(directory: Path, *, error: str | None) -> None:
    """Leave the outcome to the other ranks of this machine; where nothing can be written, nothing was wrong either."""
    if os.access(directory.parent, os.W_OK):
        note = _outcome_file(directory)
        text = json.dumps({"launch": _launch(), "error": error})
        atomic_write(note, text, partial=note.with_name(f"{note.name}.tmp-{socket.gethostname()}-{os.getpid()}"))


def _wait_for(directory: Path, progress: Callable[[], None]) -> None:
    while True:
        with contextlib.suppress(OSError, ValueError):
            outcome = json.loads(_outcome_file(directory).read_text())
            if outcome["launch"] == _launch():
                break
        if directory.is_dir() and not os.access(directory.parent, os.W_OK):
            return
        progress()
        time.sleep(POLL_S)
    if outcome["error"] is not None:
        raise DataError(outcome["error"])


def _outcome_file(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.outcome")


def _launch() -> str:
    """What the ranks of one launch on one machine have in common, and with no other launch: their parent process."""
    try:
        return f"{socket.gethostname()} {os.getppid()} {psutil.Process(os.getppid()).create_time()}"
    except psutil.Error:  # outside of this container
        return f"{socket.gethostname()} {os.getppid()}"


def _make(directory: Path, fill: Callable[[Path], None], *, is_alone: bool) -> None:
    """Where the file system has no locks (not `is_alone`) the rename keeps readers safe, and the work is done twice."""
    for leftover in directory.parent.glob(f"{directory.name}.tmp-*") if is_alone else ():
        shutil.rmtree(leftover, ignore_errors=True)
    staging = directory.with_name(f"{directory.name}.tmp-{socket.gethostname()}-{os.getpid()}")
    staging.mkdir()
    try:
        fill(staging)
        write_checksums(staging)
        _publish(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _fill(
    files: list[Path],
    tokenizer: transformers.PreTrainedTokenizerBase,
    options: PrepareOptions,
    progress: Callable[[], None],
    staging: Path,
) -> None:
    encoder = ChatEncoder(
        tokenizer, template_kwargs=options.template_kwargs, special_in_content=options.special_in_content
    )
    with SampleWriter(staging, options) as writer:
        write_samples(writer, encoder, files, progress)
    summary = writer.summary(encoder)
    _check_usable(summary, writer.bad_rows, options, staging)
    (staging / "summary.json").write_text(json.dumps(dataclasses.asdict(summary), indent=2) + "\n")


def _check_usable(summary: Summary, bad_rows: BadRows, options: PrepareOptions, staging: Path) -> None:
    """Raise `DataError` with the first bad rows, their counts and the way out, unless enough rows can be trained on."""
    num_bad, num_rows = summary.num_bad_rows, summary.num_rows
    allowed = options.max_bad_fraction * num_rows if options.on_bad_row == "skip" else 0
    if summary.num_samples and num_bad <= allowed:
        return
    if num_bad == 0:
        raise DataError(
            f"no row left to train on: {num_rows} rows read, {summary.num_dropped} dropped by data.truncation"
        )
    cache_dir = staging.parent.parent
    bad_rows_file = cache_dir / f"bad_rows_{staging.name[:8]}.jsonl"
    shutil.copyfile(staging / BAD_ROWS, bad_rows_file)
    lines = [f"{num_bad} of {num_rows} rows cannot be trained on ({summary.num_samples} can):"]
    lines += bad_rows.lines()
    lines.append(f"all of them: {bad_rows_file}")
    lines.append(_way_out(summary, options))
    raise DataError("\n".join(lines))


def _way_out(summary: Summary, options: PrepareOptions) -> str:
    fixes = ["repair the rows"]
    if "over-long" in summary.bad_rows_by_kind:
        fixes.append("for over-long rows raise data.max_length or set data.truncation=right, left or drop")
    if summary.num_samples and options.on_bad_row == "error":
        fixes.append("leave them out with data.on_bad_row=skip")
    if summary.num_samples and options.on_bad_row == "skip":
        fixes.append(f"raise data.max_bad_fraction (now {options.max_bad_fraction:g})")
    return "fix: " + "; ".join(fixes)


def _publish(staging: Path, directory: Path) -> None:
    # Another process may be first, with the same content; or the damaged one is there, which may still be mapped.
    if not publish(staging, directory) and find_damage(directory):
        damaged = staging.with_name(f"{staging.name}-damaged")
        directory.rename(damaged)
        publish(staging, directory)
        shutil.rmtree(damaged, ignore_errors=True)
