"""Prepared samples: what every process maps of the token cache, and the samples of a run, of
one source or several.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from trainer.data import sample_writer
from trainer.data.mapped import MappedFile, read_checksums
from trainer.data.order import Share, held_out_rows
from trainer.data.row_encoder import ROW, SUPERVISED, TOKEN
from trainer.data.rows import location
from trainer.data.sample_writer import Summary
from trainer.errors import DataError


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
    bounds: np.ndarray | None
    """Where the samples of each kept row begin, int64 with the end of the last; None: each row
    is one sample.
    """
    mapped: tuple[MappedFile, ...] = ()
    """The files behind `tokens` and `rows`."""

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (int32) and loss mask (bool) of one sample."""
        end = int(self.rows["end"][index])
        tokens = self.tokens[end - int(self.rows["num_tokens"][index]) : end]
        return tokens & ~SUPERVISED, tokens < 0

    def require_unchanged(self) -> None:
        """Raise `ResumableError` if a mapped file was written to since it was opened."""
        for file in self.mapped:
            file.require_unchanged()

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
            listed = self.directory / sample_writer.BAD_ROWS
            notes.append(f"left out {summary.num_bad_rows} bad rows ({kinds}), listed in {listed}")
        if summary.num_dropped or summary.num_truncated:
            notes.append(
                f"over-long rows: {summary.num_dropped} dropped, {summary.num_truncated} cut by "
                f"{summary.num_cut_tokens} tokens, listed in "
                f"{self.directory / sample_writer.OVER_LONG_ROWS}"
            )
        if summary.unread_keys:
            keys = ", ".join(f"'{key}' {count}" for key, count in summary.unread_keys.items())
            notes.append(f"nothing reads these keys of messages: {keys}")
        return notes

    def whole(self, name: str, repeat: float = 1.0) -> "SourceSamples":
        """All samples, as a source."""
        return SourceSamples(name, self, np.arange(self.num_rows), repeat)

    @property
    def num_rows(self) -> int:
        """Kept rows: each has one sample or more."""
        return len(self) if self.bounds is None else len(self.bounds) - 1


def open_dataset(directory: Path, files: tuple[Path, ...]) -> TokenDataset:
    """Map a prepared directory. `files` are where its rows came from, for messages."""
    checksums = read_checksums(directory)
    mapped = tuple(
        MappedFile(directory / name, sha256=checksums[name])
        for name in (sample_writer.TOKENS, sample_writer.ROWS)
    )
    tokens, rows = mapped[0].array(TOKEN), mapped[1].array(ROW)
    summary = Summary(**json.loads((directory / "summary.json").read_text(encoding="utf-8")))
    bounds = None
    if len(rows) != summary.num_kept_rows:
        places = rows[["file", "line"]]
        bounds = np.flatnonzero(np.concatenate([[True], places[1:] != places[:-1], [True]]))
    return TokenDataset(directory, files, summary, tokens, rows, bounds, mapped)


def _samples_of(rows: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The samples of `rows`, those of a row side by side."""
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
            what = f"source '{self.name}': repeat {share.repeat:g} of {share.num_rows} rows is less than half a sample"
            raise DataError(f"{what}; raise it or leave the source out")
        return share

    @cached_property
    def samples(self) -> np.ndarray:
        """Their numbers in the dataset, int64."""
        bounds = self.dataset.bounds
        return self.indices if bounds is None else _samples_of(self.indices, bounds)

    @cached_property
    def num_tokens(self) -> int:
        return int(self.dataset.rows["num_tokens"][self.samples].sum())

    @cached_property
    def num_loss_tokens(self) -> int:
        return int(self.dataset.rows["num_loss_tokens"][self.samples].sum())

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

    def split(
        self, val_ratio: float, *, seed: int, limit: int | None
    ) -> tuple["SourceSamples", "SourceSamples"]:
        """(training, validation samples) of a whole dataset, in their order; of the second the
        first `limit` rows.
        """
        held_out = held_out_rows(self.dataset.num_rows, val_ratio, seed=seed)
        is_trained = np.ones(self.dataset.num_rows, dtype=bool)
        is_trained[held_out] = False
        train = replace(self, indices=np.flatnonzero(is_trained))
        return train, replace(self, indices=held_out[:limit], repeat=1.0)


class Samples:
    """The samples of all sources under ids of their own, source by source; so are their rows."""

    def __init__(self, sources: Sequence[SourceSamples]) -> None:
        self.sources = tuple(sources)
        self.shares = tuple(source.share for source in sources)
        self._bounds = np.cumsum([0, *(len(source.samples) for source in sources)])
        self._row_bounds: np.ndarray | None = None
        if any(source.dataset.bounds is not None for source in sources):
            self._row_bounds = np.cumsum(
                np.concatenate([[0], *(source.row_sizes for source in sources)])
            )

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def of_rows(self, rows: np.ndarray) -> np.ndarray:
        """Ids of the samples of rows (int64 ids), in their order."""
        return rows if self._row_bounds is None else _samples_of(rows, self._row_bounds)

    def counts(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(Tokens, labels) of samples, int64."""
        lengths, num_loss_tokens = np.empty_like(ids), np.empty_like(ids)
        numbers = self.source_of(ids)
        for number, source in enumerate(self.sources):
            own = np.flatnonzero(numbers == number)
            indices = source.samples[ids[own] - self._bounds[number]]
            lengths[own] = source.dataset.rows["num_tokens"][indices]
            num_loss_tokens[own] = source.dataset.rows["num_loss_tokens"][indices]
        return lengths, num_loss_tokens

    @property
    def lengths(self) -> np.ndarray:
        """Of all samples, read anew each time."""
        return self.counts(np.arange(len(self)))[0]

    @property
    def num_loss_tokens(self) -> np.ndarray:
        return self.counts(np.arange(len(self)))[1]

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
        """Equal for equal samples that come equally often in equal order, whatever their
        sources are called.
        """
        if len(self.sources) == 1 and self.sources[0].repeat == 1:
            return self.sources[0].fingerprint
        parts = [[source.fingerprint, source.repeat] for source in self.sources]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids that close the assistant turns of any source: what generation must stop at."""
        return tuple(
            sorted(
                {token for source in self.sources for token in source.dataset.summary.end_token_ids}
            )
        )

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

    def require_unchanged(self) -> None:
        """Raise `ResumableError` if prepared tokens were written to since they were opened;
        takes microseconds.
        """
        for source in self.sources:
            source.dataset.require_unchanged()

    def location(self, sample_id: int) -> str:
        """`file:line` of a sample."""
        dataset, index = self._locate(sample_id)
        return dataset.location(index)

    def _locate(self, sample_id: int) -> tuple[TokenDataset, int]:
        number = int(self.source_of([sample_id])[0])
        source = self.sources[number]
        return source.dataset, int(source.samples[sample_id - self._bounds[number]])
