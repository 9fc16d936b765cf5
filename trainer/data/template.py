"""Renders a tokenizer's chat template, and analyses it with short test conversations."""

import json
import re
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from trainer.data.formats import Message
from trainer.data.rows import UnusableError
from trainer.data.tokens import Span, require_unicode
from trainer.errors import DataError

SEQUENCE_BOUNDS = ("<s>", "</s>")
"""Tokens for the beginning and end of a sequence. They look like a pair of tags, such as <think> and
</think>, but are not.
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
CALL = {
    "id": "call00001",  # some templates require ids of nine characters
    "type": "function",
    "function": {"name": "weather", "arguments": ARGUMENTS},
}
TOOL: list[Message] = [
    {"role": "user", "content": "The weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": "Sunny."},
    {"role": "assistant", "content": "It is sunny."},
]


class TokenTexts:
    """The texts of added tokens, for searches in renderings and conversations."""

    def __init__(self, texts: set[str]) -> None:
        own = {text for text in texts if text.strip()}  # some vocabularies add runs of spaces
        self._longest_first = tuple(sorted(own, key=len, reverse=True))
        self._any = re.compile("|".join(map(re.escape, self._longest_first)) or r"(?!)")

    def last_in(self, text: str) -> str | None:
        return next(filter(text.endswith, self._longest_first), None)

    def first_in(self, text: str, position: int) -> str | None:
        found = self._any.match(text, position)
        return found[0] if found else None

    def positions(self, text: str) -> list[int]:
        return [match.start() for match in self._any.finditer(text)]

    def require_none(self, named: dict[str, Any]) -> None:
        """Raise `UnusableError` if a value contains one of the tokens. `named` maps names for the
        message to nested values.
        """
        for name, value in named.items():
            if found := self._any.search("\0".join(_texts(value))):
                raise UnusableError(
                    f"special token in content: {name} contains {found[0]!r}; remove it, or set "
                    f"data.special_in_content=parse to train it as that token"
                )


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a nested value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


class ChatTemplate:
    """A jinja template and the variables for rendering it."""

    def __init__(
        self,
        source: str,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: dict[str, Any],
        *,
        special: TokenTexts,
    ) -> None:
        self.source = source
        self.has_generation_tags = GENERATION_TAG.search(source) is not None
        self.words = frozenset(re.findall(r"\w+", source))
        self._variables = {**tokenizer.special_tokens_map, **template_kwargs}
        self._added = {token.content for token in tokenizer.added_tokens_decoder.values()}
        self.added = TokenTexts(self._added)
        self.special = special
        self._end = str(tokenizer.eos_token or "")
        self._bounds = {self._end, str(tokenizer.bos_token or "")} - {""}

    def render(
        self,
        messages: list[Message],
        tools: Tools,
        *,
        prompt: bool = False,
    ) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the spans inside generation tags.

        With `prompt`, the text ends with the generation prompt, and there are no spans. Raises
        `UnusableError`, and `DataError` for a broken template.
        """
        has_spans = self.has_generation_tags and not prompt
        try:
            rendered: Any = render_jinja_template(  # returns two lists, but is annotated as str
                conversations=[messages],
                tools=tools,  # type: ignore[arg-type]  # list is invariant
                chat_template=self.source,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=has_spans,
                **self._variables,
            )
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"the chat template has a syntax error in line {error.lineno}: {error}.\n"
                f"Fix: repair it, or set data.chat_template to a different one"
            ) from error
        except Exception as error:  # templates run arbitrary expressions on the row
            reason = f"{type(error).__name__}: {error}"
            roles = (message["role"] for message in messages)
            if next((role for role in roles if role != "system"), "assistant") == "assistant":
                reason += (
                    "; the conversation begins with an assistant turn, which many templates "
                    "reject: start it with a user message, or choose another template "
                    "(data.chat_template)"
                )
            raise UnusableError(
                f"chat template: cannot render the conversation: {reason}"
            ) from error
        (text, *_), spans = rendered
        require_unicode(text)
        return text, spans[0] if has_spans else []

    def _try(self, messages: list[Message]) -> str:
        """Return the text of a test conversation, or '' if the template cannot render it."""
        try:
            return self.render(messages, None)[0]
        except UnusableError:
            return ""

    @cached_property
    def with_arguments(self) -> Callable[[Message], Message]:
        """A function that converts a message for this template: the arguments of tool calls become
        objects or JSON text.

        Servers pass objects to templates, and most templates would quote JSON text a second time. A
        template that fails on objects, or prints them as Python does, was written for JSON text. If
        a template, such as DeepSeek-V3's first one, omits calls next to an empty text, the empty
        text becomes null.
        """
        for empty in ("", None):
            for change in (_as_object, _as_text):
                convert = partial(_with_arguments, change, empty)
                written = self._try(list(map(convert, TOOL)))
                if ARGUMENTS["city"] in written and repr(ARGUMENTS) not in written:
                    return convert
        return partial(_with_arguments, _as_object, "")

    @cached_property
    def _tool_probe(self) -> list[Message]:
        return list(map(self.with_arguments, TOOL))

    def end_after(self, message: Message) -> str:
        """Return the role token of the next message if nothing else marks the end of an assistant
        message, as in GLM's template; '' for all other templates. Generation stops at this token.
        """
        return self._next_roles[bool(message.get("tool_calls"))]

    @cached_property
    def _next_roles(self) -> tuple[str, str]:
        """The tokens that follow an answer, and those that follow a tool call."""
        return self._next_role(PLAIN[:3]), self._next_role(self._tool_probe[:3])

    def _next_role(self, probe: list[Message]) -> str:
        head = self._try(probe[:-1])
        longer = self._try(probe)
        is_whole = head.endswith((*self._marks_in(head), *self._bounds))
        if is_whole or not head or head != head.rstrip() or not longer.startswith(head):
            return ""
        marks = (token for token in self._marks_in(longer) if longer.startswith(token, len(head)))
        return max(marks, key=len, default="")

    @cached_property
    def structural_tokens(self) -> TokenTexts:
        """Added tokens that the template writes around turns, and the tokenizer's beginning and end
        tokens. Tokens inside a turn do not count, such as paired tags (<think>) and the tokens
        around tool calls.
        """
        # without a system message, some templates write a long default that explains tokens
        for system in (SYSTEM, []):
            plain, called, answered = (
                self._try(system + probe)
                for probe in (PLAIN, self._tool_probe[:2], self._tool_probe)
            )
            if plain:
                break
        around = self._marks_in(plain)
        if called and answered:
            calls = self._marks_in(called)
            ends = {token for token in calls if called.rstrip().endswith(token)}
            around |= self._marks_in(answered) - calls | ends
        return TokenTexts(around | self._bounds & self._added)

    @cached_property
    def closing(self) -> str:
        """The text that the template adds after the end token of a conversation's last turn, which
        the model never generates.

        If two tokens end every turn, and the second is the tokenizer's end token (Command:
        `<|END_RESPONSE|><|END_OF_TURN_TOKEN|>`), a turn ends with the second. The model must learn
        to write it, because a server may stop only at this token.
        """
        ended = self._try(PLAIN[:2])
        continued = self._try(PLAIN[:3])
        answer = ended.rfind(PLAIN[1]["content"])
        places = [(ended.find(token, answer), token) for token in self._marks_in(ended)]
        end = min((at + len(token) for at, token in places if at >= 0), default=len(ended))
        with_end = ended[:end] + self._end
        if continued.startswith(with_end) and ended.startswith(with_end):
            end = len(with_end)
        return ended[end:] if ended[end:].strip() and continued.startswith(ended[:end]) else ""

    def _marks_in(self, text: str) -> set[str]:
        return {token for token in self._added if token in text and self._is_mark(token)}

    def _is_mark(self, token: str) -> bool:
        """Return False for a tag of a pair, and for a plain word, which some vocabularies add as a
        token.
        """
        partner = token.replace("</", "<", 1)
        if partner == token:
            partner = token.replace("<", "</", 1)
        is_paired = token[0] == "<" and partner in self._added and token not in SEQUENCE_BOUNDS
        word = token.strip()
        return bool(word) and not word.isalnum() and not is_paired


def _as_object(arguments: Any) -> object:
    try:
        found = json.loads(arguments or "{}")  # servers read empty arguments as an empty object
    except (TypeError, ValueError):  # not text, or not JSON
        return arguments
    return found if isinstance(found, dict) else arguments


def _as_text(arguments: object) -> object:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _with_arguments(
    change: Callable[[object], object], empty: str | None, message: Message
) -> Message:
    """Apply `change` to the arguments of a message's tool calls. If it has tool calls but no text,
    `empty` becomes its content.
    """
    if not message.get("tool_calls"):
        return message
    calls = [with_function(call, "arguments", change) for call in message["tool_calls"]]
    return {**message, "content": message["content"] or empty, "tool_calls": calls}


def with_function(
    call: dict[str, Any], key: str, change: Callable[[object], object]
) -> dict[str, Any]:
    """Apply `change` to one value of a tool call's function. The call may itself be the
    function.
    """
    function = call.get("function", call)
    if not isinstance(function, dict) or key not in function:
        return call
    function = {**function, key: change(function[key])}
    return {**call, "function": function} if "function" in call else function
