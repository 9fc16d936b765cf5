"""Where two kinds of data, or two features, meet: text beside chats, tokens, long text, packed
files.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared import run, write_rows
from source_files import chats, words, write_sources

from trainer.config import RowKeys
from trainer.data.rows import PrepareOptions
from trainer.data.samples import TokenDataset
from trainer.errors import DataError
from trainer.train.start.compose import load_config
from trainer.train.start.inputs import Inputs, prepare_inputs

TEXT = RowKeys(text_key="text")
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


def test_keys_of_conversations_do_not_prepare_plain_text_again(files):
    text = f"{{files:{files}/texts.jsonl,text_key:text}}"
    given = words(files, chats(files), text)
    plain = inputs_of(*given)
    others = ["data.turns=apart", "data.train_on=last", f"data.chat_template={files}/says.jinja"]
    changed = inputs_of(*given, *others, "data.apply_chat_template_kwargs={a: 1}")
    (chat, text), (chat_2, text_2) = plain.train.sources, changed.train.sources
    assert chat.dataset.directory != chat_2.dataset.directory
    assert text.dataset.directory == text_2.dataset.directory


def split(
    directory: Path, *rows: dict[str, Any], max_length: int = 16, keys: RowKeys = TEXT
) -> TokenDataset:
    options = PrepareOptions(keys, max_length=max_length, truncation="split")
    return run(write_rows(directory / "long.jsonl", *rows), options, cache=directory)


def test_a_long_text_becomes_samples_in_which_each_token_is_trained_once(tmp_path):
    ids, _ = split(tmp_path, {"text": LONG}, max_length=512).sample(0)
    dataset = split(tmp_path, {"text": LONG}, {"text": "short"})
    pieces = [dataset.sample(number)[0] for number in range(len(dataset) - 1)]
    assert dataset.summary.num_kept_rows == 2 and {len(piece) for piece in pieces[:-1]} == {16}
    labels = np.concatenate([piece[1:] for piece in pieces])
    assert labels.tolist() == ids[1:].tolist()
    assert dataset.summary.num_truncated == dataset.summary.num_cut_tokens == 0
    assert len(split(tmp_path, {"text": LONG}, max_length=len(ids))) == 1


def test_only_text_is_split(tmp_path):
    ask, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": LONG}
    row = {"messages": [ask, answer]}
    with pytest.raises(DataError, match=r"over-long: \d+ tokens > data.max_length=16"):
        split(tmp_path, row, keys=RowKeys())
