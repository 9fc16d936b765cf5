"""Tokens and loss masks prepared once, under a content hash, and memory-mapped by every process.

`<cache_dir>/tokens/<hash>/` appears by one rename of a finished, synced directory; what a killed preparation leaves
behind is never read. The memory used does not grow with the number of rows.
"""

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers

from trainer.data.chat import ChatEncoder
from trainer.data.rows import BadRow
from trainer.data.sample_writer import (
    ARRAYS,
    BAD_ROWS,
    OVER_LONG_ROWS,
    PrepareOptions,
    SampleWriter,
    Summary,
    write_samples,
)
from trainer.protocols import CannotWriteError, DataError

CODE_VERSION = 2  # raise it when the same input gives other tokens
POLL_S = 0.2
SPLIT_STREAM = 1  # keeps the draw of the validation rows apart from other uses of the seed


@dataclass(frozen=True, eq=False)
class TokenDataset:
    """Prepared samples; cheap to send to another process, which maps the same files."""

    directory: Path
    files: tuple[Path, ...]
    summary: Summary
    input_ids: np.ndarray
    """Tokens of all samples end to end, int32 [T]; `loss_mask` is bool [T]."""
    loss_mask: np.ndarray
    offsets: np.ndarray
    """Bounds of the N samples in them, int64 [N + 1]."""
    source: np.ndarray
    """File index and line of each sample, int64 [N, 2]."""
    lengths: np.ndarray
    num_loss_tokens: np.ndarray
    """Labels a sample contributes, int32 [N]: a supervised first token has nothing to be predicted from."""

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (int32) and loss mask (bool) of one sample, as views of the mapped files."""
        part = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.input_ids[part], self.loss_mask[part]

    def location(self, index: int) -> str:
        """The `file:line` a sample comes from."""
        file_index, line = self.source[index]
        return f"{self.files[file_index]}:{line}"

    @property
    def notes(self) -> list[str]:
        """What was left out or cut, and where the list of it lies; for the log."""
        summary, notes = self.summary, []
        if summary.num_bad_rows:
            kinds = ", ".join(f"{kind} {count}" for kind, count in summary.bad_rows_by_kind.items())
            notes.append(f"left out {summary.num_bad_rows} bad rows ({kinds}), listed in {self.directory / BAD_ROWS}")
        if summary.num_dropped or summary.num_truncated:
            notes.append(
                f"over-long rows: {summary.num_dropped} dropped, {summary.num_truncated} cut by "
                f"{summary.num_cut_tokens} tokens, listed in {self.directory / OVER_LONG_ROWS}"
            )
        return notes

    @property
    def fingerprint(self) -> str:
        """sha256 over tokens, masks and bounds: equal exactly when the samples and their order are."""
        return self.summary.fingerprint

    def __reduce__(self) -> tuple[Any, ...]:
        return open_dataset, (self.directory, self.files)


def prepare(
    files: list[Path],
    *,
    tokenizer: transformers.PreTrainedTokenizerBase,
    tokenizer_digest: str,
    options: PrepareOptions,
    cache_dir: Path,
    wait: bool,
) -> TokenDataset:
    """The samples of `files`, prepared unless the cache has them.

    With `wait` this process leaves the work to another one and polls for its result. Raises `DataError` for rows or
    files that cannot be trained on, `CannotWriteError` when the cache cannot be written.
    """
    directory = cache_dir / "tokens" / _content_hash(files, tokenizer_digest, options)
    if wait:
        _wait_for(directory)
    elif not directory.is_dir():
        try:
            with _locked(directory) as is_locked:
                if not directory.is_dir():
                    _prepare_directory(directory, files, tokenizer, options, is_alone=is_locked)
        except OSError as error:
            fix = "free space or point data.cache_dir to a writable directory"
            raise CannotWriteError(f"cannot write prepared tokens to '{directory}': {error}; {fix}") from error
    return open_dataset(directory, tuple(files))


def open_dataset(directory: Path, files: tuple[Path, ...]) -> TokenDataset:
    """Map a prepared directory. `files` are where its rows came from, for messages."""
    arrays = {name: np.load(directory / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
    return TokenDataset(
        directory=directory,
        files=files,
        summary=Summary(**json.loads((directory / "summary.json").read_text())),
        input_ids=arrays["input_ids"],
        loss_mask=arrays["loss_mask"],
        offsets=arrays["offsets"],
        source=arrays["source"],
        lengths=np.diff(np.asarray(arrays["offsets"])),
        num_loss_tokens=arrays["num_loss_tokens"],
    )


def split(dataset: TokenDataset, *, val_ratio: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted train and validation indices (int64): a function of length, ratio and seed alone.

    At least one row on each side when `val_ratio` is positive and there are two rows.
    """
    num_val = 0
    if val_ratio > 0 and len(dataset) >= 2:
        num_val = min(max(1, round(len(dataset) * val_ratio)), len(dataset) - 1)
    rng = np.random.Generator(np.random.Philox(key=[seed % 2**64, SPLIT_STREAM]))
    order = rng.permutation(len(dataset))
    return np.sort(order[num_val:]), np.sort(order[:num_val])


