"""The templates that come with the package."""

import json

import pytest
import tokenizer_fixtures as fixtures
from prepared import supervised
from small_files import write_json, write_lines

from trainer.config import ConfigError
from trainer.train.start.compose import load_config
from trainer.train.start.inputs import prepare_data_alone
from trainer.train.start.preflight import read_chat_template

USER = {"role": "user", "content": "How warm?"}
SYSTEM = {"role": "system", "content": "Be brief."}
HI = {"role": "assistant", "content": "Hi."}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": WEATHER}
RESULT = {"role": "tool", "content": "3 degrees"}


def calls(*cities, content=""):
    functions = [{"name": "weather", "arguments": {"city": city}} for city in cities]
    tool_calls = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": content, "tool_calls": tool_calls}


def trained(template, *messages, tools=None):
    """The supervised texts of a conversation, sample after sample."""
    tokenizer = fixtures.make_tokenizer(template, eos_token="</s>")
    return supervised({"messages": list(messages), "tools": tools}, tokenizer)


def ours(name):
    return read_chat_template(name) or ""


CHATML_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
LLAMA3_CALL = '{"name": "weather", "parameters": {"city": "%s"}}'


@pytest.mark.parametrize(
    ("name", "call", "between", "end"),
    [
        ("chatml", CHATML_CALL, "\n", "<|im_end|>"),
        ("llama3", LLAMA3_CALL, "; ", "<|eot_id|>"),
    ],
)
def test_tools_are_offered_called_and_answered(name, call, between, end):
    chat = [SYSTEM, USER, calls("Oslo", "Rome", content="Let me see."), RESULT, HI]
    both = f"Let me see.\n{call % 'Oslo'}{between}{call % 'Rome'}{end}"
    assert trained(ours(name), *chat, tools=[TOOL]) == [both, f"Hi.{end}"]
    tokenizer = fixtures.make_tokenizer(ours(name))
    text = str(tokenizer.apply_chat_template(chat, tools=[TOOL], tokenize=False))
    assert json.dumps(TOOL) in text and "Be brief." in text and "3 degrees" in text
    (refusal,) = trained(ours("plain"), *chat, tools=[TOOL])
    assert refusal.endswith("the template plain has no tools; chatml and llama3 have")


def test_tokens_that_a_template_of_ours_needs_are_asked_for(tmp_path):
    tokenizer = fixtures.make_tokenizer(None, eos_token="</s>")
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = state["added_tokens"]
    state["added_tokens"] = [token for token in tokens if token["content"] != "<|im_end|>"]
    write_json(tmp_path / "tokenizer.json", state)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    write_lines(tmp_path / "rows.jsonl", [{"messages": [USER, HI]}])
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    words = [f"data.train_files={tmp_path}/rows.jsonl", f"data.cache_dir={tmp_path}/cache"]
    words += [f"model.partial_pretrain={tmp_path}", "model.random_weights=true"]

    def template_of(name):
        config = load_config([*words, "data.val_ratio=0", f"data.chat_template={name}"])
        return prepare_data_alone(config).chat_template

    for name in ("llama3", "plain"):
        assert template_of(name) == ours(name)
    with pytest.raises(ConfigError, match=r"'model.new_tokens=\[\"<\|im_end\|>\"\]'"):
        template_of("chatml")
