"""How the data of a run goes on from a checkpoint: in its order, with its validation rows, with rows that came since.

A checkpoint says of each source how many rows it had and what they were (`Samples.record`). Data that begins with
exactly these has grown: they keep their order in the epoch under way and their side of validation, and the new rows
join with the epoch that follows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trainer.data.batch_plan import Earlier
from trainer.data.order import FEISTEL, LISTED, Draw, Share
from trainer.data.samples import Samples, SourceSamples, TokenDataset
from trainer.progress import Position

UNKNOWN = "the checkpoint does not say source by source what it was trained on"


@dataclass(frozen=True)
class TrainingData:
    """What is trained and validated on from a position on, and in which order."""

    train: Samples
    validation: Samples | None
    order: str = FEISTEL
    earlier: tuple[Earlier, ...] = ()
    growth: str = ""
    """What came to the rows of the checkpoint, in words; empty where nothing did."""
    not_grown: str = ""
    """Why these are no longer the rows of the checkpoint; empty where they are, or nobody knows."""


@dataclass(frozen=True)
class Division:
    """Prepared sources, and how they come to be trained or validated on."""

    sources: tuple[SourceSamples, ...]
    """Whole."""
    val_sources: tuple[SourceSamples, ...] | None
    """None: rows are held out of `sources`."""
    val_ratio: float
    val_limit: int | None
    seed: int

    def begin(self, order: str = FEISTEL) -> TrainingData:
        """Of a run that starts."""
        return self._divided([(source.dataset.num_rows,) for source in self.sources], order)

    def resume(self, saved: Mapping[str, Any], position: Position) -> TrainingData:
        """Of a run that goes on at `position` from a checkpoint whose data said `saved`."""
        order = str(saved.get("order", LISTED))
        records = saved.get("sources")
        problem = UNKNOWN if records is None else self._not_grown(records, order)
        if records is None or problem:
            return TrainingData(**vars(self.begin(order)) | {"not_grown": problem})
        sizes: list[tuple[int, ...]] = [tuple(record["sizes"]) for record in records]
        sizes += [()] * (len(self.sources) - len(records))
        for number, source in enumerate(self.sources):
            if source.dataset.num_rows not in sizes[number][-1:]:
                sizes[number] = (*sizes[number], source.dataset.num_rows)
        data = self._divided(sizes, order)
        before = tuple(Share(record["num_rows"], record["repeat"]) for record in records)
        earlier = tuple(Earlier(until, tuple(Share(*share) for share in shares)) for until, shares in saved["earlier"])
        if before == data.train.shares:
            return TrainingData(**vars(data) | {"earlier": earlier})
        joins = position.epoch + (position.samples_consumed > 0)
        if joins > (earlier[-1].until if earlier else 0):
            earlier = (*earlier, Earlier(joins, before))
        growth = f"{_difference(before, data.train)}, from epoch {joins} on (counted from 0)"
        return TrainingData(**vars(data) | {"earlier": earlier, "growth": growth})

    def _not_grown(self, records: list[dict[str, Any]], order: str) -> str:
        """Why the sources do not begin with the rows of these records; empty where they do."""
        if len(self.sources) < len(records):
            return f"there were {len(records)} sources, now there are {len(self.sources)}"
        for source, record in zip(self.sources, records, strict=False):
            num_rows = record["sizes"][-1]
            if source.dataset.num_rows < num_rows:
                return f"source '{source.name}' had {num_rows} rows, now {source.dataset.num_rows}"
            then = _of_first(source.dataset, num_rows).whole(source.name)
            draw = Draw(self._ratio, self.seed, tuple(record["sizes"]), order)
            if then.split(draw, limit=0)[0].fingerprint != record["fingerprint"]:
                return (
                    f"the first {num_rows} rows of source '{source.name}' are not those it had, or others are held out "
                    f"for validation (data.val_files, data.val_ratio); new rows and sources stand behind the old ones"
                )
        return ""

    @property
    def _ratio(self) -> float:
        return self.val_ratio if self.val_sources is None else 0.0

    def _divided(self, sizes: list[tuple[int, ...]], order: str) -> TrainingData:
        draws = [Draw(self._ratio, self.seed, each, order) for each in sizes]
        parts = [source.split(draw, limit=self.val_limit) for source, draw in zip(self.sources, draws, strict=True)]
        held_out = [part for _, part in parts] if self.val_sources is None else list(self.val_sources)
        validation = Samples(held_out)
        train = Samples([part for part, _ in parts])
        return TrainingData(train, validation if len(validation) else None, order)


@lru_cache(maxsize=64)
def _of_first(dataset: TokenDataset, num_rows: int) -> TokenDataset:
    """Reads the tokens of all these rows, once."""
    return dataset.of_first(num_rows)


def _difference(before: tuple[Share, ...], train: Samples) -> str:
    words = []
    for number, (name, share) in enumerate(zip(train.names, train.shares, strict=True)):
        if number >= len(before):
            words.append(f"source '{name}' with {share.num_rows} rows came")
        elif share != before[number]:
            old, repeat = before[number], ""
            if share.repeat != old.repeat:
                repeat = f", repeat {old.repeat:g} -> {share.repeat:g}"
            words.append(f"source '{name}' has {share.num_rows} training rows for {old.num_rows}{repeat}")
    return ", ".join(words)
