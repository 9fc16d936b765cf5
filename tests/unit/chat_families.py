"""Small chat templates that write turns like well-known families, with the tokens at which a server
stops.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tokenizer_fixtures as fixtures
from tokenizers import AddedToken

from trainer.train.start.preflight import read_chat_template


@dataclass(frozen=True)
class Family:
    """A template, the tokens that end generation, and the features that its conversations may have."""

    template: str
    stops: tuple[str, ...]
    system: bool = True
    tools: bool = True
    thinking: str | None = None
    """The key of a message's reasoning."""
    text_arguments: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict)
    turn: Callable[[dict[str, Any]], str] | None = None
    """The expected text of a generated message, by hand, if renderings up to it do not begin with
    its prompt.
    """
    is_open: bool = False
    """True if the next message writes the token that ends a turn."""
    together: bool = False
    """True if the whole rendering of any conversation shows every turn as generation makes it."""

    def tokenizer(self):
        tokenizer = fixtures.make_tokenizer(self.template, eos_token=self.stops[0])
        tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in TOKENS])
        return tokenizer


TOKENS = (
    "<|eom_id|>", "<|python_tag|>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>",
    "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>",
)  # fmt: skip

CALLS = (
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>\n' + call.function.name + ' ' + "
    "call.function.arguments | tojson + '\n</tool_call>' }}{% endfor %}"
)
HEAD = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
CHATML = (
    HEAD
    + "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    + CALLS
    + "{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_TAGGED = (
    HEAD
    + "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% "
    "generation %}{{ m.content }}"
    + CALLS
    + "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3_TAGGED = fixtures.QWEN3.replace(
    "assistant\\n' }}", "assistant\\n' }}{% generation %}", 1
).replace(
    "{{- '<|im_end|>\\n' }}\n{%- elif message.role == 'tool'",
    "{{- '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}\n{%- elif message.role == 'tool'",
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + ('ipython' if m.role == "
    "'tool' else m.role) + '<|end_header_id|>\n\n' }}{% if tools and m.role == 'user' and "
    "loop.index0 <= 1 %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{{ m.content | "
    "trim }}{% for call in m.tool_calls or [] %}{{ '<|python_tag|>' + call.function | tojson }}{% "
    "endfor %}{{ '<|eom_id|>' if m.tool_calls else '<|eot_id|>' }}{% endfor %}{% if "
    "add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# The system text and the tools stand at the last user turn; there is no generation prompt.
MISTRAL = """{{- bos_token }}
{%- set ns = namespace(last=-1, system='') %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- if m.role == 'system' %}{%- set ns.system = m.content + '\\n\\n' %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + (ns.system if loop.index0 == ns.last else '') + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{{- m.content + '[TOOL_CALLS]' + m.tool_calls | map(attribute='function') | list | tojson + '</s>' }}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content + '</s>' }}
{%- endif %}
{%- endfor %}"""
# An ended conversation ends with another token than a turn; reasoning is written in the last turn
# alone.
GPT_OSS = """{%- macro call(m) %}
{{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|channel|>commentary json<|message|>' }}
{{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- endmacro %}
{{- '<|start|>system<|message|>You are a model.' }}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ '<|end|>' }}
{%- set ns = namespace(final=-1) %}
{%- for m in messages %}
{%- if m.role == 'assistant' and not m.tool_calls %}{% set ns.final = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- set said = m.thinking or m.content %}
{%- if said and loop.index0 > ns.final %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + said + '<|end|>' }}
{%- endif %}
{{- call(m) }}
{%- elif m.role == 'assistant' and loop.last and not add_generation_prompt %}
{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- elif m.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
# Tool arguments are joined as text.
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<｜Assistant｜>' + "
    "m.content }}{% for call in m.tool_calls or [] %}{{ '<｜tool▁call▁begin｜>' + call.function.name "
    "+ '\n' + call.function.arguments + '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜end▁of▁sentence｜>' "
    "}}{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% else %}{{ m.content }}{% endif "
    "%}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ '<|endoftext|>' }}{% endif %}"
)
# A turn has no end of its own: the next message begins with its role.
GLM = """{%- set ns = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.user = loop.index0 %}{% endif %}{% endfor %}
{%- for t in tools or [] %}{{- '<|system|>\\n' + t | tojson }}{%- endfor %}
{%- for m in messages %}
{%- set before = loop.previtem.role if not loop.first %}
{%- if m.role == 'assistant' %}
{{- '<|assistant|>' }}
{%- if loop.index0 > ns.user and m.reasoning_content %}{{- '\\n<think>' + m.reasoning_content + '</think>' }}
{%- else %}{{- '\\n<think></think>' }}{%- endif %}
{{- '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{- '\\n<tool_call>' + call.function | tojson + '</tool_call>' }}{%- endfor %}
{%- elif m.role == 'tool' %}
{{- ('' if before == 'tool' else '<|observation|>') + '\\n<tool_response>' + m.content }}
{{- '</tool_response>' }}
{%- elif m.role == 'user' %}{{- '<|user|>' + '\\n' + m.content }}
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
# A turn ends with a mark of the template and, directly behind it, the tokenizer's end token.
COMMAND = (
    "{{ bos_token }}{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}{% if m.role == "
    "'assistant' %}{{ '<|CHATBOT_TOKEN|><|START_RESPONSE|>' + m.content + "
    "'<|END_RESPONSE|><|END_OF_TURN_TOKEN|>' }}{% else %}{{ m.role + m.content + "
    "'<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}{% if add_generation_prompt "
    "%}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>{% endif %}"
)
COMMAND_TAGGED = COMMAND.replace(
    "{{ '<|CHATBOT_TOKEN|><|START_RESPONSE|>' + m.content + "
    "'<|END_RESPONSE|><|END_OF_TURN_TOKEN|>' }}",
    "{{ '<|CHATBOT_TOKEN|><|START_RESPONSE|>' }}{% generation %}"
    "{{ m.content + '<|END_RESPONSE|><|END_OF_TURN_TOKEN|>' }}{% endgeneration %}",
)


def gpt_oss_turn(message):
    call = message["tool_calls"][0]["function"] if message.get("tool_calls") else None
    said = message.get("thinking") or (message["content"] if call else "")
    text = f"<|channel|>analysis<|message|>{said}<|end|><|start|>assistant" if said else ""
    if call is None:
        return f"{text}<|channel|>final<|message|>{message['content']}<|return|>"
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return f"{text} to=functions.{call['name']}<|channel|>commentary json<|message|>{arguments}<|call|>"


IM_END = ("<|im_end|>",)
NO_THINKING = {"enable_thinking": False}
FAMILIES = {
    "our chatml": Family(str(read_chat_template("chatml")), IM_END, together=True),
    "our llama 3": Family(str(read_chat_template("llama3")), ("<|eot_id|>",), together=True),
    "our plain": Family(str(read_chat_template("plain")), ("</s>",), tools=False, together=True),
    "chatml": Family(CHATML, IM_END, together=True),
    "chatml with tags": Family(CHATML_TAGGED, IM_END, together=True),
    "llama 3": Family(LLAMA3, ("<|eot_id|>", "<|eom_id|>"), together=True),
    "llama 2": Family(fixtures.LLAMA2, ("</s>",), False, False, together=True),
    "mistral": Family(MISTRAL, ("</s>",)),
    "gemma": Family(fixtures.GEMMA, ("<end_of_turn>",), False, False, together=True),
    "qwen 3": Family(fixtures.QWEN3, IM_END, thinking="reasoning_content"),
    "qwen 3 with tags": Family(QWEN3_TAGGED, IM_END, thinking="reasoning_content"),
    "qwen 3 without thinking": Family(fixtures.QWEN3, IM_END, tools=False, kwargs=NO_THINKING),
    "gpt-oss": Family(GPT_OSS, ("<|return|>", "<|call|>"), thinking="thinking", turn=gpt_oss_turn),
    "deepseek": Family(DEEPSEEK, ("<｜end▁of▁sentence｜>",), text_arguments=True, together=True),
    "phi": Family(PHI, ("<|end|>",), tools=False, together=True),
    "glm": Family(GLM, ("<|user|>", "<|observation|>"), thinking="reasoning_content", is_open=True),
    "command": Family(COMMAND, ("<|END_OF_TURN_TOKEN|>",), tools=False, together=True),
    "command with tags": Family(
        COMMAND_TAGGED, ("<|END_OF_TURN_TOKEN|>",), tools=False, together=True
    ),
}
