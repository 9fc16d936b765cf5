"""Golden loss masks: the supervised text is exactly what the assistant said, each turn with its
end token.
"""

from typing import Any

import numpy as np
import pytest
import tokenizer_fixtures as fixtures
from tokenizer_fixtures import make_tokenizer
from tokenizers import AddedToken

from trainer.data.chat import ChatEncoder
from trainer.data.formats import Conversation
from trainer.data.rows import UnusableError
from trainer.data.show import preview
from trainer.data.tokens import Encoded, tokenizer_digest
from trainer.errors import DataError

CODE = "```python\ndef f(x):\n        return 🙂\n```"
ANSWERS = ["hello world", "  two spaces around  ", "你好，世界 café 🙂👩‍🚀", CODE]


def chat(*answers: str, system: bool = False) -> Conversation:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "be kind"}] if system else []
    for number, answer in enumerate(answers):
        messages += [
            {"role": "user", "content": f"question {number}?"},
            {"role": "assistant", "content": answer},
        ]
    return Conversation(messages, None)


def encode(
    template: str, conversation: Conversation, *, special: str = "error", **kwargs: Any
) -> tuple[Any, Encoded | str]:
    tokenizer = make_tokenizer(template)
    encoder = ChatEncoder(
        tokenizer, template_kwargs=kwargs, special_in_content=special, turns="together"
    )
    [encoded] = encoder.encode([conversation])
    return tokenizer, str(encoded) if isinstance(encoded, UnusableError) else only(encoded)


def only(samples: list[Encoded] | UnusableError) -> Encoded:
    assert isinstance(samples, list), samples
    [sample] = samples
    return sample


def supervised(
    template: str, conversation: Conversation, *, special: str = "error", **kwargs: Any
) -> list[str]:
    """The decoded text of every supervised run; also checks that the tokens are those of
    transformers.
    """
    tokenizer, encoded = encode(template, conversation, special=special, **kwargs)
    assert isinstance(encoded, Encoded), encoded
    whole = tokenizer.apply_chat_template(
        conversation.messages, tools=conversation.tools, tokenize=False, **kwargs
    )
    assert encoded.input_ids.tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert encoded.input_ids.dtype == np.int32 and encoded.loss_mask.dtype == np.bool_
    marked = preview(encoded.input_ids, encoded.loss_mask, tokenizer, color=False)
    assert marked.replace("[[", "").replace("]]", "") == whole
    return [part.split("]]")[0] for part in marked.split("[[")[1:]]


def reason(template: str, conversation: Conversation, **kwargs: Any) -> str:
    _, encoded = encode(template, conversation, **kwargs)
    assert isinstance(encoded, str)
    return encoded


CHATML_LIKE = {
    "prefixes": fixtures.CHATML,
    "tags": fixtures.CHATML_TAGGED,
    "end token behind the tag": fixtures.CHATML_TAGGED_OUTSIDE,
    "newline inside the tag": fixtures.CHATML_TAGGED_NEWLINE,
}


@pytest.mark.covers("S3.9")
@pytest.mark.parametrize("template", CHATML_LIKE.values(), ids=CHATML_LIKE)
def test_chatml(template: str) -> None:
    assert supervised(template, chat(*ANSWERS, system=True)) == [
        f"{answer}<|im_end|>" for answer in ANSWERS
    ]


def test_qwen3_without_thinking_does_not_train_the_empty_block() -> None:
    expected = ["one<|im_end|>", "two<|im_end|>"]
    assert supervised(fixtures.QWEN3, chat("one", "two"), enable_thinking=False) == expected


def thinking_chat() -> Conversation:
    conversation = chat("one", "two", "three")
    for message in conversation.messages[1::2]:
        message["reasoning_content"] = f"about {message['content']}"
    return conversation


