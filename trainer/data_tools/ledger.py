"""How often each row was trained, computed anew from what a run left: `data ledger` (floor 5).

Every attempt writes into `events.jsonl` what it trains on, in which order and from where; `metrics.jsonl` says which
steps it came to, `rollbacks.json` which are passed over. What counts is what the weights have seen: steps lost to a
kill or taken back by a rollback do not, nor do those whose update was left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.checkpoint import rollback
from trainer.config import ConfigError
from trainer.data.batch_plan import Earlier, Schedule
from trainer.data.loader import DATA_EVENT
from trainer.data.order import Draw, Share
from trainer.data.samples import Samples, SourceSamples, open_dataset
from trainer.progress import Position
from trainer.runtime.json_lines import JsonLines
from trainer.tracking import events_file, metrics_file

ROWS_AT_ONCE = 1 << 20


@dataclass
class StepRange:
    """Steps `first` to `last` of an attempt, one after the other."""

    record: Mapping[str, Any]
    schedule: Schedule
    first: int
    last: int


@dataclass
class TrainedSteps:
    """The steps that count."""

    ranges: list[StepRange] = field(default_factory=list)
    left_out: set[int] = field(default_factory=set)
    """Steps whose update was left out."""
    notes: list[str] = field(default_factory=list)
    num_attempts: int = 0
    num_rollbacks: int = 0

    def go_back_to(self, step: int) -> None:
        """Later steps no longer count."""
        self.ranges = [part for part in self.ranges if part.first <= step]
        if self.ranges:
            self.ranges[-1].last = min(self.ranges[-1].last, step)
        self.left_out = {number for number in self.left_out if number <= step}

    def position(self, step: int) -> Position | None:
        """Where the steps before lead to; None where they do not reach it."""
        found = [part for part in self.ranges if part.first - 1 <= step <= part.last]
        return found[-1].schedule.position(step) if found else None


def ledger(run_dir: Path, *, has_rows: bool) -> dict[str, Any]:
    """Of each source how many rows were trained how often; with `has_rows` also each row by its place.

    Raises `ConfigError` for a directory without the records of a run.
    """
    history = read_history(run_dir)
    skipped = rollback.read(run_dir).skipped_steps
    generations: list[tuple[Mapping[str, Any], list[np.ndarray]]] = []
    for part in history.ranges:
        if not generations or not _goes_on(generations[-1][0], part.record):
            generations.append((part.record, []))
        counts = _grown(generations[-1][1], part.record)
        for epoch, first, end in _places(part, skipped | history.left_out):
            for start in range(first, end, ROWS_AT_ONCE):
                sources, rows = part.schedule.places(epoch, start, min(end, start + ROWS_AT_ONCE))
                for number, count in enumerate(counts):
                    count += np.bincount(rows[sources == number], minlength=len(count))
        generations[-1] = (part.record, counts)
    trained = [s for s in history.ranges if s.last >= s.first]
    return {
        "run_dir": str(run_dir),
        "last_step": trained[-1].last if trained else 0,
        "attempts": history.num_attempts,
        "rollbacks": history.num_rollbacks,
        "passed_over_steps": sorted(skipped),
        "updates_left_out": sorted(history.left_out),
        "notes": history.notes,
        "sources": [
            _of_source(source, count, has_rows=has_rows)
            for record, counts in generations
            for source, count in zip(record["sources"], counts, strict=True)
        ],
    }


def read_history(run_dir: Path) -> TrainedSteps:
    """Which steps of which attempts count, from the files of a run."""
    metrics = run_dir / metrics_file.FILE_NAME
    events = events_file.read_events(run_dir / events_file.FILE_NAME)
    records = {event["attempt"]: event for event in events if event["kind"] == DATA_EVENT}
    if not records or not metrics.is_file():
        raise ConfigError(f"'{run_dir}' has no record of what was trained: give the directory of a run of this version")
    history, last_attempt, newest_count = TrainedSteps(), 0, 0
    counts = {0: 0}  # of updates left out so far, by step: every row has it, restarts and rollbacks keep it
    for _, line in JsonLines(metrics):
        kind, step, attempt = line.get("kind"), line.get("step"), line.get("attempt")
        if not isinstance(step, int) or not isinstance(attempt, int):
            continue
        if kind == metrics_file.START:
            _begin(history, records.get(attempt), step)
        elif kind == metrics_file.ROLLBACK:
            newest = history.ranges[-1]
            schedule = replace(newest.schedule, start=history.position(step) or newest.schedule.start)
            history.go_back_to(step)
            history.num_rollbacks += 1
            history.ranges.append(StepRange(newest.record, schedule, step + 1, step))
        elif kind == "train" and history.ranges:
            count = int(line.get("optim/skipped_steps", 0))
            resumed_from = history.ranges[-1].first - 1
            if count > (newest_count if attempt == last_attempt else counts.get(resumed_from, count)):
                history.left_out.add(step)
            counts[step] = newest_count = count
            history.ranges[-1].last, last_attempt = step, attempt
    return history


def _begin(history: TrainedSteps, record: Mapping[str, Any] | None, step: int) -> None:
    """A new attempt goes on from a finished step."""
    history.num_attempts += 1
    if history.ranges and step > history.ranges[-1].last:
        history.ranges[-1].last = step  # rows that a crash of the machine lost; its checkpoint has the steps
    expected = history.position(step)
    history.go_back_to(step)
    if record is None:
        if history.ranges:
            text = f"attempt {history.num_attempts} left no record of what it trained on"
            raise ConfigError(f"{text}: the rows of this run cannot be counted")
        return  # it ended, or was of an earlier version
    position = Position(step, record["epoch"], record["samples_consumed"])
    if step and expected is None:
        history.notes.append(f"goes on from step {step} of another run or version: what that trained is not counted")
    elif step and replace(expected, step=step) != position:  # type: ignore[type-var]
        history.notes.append(f"attempt {history.num_attempts} went on at another place than its steps before lead to")
    history.ranges.append(StepRange(record, _schedule(record, position), step + 1, step))


def _schedule(record: Mapping[str, Any], position: Position) -> Schedule:
    return Schedule(
        tuple(Share(source["num_rows"], source["repeat"]) for source in record["sources"]),
        record["train_batch_size"],
        record["seed"],
        position,
        order=record["order"],
        earlier=tuple(Earlier(until, tuple(Share(*share) for share in was)) for until, was in record["earlier"]),
    )


def _places(part: StepRange, without: frozenset[int] | set[int]) -> list[tuple[int, int, int]]:
    """(Epoch, first place, the one behind the last) of the steps that count, neighbours together."""
    found: list[tuple[int, int, int]] = []
    for step in range(part.first, part.last + 1):
        if step in without:
            continue
        at, size = part.schedule.position(step - 1), part.schedule.batch_size
        end = min(at.samples_consumed + size, part.schedule.num_samples_in(at.epoch))
        is_neighbour = bool(found) and (found[-1][0], found[-1][2]) == (at.epoch, at.samples_consumed)
        first = found.pop()[1] if is_neighbour else at.samples_consumed
        found.append((at.epoch, first, end))
    return found


def _goes_on(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the data of an attempt is that of an earlier one, grown or not."""
    if len(before["sources"]) > len(now["sources"]):
        return False
    return all(
        new["sizes"][: len(old["sizes"])] == old["sizes"]
        and (len(new["sizes"]) > len(old["sizes"]) or new["fingerprint"] == old["fingerprint"])
        for old, new in zip(before["sources"], now["sources"], strict=False)
    )


