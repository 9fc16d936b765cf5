"""An outline filled in is what jinja writes, and templates that look into texts get none."""

import random
from pathlib import Path
from typing import Any

import pytest
import tokenizer_fixtures as fixtures
from chat_families import FAMILIES
from transformers.utils.chat_template_utils import render_jinja_template

from trainer.data import template
from trainer.data.outline import blind_template
from trainer.data.rows import UnusableError
from trainer.data.template import ChatTemplate
from trainer.errors import DataError

TOKENIZER = fixtures.make_tokenizer(fixtures.CHATML)
SHIPPED = {path.name: path.read_text() for path in Path(template.__file__).with_name("templates").glob("*.jinja")}
FULL = {name: family.template for name, family in FAMILIES.items()} | SHIPPED
TEXTS = (
    *(
        "hello",
        " a b\n",
        "\n\n x",
        "<think>\nwhy\n</think>\n\nso",
        "<tool_response>1</tool_response>",
        "A",
        "11",
        "get",
    ),
    *("</think>", "\x1cq", "0", "<|im_end|>", "{{ x }}", "\U0010ffff0\U0010ffff", "items", "…</think> "),
)
SEES = (
    *("{{ c | upper }}", "{{ c | length }}", "{{ c[0] }}", "{{ c[::-1] }}", "{{ c ~ 'x' }}", "{{ c | tojson }}"),
    *("{{ {'a': c} | tojson }}", "{{ m }}", "{{ [c] }}", "{{ m | string | length }}", "{{ c.split('<')[0] }}"),
    *("{% if c is lower %}L{% endif %}", "{% if c is sequence %}S{% endif %}", "{% if c is iterable %}I{% endif %}"),
    *("{% if c > 'b' %}G{% endif %}", "{% if c in 'hello' %}H{% endif %}", "{% if c in ['A'] %}A{% endif %}"),
    *("{% if c == 'A' %}A{% else %}{{ c }}{% endif %}", "{{ c if c != 'A' }}", "{{ 'yes' if 'b' in c else c | trim }}"),
    *("{% if c.startswith('\n') %}N{% endif %}{{ c.lstrip('\n') }}", "{{ c.strip('<h') or 'none' }}"),
    *("{% set x %}{{ c }}{% endset %}{{ x | length }}", "{% macro f(t) %}{{ t }}{% endmacro %}{{ f(c) | upper }}"),
    *("{{ ('%s' % c) | length }}", "{{ '{}'.format(c)[0] }}", "{{ '{0!s}'.format(c)[0] }}", "{{ c | int }}"),
    *("{% set range = '{0!s}'.format %}{{ range(c)[0] }}", "{{ {'A': 1}[c] is defined }}", "{{ {'A': 1}.get(c) }}"),
    *("{{ messages[c] }}", "{% set k = 'content' %}{{ m[k] | first }}", "{{ m[c] is defined }}"),
    *("{% for x in c %}{{ x }}-{% endfor %}", "{{ c == messages[0].content }}", "{{ c * 2 }}", "{{ c + 1 }}"),
    *("{{ (c + 'x') | trim }}", "{{ c | trim | trim }}", "{{ 'ab' in (c + 'b') }}", "{{ ([c] | join('-'))[1] }}"),
    *("{% filter upper %}{{ c }}{% endfilter %}", "{{ raise_exception(c) }}", "{{ c.foo is defined }}"),
    *("{{ messages | map(attribute='content') | join }}", "{% for k, v in m.items() %}{{ k + v }}{% endfor %}"),
    *("{{ c is callable }}", "{{ c | replace('A', 'b') }}"),
)  # fmt: skip


def expected(source: str, messages: list[Any], *, prompt: bool = False, tagged: bool = False) -> Any:
    """By transformers alone; the cause where it refuses."""
    words = TOKENIZER.special_tokens_map | {"return_assistant_tokens_mask": tagged, "add_generation_prompt": prompt}
    try:
        (text,), spans = render_jinja_template([messages], chat_template=source, **words)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return text, spans[0] if tagged else []


