"""Data that grew since a checkpoint: the epoch under way keeps its rows, those that came join with the next."""

from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_origin

import numpy as np
import pytest
from prepared import good_rows, run, write_rows

from trainer.data.announce import source_facts
from trainer.data.batch_plan import Limits, Schedule
from trainer.data.growth import UNKNOWN, Division, TrainingData
from trainer.data.loader import RankPlan, TrainLoader
from trainer.data.order import FEISTEL, LISTED
from trainer.data.row_encoder import ROW, SUPERVISED
from trainer.data.sample_writer import SamplesDigest, Summary
from trainer.data.samples import TokenDataset
from trainer.progress import Position

PLAN = RankPlan(0, 1, Limits(None, None), quadratic_cost=0.0)
NO_SUMMARY = Summary(**{field.name: (get_origin(field.type) or field.type)() for field in fields(Summary)})


def dataset(*rows: int, sizes: tuple[int, ...] = ()) -> TokenDataset:
    """One sample of two tokens for each number, all in rows of one sample or in rows of `sizes`."""
    ids = np.repeat(np.array(rows, dtype=np.int32), 2)
    tokens = np.where(np.arange(len(ids)) % 2, ids | SUPERVISED, ids)
    table = np.zeros(len(rows), dtype=ROW)
    table["num_tokens"], table["num_loss_tokens"], table["end"] = 2, 1, np.arange(1, len(rows) + 1) * 2
    (digest := SamplesDigest()).update(tokens, table["end"])
    summary = replace(NO_SUMMARY, num_tokens=len(ids), num_loss_tokens=len(rows), fingerprint=digest.hexdigest())
    bounds = np.cumsum([0, *sizes]) if sizes else None
    return TokenDataset(Path(), (), summary, tokens, table, bounds)


def division(*sources: tuple[TokenDataset, float], val_ratio: float = 0.2, **more: Any) -> Division:
    whole = tuple(data.whole(f"s{number}", repeat) for number, (data, repeat) in enumerate(sources))
    return Division(sources=whole, val_sources=None, val_ratio=val_ratio, val_limit=None, seed=3, **more)


def loader(data: TrainingData, start: Position, batch_size: int) -> TrainLoader:
    schedule = Schedule(data.train.shares, batch_size, 3, start, order=data.order, earlier=data.earlier)
    return TrainLoader(data.train, plan=PLAN, schedule=schedule, total_steps=10**6, num_workers=0)


class Run:
    """Trains, is stopped and goes on; what came in which epoch are the numbers of `dataset`."""

    def __init__(self, first: Division) -> None:
        self.data = first.begin()
        self.loader = loader(self.data, Position(), 4)
        self.trained: dict[int, Counter[int]] = {}

    def steps(self, count: int) -> None:
        for step in range(self.loader.step + 1, self.loader.step + count + 1):
            epoch = self.loader.schedule.position(step - 1).epoch
            for index in self.data.train.of_rows(self.loader.schedule.rows(step)):
                self.trained.setdefault(epoch, Counter())[int(self.data.train.sample(int(index))[0][0])] += 1
            self.loader.step = step

    def resume(self, now: Division, batch_size: int = 4) -> TrainingData:
        position = self.loader.position
        self.data = now.resume(self.loader.state_dict(), position)
        self.loader = loader(self.data, position, batch_size)
        return self.data

    def finish_epoch(self) -> None:
        epoch = self.loader.position.epoch
        while self.loader.position.epoch == epoch:
            self.steps(1)

    @property
    def held_out(self) -> set[int]:
        assert self.data.validation is not None
        return {int(self.data.validation.sample(i)[0][0]) for i in range(len(self.data.validation))}


A, B = tuple(range(20)), tuple(range(100, 110))
MORE_A, C = tuple(range(20, 33)), tuple(range(200, 206))


def test_the_epoch_under_way_keeps_its_rows_and_the_next_has_all() -> None:
    """Appended rows, a new source and another batch size; grown once more in the same epoch, and resumed after that."""
    old = division((dataset(*A), 1.5), (dataset(*B), 1.0))
    whole, grown = Run(old), Run(old)
    whole.finish_epoch()
    old_held_out = grown.held_out
    grown.steps(3)
    grown.resume(division((dataset(*A, *MORE_A[:5]), 1.5), (dataset(*B), 1.0)), batch_size=5)
    grown.steps(1)
    last = division((dataset(*A, *MORE_A), 1.5), (dataset(*B), 1.0), (dataset(*C), 2.0))
    data = grown.resume(last)
    assert "source 's0' has 26 training rows for 20" in data.growth and "'s2' with 5 rows came" in data.growth
    assert "from epoch 1 on" in data.growth
    assert not grown.resume(last).growth and len(grown.data.earlier) == 1, "a resume after that is like any other"
    grown.finish_epoch()
    assert grown.trained[0] == whole.trained[0], "each old row as often as without the new ones, and no new one"
    assert grown.held_out & {*A, *B} == old_held_out and grown.held_out & {*MORE_A} and grown.held_out & {*C}

    grown.steps(4)
    grown.resume(last, batch_size=7)
    grown.finish_epoch()
    assert set(grown.trained[1]) == {*A, *MORE_A, *B, *C} - grown.held_out
    assert all(grown.trained[1][number] == 2 for number in {*C} - grown.held_out)
    assert grown.trained[1].total() == sum(share.num_samples for share in grown.data.train.shares)


