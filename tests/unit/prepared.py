"""Rows written to files and prepared with a small tokenizer, for tests."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizer_fixtures as fixtures
from small_files import write_lines
from tokenizer_fixtures import make_tokenizer
from transformers import PreTrainedTokenizerBase

from trainer.config import RowKeys
from trainer.data.chat import RowEncoder
from trainer.data.formats import Conversation, Item, RowParser
from trainer.data.rows import PrepareOptions, Row, Summary, UnusableError
from trainer.data.samples import TokenDataset
from trainer.data.show import preview
from trainer.data.token_cache import prepare
from trainer.data.tokens import Encoded, tokenizer_digest

CHATS = RowKeys()
OPTIONS = PrepareOptions(keys=RowKeys(prompt_key="q", response_key="a"), max_length=64)


def good_rows(count: int) -> list[dict[str, str]]:
    return [{"q": f"question {i}", "a": f"answer {i}"} for i in range(count)]


def run(
    files: Path | list[Path],
    options: PrepareOptions = OPTIONS,
    *,
    cache: Path,
    template: str = fixtures.CHATML,
    **more: Any,
) -> TokenDataset:
    tokenizer = make_tokenizer(template)
    return prepare(
        [files] if isinstance(files, Path) else files,
        tokenizer=tokenizer,
        tokenizer_digest=tokenizer_digest(tokenizer),
        options=options,
        cache_dir=cache,
        **more,
    )


def run_rows(directory: Path, *rows: Any, **changes: Any) -> TokenDataset:
    """Prepare rows in a file of the directory, with changes of `OPTIONS`."""
    path = write_lines(directory / "rows.jsonl", rows)
    return run(path, replace(OPTIONS, **changes), cache=directory / "cache")


def encoded(
    row: Any, tokenizer: PreTrainedTokenizerBase, keys: RowKeys = CHATS, **options: Any
) -> tuple[list[Encoded] | str, Summary]:
    """Return the samples of a row (JSON text, or its messages) or the reason why it has none, and
    the counts.
    """
    if isinstance(row, list):
        row = {"messages": row}
    record = json.loads(row) if isinstance(row, str) else row
    encoder = RowEncoder(tokenizer, PrepareOptions(keys, max_length=4096, **options))
    try:
        return encoder.encode(Row(Path("a.jsonl"), 1, record)), encoder.seen
    except UnusableError as error:
        return str(error), encoder.seen


def sample_of(row: Any, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Encoded:
    """The only sample of a row."""
    samples, _ = encoded(row, tokenizer, **options)
    assert not isinstance(samples, str), samples
    [sample] = samples
    return sample


def marked(row: Any, tokenizer: PreTrainedTokenizerBase, *args: Any, **options: Any) -> list[str]:
    """Return the samples of a row with the supervised part in [[ ]], or the reason why it has none."""
    samples, _ = encoded(row, tokenizer, *args, **options)
    if isinstance(samples, str):
        return [samples]
    return [preview(each.input_ids, each.loss_mask, tokenizer) for each in samples]


def supervised(row: Any, tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[str]:
    """The supervised texts of a row, sample after sample."""
    texts = marked(row, tokenizer, **options)
    return [part.partition("]]")[0] for text in texts for part in text.split("[[")[1:]] or texts


def parsed(row: Any, keys: RowKeys = CHATS) -> Item | UnusableError:
    """Return the content that is recognised in a row, given as JSON text, an object, or the result
    of reading a file.
    """
    record = json.loads(row) if isinstance(row, str) else row
    if not isinstance(row, Row):
        row = Row(Path("a.jsonl"), 7, record)
    try:
        return RowParser(keys, make_tokenizer(None), Summary()).parse(row)
    except UnusableError as error:
        return error


def messages_of(row: Any, keys: RowKeys = CHATS) -> list[dict[str, Any]]:
    item = parsed(row, keys)
    assert isinstance(item, Conversation), item
    return item.messages