def tool_chat(arguments: object) -> Conversation:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "add 1 and 2"},
        {"role": "assistant", "content": "", "reasoning_content": "a tool", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    return Conversation(messages, [{"type": "function", "function": {"name": "add"}}])


@pytest.mark.covers("S3.9")
@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'], ids=["object", "json text"])
def test_tool_calls_are_supervised_and_results_are_not(arguments: object) -> None:
    conversation = tool_chat(arguments)
    tokenizer, encoded = encode(fixtures.QWEN3, conversation)
    assert isinstance(encoded, Encoded)
    kept = tokenizer.decode(encoded.input_ids[encoded.loss_mask])
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert kept == (
        f"<think>\na tool\n</think>\n\n\n{call}<|im_end|><think>\n\n</think>\n\nIt is 3.<|im_end|>"
    )


@pytest.mark.parametrize(
    "template", [fixtures.CHATML, fixtures.CHATML_TAGGED], ids=["prefixes", "tags"]
)
def test_text_that_looks_like_template_markers_is_parsed_on_request(template: str) -> None:
    fake = "<|im_start|>assistant\nfake<|im_end|>\n"
    conversation = chat(f"say {fake} and more", "done")
    conversation.messages[0]["content"] = fake
    expected = [f"say {fake} and more<|im_end|>", "done<|im_end|>"]
    assert supervised(template, conversation, special="parse") == expected


def test_end_token_that_swallows_the_newline_behind_it() -> None:
    tokenizer = make_tokenizer(fixtures.CHATML)
    backend = tokenizer.backend_tokenizer
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False, rstrip=True)])
    tokenizer = type(tokenizer)(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = fixtures.CHATML.replace("<|im_end|>", "<|end|>")
    [samples] = ChatEncoder(tokenizer, template_kwargs={}).encode([chat("one", "two")])
    encoded = only(samples)
    assert tokenizer.decode(encoded.input_ids[encoded.loss_mask]) == "one<|end|>two<|end|>"


UNPROMPTED = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '\n' }}{% endfor %}"
NEVER_ENDS = UNPROMPTED + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
NEVER_ENDS_TAGGED = fixtures.CHATML_TAGGED.replace(
    "message['content'] + '<|im_end|>' }}{% end", "message['content'] }}{% end"
)
NO_PROMPT = fixtures.CHATML.split("{% if add_generation_prompt")[0]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (NEVER_ENDS, "turn 1 does not end with a special token, so the model would never"),
        (NEVER_ENDS_TAGGED, "turn 1 does not end with a special token, so the model would never"),
        (NO_PROMPT, "'<|im_start|>assistant\\n' before it would be trained"),
        ("{{ messages | length }}" + fixtures.CHATML, "message 2 cannot be masked"),
    ],
    ids=["never ends", "never ends, with tags", "no generation prompt", "changes its past"],
)
def test_a_template_that_would_be_masked_wrongly_is_refused(template: str, why: str) -> None:
    assert why in reason(template, chat("one", "two"))


def test_rewritten_turn_that_contains_the_end_token_is_refused() -> None:
    conversation = thinking_chat()
    conversation.messages[1]["content"] = "one<|im_end|> more"
    assert "turn 1 contains '<|im_end|>' and is rewritten" in reason(
        fixtures.QWEN3, conversation, special="parse"
    )


def test_template_refusals_are_the_rows_reasons_and_leave_the_others_alone() -> None:
    encoder = ChatEncoder(make_tokenizer(fixtures.GEMMA), template_kwargs={})
    refused = chat("one", system=True)
    surrogate = chat("half \ud83d of a pair")
    first, second, third, fourth = encoder.encode([chat("one"), refused, surrogate, chat("two")])
    assert only(first) and only(fourth)
    assert str(second) == "chat template: refuses the conversation: TemplateError: " + (
        "Conversation roles must alternate user/assistant"
    )
    assert isinstance(third, UnusableError) and str(third).startswith(
        "bad unicode: half of a surrogate pair"
    )


def test_bad_rows_keep_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    # one of the batches holds bad rows alone
    monkeypatch.setattr("trainer.data.chat.BATCH_ROWS", 2)
    bad = [UnusableError("empty prompt: no text") for _ in range(3)]
    encoder = ChatEncoder(make_tokenizer(fixtures.CHATML), template_kwargs={})
    results = list(encoder.encode([chat("one"), bad[0], bad[1], bad[2], chat("two")]))
    assert results[1:4] == bad
    assert only(results[0]) and only(results[4])


def test_unusable_tokenizers() -> None:
    with pytest.raises(DataError, match="no chat template"):
        list(ChatEncoder(make_tokenizer(None), template_kwargs={}).encode([chat("one")]))
    slow = make_tokenizer(fixtures.CHATML)
    slow_type = type("SlowTokenizer", (type(slow),), {"is_fast": property(lambda self: False)})
    slow.__class__ = slow_type
    with pytest.raises(DataError, match="SlowTokenizer is a slow tokenizer"):
        ChatEncoder(slow, template_kwargs={})
    with pytest.raises(DataError, match="chat template is broken in line 2"):
        encode("{{ bos_token }}\n{% for %}", chat("one"))


def test_digest_covers_vocabulary_template_and_special_tokens_only() -> None:
    tokenizer = make_tokenizer(fixtures.CHATML)
    digest = tokenizer_digest(tokenizer)
    tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=2)
    assert (
        tokenizer_digest(tokenizer) == digest == tokenizer_digest(make_tokenizer(fixtures.CHATML))
    )
    others = [
        make_tokenizer(fixtures.CHATML_TAGGED),
        make_tokenizer(fixtures.CHATML, eos_token="</s>"),
    ]
    longer = make_tokenizer(fixtures.CHATML)
    longer.add_tokens(["<new>"])
    assert len({digest, *map(tokenizer_digest, [*others, longer])}) == 4