def test_rows_that_come_between_two_epochs_join_the_first_that_begins() -> None:
    run = Run(division((dataset(*A), 1.0)))
    run.finish_epoch()
    run.resume(division((dataset(*A, *MORE_A), 1.0)))
    run.finish_epoch()
    assert set(run.trained[1]) == {*A, *MORE_A} - run.held_out


def test_a_longer_run_has_the_epochs_of_old_and_new_rows() -> None:
    run = Run(division((dataset(*A), 1.0), val_ratio=0.0))
    run.steps(2)
    run.resume(division((dataset(*A, *MORE_A), 1.0), val_ratio=0.0))
    schedule = run.loader.schedule
    assert [schedule.steps_until(epochs) for epochs in (1, 2, 4)] == [5, 5 + 9, 5 + 27]
    assert [schedule.position(step) for step in (4, 5, 14)] == [
        Position(4, 0, 16),
        Position(5, 1, 0),
        Position(14, 2, 0),
    ]


def test_totals_by_source_count_what_the_whole_run_trains() -> None:
    """By the end of three epochs, the second source of which came with the second."""
    run = Run(division((dataset(*A), 1.5), val_ratio=0.0))
    run.steps(2)
    run.resume(division((dataset(*A), 1.5), (dataset(*B, *C), 2.0), val_ratio=0.0))
    schedule, train = run.loader.schedule, run.data.train
    facts = source_facts(train, schedule, total_steps=(last := schedule.steps_until(3)))
    run.steps(last - 2)
    trained = sum(run.trained.values(), Counter[int]())
    for name, rows in (("s0", A), ("s1", (*B, *C))):
        assert facts[f"data/times_by/{name}"] == pytest.approx(sum(trained[n] for n in rows) / len(rows))
        assert (facts[f"data/rows_by/{name}"], facts[f"data/tokens_by/{name}"]) == (len(rows), 2 * len(rows))
        assert facts[f"data/valid_token_frac_by/{name}"] == 0.5
    assert (facts["data/repeat_by/s0"], facts["data/repeat_by/s1"]) == (1.5, 2.0)
    assert not source_facts(Run(division((dataset(*A), 1.0))).data.train, schedule, total_steps=last)


def test_rows_of_several_samples_grow_alike() -> None:
    sizes = (3, 1, 2, 2, 1, 1)
    run = Run(division((dataset(*range(10), sizes=sizes), 1.0), val_ratio=0.3))
    run.steps(1)
    held_out = run.held_out
    data = run.resume(division((dataset(*range(15), sizes=(*sizes, 2, 3)), 1.0), val_ratio=0.3))
    assert data.growth
    run.finish_epoch()
    assert set(run.trained[0]) == {*range(10)} - held_out
    single = Run(division((dataset(*range(6)), 1.0)))
    assert single.resume(division((dataset(*range(9), sizes=(1,) * 6 + (3,)), 1.0))).growth, "the new row is the first"


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (division((dataset(*A[:-1]), 1.0), (dataset(*B), 1.0)), "source 's0' had 20 rows, now 19"),
        (division((dataset(*A), 1.0)), "there were 2 sources, now there are 1"),
        (division((dataset(7, *A), 1.0), (dataset(*B), 1.0)), "the first 20 rows of source 's0' are not those"),
        (division((dataset(*A), 1.0), (dataset(*C, *B), 1.0)), "the first 10 rows of source 's1' are not those"),
        (division((dataset(*A, *C), 1.0), (dataset(*B), 1.0), val_ratio=0.5), "or others are held out"),
    ],
)
def test_what_is_no_growth_is_told_why(now: Division, reason: str) -> None:
    run = Run(division((dataset(*A), 1.0), (dataset(*B), 1.0)))
    run.steps(1)
    data = run.resume(now)
    assert reason in data.not_grown and not data.growth and not data.earlier


def test_a_checkpoint_from_before_goes_on_in_the_list_it_began_with() -> None:
    data = division((dataset(*A), 1.0)).resume({"epoch": 0, "seed": 3}, Position(2, 0, 8))
    assert (data.order, data.not_grown, data.growth) == (LISTED, UNKNOWN, "")
    assert data.validation is not None and data.validation.sources[0].indices.tolist() == [1, 8, 14, 16]
    again = division((dataset(*A, *C), 1.0)).resume(loader(data, Position(), 4).state_dict(), Position(2, 0, 8))
    assert again.order == LISTED != FEISTEL and again.growth, "saved again, it can grow"


def test_the_proof_is_over_what_preparation_wrote(tmp_path: Path) -> None:
    first = run(write_rows(tmp_path / "a.jsonl", *good_rows(300)), cache=tmp_path / "cache")
    longer = run(write_rows(tmp_path / "a.jsonl", *good_rows(700)), cache=tmp_path / "cache")
    assert longer.of_first(300).summary.fingerprint == first.summary.fingerprint != longer.summary.fingerprint
    assert longer.of_first(299).summary.fingerprint != first.summary.fingerprint
