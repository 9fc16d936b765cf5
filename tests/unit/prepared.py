"""Rows written to files and prepared with a small tokenizer, for tests."""

import json
from pathlib import Path
from typing import Any

import tokenizer_fixtures as fixtures
from tokenizer_fixtures import make_tokenizer

from trainer.config import RowKeys
from trainer.data.formats import Item, RowParser
from trainer.data.prepare import PrepareOptions
from trainer.data.rows import Row
from trainer.data.samples import TokenDataset
from trainer.data.token_cache import prepare
from trainer.data.tokens import tokenizer_digest

OPTIONS = PrepareOptions(keys=RowKeys(prompt_key="q", response_key="a"), max_length=64)


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


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
    paths = [files] if isinstance(files, Path) else files
    digest = tokenizer_digest(tokenizer)
    return prepare(
        paths,
        tokenizer=tokenizer,
        tokenizer_digest=digest,
        options=options,
        cache_dir=cache,
        **more,
    )


def to_conversation(row: Row, keys: RowKeys) -> Item:
    """What stands in a row that is none of tokens."""
    return RowParser(keys, make_tokenizer(None)).parse(row)
