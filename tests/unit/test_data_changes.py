"""Files of rows that change while they are prepared, and prepared tokens that are damaged before a
run or change during it.
"""

import itertools
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from prepared import good_rows, run, run_rows
from small_files import flip, write_lines

from trainer.data import readers, token_cache
from trainer.data.batch_plan import Limits, RankPlan, Schedule
from trainer.data.loader import TrainLoader, ValidationBatches
from trainer.data.prepare import ROWS, TOKENS
from trainer.data.samples import Samples
from trainer.errors import DataError, ResumableError

NUM_ROWS = 30
PLAN = RankPlan(0, 1, Limits(None, None), 0.01)


def replace(path):
    """Rename another file to this name."""
    other = path.with_suffix(".new")
    shutil.copyfile(path, other)
    flip(other)
    other.replace(path)


def tear(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    """Reading the mapping of a truncated file would kill the process."""
    os.truncate(path, 0)


# Files of rows


def acts_at(actions):
    """Return a `progress` that performs an action at its calls with these numbers."""
    calls = itertools.count(1)
    return lambda: actions.get(next(calls), lambda: None)()


@pytest.mark.parametrize("change", [flip, replace, tear])
@pytest.mark.parametrize("moment", ["hash", "middle", "last row"])
def test_tokens_are_never_kept_under_the_hash_of_other_rows(tmp_path, monkeypatch, change, moment):
    monkeypatch.setattr(readers, "BLOCK_ROWS", 5)
    path = write_lines(tmp_path / "rows.jsonl", good_rows(NUM_ROWS))
    calls = []
    run(path, cache=tmp_path / "clean", progress=lambda: calls.append(None))
    num_calls = len(calls) - 1  # the last one is of the hash that finds the change
    call = {"hash": 1, "middle": num_calls // 2, "last row": num_calls}[moment]
    with pytest.raises(DataError, match=rf"'{path}' changed while its rows were .*\n.*Fix: "):
        run(path, cache=tmp_path / "cache", progress=acts_at({call: lambda: change(path)}))
    assert not [entry for entry in (tmp_path / "cache" / "tokens").iterdir() if entry.is_dir()]


def test_rows_that_were_other_ones_for_a_moment_are_refused(tmp_path):
    """The file has its first content and time again when it is hashed for the second time."""
    path = write_lines(tmp_path / "rows.jsonl", good_rows(NUM_ROWS))
    first = path.with_suffix(".first")
    shutil.copy2(path, first)
    # calls 1 and 2 are of the first hash and of the only block
    changes = acts_at({1: lambda: replace(path), 2: lambda: first.replace(path)})
    with pytest.raises(DataError, match="changed while its rows were prepared"):
        run(path, cache=tmp_path / "cache", progress=changes)


def test_a_change_that_coarse_times_do_not_show_is_found_by_its_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result([0] * 10))
    path = write_lines(tmp_path / "rows.jsonl", good_rows(NUM_ROWS))
    with pytest.raises(DataError, match="changed while its rows were prepared"):
        run(path, cache=tmp_path / "cache", progress=acts_at({2: lambda: flip(path)}))


# Prepared tokens before a run


@pytest.fixture(scope="module")
def prepared(root):
    """A file of rows, and the cache with its tokens."""
    path = write_lines(root / "rows.jsonl", good_rows(300))
    run(path, cache=root / "cache")
    return path, root / "cache"


DAMAGE = [
    *((name, flip) for name in (TOKENS, ROWS, "summary.json", "SHA256SUMS")),
    (TOKENS, tear),
    (ROWS, Path.unlink),
    ("SHA256SUMS", empty),
    ("SHA256SUMS", Path.unlink),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGE)
def test_damage_is_found_told_and_mended(tmp_path, prepared, caplog, name, damage):
    path, first = prepared
    cache = tmp_path / "cache"
    shutil.copytree(first, cache)
    expected = run(path, cache=first)
    directory = cache / "tokens" / expected.directory.name
    damage(directory / name)
    mended = run(path, cache=cache)
    [message] = caplog.messages
    assert f"{directory} are damaged: preparing them again" in message
    assert np.array_equal(mended.tokens, expected.tokens)
    assert np.array_equal(mended.rows, expected.rows)
    assert mended.summary == expected.summary
    assert [entry for entry in (cache / "tokens").iterdir() if entry.is_dir()] == [directory]


def test_whole_tokens_are_read_where_nothing_can_be_written(prepared, monkeypatch):
    monkeypatch.setattr(Path, "mkdir", None)
    monkeypatch.setattr(Path, "write_text", None)
    path, cache = prepared
    assert len(run(path, cache=cache)) == 300


def test_the_name_of_a_cache_covers_the_code_that_makes_it(tmp_path, monkeypatch):
    sources = tmp_path / "data"
    shutil.copytree(Path(token_cache.__file__).parent, sources)
    monkeypatch.setattr(token_cache, "__file__", str(sources / "token_cache.py"))
    digest = token_cache._code_digest.__wrapped__
    before = digest()
    with (sources / "formats.py").open("a") as file:
        file.write("# another rule\n")
    assert digest() != before


# Prepared tokens during a run


def steps_of(dataset, num_workers=0):
    samples = Samples([dataset.whole("rows")])
    schedule = Schedule(samples.shares, 5, seed=1)
    return TrainLoader(
        samples, plan=PLAN, schedule=schedule, total_steps=4, num_workers=num_workers
    )


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("name", "change"), [(TOKENS, flip), (ROWS, empty)])
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

    def changing(self, sample_id):
        flip(dataset.directory / TOKENS)
        return sample(self, sample_id)

    monkeypatch.setattr(Samples, "sample", changing)
    validation = ValidationBatches(Samples([dataset.whole("rows")]), PLAN, batch_size=5)
    with pytest.raises(ResumableError, match="prepared tokens changed"):
        next(iter(validation if is_validation else steps_of(dataset)))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("change", [os.utime, Path.unlink])
def test_a_run_keeps_its_tokens_when_their_files_are_touched_or_deleted(
    tmp_path, change, num_workers
):
    dataset = run_rows(tmp_path, *good_rows(NUM_ROWS))
    expected = [batch.sample_ids for batch in steps_of(dataset)]
    batches = iter(steps_of(dataset, num_workers))
    found = [next(batches).sample_ids]
    for name in (TOKENS, ROWS):
        change(dataset.directory / name)
    assert found + [batch.sample_ids for batch in batches] == expected
