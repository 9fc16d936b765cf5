"""Batches of marked texts: the ids that the tokenizer gives for each text alone, and the tokens
inside the marks.
"""

import inspect
import json
import random
import unicodedata
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN3_5

from trainer.data.tokens import MarkedText, TokenFinder

SEEDS = range(20)
WHITESPACE = [
    *" \n\t\r\x0b\x1c\x85\xa0\u1680\u2003\u2028\u202f\u205f\u3000",
    "  ",
    "   ",
    "\n\n",
    " \n",
    "\r\n",
]
ASCII = "a The answer don't 's 'S ' x's 12 3 1234567 . , ... !?\n / _ # <<5*4=20>>20 <|end|> <|end|>\n <think> \x7f"
OTHER = "٣ Ⅻ é e\u0301 \u0301 ñ привет ДА 你好 世界 。 ア กำ 한국 🙂 👩\u200d🚀 € † Ⱥ ǅ \u200b \ufeff \u180e"
WORDS = [*ASCII.split(" "), *OTHER.split(" ")]


def random_text(rng: random.Random) -> str:
    return "".join(
        rng.choice(WORDS if rng.random() < 0.6 else WHITESPACE) for _ in range(rng.randint(1, 12))
    )


def merge_all() -> dict[str, Any]:
    """The state of a byte-level tokenizer that merges whatever stands side by side: cutting
    elsewhere shows.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    rng = random.Random(0)
    backend.train_from_iterator([random_text(rng) for _ in range(2000)], trainer)
    backend.add_special_tokens(["<|end|>", "<s>"])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    state: dict[str, Any] = json.loads(backend.to_str())
    return state


STATE = merge_all()


def changed(**changes: Any) -> PreTrainedTokenizerFast:
    """A tokenizer with other parts, as in a tokenizer.json."""
    state = {**STATE, **changes, "model": {**STATE["model"], **changes.get("model", {})}}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))


def cut_by(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def split(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


def with_token(content: str, **flags: bool) -> dict[str, Any]:
    plain = {**STATE["added_tokens"][0], "single_word": False, "lstrip": False, "rstrip": False}
    added = [token for token in STATE["added_tokens"] if token["content"] != content]
    return {
        "pre_tokenizer": LLAMA3,
        "added_tokens": [*added, {**plain, "id": 3100, "content": content, **flags}],
    }


WORD_PATTERNS = {
    "qwen 2 and 3": QWEN2,
    "qwen 3.5": QWEN3_5,
    "llama 3": inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default,
}
GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTES = {**GPT2, "use_regex": False}
LLAMA3 = cut_by(split(WORD_PATTERNS["llama 3"]), BYTES)
KINDS = {
    **{
        name: {"pre_tokenizer": cut_by(split(pattern), BYTES)}
        for name, pattern in WORD_PATTERNS.items()
    },
    "gpt 2": {"pre_tokenizer": GPT2},
    "normalizer": {"pre_tokenizer": LLAMA3, "normalizer": {"type": "NFC"}},
    "digits": {"pre_tokenizer": cut_by({"type": "Digits", "individual_digits": True}, GPT2)},
    "whole texts": {"pre_tokenizer": BYTES},
    "another pattern": {"pre_tokenizer": cut_by(split(r"\S+ \S+"), BYTES)},
    "other pieces": {
        "pre_tokenizer": cut_by(split(WORD_PATTERNS["llama 3"], "MergedWithPrevious"), BYTES)
    },
    "token of two words": with_token("answer The"),
    "tokens that overlap": with_token("e<|end"),
    "tokens looked for one after the other": with_token("e<|end", normalized=True),
    "prefix space": {"pre_tokenizer": {**GPT2, "add_prefix_space": True}},
    "another normalizer": {"pre_tokenizer": LLAMA3, "normalizer": {"type": "NFKC"}},
    "token that takes spaces after it in": with_token("<|end|>", rstrip=True),
    "token that takes spaces before it in": with_token("<|end|>", lstrip=True),
    "word of its own": with_token("answer", single_word=True),
    "token that normalization changes": {
        **with_token("e\u0301", normalized=True),
        "normalizer": {"type": "NFC"},
    },
    "missing bytes": {
        "pre_tokenizer": LLAMA3,
        "model": {"vocab": {"a": 0, "Ġ": 1, "<u>": 2}, "merges": []},
    },
    "unknown bytes": {
        "pre_tokenizer": GPT2,
        "model": {"vocab": {"a": 0, "<u>": 2}, "merges": [], "unk_token": "<u>"},
    },
    "metaspace": {
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "always",
            "split": True,
        }
    },
}


def find(
    finder: TokenFinder, batch: list[MarkedText]
) -> list[tuple[list[int], list[tuple[int, int]]]]:
    located = finder.find(batch)
    assert all(ids.dtype == np.int32 for ids, _ in located)
    return [(ids.tolist(), spans) for ids, spans in located]


def expected(
    tokenizer: PreTrainedTokenizerFast, item: MarkedText
) -> tuple[list[int], list[tuple[int, int]]]:
    """One text after the other, by offsets."""
    encoding = tokenizer.backend_tokenizer.encode(item.text, add_special_tokens=False)
    starts = [start for start, _ in encoding.offsets]
    bounds = [np.searchsorted(starts, span).tolist() for span in item.spans]
    return encoding.ids, [(first, end) for first, end in bounds]


def marked_texts(seed: int) -> list[MarkedText]:
    rng = random.Random(seed)
    batch = []
    for _ in range(30):
        text = random_text(rng)
        marks = sorted(
            rng.sample(range(len(text) + 1), k=min(len(text) // 2, rng.randint(0, 3)) * 2)
        )
        batch.append(MarkedText(text, list(zip(marks[::2], marks[1::2], strict=True))))
    return batch


@pytest.mark.parametrize("name", KINDS)
def test_tokens_of_a_batch_are_the_tokenizers(name: str) -> None:
    tokenizer = changed(**KINDS[name])
    finder = TokenFinder(tokenizer)
    for seed in SEEDS:
        batch = marked_texts(seed)
        normalized = [item for item in batch if unicodedata.is_normalized("NFC", item.text)]
        for items in (batch, normalized):
            for item, found in zip(items, find(finder, items), strict=True):
                assert found == expected(tokenizer, item), f"seed {seed}: {item}"


def test_nothing_is_found_in_nothing() -> None:
    assert all(
        find(TokenFinder(changed(**KINDS[name])), []) == [] for name in ("gpt 2", "metaspace")
    )
