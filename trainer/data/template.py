"""A tokenizer's chat template: rendered, and asked once by probe conversations how it wants and
writes things.
"""

import json
import re
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from trainer.data.conversation import Message
from trainer.data.rows import UnusableError
from trainer.data.tokens import Span, require_unicode
from trainer.errors import DataError

SEQUENCE_BOUNDS = ("<s>", "</s>")
"""A beginning and an end, whatever the tokenizer's own are; unlike <think> and </think> no pair
around a part.
"""
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
Tools = list[dict[Any, Any]] | None
ARGUMENTS = {"city": "Paris"}
SYSTEM = [{"role": "system", "content": "Be brief."}]
PLAIN = [
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Bye."},
]


def _tool_probe() -> list[Message]:
    """A call, its result and an answer; some templates insist on ids of nine characters."""
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "weather", "arguments": ARGUMENTS},
    }
    return [
        {"role": "user", "content": "The weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": "Sunny."},
        {"role": "assistant", "content": "It is sunny."},
    ]


class ChatTemplate:
    """One jinja template with the variables it is rendered with."""

    def __init__(
        self, source: str, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]
    ) -> None:
        self.source = source
        self.has_generation_tags = GENERATION_TAG.search(source) is not None
        self.words = frozenset(re.findall(r"\w+", source))
        self._variables = {**tokenizer.special_tokens_map, **template_kwargs}
        self._added = {token.content for token in tokenizer.added_tokens_decoder.values()}
        self._ends = {str(token) for token in (tokenizer.bos_token, tokenizer.eos_token) if token}
        self._end = str(tokenizer.eos_token or "")

    def render(
        self, messages: list[Message], tools: Tools, *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """The text, and the characters that generation tags enclose; none of a `prompt`, which ends
        where the assistant begins. Raises `UnusableError`, and `DataError` for a template that is
        none.
        """
        has_spans = self.has_generation_tags and not prompt
        try:
            rendered: Any = render_jinja_template(  # annotated as str, returns two lists
                conversations=[messages],
                tools=tools,  # type: ignore[arg-type]  # list is invariant
                chat_template=self.source,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=has_spans,
                **self._variables,
            )
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"the chat template is broken in line {error.lineno}: {error}; see "
                f"data.chat_template"
            ) from error
        except Exception as error:  # templates run arbitrary expressions on the row
            raise UnusableError(
                f"chat template: refuses the conversation: {type(error).__name__}: {error}"
            ) from error
        (text, *_), spans = rendered
        require_unicode(text)
        return text, spans[0] if has_spans else []

    def _try(self, messages: list[Message]) -> str | None:
        try:
            return self.render(messages, None)[0]
        except UnusableError:
            return None

    @cached_property
    def with_arguments(self) -> Callable[[Message], Message]:
        """How messages are handed over: tool arguments as objects, or as JSON text to a template
        that needs text.

        Servers hand templates objects, and a template would quote JSON text a second time. One that
        refuses objects, or prints them as Python does, was written for text. And one that writes no
        calls beside an empty text, as DeepSeek-V3's first did, gets none.
        """
        for empty in ("", None):
            for change in (_as_object, _as_text):
                handed_over = partial(_with_arguments, change, empty)
                written = self._try([handed_over(message) for message in _tool_probe()])
                if (
                    written is not None
                    and ARGUMENTS["city"] in written
                    and repr(ARGUMENTS) not in written
                ):
                    return handed_over
        return partial(_with_arguments, _as_object, "")

    def end_behind(self, message: Message) -> str:
        """What ends an assistant's message where a template leaves that to the next one's role, as
        GLM does: generation stops when the model writes that token. Empty for all other templates.
        """
        return self._next_roles[bool(message.get("tool_calls"))]

    @cached_property
    def _next_roles(self) -> tuple[str, str]:
        tool = [self.with_arguments(message) for message in _tool_probe()]
        return self._next_role(PLAIN[:3]), self._next_role(tool[:3])

    def _next_role(self, probe: list[Message]) -> str:
        """The token that is found where the last message but one ends without one of its own."""
        head, longer = self._try(probe[:-1]), self._try(probe)
        if head is None or longer is None or head != head.rstrip() or not longer.startswith(head):
            return ""
        if head.endswith((*self._marks_in(head), *self._ends)):
            return ""
        marks = (token for token in self._marks_in(longer) if longer.startswith(token, len(head)))
        return max(marks, key=len, default="")

    @cached_property
    def structural_tokens(self) -> frozenset[str]:
        """Added tokens that the template writes around turns, and the tokenizer's own beginning and
        end.

        Not those inside a turn: around tool calls, and tags in pairs such as <think> and </think>.
        """
        tool = [self.with_arguments(message) for message in _tool_probe()]
        # without one, some templates write a default full of explanations
        for system in (SYSTEM, []):
            plain, called, answered = (
                self._try(system + probe) for probe in (PLAIN, tool[:2], tool)
            )
            if plain is not None:
                break
        around = self._marks_in(plain or "")
        if called is not None and answered is not None:
            calls = self._marks_in(called)
            ends = {token for token in calls if called.rstrip().endswith(token)}
            around |= self._marks_in(answered) - calls | ends
        return frozenset(around | self._ends & self._added)

    @cached_property
    def closing(self) -> str:
        """What the end of a conversation adds behind the end token of its last turn: nothing
        generates that.

        Where every turn, also one that others follow, has the tokenizer's own end token directly
        behind another mark (Command: `<|END_RESPONSE|><|END_OF_TURN_TOKEN|>`), that token is the
        turn's end: the model must learn to write it, because a server may stop there alone.
        """
        ended, continued = self._try(PLAIN[:2]) or "", self._try(PLAIN[:3]) or ""
        answer = ended.rfind(PLAIN[1]["content"])
        ends = [
            at + len(token)
            for token in self._marks_in(ended)
            if (at := ended.find(token, answer)) >= 0
        ]
        end = min(ends, default=len(ended))
        if (
            self._end
            and continued.startswith(ended[:end] + self._end)
            and ended.startswith(self._end, end)
        ):
            end += len(self._end)
        return ended[end:] if ended[end:].strip() and continued.startswith(ended[:end]) else ""

    def _marks_in(self, text: str) -> set[str]:
        return {token for token in self._added if token in text and self._is_mark(token)}

    def _is_mark(self, token: str) -> bool:
        # some vocabularies add words and runs of spaces
        is_ordinary = not token.strip() or token.strip().isalnum()
        return not is_ordinary and not self._is_paired(token)

    def _is_paired(self, token: str) -> bool:
        partner = (
            token.replace("</", "<", 1) if token.startswith("</") else token.replace("<", "</", 1)
        )
        return (
            token not in SEQUENCE_BOUNDS
            and token[0] == "<"
            and partner != token
            and partner in self._added
        )


def _as_object(arguments: object) -> object:
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def _as_text(arguments: object) -> object:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _with_arguments(
    change: Callable[[object], object], empty: str | None, message: Message
) -> Message:
    """`empty`: the content of a message that has calls alone."""
    if not message.get("tool_calls"):
        return message
    calls = [with_function(call, "arguments", change) for call in message["tool_calls"]]
    return {**message, "content": message["content"] or empty, "tool_calls": calls}


def with_function(
    call: dict[str, Any], key: str, change: Callable[[object], object]
) -> dict[str, Any]:
    """A tool call with one value of its function changed; the function may be the call itself."""
    function = call.get("function", call)
    if not isinstance(function, dict) or key not in function:
        return call
    function = {**function, key: change(function[key])}
    return {**call, "function": function} if "function" in call else function
