"""Prepared samples: what every process maps of the token cache, and the samples of a run, of one source or several."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from trainer.data.batch_plan import Share
from trainer.data.rows import location
from trainer.data.sample_writer import BAD_ROWS, OVER_LONG_ROWS, ROW, ROWS, SUPERVISED, TOKEN, TOKENS, Summary
from trainer.errors import DataError

SPLIT_STREAM = 1  # keeps the draw of the validation rows apart from other uses of the seed


@dataclass(frozen=True, eq=False)
class TokenDataset:
    """Prepared samples; cheap to send to another process, which maps the same files."""

    directory: Path
    files: tuple[Path, ...]
    summary: Summary
    tokens: np.ndarray
    """Of all samples, end to end, as `TOKEN` says."""
    rows: np.ndarray
    """`ROW` of each sample."""
    ends: np.ndarray
    """Where each sample ends in `tokens`, int64."""
    bounds: np.ndarray | None
    """Where the samples of each kept row begin, int64 with the end of the last; None: each row is one sample."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> np.ndarray:
        return self.rows["num_tokens"]

    @property
    def num_loss_tokens(self) -> np.ndarray:
        """Labels each sample contributes: a supervised first token has nothing to be predicted from."""
        return self.rows["num_loss_tokens"]

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (int32) and loss mask (bool) of one sample."""
        end = int(self.ends[index])
        tokens = self.tokens[end - int(self.lengths[index]) : end]
        return tokens & ~SUPERVISED, tokens < 0

    def location(self, index: int) -> str:
        """Where a sample comes from, as `file:line`."""
        row = self.rows[index]
        return location(self.files[row["file"]], int(row["line"]))

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
        if summary.unread_keys:
            keys = ", ".join(f"'{key}' {count}" for key, count in summary.unread_keys.items())
            notes.append(f"nothing reads these keys of messages: {keys}")
        return notes

    def whole(self, name: str, repeat: float = 1.0) -> "SourceSamples":
        """All samples, as a source."""
        num_rows = len(self) if self.bounds is None else len(self.bounds) - 1
        return SourceSamples(name, self, np.arange(num_rows), repeat)


def open_dataset(directory: Path, files: tuple[Path, ...]) -> TokenDataset:
    """Map a prepared directory. `files` are where its rows came from, for messages."""
    tokens: np.ndarray = np.memmap(directory / TOKENS, TOKEN, "r")
    rows: np.ndarray = np.memmap(directory / ROWS, ROW, "r")
    summary = Summary(**json.loads((directory / "summary.json").read_text()))
    ends, bounds = np.cumsum(rows["num_tokens"], dtype=np.int64), None
    if len(rows) != summary.num_kept_rows:
        places = rows[["file", "line"]]
        bounds = np.flatnonzero(np.concatenate([[True], places[1:] != places[:-1], [True]]))
    return TokenDataset(directory, files, summary, tokens, rows, ends, bounds)


def _samples_of(rows: np.ndarray, bounds: np.ndarray | None) -> np.ndarray:
    """The samples of `rows`, those of a row side by side."""
    if bounds is None:
        return rows
    counts = bounds[rows + 1] - bounds[rows]
    ends = np.cumsum(counts)
    return np.arange(counts.sum()) + np.repeat(bounds[rows] - ends + counts, counts)


@dataclass(frozen=True, eq=False)
class SourceSamples:
    """The samples of one source: those of the kept rows `indices` (int64 [N]) of a prepared dataset."""

    name: str
    dataset: TokenDataset
    indices: np.ndarray
    repeat: float = 1.0

    @property
    def share(self) -> Share:
        """Raises `DataError` where not one sample comes in an epoch."""
        share = Share(len(self.indices), self.repeat)
        if not share.num_samples and share.num_rows:
            what = f"source '{self.name}': repeat {share.repeat:g} of {share.num_rows} rows is less than half a sample"
            raise DataError(f"{what}; raise it or leave the source out")
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

    @property
    def fingerprint(self) -> str:
        """Equal for equal samples in equal order, of rows with equally many."""
        digest = hashlib.sha256(self.dataset.summary.fingerprint.encode())
        digest.update(np.ascontiguousarray(self.indices, dtype=np.int64).tobytes())
        if self.dataset.bounds is not None:
            digest.update(self.dataset.bounds.tobytes())
        return digest.hexdigest()[:16]

    def split(self, *, val_ratio: float, seed: int, limit: int | None) -> tuple["SourceSamples", "SourceSamples"]:
        """(training, validation samples), in their order: whole rows, drawn by their number, ratio and seed alone.

        At least one on each side when `val_ratio` is positive and there are two; of the second the first `limit`.
        """
        num_rows, num_val = len(self.indices), 0
        if val_ratio > 0 and num_rows >= 2:
            num_val = min(max(1, round(num_rows * val_ratio)), num_rows - 1)
        rng = np.random.Generator(np.random.Philox(key=[seed % 2**64, SPLIT_STREAM]))
        order = self.indices[rng.permutation(num_rows)]
        train, val = np.sort(order[num_val:]), np.sort(order[:num_val])[:limit]
        return replace(self, indices=train), replace(self, indices=val, repeat=1.0)


class Samples:
    """The samples of all sources under ids of their own, source by source; so are their rows."""

    def __init__(self, sources: Sequence[SourceSamples]) -> None:
        self.sources = tuple(sources)
        self.shares = tuple(source.share for source in sources)
        self._bounds = np.cumsum([0, *(len(source.samples) for source in sources)])
        self._row_bounds: np.ndarray | None = None
        if any(source.dataset.bounds is not None for source in sources):
            self._row_bounds = np.cumsum(np.concatenate([[0], *(source.row_sizes for source in sources)]))
        self.lengths = np.concatenate([source.dataset.lengths[source.samples] for source in sources])
        self.num_loss_tokens = np.concatenate([source.dataset.num_loss_tokens[source.samples] for source in sources])

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """Ids of the samples of rows (int64 ids), in their order."""
        return _samples_of(rows, self._row_bounds)

    def beside(self, sample_id: int) -> np.ndarray:
        """Ids of all samples of the row that a sample belongs to."""
        if self._row_bounds is None:
            return np.array([sample_id])
        row = int(np.searchsorted(self._row_bounds, sample_id, side="right")) - 1
        return np.arange(self._row_bounds[row], self._row_bounds[row + 1])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal samples that come equally often in equal order, whatever their sources are called."""
        if len(self.sources) == 1 and self.sources[0].repeat == 1:
            return self.sources[0].fingerprint
        parts = [[source.fingerprint, source.repeat] for source in self.sources]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids that close the assistant turns of any source: what generation must stop at."""
        return tuple(sorted({token for source in self.sources for token in source.dataset.summary.end_token_ids}))

    def total(self, count: str) -> int:
        """A count of `Summary` over all sources."""
        return sum(getattr(source.dataset.summary, count) for source in self.sources)

    def source_of(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Number of the source of each sample, int64."""
        return np.searchsorted(self._bounds, ids, side="right") - 1

    def sample(self, sample_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (int32) and loss mask (bool)."""
        dataset, index = self._locate(sample_id)
        return dataset.sample(index)

    def location(self, sample_id: int) -> str:
        """`file:line` of a sample."""
        dataset, index = self._locate(sample_id)
        return dataset.location(index)

    def _locate(self, sample_id: int) -> tuple[TokenDataset, int]:
        number = int(self.source_of([sample_id])[0])
        source = self.sources[number]
        return source.dataset, int(source.samples[sample_id - self._bounds[number]])
