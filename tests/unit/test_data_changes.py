"""Files of rows that change while they are prepared, and prepared tokens that change while they
are mapped.
"""

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from prepared import good_rows, run, run_rows, write_rows

from trainer.data import readers
from trainer.data.batch_plan import Limits, RankPlan, Schedule
from trainer.data.loader import TrainLoader, ValidationBatches
from trainer.data.prepare import ROWS, TOKENS
from trainer.data.samples import Samples, TokenDataset
from trainer.errors import DataError, ResumableError

NUM_ROWS = 30
PLAN = RankPlan(0, 1, Limits(None, None), 0.01)


def overwrite(path: Path) -> None:
    """Put other rows of the same length into the same file."""
    rows = path.read_bytes().replace(b"answer", b"ANSWER")
    with path.open("r+b") as file:
        file.write(rows)


def replace(path: Path) -> None:
    """Rename another file to this name."""
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes().replace(b"answer", b"ANSWER"))
    other.replace(path)


def tear(path: Path) -> None:
    """Cut the file in the middle of a row."""
    os.truncate(path, path.stat().st_size - 9)


def replace_for_a_moment(path: Path) -> None:
    """Rename another file to this name, to be put back by `put_back`."""
    path.rename(path.with_suffix(".first"))
    path.write_bytes(path.with_suffix(".first").read_bytes().replace(b"answer", b"ANSWER"))


def put_back(path: Path) -> None:
    path.with_suffix(".first").replace(path)


def acts_at(actions: dict[int, Callable[[], None]]) -> Callable[[], None]:
    """Return a `progress` that calls an action at its calls of these numbers."""
    calls = itertools.count(1)
    return lambda: actions.get(next(calls), lambda: None)()


def tokens_of(dataset: TokenDataset) -> list[int]:
    tokens: list[int] = dataset.tokens.tolist()
    return tokens


@pytest.mark.parametrize("change", [overwrite, replace, tear])
@pytest.mark.parametrize("moment", ["hash", "first row", "middle", "last row"])
def test_tokens_are_never_kept_under_the_hash_of_other_rows(tmp_path, monkeypatch, change, moment):
    monkeypatch.setattr(readers, "BLOCK_ROWS", 5)
    path = write_rows(tmp_path / "rows.jsonl", *good_rows(NUM_ROWS))
    first_content = path.read_bytes()
    calls: list[None] = []
    expected = run(path, cache=tmp_path / "clean", progress=lambda: calls.append(None))
    num_calls = len(calls) - 1  # the last one is of the hash that finds the change
    call = {"hash": 1, "first row": 2, "middle": num_calls // 2, "last row": num_calls}[moment]
    with pytest.raises(DataError, match=rf"'{path}' changed while its rows were prepared") as error:
        run(path, cache=tmp_path / "cache", progress=acts_at({call: lambda: change(path)}))
    assert "Fix: " in str(error.value)
    assert not [entry for entry in (tmp_path / "cache" / "tokens").iterdir() if entry.is_dir()]
    path.write_bytes(first_content)
    assert tokens_of(run(path, cache=tmp_path / "cache")) == tokens_of(expected)


def test_rows_that_were_other_ones_for_a_moment_are_refused(tmp_path):
    """The file has its first content again when it is hashed once more."""
    path = write_rows(tmp_path / "rows.jsonl", *good_rows(NUM_ROWS))
    changes = acts_at({1: lambda: replace_for_a_moment(path), NUM_ROWS: lambda: put_back(path)})
    with pytest.raises(DataError, match="changed while its rows were prepared"):
        run(path, cache=tmp_path / "cache", progress=changes)


def test_a_change_that_coarse_times_do_not_show_is_found_by_its_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result([0] * 10))
    path = write_rows(tmp_path / "rows.jsonl", *good_rows(NUM_ROWS))
    with pytest.raises(DataError, match="changed while its rows were prepared"):
        run(path, cache=tmp_path / "cache", progress=acts_at({2: lambda: overwrite(path)}))


def rewrite(path: Path) -> None:
    """Other tokens in the same file."""
    data = np.fromfile(path, dtype=np.uint8)
    data[len(data) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(data.tobytes())


def truncate(path: Path) -> None:
    """To read a mapping of what is gone would kill the process."""
    os.truncate(path, 0)


def steps_of(dataset: TokenDataset, num_workers: int = 0) -> TrainLoader:
    samples = Samples([dataset.whole("rows")])
    schedule = Schedule(samples.shares, 5, seed=1)
    return TrainLoader(
        samples, plan=PLAN, schedule=schedule, total_steps=4, num_workers=num_workers
    )


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("name", [TOKENS, ROWS])
@pytest.mark.parametrize("change", [rewrite, truncate])
def test_no_batch_comes_from_prepared_tokens_that_have_changed(tmp_path, change, name, num_workers):
    dataset = run_rows(tmp_path, *good_rows(NUM_ROWS))
    batches = iter(steps_of(dataset, num_workers))
    assert next(batches).step == 1
    change(dataset.directory / name)
    with pytest.raises(ResumableError) as error:
        next(batches)
    place = dataset.directory / name
    why = f"prepared tokens changed while the run trained on them: {place}.\nFix: "
    assert str(error.value).startswith(why)


@pytest.mark.parametrize("is_validation", [False, True])
def test_a_batch_during_whose_reading_the_tokens_changed_is_not_handed_out(
    tmp_path, monkeypatch, is_validation
):
    dataset = run_rows(tmp_path, *good_rows(NUM_ROWS))
    sample = Samples.sample

    def changing(self: Samples, sample_id: int) -> tuple[np.ndarray, np.ndarray]:
        rewrite(dataset.directory / TOKENS)
        return sample(self, sample_id)

    monkeypatch.setattr(Samples, "sample", changing)
    validation = ValidationBatches(Samples([dataset.whole("rows")]), PLAN, batch_size=5)
    with pytest.raises(ResumableError, match="prepared tokens changed"):
        next(iter(validation if is_validation else steps_of(dataset)))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "change", [os.utime, Path.unlink, lambda path: path.replace(path.with_suffix(".moved"))]
)
def test_a_run_keeps_its_tokens_when_their_files_are_touched_moved_or_deleted(
    tmp_path, change, num_workers
):
    dataset = run_rows(tmp_path, *good_rows(NUM_ROWS))
    expected = [batch.sample_ids for batch in steps_of(dataset)]
    batches = iter(steps_of(dataset, num_workers))
    found = [next(batches).sample_ids]
    for name in (TOKENS, ROWS):
        change(dataset.directory / name)
    assert found + [batch.sample_ids for batch in batches] == expected
