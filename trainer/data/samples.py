"""Prepared samples: what every process maps of the token cache, and the samples of a run, of
one source or several.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from trainer.data.batch_plan import Share, held_out_rows
from trainer.data.prepare import ROW, ROWS, SUPERVISED, TOKEN, TOKENS
from trainer.data.rows import Summary, location
from trainer.errors import DataError, ResumableError

SUMMARY, CHECKSUMS = "summary.json", "SHA256SUMS"
"""Counts of the rows, and a list of every other file in the format of `sha256sum`."""


class MappedFile:
    """One file of a prepared directory, open and mapped as long as this object lives.

    A file that is renamed, replaced or deleted does no harm. Writing into it changes what is
    mapped, and cutting it short kills the process that reads beyond its new end.
    """

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._path, self._file = path, path.open("rb")
        self._state = self._size_and_time()
        self.array: np.ndarray = np.memmap(self._file, dtype, "r")
        listed = (path.parent / CHECKSUMS).read_text(encoding="utf-8").split()
        self._sha256 = listed[listed.index(path.name) - 1]

    def require_unchanged(self) -> None:
        """Raise `ResumableError` if the content changed; it takes about a microsecond. A file whose
        time alone has changed, as `touch` does, is hashed.
        """
        now = self._size_and_time()
        if now == self._state:
            return
        is_same_size = now[0] == self._state[0]
        if not is_same_size or hashlib.sha256(self.array.data).hexdigest() != self._sha256:
            raise ResumableError(
                f"prepared tokens changed while the run trained on them: {self._path}.\nFix: find "
                f"what writes to data.cache_dir, and start again with the same command: it "
                f"prepares the tokens again, and continues from the last checkpoint"
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
    """The tokens of all samples, end to end, as `TOKEN`."""
    rows: np.ndarray
    """`ROW` of each sample."""
    bounds: np.ndarray | None
    """Index of the first sample of each kept row, int64, with the end of the last; None: each row is
    one sample.
    """
    mapped: tuple[MappedFile, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids (int32) and loss mask (bool) of one sample."""
        end = int(self.rows["end"][index])
        tokens = self.tokens[end - int(self.rows["num_tokens"][index]) : end]
        return tokens & ~SUPERVISED, tokens < 0

    def location(self, index: int) -> str:
        """Return where a sample comes from, as `file:line`."""
        row = self.rows[index]
        return location(self.files[row["file"]], int(row["line"]))

    def whole(self, name: str, repeat: float = 1.0) -> "SourceSamples":
        """Return all samples, as a source."""
        return SourceSamples(name, self, np.arange(self.summary.num_kept_rows), repeat)


def open_dataset(directory: Path, files: tuple[Path, ...]) -> TokenDataset:
    """Map a prepared directory. `files` are where its rows came from, for messages."""
    mapped = MappedFile(directory / TOKENS, TOKEN), MappedFile(directory / ROWS, ROW)
    tokens, rows = (file.array for file in mapped)
    summary = Summary.from_json(json.loads((directory / SUMMARY).read_text(encoding="utf-8")))
    bounds = None
    if len(rows) != summary.num_kept_rows:
        places = rows[["file", "line"]]
        bounds = np.flatnonzero(np.concatenate([[True], places[1:] != places[:-1], [True]]))
    return TokenDataset(directory, files, summary, tokens, rows, bounds, mapped)


def _samples_of(rows: np.ndarray, bounds: np.ndarray | None) -> np.ndarray:
    """Return the samples of `rows`, those of a row side by side."""
    if bounds is None:
        return rows
    counts = bounds[rows + 1] - bounds[rows]
    ends = np.cumsum(counts)
    return np.arange(counts.sum()) + np.repeat(bounds[rows] - ends + counts, counts)


@dataclass(frozen=True, eq=False)
class SourceSamples:
    """The samples of one source: those of the kept rows `indices` (int64) of a prepared dataset."""

    name: str
    dataset: TokenDataset
    indices: np.ndarray
    repeat: float = 1.0

    @property
    def share(self) -> Share:
        """Raises `DataError` where not one sample comes in an epoch."""
        share = Share(len(self.indices), self.repeat)
        if not share.num_samples and share.num_rows:
            raise DataError(
                f"source '{self.name}': repeat {share.repeat:g} of {share.num_rows} rows is less "
                f"than half a sample.\nFix: raise it, or leave the source out"
            )
        return share

    @cached_property
    def samples(self) -> np.ndarray:
        """Their numbers in the dataset, int64."""
        return _samples_of(self.indices, self.dataset.bounds)

    @property
    def row_sizes(self) -> np.ndarray:
        """Number of samples of each row, int64."""
        bounds = self.dataset.bounds
        return np.ones_like(self.indices) if bounds is None else np.diff(bounds)[self.indices]

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal samples in equal order, of rows with equally many."""
        digest = hashlib.sha256(self.dataset.summary.fingerprint.encode())
        digest.update(self.indices.astype(np.int64, copy=False).data)
        if self.dataset.bounds is not None:
            digest.update(self.dataset.bounds.tobytes())
        return digest.hexdigest()[:16]

    def split(self, val_ratio: float, *, seed: int) -> tuple["SourceSamples", "SourceSamples"]:
        """Return (training, validation samples) of a whole dataset, in their order."""
        held_out = held_out_rows(len(self.indices), val_ratio, seed=seed)
        train = replace(self, indices=np.delete(self.indices, held_out))
        return train, replace(self, indices=held_out, repeat=1.0)


class Samples:
    """The samples of all sources under ids of their own, source by source; so are their rows."""

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
        """Equal for equal samples that come equally often in equal order, whatever their
        sources are called.
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
        """Return ids of the samples of rows (int64 ids), in their order."""
        return _samples_of(rows, self._row_bounds)

    @property
    def row_lengths(self) -> np.ndarray:
        """Tokens of all rows, int64."""
        lengths = self.lengths
        if self._row_bounds is None:
            return lengths
        return np.add.reduceat(lengths, self._row_bounds[:-1])

    def source_of(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the number of the source of each sample, int64."""
        return np.searchsorted(self._bounds, ids, side="right") - 1

    def counts(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens, labels) of samples, int64."""
        found = np.empty((2, len(ids)), dtype=np.int64)
        numbers = self.source_of(ids)
        for number, source in enumerate(self.sources):
            own = numbers == number
            indices, rows = source.samples[ids[own] - self._bounds[number]], source.dataset.rows
            found[:, own] = rows["num_tokens"][indices], rows["num_loss_tokens"][indices]
        return found[0], found[1]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of all samples, read again each time."""
        return self.counts(np.arange(len(self)))[0]

    def sample(self, sample_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids (int32) and loss mask (bool)."""
        dataset, index = self._locate(sample_id)
        return dataset.sample(index)

    def location(self, sample_id: int) -> str:
        """Return `file:line` of a sample."""
        dataset, index = self._locate(sample_id)
        return dataset.location(index)

    def _locate(self, sample_id: int) -> tuple[TokenDataset, int]:
        number = int(self.source_of([sample_id])[0])
        source = self.sources[number]
        return source.dataset, int(source.samples[sample_id - self._bounds[number]])

    def require_unchanged(self) -> None:
        """Raise `ResumableError` if prepared tokens were written to since they were opened;
        takes microseconds.
        """
        for source in self.sources:
            for file in source.dataset.mapped:
                file.require_unchanged()
