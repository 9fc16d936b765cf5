"""The token cache: prepared once per content, whole or not at all, every row accounted for."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizer_fixtures as fixtures
from prepared import OPTIONS, good_rows, run, write_rows
from tokenizer_fixtures import make_tokenizer

from trainer.data import chat, readers
from trainer.data.chat import ChatEncoder
from trainer.errors import CannotWriteError, DataError
from trainer.runtime.files import locked


@pytest.fixture
def num_encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many conversations each call of the encoder took."""
    calls: list[int] = []
    encode = ChatEncoder.encode

    def counted(self: ChatEncoder, conversations: Iterable[Any]) -> Iterator[Any]:
        calls.append(0)
        for result in encode(self, conversations):
            calls[-1] += 1
            yield result

    monkeypatch.setattr(ChatEncoder, "encode", counted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # no other process encodes
    return calls


def test_samples_are_those_of_the_encoder_over_batches_writes_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_encoded: list[int]
) -> None:
    monkeypatch.setattr(chat, "BATCH_ROWS", 4)
    monkeypatch.setattr(readers, "BLOCK_ROWS", 5)
    first = write_rows(tmp_path / "1.jsonl", *good_rows(6))
    second = write_rows(tmp_path / "2.jsonl", "", {"q": "last", "a": "row 🙂"})
    dataset = run([first, second], cache=tmp_path / "cache")
    tokenizer = make_tokenizer()
    assert num_encoded == [5, 1, 1]
    assert len(dataset) == 7
    for index, answer in enumerate([*(row["a"] for row in good_rows(6)), "row 🙂"]):
        input_ids, loss_mask = dataset.sample(index)
        assert tokenizer.decode(input_ids[loss_mask]) == f"{answer}<|im_end|>"
        assert dataset.rows["num_tokens"][index] == len(input_ids)
        assert dataset.rows["num_loss_tokens"][index] == loss_mask.sum()
    assert (dataset.location(0), dataset.location(6)) == (f"{first}:1", f"{second}:2")
    assert isinstance(dataset.tokens, np.memmap) and not dataset.tokens.flags.writeable
    summary = dataset.summary
    assert (summary.num_rows, summary.num_samples, summary.num_bad_rows) == (7, 7, 0)
    assert summary.num_tokens == dataset.rows["num_tokens"].sum() == len(dataset.tokens)
    assert summary.num_loss_tokens == dataset.rows["num_loss_tokens"].sum()
    assert summary.end_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_second_call_does_not_tokenize(tmp_path: Path, num_encoded: list[int]) -> None:
    path = write_rows(tmp_path / "rows.jsonl", *good_rows(3))
    first = run(path, cache=tmp_path / "cache")
    moved = path.rename(tmp_path / "moved.jsonl")
    second = run(moved, cache=tmp_path / "cache")
    assert num_encoded == [3]
    assert first.directory == second.directory
    assert first.summary == second.summary
    assert second.location(0) == f"{moved}:1"


def test_anything_that_matters_gives_another_directory(tmp_path: Path) -> None:
    path, cache = write_rows(tmp_path / "rows.jsonl", *good_rows(3)), tmp_path / "cache"
    first = run(path, cache=cache)
    template = fixtures.CHATML.replace("message['role'] + '\n'", "message['role'] + ': '").replace(
        "assistant\n", "assistant: "
    )
    others = [
        run(path, cache=cache, template=template),
        run(path, replace(OPTIONS, max_length=63), cache=cache),
        run(path, replace(OPTIONS, template_kwargs={"enable_thinking": False}), cache=cache),
        run(write_rows(path, *good_rows(2), {"q": "question 2", "a": "answer 3"}), cache=cache),
    ]
    assert len({first.directory, *(other.directory for other in others)}) == 5
    fingerprints = [other.summary.fingerprint for other in others]
    assert fingerprints[1:3] == [first.summary.fingerprint] * 2  # the same tokens
    assert len({first.summary.fingerprint, fingerprints[0], fingerprints[3]}) == 3


def bad_file(tmp_path: Path) -> Path:
    rows = good_rows(4)
    return write_rows(
        tmp_path / "rows.jsonl",
        rows[0],
        "{",
        rows[1],
        {"q": "long", "a": "x" * 200},
        rows[2],
        {"q": "", "a": "b"},
        rows[3],
    )


def test_bad_rows_are_an_error_that_lists_them(tmp_path: Path) -> None:
    path = bad_file(tmp_path)
    with pytest.raises(DataError) as error:
        run(path, cache=tmp_path / "cache")
    lines = str(error.value).splitlines()
    assert lines[0] == "3 of 7 rows cannot be trained on (4 can):"
    assert lines[1].startswith(f"  {path}:2: broken JSON: Expecting property name")
    assert lines[2].startswith(f"  {path}:4: over-long: ") and lines[2].endswith(
        " tokens > data.max_length 64"
    )
    assert lines[3].startswith(f"  {path}:6: empty prompt: ")
    assert lines[4] == "by reason: broken JSON 1, over-long 1, empty prompt 1"
    listed = [
        json.loads(line)
        for line in Path(lines[5].removeprefix("all of them: ")).read_text().splitlines()
    ]
    assert [(row["file"], row["line"]) for row in listed] == [
        (str(path), 2),
        (str(path), 4),
        (str(path), 6),
    ]
    assert (
        listed[2]["reason"].startswith("empty prompt")
        and listed[2]["excerpt"] == "{'a': 'b', 'q': ''}"
    )
    assert "data.on_bad_row=skip" in lines[6] and "data.truncation=right" in lines[6]


