"""The token cache: prepared once per content, atomically, and with every row accounted for."""

from dataclasses import replace

import numpy as np
import pytest
from prepared import OPTIONS, good_rows, run, run_rows
from small_files import read_lines, write_lines
from tokenizer_fixtures import make_tokenizer

from trainer.config import RowKeys
from trainer.data import readers
from trainer.errors import DataError
from trainer.runtime.files import locked


def test_samples_are_those_of_the_rows_over_blocks_and_files(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK_ROWS", 5)
    first = write_lines(tmp_path / "1.jsonl", good_rows(6))
    second = write_lines(tmp_path / "2.jsonl", ["", {"q": "last", "a": "row 🙂"}])
    dataset = run([first, second], cache=tmp_path / "cache")
    tokenizer = make_tokenizer()
    rows = dataset.rows
    summary = dataset.summary
    answers = [*(row["a"] for row in good_rows(6)), "row 🙂"]
    for index, answer in enumerate(answers):
        input_ids, loss_mask = dataset.sample(index)
        assert tokenizer.decode(input_ids[loss_mask]) == f"{answer}<|im_end|>"
        assert rows["num_tokens"][index] == len(input_ids)
        assert rows["num_loss_tokens"][index] == loss_mask.sum()
    assert (dataset.location(0), dataset.location(6)) == (f"{first}:1", f"{second}:2")
    assert summary.num_tokens == rows["num_tokens"].sum() == len(dataset.tokens)
    assert summary.end_token_ids == {tokenizer.eos_token_id}


def test_second_call_does_not_tokenize(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "rows.jsonl", good_rows(3))
    first = run(path, cache=tmp_path / "cache")
    moved = path.rename(tmp_path / "moved.jsonl")
    monkeypatch.setattr("trainer.data.prepare.prepare_rows", None)
    second = run(moved, cache=tmp_path / "cache")
    assert (first.directory, first.summary) == (second.directory, second.summary)
    assert second.location(0) == f"{moved}:1"


def test_anything_that_matters_gives_another_directory(tmp_path):
    rows = good_rows(3)
    other = {"q": "question 2", "a": "answer 3"}
    datasets = [
        run_rows(tmp_path, *rows),
        run_rows(tmp_path, *rows, max_length=63),
        run_rows(tmp_path, *rows, template_kwargs={"enable_thinking": False}),
        run_rows(tmp_path, *rows[:2], other),
    ]
    assert len({dataset.directory for dataset in datasets}) == 4
    first, same, also_same, changed = (dataset.summary.fingerprint for dataset in datasets)
    assert first == same == also_same != changed, "it is of the tokens"


BAD_FILE = f"""{{"q": "question 0", "a": "answer 0"}}
{{
{{"q": "question 1", "a": "answer 1"}}
{{"q": "long", "a": "{"x" * 200}"}}
{{"q": "", "a": "b"}}
{{"q": "question 2", "a": "answer 2"}}"""


def test_bad_rows_skipped_are_counted_and_listed(tmp_path):
    dataset = run_rows(tmp_path, BAD_FILE, on_bad_row="skip")
    assert dataset.rows["line"].tolist() == [1, 3, 6]
    assert dataset.summary.bad_rows_by_kind == {"broken JSON": 1, "over-long": 1, "empty prompt": 1}
    *_, empty = read_lines(dataset.directory / "bad_rows.jsonl")
    assert empty["reason"].startswith("empty prompt") and "'q': ''" in empty["excerpt"]


@pytest.mark.parametrize(
    ("rows", "options", "why"),
    [
        (["{"], {"on_bad_row": "skip"}, r"1 of 1 rows cannot be used for training \(0 can\)"),
        (good_rows(2), {"truncation": "drop", "max_length": 2}, "2 of 2 rows were dropped"),
        (
            [{"q": "x" * 200, "a": "b"}],
            {"truncation": "right", "max_length": 20},
            r"rows.jsonl:1: nothing supervised: none of 20 .* after data.truncation=right",
        ),
    ],
)
def test_no_usable_row(tmp_path, rows, options, why):
    with pytest.raises(DataError, match=why):
        run_rows(tmp_path, *rows, **options)


@pytest.mark.parametrize(
    ("truncation", "kept"), [("left", slice(-64, None)), ("right", slice(64)), ("drop", None)]
)
def test_over_long_rows_are_cut_or_dropped_and_listed_with_file_and_line(
    tmp_path, truncation, kept
):
    rows = [*good_rows(1), {"q": "long", "a": "x y z " * 30}]
    ids, mask = run_rows(tmp_path, *rows, max_length=1000).sample(1)
    found = run_rows(tmp_path, *rows, truncation=truncation)
    summary = found.summary
    if kept:
        assert np.array_equal(found.sample(1), (ids[kept], mask[kept]))
        assert (summary.num_truncated, summary.num_cut_tokens) == (1, len(ids) - 64)
    assert (len(found), summary.num_dropped) == ((2, 0) if kept else (1, 1))
    [row] = read_lines(found.directory / "over_long_rows.jsonl")
    place = {"file": f"{tmp_path}/rows.jsonl", "line": 2}
    assert row == place | {"num_tokens": len(ids), "action": "cut" if kept else "dropped"}
    assert summary.num_bad_rows == 0


LONG = "one two three four five six seven eight nine ten eleven twelve"


def test_a_long_text_becomes_samples_in_which_each_token_is_trained_once(tmp_path):
    def split(*texts, max_length):
        rows = [{"text": text} for text in texts]
        keys = RowKeys(text_key="text")
        return run_rows(tmp_path, *rows, keys=keys, max_length=max_length, truncation="split")

    ids, _ = split(LONG, max_length=512).sample(0)
    dataset = split(LONG, "short", max_length=16)
    pieces = [dataset.sample(number)[0] for number in range(len(dataset) - 1)]
    assert dataset.summary.num_kept_rows == 2 and {len(piece) for piece in pieces[:-1]} == {16}
    labels = np.concatenate([piece[1:] for piece in pieces])
    assert labels.tolist() == ids[1:].tolist()
    assert dataset.summary.num_truncated == dataset.summary.num_cut_tokens == 0
    assert len(split(LONG, max_length=len(ids))) == 1


def test_only_text_is_split(tmp_path):
    with pytest.raises(DataError, match=r"over-long: \d+ tokens > data.max_length=16"):
        run_rows(tmp_path, {"q": "hi", "a": LONG}, max_length=16, truncation="split")


@pytest.mark.covers("S3.9")
def test_a_supervised_first_token_is_no_label(tmp_path):
    row = {"q": "q", "a": "x y z " * 30}
    dataset = run_rows(tmp_path, row, truncation="left", max_length=20)
    _, mask = dataset.sample(0)
    assert mask[0] and dataset.rows["num_loss_tokens"][0] == mask.sum() - 1


def test_max_samples_takes_the_first_rows(tmp_path):
    files = [write_lines(tmp_path / f"{i}.jsonl", good_rows(3)) for i in range(2)]
    dataset = run(files, replace(OPTIONS, max_samples=4), cache=tmp_path / "cache")
    assert [dataset.location(i) for i in (2, 3)] == [f"{files[0]}:3", f"{files[1]}:1"]
    assert len(dataset) == dataset.summary.num_rows == 4


def test_what_a_killed_preparation_left_goes_with_the_next_of_any_data(tmp_path):
    """This excludes files that another process is preparing."""
    killed, under_way = (
        tmp_path / "cache" / "tokens" / f"{name}.tmp-host-1" for name in ("killed", "alive")
    )
    for directory in (killed, under_way):
        directory.mkdir(parents=True)
        (directory / "tokens.bin").write_bytes(b"half a file")
    with locked(under_way.with_name("alive.lock")):
        run_rows(tmp_path, *good_rows(3))
    assert (killed.exists(), under_way.exists()) == (False, True)
