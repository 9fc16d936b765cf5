"""Prepared samples: the memory-mapped token cache, and the samples of a run from all its sources."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from trainer.data.batch_plan import Share, held_out_rows
from trainer.data.prepare import ROW, ROWS, SUPERVISED, TOKEN, TOKENS
from trainer.data.rows import Summary, location
from trainer.errors import DataError, ResumableError

SUMMARY = "summary.json"
CHECKSUMS = "SHA256SUMS"
"""The file with counts of the rows, and the checksums of all files in `sha256sum`'s format."""
BLOCK_TOKENS = 1 << 18


class MappedFile:
    """One file of a prepared directory, mapped into memory as long as this object exists.

    Renaming, replacing or deleting the file is harmless. Writing to it changes the mapped data, and
    truncating it kills a process that reads past the new end.
    """

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._path = path
        self._file = path.open("rb")
        self._state = self._size_and_time()
        self.array: np.ndarray = np.memmap(self._file, dtype, "r")
        listed = (path.parent / CHECKSUMS).read_text(encoding="utf-8").split()
        self._sha256 = listed[listed.index(path.name) - 1]

    def require_unchanged(self) -> None:
        """Raise `ResumableError` if the content changed. The check takes about a microsecond.

        If only the modification time changed (`touch`), the file is hashed.
        """
        now = self._size_and_time()
        if now == self._state:
            return
        is_same_size = now[0] == self._state[0]
        if not is_same_size or hashlib.sha256(self.array.data).hexdigest() != self._sha256:
            raise ResumableError(
                f"prepared tokens changed while the run trained on them: {self._path}.\n"
                f"Fix: stop the program that writes to data.cache_dir, then rerun the same command, "
                f"which prepares the tokens again and continues from the last checkpoint"
            )
        self._state = now

    def _size_and_time(self) -> tuple[int, int]:
        state = os.fstat(self._file.fileno())
        return state.st_size, state.st_mtime_ns


