"""Rows written to files and prepared with a small tokenizer, for tests."""

import json
from dataclasses import replace
from pathlib import Path

import tokenizer_fixtures as fixtures
from small_files import write_lines
from tokenizer_fixtures import make_tokenizer

from trainer.config import RowKeys
from trainer.data.chat import RowEncoder
from trainer.data.formats import Conversation, RowParser
from trainer.data.rows import PrepareOptions, Row, Summary, UnusableError
from trainer.data.show import preview
from trainer.data.token_cache import prepare
from trainer.data.tokens import tokenizer_digest

CHATS = RowKeys()
OPTIONS = PrepareOptions(keys=RowKeys(prompt_key="q", response_key="a"), max_length=64)


def good_rows(count):
    return [{"q": f"question {i}", "a": f"answer {i}"} for i in range(count)]


def run(
    files,
    options=OPTIONS,
    *,
    cache,
    template=fixtures.CHATML,
    **more,
):
    tokenizer = make_tokenizer(template)
    return prepare(
        [files] if isinstance(files, Path) else files,
        tokenizer=tokenizer,
        tokenizer_digest=tokenizer_digest(tokenizer),
        options=options,
        cache_dir=cache,
        **more,
    )


def run_rows(directory, *rows, **changes):
    """Prepare rows in a file of the directory, with changes of `OPTIONS`."""
    path = write_lines(directory / "rows.jsonl", rows)
    return run(path, replace(OPTIONS, **changes), cache=directory / "cache")


def encoded(row, tokenizer, keys=CHATS, **options):
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


def sample_of(row, tokenizer, **options):
    """The only sample of a row."""
    samples, _ = encoded(row, tokenizer, **options)
    assert not isinstance(samples, str), samples
    [sample] = samples
    return sample


def marked(row, tokenizer, *args, **options):
    """Return the samples of a row with the supervised part in [[ ]], or the reason why it has none."""
    samples, _ = encoded(row, tokenizer, *args, **options)
    if isinstance(samples, str):
        return [samples]
    return [preview(each.input_ids, each.loss_mask, tokenizer) for each in samples]


def supervised(row, tokenizer, **options):
    """The supervised texts of a row, sample after sample."""
    texts = marked(row, tokenizer, **options)
    return [part.partition("]]")[0] for text in texts for part in text.split("[[")[1:]] or texts


def parsed(row, keys=CHATS):
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


def messages_of(row, keys=CHATS):
    item = parsed(row, keys)
    assert isinstance(item, Conversation), item
    return item.messages