def _grown(counts: list[np.ndarray], record: Mapping[str, Any]) -> list[np.ndarray]:
    found = [np.zeros(source["num_rows"], dtype=np.int64) for source in record["sources"]]
    for new, old in zip(found, counts, strict=False):
        new[: len(old)] = old
    return found


def _of_source(source: Mapping[str, Any], counts: np.ndarray, *, has_rows: bool) -> dict[str, Any]:
    times = np.bincount(counts)
    found: dict[str, Any] = {
        "name": source["name"],
        "rows": len(counts),
        "held_out": source["sizes"][-1] - len(counts),
        "trained": int(counts.sum()),
        "times": {str(number): int(times[number]) for number in np.flatnonzero(times)},
    }
    if has_rows:
        found["by_row"] = _by_row(source, counts)
    return found


def _by_row(source: Mapping[str, Any], counts: np.ndarray) -> dict[str, int] | None:
    """`file:line` of each row; None where the prepared tokens cannot be read."""
    if (samples := _samples_of(source)) is None:
        return None
    dataset, rows = samples.dataset, np.asarray(samples.indices)
    firsts = rows if dataset.bounds is None else dataset.bounds[rows]
    return {dataset.location(int(index)): int(count) for index, count in zip(firsts, counts, strict=True)}


def _samples_of(source: Mapping[str, Any]) -> SourceSamples | None:
    """What an attempt trained of a source; None where the prepared tokens are gone, or written by another version."""
    try:
        dataset = open_dataset(Path(source["directory"]), tuple(map(Path, source["files"])))
    except (OSError, ValueError, TypeError):  # no file, a file cut short, and fields that a summary has or lacks
        return None
    draw = Draw(source["val_ratio"], source["seed"], tuple(source["sizes"]), source["order"])
    return dataset.whole(source["name"], source["repeat"]).split(draw, limit=0)[0]


def rows_at(run_dir: Path, places: Sequence[str], steps: range) -> dict[int, list[str]]:
    """Which of the rows at `places` (`file:line`) each of the steps that count trained, where any.

    Raises `ConfigError` for rows that are not trained at all, for a step with no other rows, and where prepared tokens
    are gone.
    """
    found: dict[int, list[str]] = {}
    for part in read_history(run_dir).ranges:
        own_steps = range(max(part.first, steps.start), min(part.last + 1, steps.stop))
        if not own_steps:
            continue
        sources = [_samples_of(source) for source in part.record["sources"]]
        if None in sources:
            raise ConfigError(
                "the prepared tokens of the run are gone ('data stats' with its words makes them anew), or another "
                "version prepared them: use that one"
            )
        samples = Samples([source for source in sources if source is not None]).without(places)
        ids = {place: samples.find(place) for place in places}
        for step in own_steps:
            batch = samples.of_rows(part.schedule.rows(step))
            if own := [place for place in places if np.isin(ids[place], batch).any()]:
                found[step] = own
                if not samples.counts(batch)[1].any():
                    raise ConfigError(f"nothing would be trained in step {step}: these are all of its rows")
    return found


def as_lines(tree: Mapping[str, Any]) -> list[str]:
    """For a terminal."""
    lines = [
        f"{tree['run_dir']}: {tree['last_step']} steps, {tree['attempts']} attempts, {tree['rollbacks']} rollbacks"
    ]
    for key, words in (("passed_over_steps", "passed over by rollbacks"), ("updates_left_out", "update left out")):
        if tree[key]:
            lines.append(f"{words}: steps {', '.join(map(str, tree[key]))}")
    for source in tree["sources"]:
        times = ", ".join(f"{count} rows {number} times" for number, count in source["times"].items())
        mean = source["trained"] / source["rows"] if source["rows"] else math.nan
        held_out = f", {source['held_out']} held out" if source["held_out"] else ""
        lines.append(f"{source['name']}: {source['rows']} rows{held_out}, {mean:.3g} times on average: {times}")
    return [*lines, *tree["notes"]]
