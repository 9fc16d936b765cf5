"""Reference loss masks: the supervised text is exactly the assistant's text, each turn with its end
token.
"""

import pytest
import tokenizer_fixtures as fixtures
from chat_families import PHI
from prepared import encoded, sample_of, supervised
from tokenizer_fixtures import make_tokenizer
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel

from trainer.config import RowKeys
from trainer.data.chat import RowEncoder
from trainer.data.rows import PrepareOptions
from trainer.data.tokens import tokenizer_digest
from trainer.errors import DataError

THINKING = "<think>\nhm\n</think>\n\n<tool_call>\n{}\n</tool_call>"
CODE = "```python\ndef f(x):\n        return 🙂\n```"
ANSWERS = ["hello world", "  two spaces around  ", "你好，世界 café 🙂👩‍🚀", CODE, THINKING]


def chat(*answers, system=False):
    messages = [{"role": "system", "content": "be kind"}] if system else []
    for number, answer in enumerate(answers):
        messages.append({"role": "user", "content": f"question {number}?"})
        messages.append({"role": "assistant", "content": answer})
    return messages


def reason(template, messages, **options):
    [why] = supervised(messages, make_tokenizer(template), turns="together", **options)
    return why


CHATML_LIKE = {
    "prefixes": fixtures.CHATML,
    "tags": fixtures.CHATML_TAGGED,
    "end token behind the tag": fixtures.CHATML_TAGGED_OUTSIDE,
    "newline inside the tag": fixtures.CHATML_TAGGED_NEWLINE,
}


@pytest.mark.covers("S3.9")
@pytest.mark.parametrize("template", CHATML_LIKE.values(), ids=CHATML_LIKE)
def test_answers_are_supervised_with_their_end_and_the_tokens_are_those_of_transformers(template):
    tokenizer = make_tokenizer(template)
    messages = chat(*ANSWERS, system=True)
    sample = sample_of(messages, tokenizer, turns="together")
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert sample.input_ids.tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]
    expected = [f"{answer}<|im_end|>" for answer in ANSWERS]
    assert supervised(messages, tokenizer, turns="together") == expected


SPACE_BEFORE_ANSWER = [
    template.replace("assistant\n'", "assistant: '").replace("['role'] + '\n'", "['role'] + ': '")
    for template in (fixtures.CHATML, fixtures.CHATML_TAGGED)
]


@pytest.mark.parametrize("template", SPACE_BEFORE_ANSWER, ids=["prefixes", "tags"])
def test_no_token_holds_the_end_of_a_prompt_and_the_beginning_of_an_answer(template):
    tokenizer = make_tokenizer(template)
    messages = chat("return 4", "\nhello world")
    sample = sample_of(messages, tokenizer)
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    served = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert sample.input_ids[: len(served)].tolist() == served
    found = supervised(messages, tokenizer)
    assert found == ["return 4<|im_end|>", "\nhello world<|im_end|>"]


def test_an_answer_that_alone_would_begin_with_another_space_is_refused():
    tokenizer = make_tokenizer(SPACE_BEFORE_ANSWER[0])
    tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
    why, _ = encoded(chat("return 4"), tokenizer)
    assert str(why).startswith("split token: one token holds the end of the prompt")


UNPROMPTED = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '\n' }}{% endfor %}"
NEVER_ENDS = UNPROMPTED + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
NEVER_ENDS_TAGGED = fixtures.CHATML_TAGGED.replace(
    "message['content'] + '<|im_end|>' }}{% end", "message['content'] }}{% end"
)
NO_PROMPT = fixtures.CHATML.split("{% if add_generation_prompt")[0]
NO_END = "does not end with a special token, so the model would not"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (NEVER_ENDS, NO_END),
        (NEVER_ENDS_TAGGED, NO_END),
        (NO_PROMPT, "the loss would include '<|im_start|>assistant\\n'"),
        ("{{ messages | length }}" + fixtures.CHATML, "message 2 cannot be masked"),
    ],
    ids=["never ends", "never ends, with tags", "no generation prompt", "changes its past"],
)
def test_a_template_that_would_be_masked_wrongly_is_refused(template, why):
    assert why in reason(template, chat("one", "two"))


def test_rewritten_turn_that_contains_the_end_token_is_refused():
    messages = chat("one<|im_end|> more", "two", "three")
    for message in messages[1::2]:
        message["reasoning_content"] = "hm"
    why = reason(fixtures.QWEN3, messages, special_in_content="parse")
    assert "message 2 contains '<|im_end|>', and the template rewrites it" in why


READS_THE_FIRST = "{% if messages[0]['role'] == 'system' %}{% endif %}" + fixtures.CHATML


@pytest.mark.parametrize("template", [fixtures.GEMMA, READS_THE_FIRST])
def test_a_conversation_that_begins_with_the_assistant_is_refused_with_the_fix(template):
    """The error contained only jinja's message."""
    why = reason(template, chat("one", "two")[1:])
    assert why.startswith("chat template: cannot render the conversation: ")
    assert "begins with an assistant turn" in why and "start it with a user message" in why


def test_a_template_refuses_a_conversation_in_its_own_words():
    why = reason(fixtures.GEMMA, chat("one", system=True))
    assert why.endswith("TemplateError: Conversation roles must alternate user/assistant")


def test_whitespace_that_the_token_before_an_answer_absorbs_is_not_trained():
    """Phi-3's tokens absorb the whitespace after them."""
    tokenizer = make_tokenizer(PHI, eos_token="<|end|>")
    tokenizer.add_tokens([AddedToken("<|assistant|>", rstrip=True, normalized=False)])
    assert supervised(chat("  one"), tokenizer) == ["one<|end|>"]


def test_unusable_tokenizers():
    with pytest.raises(DataError, match="no chat template"):
        encoded(chat("one"), make_tokenizer(None))
    with pytest.raises(DataError, match="the chat template has a syntax error in line 2"):
        encoded(chat("one"), make_tokenizer("{{ bos_token }}\n{% for %}"))
    slow = make_tokenizer(fixtures.CHATML)
    slow.__class__ = type("SlowTokenizer", (type(slow),), {"is_fast": False})
    with pytest.raises(DataError, match="SlowTokenizer is a slow tokenizer"):
        RowEncoder(slow, PrepareOptions(RowKeys(), max_length=64))


def test_digest_covers_vocabulary_template_and_special_tokens_only():
    tokenizer = make_tokenizer(fixtures.CHATML)
    digest = tokenizer_digest(tokenizer)
    tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=2)
    again = make_tokenizer(fixtures.CHATML)
    assert tokenizer_digest(tokenizer) == digest == tokenizer_digest(again)
    longer = make_tokenizer(fixtures.CHATML)
    longer.add_tokens(["<new>"])
    others = [
        make_tokenizer(fixtures.CHATML_TAGGED),
        make_tokenizer(fixtures.CHATML, eos_token="</s>"),
        longer,
    ]
    assert len({digest, *map(tokenizer_digest, others)}) == 4