def _content_hash(files: list[Path], tokenizer_digest: str, options: PrepareOptions) -> str:
    parts = [
        CODE_VERSION,
        tokenizers.__version__,
        transformers.__version__,
        tokenizer_digest,
        dataclasses.asdict(options),
    ]
    for path in files:
        try:
            with path.open("rb") as file:
                parts.append([path.suffix, hashlib.file_digest(file, "sha256").hexdigest()])
        except OSError as error:
            raise DataError(f"cannot read '{path}': {error.strerror}") from error
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _failed_marker(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.failed")


def _wait_for(directory: Path) -> None:
    while not directory.is_dir():
        try:
            raise DataError(_failed_marker(directory).read_text())
        except FileNotFoundError:
            time.sleep(POLL_S)


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Let one process prepare while the others wait; False where the file system has no locks."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            is_locked = True
        except OSError:  # some network file systems; the rename alone keeps readers safe, the work is done twice
            is_locked = False
        yield is_locked


def _prepare_directory(
    directory: Path,
    files: list[Path],
    tokenizer: transformers.PreTrainedTokenizerBase,
    options: PrepareOptions,
    *,
    is_alone: bool,
) -> None:
    marker = _failed_marker(directory)
    marker.unlink(missing_ok=True)
    for leftover in directory.parent.glob(f"{directory.name}.tmp-*") if is_alone else ():
        shutil.rmtree(leftover, ignore_errors=True)
    staging = directory.with_name(f"{directory.name}.tmp-{socket.gethostname()}-{os.getpid()}")
    staging.mkdir()
    try:
        encoder = ChatEncoder(tokenizer, template_kwargs=options.template_kwargs)
        with SampleWriter(staging, options) as writer:
            write_samples(writer, encoder, files)
        summary = writer.summary(encoder.end_token_ids)
        _check_usable(summary, writer.first_bad_rows, options, staging)
        (staging / "summary.json").write_text(json.dumps(dataclasses.asdict(summary), indent=2) + "\n")
        _publish(staging, directory)
    except DataError as error:
        (staging / "failed").write_text(str(error))
        (staging / "failed").rename(marker)
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check_usable(summary: Summary, first_bad_rows: list[BadRow], options: PrepareOptions, staging: Path) -> None:
    """Raise `DataError` with the first bad rows, their counts and the way out, unless enough rows can be trained on."""
    num_bad, num_rows = summary.num_bad_rows, summary.num_rows
    if options.on_bad_row == "skip" and num_bad <= options.max_bad_fraction * num_rows and summary.num_samples:
        return
    if num_bad == 0 and summary.num_samples:
        return
    if num_bad == 0:
        raise DataError(
            f"no row left to train on: {num_rows} rows read, {summary.num_dropped} dropped by data.truncation"
        )
    cache_dir = staging.parent.parent
    bad_rows_file = cache_dir / f"bad_rows_{staging.name[:8]}.jsonl"
    shutil.copyfile(staging / BAD_ROWS, bad_rows_file)
    lines = [f"{num_bad} of {num_rows} rows cannot be trained on ({summary.num_samples} can):"]
    lines += [f"  {row.file}:{row.line}: {row.reason}" for row in first_bad_rows]
    if num_bad > len(first_bad_rows):
        lines.append(f"  … and {num_bad - len(first_bad_rows)} more")
    lines.append("by reason: " + ", ".join(f"{kind} {count}" for kind, count in summary.bad_rows_by_kind.items()))
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
    for path in (*staging.iterdir(), staging):
        _fsync(path)
    try:
        staging.rename(directory)
    except OSError:
        if not directory.is_dir():  # else another process was first, with the same content
            raise
    _fsync(directory.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