@dataclass(frozen=True, eq=False)
class TokenDataset:
    """Prepared samples of one source, memory-mapped."""

    directory: Path
    files: tuple[Path, ...]
    summary: Summary
    tokens: np.ndarray
    """The `TOKEN`s of all samples, end to end."""
    rows: np.ndarray
    """The `ROW` of each sample."""
    bounds: np.ndarray | None
    """Index of the first sample of each kept row, followed by the number of samples; int64. None if
    each row is one sample.
    """
    mapped: tuple[MappedFile, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids (int32) and the loss mask (bool) of a sample."""
        end = int(self.rows["end"][index])
        tokens = self.tokens[end - int(self.rows["num_tokens"][index]) : end]
        return tokens & ~SUPERVISED, tokens < 0

    def location(self, index: int) -> str:
        """Return the place of a sample in the data files, as `file:line`."""
        row = self.rows[index]
        return location(self.files[row["file"]], int(row["line"]))

    def first_beyond(self, num_ids: int, progress: Callable[[], None]) -> tuple[int, int] | None:
        """Return (sample, token id) of the first token whose id is not less than `num_ids`; None if
        there is none. Calls `progress` while it reads all tokens, which is faster than hashing them.
        """
        for start in range(0, len(self.tokens), BLOCK_TOKENS):
            ids = self.tokens[start : start + BLOCK_TOKENS] & ~SUPERVISED
            if ids.max() >= num_ids:
                place = int(np.argmax(ids >= num_ids))
                index = np.searchsorted(self.rows["end"], start + place, side="right")
                return int(index), int(ids[place])
            progress()
        return None

    def whole(self, name: str, repeat: float = 1.0) -> "SourceSamples":
        """Return all samples as one source."""
        return SourceSamples(name, self, np.arange(self.summary.num_kept_rows), repeat)


def open_dataset(directory: Path, files: tuple[Path, ...]) -> TokenDataset:
    """Map a prepared directory into memory. `files` are the data files of its rows."""
    mapped = MappedFile(directory / TOKENS, TOKEN), MappedFile(directory / ROWS, ROW)
    tokens, rows = (file.array for file in mapped)
    summary = Summary.from_json(json.loads((directory / SUMMARY).read_text(encoding="utf-8")))
    bounds = None
    if len(rows) != summary.num_kept_rows:
        places = rows[["file", "line"]]
        bounds = np.flatnonzero(np.concatenate([[True], places[1:] != places[:-1], [True]]))
    return TokenDataset(directory, files, summary, tokens, rows, bounds, mapped)


def _samples_of(rows: np.ndarray, bounds: np.ndarray | None) -> np.ndarray:
    """Return the indices of the samples of `rows`. `bounds` has the format of
    `TokenDataset.bounds`.
    """
    if bounds is None:
        return rows
    counts = bounds[rows + 1] - bounds[rows]
    ends = np.cumsum(counts)
    # Element p of the result belongs to a row whose first element is ends - counts, and whose first
    # sample is bounds[row]. So it is sample bounds[row] + p - (ends - counts).
    return np.arange(counts.sum()) + np.repeat(bounds[rows] - ends + counts, counts)


@dataclass(frozen=True, eq=False)
class SourceSamples:
    """The samples of one source. `indices` selects kept rows of a prepared dataset; int64."""

    name: str
    dataset: TokenDataset
    indices: np.ndarray
    repeat: float = 1.0

    @property
    def share(self) -> Share:
        """The number of rows, and how often an epoch trains them. Raises `DataError` if an epoch
        would train no row.
        """
        share = Share(len(self.indices), self.repeat)
        if not share.num_samples and share.num_rows:
            raise DataError(
                f"source '{self.name}': repeat={share.repeat:g} of its {share.num_rows} rows is "
                f"less than half a sample.\nFix: raise it, or remove the source"
            )
        return share

    @cached_property
    def samples(self) -> np.ndarray:
        """Indices of the samples in the dataset, int64."""
        return _samples_of(self.indices, self.dataset.bounds)

    @property
    def row_sizes(self) -> np.ndarray:
        """Number of samples of each row, int64."""
        bounds = self.dataset.bounds
        return np.ones_like(self.indices) if bounds is None else np.diff(bounds)[self.indices]

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the samples, their order, and their grouping into rows."""
        digest = hashlib.sha256(self.dataset.summary.fingerprint.encode())
        digest.update(self.indices.astype(np.int64, copy=False).data)
        if self.dataset.bounds is not None:
            digest.update(self.dataset.bounds.tobytes())
        return digest.hexdigest()[:16]

    def split(self, val_ratio: float, *, seed: int) -> tuple["SourceSamples", "SourceSamples"]:
        """Split a whole dataset into training and validation samples, each in row order."""
        held_out = held_out_rows(len(self.indices), val_ratio, seed=seed)
        train = replace(self, indices=np.delete(self.indices, held_out))
        return train, replace(self, indices=held_out, repeat=1.0)


class Samples:
    """The samples of all sources. Sample ids and row ids are numbered consecutively across sources."""

    def __init__(self, sources: Sequence[SourceSamples]) -> None:
        self.sources = tuple(sources)
        self.names = tuple(source.name for source in sources)
        self.shares = tuple(source.share for source in sources)
        self._bounds = np.cumsum([0, *(len(source.samples) for source in sources)])
        self._row_bounds: np.ndarray | None = None
        if any(source.dataset.bounds is not None for source in sources):
            sizes = [source.row_sizes for source in sources]
            self._row_bounds = np.cumsum(np.concatenate([[0], *sizes]))

    def __len__(self) -> int:
        return int(self._bounds[-1])

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the samples, their order, and how often they are repeated. It does not depend
        on the names of the sources.
        """
        if len(self.sources) == 1 and self.sources[0].repeat == 1:
            return self.sources[0].fingerprint
        parts = [[source.fingerprint, source.repeat] for source in self.sources]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    @cached_property
    def summary(self) -> Summary:
        """Counts of the rows of all sources."""
        total = Summary()
        for source in self.sources:
            total.add(source.dataset.summary)
        return total

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the sample ids of rows, in the order of the row ids `rows` (int64)."""
        return _samples_of(rows, self._row_bounds)

    @property
    def row_lengths(self) -> np.ndarray:
        """Number of tokens in each row, int64."""
        lengths = self.lengths
        if self._row_bounds is None:
            return lengths
        return np.add.reduceat(lengths, self._row_bounds[:-1])

    def source_of(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the index of each sample's source, int64."""
        return np.searchsorted(self._bounds, ids, side="right") - 1

    def counts(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (number of tokens, number of labels) of each sample, int64."""
        found = np.empty((2, len(ids)), dtype=np.int64)
        numbers = self.source_of(ids)
        for number, source in enumerate(self.sources):
            own = numbers == number
            indices = source.samples[ids[own] - self._bounds[number]]
            rows = source.dataset.rows
            found[:, own] = rows["num_tokens"][indices], rows["num_loss_tokens"][indices]
        return found[0], found[1]

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each sample, int64. Each access reads them from the cache again."""
        return self.counts(np.arange(len(self)))[0]

    def sample(self, sample_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids (int32) and the loss mask (bool) of a sample."""
        dataset, index = self._locate(sample_id)
        return dataset.sample(index)

    def location(self, sample_id: int) -> str:
        """Return the place of a sample in the data files, as `file:line`."""
        dataset, index = self._locate(sample_id)
        return dataset.location(index)

    def _locate(self, sample_id: int) -> tuple[TokenDataset, int]:
        number = int(self.source_of([sample_id])[0])
        source = self.sources[number]
        return source.dataset, int(source.samples[sample_id - self._bounds[number]])

    def require_unchanged(self) -> None:
        """Raise `ResumableError` if the prepared tokens have changed. The check takes
        microseconds.
        """
        for source in self.sources:
            for file in source.dataset.mapped:
                file.require_unchanged()
