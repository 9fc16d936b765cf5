"""Where two kinds of data, or two features, meet: text beside chats, tokens, long text, packed
files.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared import announced, run, write_rows
from source_files import chats, words, write_sources

from trainer.cli.data import main
from trainer.config import RowKeys
from trainer.data.rows import PrepareOptions
from trainer.data.samples import TokenDataset
from trainer.errors import DataError
from trainer.train.start.compose import load_config
from trainer.train.start.inputs import Inputs, prepare_inputs

LONG = "one two three four five six seven eight nine ten eleven twelve"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write_sources(tmp_path)
    write_rows(
        tmp_path / "texts.jsonl", *({"text": f"text {number}. {LONG}"} for number in range(6))
    )
    return tmp_path


def inputs_of(*given: str) -> Inputs:
    return prepare_inputs(load_config(list(given)), progress=lambda: None)


def texts(directory: Path, more: str = "") -> str:
    return f"{{files:{directory}/texts.jsonl,text_key:text{more}}}"


def turn_lines(inputs: Inputs, caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = announced(inputs.train, inputs.validation, inputs.tokenizer, caplog)
    return [line for line in lines if line.startswith("turns ")]


def test_what_is_said_of_conversations_is_nothing_to_plain_text(files, caplog):
    given = [*words(files, chats(files), texts(files)), "data.val_ratio=0.2"]
    plain = inputs_of(*given)
    others = ["data.turns=apart", "data.train_on=last", f"data.chat_template={files}/says.jinja"]
    changed = inputs_of(*given, *others, "data.apply_chat_template_kwargs={a: 1}")
    (chat, text), (chat_2, text_2) = plain.train.sources, changed.train.sources
    assert (
        chat.dataset.directory != chat_2.dataset.directory
        and text.dataset.directory == text_2.dataset.directory
    )
    assert text.fingerprint == text_2.fingerprint
    assert turn_lines(inputs_of(*words(files, texts(files)), others[0]), caplog) == []
    [line] = turn_lines(changed, caplog)
    assert " conversations are trained turn by turn" in line


def split(
    directory: Path, *rows: dict[str, Any], max_length: int = 16, keys: RowKeys | None = None
) -> TokenDataset:
    options = PrepareOptions(
        keys or RowKeys(text_key="text"), max_length=max_length, truncation="split"
    )
    return run(write_rows(directory / "long.jsonl", *rows), options, cache=directory)


def test_a_long_text_becomes_samples_in_which_each_token_is_trained_once(tmp_path):
    whole = run(
        write_rows(tmp_path / "a.jsonl", {"text": LONG}),
        PrepareOptions(RowKeys(text_key="text"), 512),
        cache=tmp_path,
    )
    ids, _ = whole.sample(0)
    dataset = split(tmp_path, {"text": LONG}, {"text": "short"})
    pieces = [dataset.sample(number)[0] for number in range(len(dataset) - 1)]
    assert (
        dataset.num_rows == 2 and len(pieces) > 2 and all(len(piece) == 16 for piece in pieces[:-1])
    )
    labels = np.concatenate([piece[1:] for piece in pieces])
    assert labels.tolist() == ids[1:].tolist(), (
        "a piece begins with the last token of the one before"
    )
    assert dataset.summary.num_loss_tokens == len(ids) - 1 + int(
        dataset.rows["num_loss_tokens"][-1]
    )
    assert dataset.summary.num_truncated == dataset.summary.num_cut_tokens == 0
    exact = split(tmp_path, {"text": LONG}, max_length=len(ids))
    assert len(exact) == 1


def test_only_text_is_split(tmp_path):
    ask, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": LONG}
    keys = RowKeys()
    with pytest.raises(
        DataError,
        match=r"over-long: \d+ tokens > data.max_length 16; data.truncation=split is for te",
    ):
        split(tmp_path, {"messages": [ask, answer]}, keys=keys)
    with pytest.raises(DataError, match="is for text_key alone"):
        split(tmp_path, {"prompt": "hi", "completion": LONG}, keys=keys)


def test_packing_a_file_changes_neither_its_name_nor_its_places(files, capsys):
    rows = (files / "chats.jsonl").read_text().replace("\n", "\r\n")
    (files / "chats.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + rows.encode()))
    packed = f"{{files:{files}/chats.jsonl.gz}}"
    inputs, plain = inputs_of(*words(files, packed)), inputs_of(*words(files, chats(files)))
    assert inputs.train.names == plain.train.names == ("chats",)
    assert inputs.train.fingerprint == plain.train.fingerprint
    assert inputs.train.location(3).startswith(f"{files}/chats.jsonl.gz:")
    (files / "chats.jsonl.gz").write_bytes(
        gzip.compress((rows + json.dumps({"messages": 3}) + "\r\n").encode())
    )
    assert main(["stats", *words(files, packed)]) == 65
    assert "chats.jsonl.gz:13: messages not a list: 'messages' is int" in capsys.readouterr().err