def found(chat: ChatTemplate, messages: list[Any], **how: bool) -> Any:
    try:
        return chat.render(messages, None, **how)
    except UnusableError as error:
        return str(error).removeprefix("chat template: refuses the conversation: ")


def conversation(rng: random.Random) -> list[dict[str, str]]:
    roles = [*rng.choice([[], ["system"]]), *["user", "assistant"] * rng.randint(1, 3)][: rng.randint(1, 7)]
    roles = roles if rng.random() < 0.8 else rng.choices(["user", "assistant", "tool", "system"], k=3)
    return [{"role": role, "content": rng.choice(TEXTS if rng.random() < 0.4 else TEXTS[:3])} for role in roles]


@pytest.mark.parametrize("name", FULL)
def test_what_is_filled_in_is_what_the_template_writes(name: str) -> None:
    rng, chat = random.Random(name), ChatTemplate(FULL[name], TOKENIZER, {})
    for _ in range(60):
        messages, prompt = conversation(rng), rng.random() < 0.5
        written = expected(chat.source, messages, prompt=prompt, tagged=chat.has_generation_tags)
        assert found(chat, messages, prompt=prompt) == written, messages


def test_most_templates_are_run_once_for_conversations_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a thinking template asks of texts is mostly denied."""
    names = set(FULL) - {"gpt-oss", "mistral"}  # with macros, and one that hands texts to a filter
    assert {name for name in FULL if blind_template(FULL[name])} == names
    render, seen = ChatTemplate._rendered, []

    def render_seen(self: ChatTemplate, *given: Any, **how: Any) -> Any:
        seen.append(self)
        return render(self, *given, **how)

    monkeypatch.setattr(ChatTemplate, "_rendered", render_seen)
    for name in sorted(names):
        chat = ChatTemplate(FULL[name], TOKENIZER, {})
        for word in "abc":
            chat.render([{"role": "user", "content": word}, {"role": "assistant", "content": word * 2}], None)
    assert len(seen) == 2 * len(names), "two conversations to check what is filled in"


@pytest.mark.parametrize("snippet", SEES)
def test_a_template_that_looks_into_texts_is_run_for_each(snippet: str) -> None:
    source = "{% for m in messages %}{% set c = m.content %}[" + snippet + "]{% endfor %}"
    chat = ChatTemplate(source, TOKENIZER, {})
    for text in TEXTS:
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "hello"}]
        assert found(chat, messages) == expected(source, messages), text


def test_blank_texts_and_further_keys_are_left_to_jinja() -> None:
    source = "{% for m in messages %}{{ m.role + ('!' if m.content | trim else '?') + (m.name or '') }}{% endfor %}"
    chat = ChatTemplate(source, TOKENIZER, {})
    for content, more, end in (("x", {}, "!"), ("", {}, "?"), (" \n", {}, "?"), ("x", {"name": "Al"}, "!Al")):
        assert chat.render([{"role": "user", "content": content, **more}], None)[0] == f"user{end}"


@pytest.mark.parametrize(
    "source", ["{% later %}x", "{% generation %}x", "{{ messages[0] ", "{% call f() %}x{% endcall %}"]
)
def test_what_another_transformers_may_know_is_left_to_it(source: str) -> None:
    assert blind_template(source) is None


def test_an_outline_is_checked_while_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the conversations 1, 2, 4, 8 and so on that it is filled with; what differs ends the preparation."""
    chat, render, seen = ChatTemplate(fixtures.CHATML, TOKENIZER, {}), ChatTemplate._rendered, []

    def render_seen(self: ChatTemplate, messages: list[Any], *given: Any, **how: Any) -> Any:
        seen.append(str(messages[0]["content"]))
        text, spans = render(self, messages, *given, **how)
        return (text.replace("9", "nine"), spans) if seen[-1] == "9" else (text, spans)

    monkeypatch.setattr(ChatTemplate, "_rendered", render_seen)
    for number in (*range(9), 10, 11, 12, 13, 14, 15):
        chat.render([{"role": "user", "content": str(number)}], None)
    assert seen == ["0", "1", "3", "7"]
    with pytest.raises(DataError, match=r'otherwise than its outline.*"9"'):
        chat.render([{"role": "user", "content": "9"}], None)
