"""Which of the known shapes a row has, and what stands in it to be encoded."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.config import RowKeys
from trainer.data.conversation import (
    COMPLETION,
    IDS_KEY,
    PROMPT,
    TOKEN_KEYS,
    TRL_KEYS,
    Conversation,
    Shape,
    column,
    has_conversation,
    require_text,
    shape_of,
    to_conversation,
)
from trainer.data.plain_text import Continuation
from trainer.data.rows import NUM_COLUMNS, TOO_DEEP, Row, Seen, UnusableError
from trainer.data.token_rows import TokenRows
from trainer.data.tokens import Encoded

Item = Conversation | Continuation | Encoded | UnusableError

TEXTS_SHAPE = (
    f"plain text in '{PROMPT}' and '{COMPLETION}' (data.prompt_key={PROMPT} "
    f"data.response_key={COMPLETION} would make them chats)"
)
SAY_NOTHING: tuple[Any, ...] = (None, "", [], {})
"""Values of columns that may stand there for the sake of other rows."""


class RowParser:
    """Takes rows apart by `keys`, and by what their columns are called."""

    def __init__(
        self,
        keys: RowKeys,
        tokenizer: PreTrainedTokenizerBase,
        new_tokens: Mapping[str, int] | None = None,
        seen: Seen | None = None,
    ) -> None:
        """`new_tokens`: what the vocabulary got since rows of tokens may have been made.
        `seen`: what is added to.
        """
        self._keys, self._token_rows = (
            keys,
            TokenRows(tokenizer, new_tokens or {}),
        )
        self._seen = Seen() if seen is None else seen

    def parse(self, row: Row) -> Item:
        if row.problem is not None:
            return row.problem
        try:
            shape, item = self._recognised(row)
        except UnusableError as error:
            return error
        except RecursionError:
            return UnusableError(TOO_DEEP)
        self._seen.rows_by_shape[shape.words] += 1
        if row.unread or not shape.columns.issuperset(row.record):
            others = (name for name in row.record if name not in shape.columns)
            unread = [
                *(name for name in others if row.record[name] not in SAY_NOTHING),
                *row.unread,
            ]
            self._seen.add_columns(dict.fromkeys(unread[:NUM_COLUMNS], 1))
        return item

    def _recognised(self, row: Row) -> tuple[Shape, Item]:
        record, keys = row.record, self._keys
        if keys.text_key is not None:
            text = require_text(column(row, keys.text_key, "text_key"), f"'{keys.text_key}'")
            return shape_of(f"plain text in '{keys.text_key}'", keys.text_key), Continuation(
                "", text
            )
        if not has_conversation(record, keys):
            if IDS_KEY in record:
                return shape_of(f"tokens in '{IDS_KEY}'", *TOKEN_KEYS), self._token_rows.encoded(
                    record
                )
            texts = record.get(PROMPT), record.get(COMPLETION)
            if isinstance(texts[0], str) and isinstance(texts[1], str):
                return shape_of(TEXTS_SHAPE, *TRL_KEYS), Continuation(*texts)
        return to_conversation(row, keys)
