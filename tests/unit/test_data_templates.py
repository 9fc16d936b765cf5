"""The templates that come with the package, and turns that end as other families end them."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizer_fixtures as fixtures
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from trainer.config import ConfigError
from trainer.data.chat import ChatEncoder
from trainer.data.formats import Conversation
from trainer.data.rows import UnusableError
from trainer.data.show import preview
from trainer.run.compose import load_config
from trainer.run.inputs import prepare_data, source_at
from trainer.run.preflight import find_files, read_chat_template

USER, AGAIN = {"role": "user", "content": "How warm?"}, {"role": "user", "content": "And now?"}
SYSTEM = {"role": "system", "content": "Be brief."}
HI, BYE = ({"role": "assistant", "content": text} for text in ("Hi.", "Bye."))
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
RESULT = {"role": "tool", "content": "3 degrees"}


def calls(*cities: str, content: str = "") -> dict[str, Any]:
    functions = [{"name": "weather", "arguments": {"city": city}} for city in cities]
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"type": "function", "function": f} for f in functions],
    }


def trained(
    template: str, *messages: dict[str, Any], tools: Any = None, added: tuple[str, ...] = ()
) -> list[str]:
    """The supervised texts of a conversation, sample after sample."""
    tokenizer = fixtures.make_tokenizer(template, eos_token="</s>")
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in added], special_tokens=True
    )
    (samples,) = ChatEncoder(tokenizer, template_kwargs={}).encode(
        [Conversation(list(messages), tools)]
    )
    if isinstance(samples, UnusableError):
        return [str(samples)]
    texts = (
        preview(sample.input_ids, sample.loss_mask, tokenizer, color=False) for sample in samples
    )
    return [part.partition("]]")[0] for text in texts for part in text.split("[[")[1:]]


def ours(name: str) -> str:
    return read_chat_template(name) or ""


@pytest.mark.parametrize(
    ("name", "end"), [("chatml", "<|im_end|>"), ("llama3", "<|eot_id|>"), ("plain", "</s>")]
)
def test_a_template_of_ours_trains_each_answer_and_its_end(name: str, end: str) -> None:
    space = " " if name == "plain" else ""
    for head in ([], [SYSTEM]):
        assert trained(ours(name), *head, USER, HI, AGAIN, BYE) == [
            f"{space}Hi.{end}",
            f"{space}Bye.{end}",
        ]


def test_tools_are_offered_called_and_answered() -> None:
    chat = (SYSTEM, USER, calls("Oslo", "Rome", content="Let me see."), RESULT, HI)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
    both = f"Let me see.\n{call % 'Oslo'}\n{call % 'Rome'}<|im_end|>"
    assert trained(ours("chatml"), *chat, tools=[TOOL]) == [both, "Hi.<|im_end|>"]
    call = '{"name": "weather", "parameters": {"city": "%s"}}'
    both = f"Let me see.\n{call % 'Oslo'}; {call % 'Rome'}<|eot_id|>"
    assert trained(ours("llama3"), *chat, tools=[TOOL]) == [both, "Hi.<|eot_id|>"]
    (refusal,) = trained(ours("plain"), *chat, tools=[TOOL])
    assert refusal.endswith("the template plain has no tools; chatml and llama3 have")
    for name in ("chatml", "llama3"):
        text = fixtures.make_tokenizer(ours(name)).apply_chat_template(
            list(chat), tools=[TOOL], tokenize=False
        )
        assert (
            json.dumps(TOOL) in str(text) and "Be brief." in str(text) and "3 degrees" in str(text)
        )


GLM_ROLES = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GLM = """[gMASK]<sop>{% set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '<|assistant|>\\n<think>' }}
{%- if loop.index0 > ns.last and m.reasoning_content %}{{- m.reasoning_content }}{% endif %}{{- '</think>' }}
{%- if m.content %}{{- '\\n' + m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}{{- '\\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}{{- '\\n' + key + '=' + value }}{% endfor %}
{{- '\\n</tool_call>' }}{% endfor %}
{%- else %}{{- ('<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>') + '\\n' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
"""As GLM-4.5's: a turn ends where the next role's token stands, reasoning is kept behind the
last user only.
"""


def test_a_turn_that_the_next_role_ends_is_trained_with_that_roles_token() -> None:
    hi, bye = "\n<think></think>\nHi.<|user|>", "\n<think></think>\nBye.<|user|>"
    assert trained(GLM, SYSTEM, USER, HI, AGAIN, BYE, added=GLM_ROLES) == [hi, bye]
    call = "\n<think></think>\n<tool_call>weather\ncity=Oslo\n</tool_call><|observation|>"
    assert trained(GLM, USER, calls("Oslo"), RESULT, HI, tools=[TOOL], added=GLM_ROLES) == [
        call,
        hi,
    ]
    assert trained(GLM, USER, calls("Oslo"), tools=[TOOL], added=GLM_ROLES) == [call]
    thought = {**HI, "reasoning_content": "Hm"}
    first = "\n<think>Hm</think>\nHi.<|user|>"
    assert trained(GLM, USER, thought, AGAIN, BYE, added=GLM_ROLES) == [first, bye], (
        "each behind its serving prompt"
    )


DEEPSEEK_NAMES = ("User", "Assistant", "calls_begin", "call_begin", "sep", "call_end", "calls_end")
DEEPSEEK = """{{ bos_token }}{% for m in messages %}
{%- if m['role'] == 'user' %}{{- '<|User|>' + m['content'] }}
{%- elif m['role'] == 'tool' %}{{- m['content'] }}
{%- elif m['role'] == 'assistant' and m['tool_calls'] CONDITION %}{{- '<|Assistant|><|calls_begin|>' }}
{%- for tool in m['tool_calls'] %}
{{- '<|call_begin|>' + tool['type'] + '<|sep|>' + tool['function']['name'] + '\\n```json\\n' }}
{{- tool['function']['arguments'] + '\\n```<|call_end|>' }}
{%- endfor %}{{- '<|calls_end|></s>' }}
{%- elif m['role'] == 'assistant' %}{{- '<|Assistant|>' + m['content'] + '</s>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|>' }}{% endif %}"""
"""As DeepSeek-V3's: arguments are concatenated; in its first version calls stand only where
content is none.
"""


@pytest.mark.parametrize("condition", ["", "and m['content'] is none"])
def test_a_template_that_concatenates_arguments_gets_json_text(condition: str) -> None:
    template = DEEPSEEK.replace("CONDITION", condition)
    found = trained(
        template,
        USER,
        calls("Oslo"),
        RESULT,
        HI,
        added=tuple(f"<|{name}|>" for name in DEEPSEEK_NAMES),
    )
    called = '<|call_begin|>function<|sep|>weather\n```json\n{"city": "Oslo"}\n```<|call_end|>'
    assert found == [f"<|calls_begin|>{called}<|calls_end|></s>", "Hi.</s>"]


def write_model(directory: Path, *tokens: str) -> PreTrainedTokenizerFast:
    tokenizer = fixtures.make_tokenizer(None, eos_token="</s>")
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [
        token for token in state["added_tokens"] if token["content"] not in tokens
    ]
    (directory / "tokenizer.json").write_text(json.dumps(state))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return tokenizer


def test_tokens_that_a_template_of_ours_needs_are_asked_for(tmp_path: Path) -> None:
    write_model(tmp_path, "<|im_end|>")
    row = {"messages": [USER, HI]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    words = [
        f"data.train_files={tmp_path}/rows.jsonl",
        f"data.cache_dir={tmp_path}/cache",
        "data.val_ratio=0",
    ]
    for name in ("chatml", "llama3", "plain"):
        config = load_config([*words, f"data.chat_template={name}"])
        if name == "chatml":
            with pytest.raises(ConfigError, match=r"'model.new_tokens=\[\"<\|im_end\|>\"\]'"):
                prepare_data(
                    config,
                    find_files(config),
                    source_at(config, str(tmp_path), random_weights=True),
                    progress=lambda: None,
                )
        else:
            prepared = prepare_data(
                config,
                find_files(config),
                source_at(config, str(tmp_path), random_weights=True),
                progress=lambda: None,
            )
            assert prepared.chat_template == ours(name)
    with pytest.raises(
        ConfigError,
        match=r"chat_template=chatlm: No such file.*; those with names are chatml, llama3",
    ):
        read_chat_template("chatlm")


def test_an_end_of_sequence_in_brackets_ends_a_turn_whatever_the_tokenizers_own_end_is() -> None:
    template = (
        "{% for m in messages %}{{ '[USER]' + m.content if m.role == 'user' "
        "else m.content + '</s>' }}{% endfor %}"
    )
    tokenizer = fixtures.make_tokenizer(
        template + "{% if add_generation_prompt %}{% endif %}", eos_token="<|im_end|>"
    )
    tokenizer.add_tokens(
        [AddedToken("[USER]", special=True, normalized=False)], special_tokens=True
    )
    ((sample,),) = ChatEncoder(tokenizer, template_kwargs={}).encode(
        [Conversation([USER, HI, AGAIN, BYE], None)]
    )
    assert tokenizer.decode(sample.input_ids[sample.loss_mask]) == "Hi.</s>Bye.</s>"