def test_bad_rows_skipped_are_counted_and_listed(tmp_path: Path) -> None:
    options = replace(OPTIONS, on_bad_row="skip")
    dataset = run(bad_file(tmp_path), options, cache=tmp_path / "cache")
    assert [dataset.location(i).rsplit(":")[-1] for i in range(len(dataset))] == [
        "1",
        "3",
        "5",
        "7",
    ]
    assert dataset.summary.bad_rows_by_kind == {"broken JSON": 1, "over-long": 1, "empty prompt": 1}
    assert dataset.summary.num_bad_rows == 3
    assert len((dataset.directory / "bad_rows.jsonl").read_text().splitlines()) == 3


def test_no_usable_row(tmp_path: Path) -> None:
    empty = write_rows(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match=r"no row to train on: there is none in .*empty.jsonl"):
        run(empty, cache=tmp_path / "cache")
    options = replace(OPTIONS, on_bad_row="skip")
    with pytest.raises(DataError, match=r"1 of 1 rows cannot be trained on \(0 can\)"):
        run(write_rows(tmp_path / "bad.jsonl", "{"), options, cache=tmp_path / "cache")
    options = replace(OPTIONS, truncation="drop", max_length=2)
    with pytest.raises(
        DataError,
        match=r"2 rows read, 2 dropped by data.truncation as longer than data.max_length=\d+: "
        r"raise it",
    ):
        run(write_rows(tmp_path / "long.jsonl", *good_rows(2)), options, cache=tmp_path / "cache")


@pytest.mark.parametrize("truncation", ["left", "right"])
def test_truncation_cuts_one_side(tmp_path: Path, truncation: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", *good_rows(1), {"q": "long", "a": "x y z " * 30})
    whole = run(path, replace(OPTIONS, max_length=1000), cache=tmp_path / "cache")
    cut = run(path, replace(OPTIONS, truncation=truncation), cache=tmp_path / "cache")
    ids, mask = whole.sample(1)
    kept = slice(-64, None) if truncation == "left" else slice(0, 64)
    assert np.array_equal(cut.sample(1)[0], ids[kept]) and np.array_equal(
        cut.sample(1)[1], mask[kept]
    )
    assert np.array_equal(cut.sample(0)[0], whole.sample(0)[0])
    assert (cut.summary.num_truncated, cut.summary.num_cut_tokens) == (1, len(ids) - 64)


@pytest.mark.covers("S3.9")
def test_a_supervised_first_token_is_no_label(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", {"q": "q", "a": "x y z " * 30})
    options = replace(OPTIONS, truncation="left", max_length=20)
    dataset = run(path, options, cache=tmp_path / "cache")
    _, mask = dataset.sample(0)
    assert mask[0] and dataset.rows["num_loss_tokens"][0] == mask.sum() - 1


def test_nothing_supervised_after_truncation(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", {"q": "x" * 200, "a": "b"})
    with pytest.raises(
        DataError,
        match=r"nothing supervised: none of 20 .* after data.truncation=right to data.max_len",
    ):
        run(path, replace(OPTIONS, truncation="right", max_length=20), cache=tmp_path / "cache")


def test_max_samples_takes_the_first_rows(tmp_path: Path) -> None:
    files = [write_rows(tmp_path / f"{i}.jsonl", *good_rows(3)) for i in range(2)]
    dataset = run(files, replace(OPTIONS, max_samples=4), cache=tmp_path / "cache")
    assert [dataset.location(i) for i in (2, 3)] == [f"{files[0]}:3", f"{files[1]}:1"]
    assert len(dataset) == dataset.summary.num_rows == 4


def test_what_a_killed_preparation_left_goes_with_the_next_of_any_data(tmp_path: Path) -> None:
    """But not what another process prepares now."""
    killed, under_way = (
        tmp_path / "cache" / "tokens" / f"{name}.tmp-host-1" for name in ("killed", "alive")
    )
    for directory in (killed, under_way):
        directory.mkdir(parents=True)
        (directory / "tokens.bin").write_bytes(b"half a file")
    with locked(under_way.with_name("alive.lock")):
        run(write_rows(tmp_path / "rows.jsonl", *good_rows(3)), cache=tmp_path / "cache")
    assert (killed.exists(), under_way.exists()) == (False, True)


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CannotWriteError, match=r"point data.cache_dir to a writable directory"):
        run(write_rows(tmp_path / "rows.jsonl", *good_rows(1)), cache=tmp_path / "cache")


@pytest.mark.parametrize("truncation, action", [("drop", "dropped"), ("right", "cut")])
def test_over_long_rows_are_listed_with_file_and_line(
    tmp_path: Path, truncation: str, action: str
) -> None:
    """Nothing is dropped or cut silently: the list names every such row."""
    path = write_rows(tmp_path / "rows.jsonl", *good_rows(1), {"q": "question", "a": "long " * 90})
    dataset = run(path, replace(OPTIONS, truncation=truncation), cache=tmp_path / "cache")
    listed = [
        json.loads(line)
        for line in (dataset.directory / "over_long_rows.jsonl").read_text().splitlines()
    ]
    assert [(Path(row["file"]).name, row["line"], row["action"]) for row in listed] == [
        ("rows.jsonl", 2, action)
    ]
    assert listed[0]["num_tokens"] > OPTIONS.max_length
    summary = dataset.summary
    assert (summary.num_dropped, summary.num_truncated) == (action == "dropped", action == "cut")
    assert summary.num_bad_rows == 0
