"""What a chat template writes around the texts of a conversation, found once and filled in for all that are alike.

The template is run on stand-ins for the texts. They can be joined, trimmed, written, and asked what they begin with,
end with, hold or equal, which they deny; texts of which that is not true get no outline filled. All else that jinja
could do with a text ends the attempt, as does a construct that could look into a text once it is written. So whatever
the texts say, the template takes the same way and writes the same around them.
"""

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import soft_str

from trainer.data.tokens import Span

MARK = "\U0010ffff"  # it will never be a character
BEGIN, END = "[", "]"
PLACE = re.compile(rf"{MARK}([0-9]+|\{BEGIN}|\{END}){MARK}")
"""Stands for a text by its number, and for the bounds of what generation tags enclose."""
NODES: tuple[type[nodes.Node], ...] = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Break, nodes.Continue, nodes.Assign),
    *(nodes.NSRef, nodes.Const, nodes.Getattr, nodes.Slice, nodes.Keyword),
    *(nodes.Add, nodes.Sub, nodes.Neg, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.CondExpr),
    *(nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair),
)
FILTERS = ("trim", "length", "first", "last", "list", "tojson", "capitalize", "lower", "upper")
TESTS = ("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "true", "false", "boolean")
FUNCTIONS = ("raise_exception", "namespace", "range")
TRIMS, QUESTIONS = ("strip", "lstrip", "rstrip"), ("startswith", "endswith")
METHODS = (*TRIMS, *QUESTIONS, "split", "get", "items")


class _GenerationTags(Extension):
    """`{% generation %} … {% endgeneration %}`: what stands between, with a mark on each side."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        begin, end = (nodes.Output([nodes.TemplateData(f"{MARK}{bound}{MARK}")]) for bound in (BEGIN, END))
        return [begin, *parser.parse_statements(("name:endgeneration",), drop_needle=True), end]


# transformers' own makes plain data of all that it hands to a template, so of stand-ins, too
ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTags, "jinja2.ext.loopcontrols"]
)
ENVIRONMENT.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
ENVIRONMENT.globals["raise_exception"] = lambda _: _refuse()


def blind_template(source: str) -> Template | None:
    """The template, if it has only what a stand-in can tell apart from looking into the text it stands for."""
    try:
        tree = ENVIRONMENT.parse(source)
    except TemplateSyntaxError:  # broken, or of more than was known here
        return None
    probe: Any = _Text("")  # which markupsafe's C code once made a text of
    is_blind = MARK not in source and soft_str(probe) is probe and all(map(_is_blind, tree.find_all(nodes.Node)))
    return ENVIRONMENT.from_string(source) if is_blind else None


def _is_blind(node: nodes.Node) -> bool:
    match node:
        case nodes.Filter(name=name):
            return name in FILTERS
        case nodes.Test(name=name):
            return name in TESTS
        case nodes.Name(name=name):
            return node.ctx == "load" or name not in FUNCTIONS
        case nodes.Call(node=nodes.Name(name=name)):
            return name in FUNCTIONS
        case nodes.Call(node=nodes.Getattr(attr=name)):
            return name in METHODS
        case (
            nodes.Getitem(arg=nodes.BinExpr(right=nodes.Const(value=value))) | nodes.Mod(right=nodes.Const(value=value))
        ):
            return isinstance(value, int)  # as in messages[loop.index0 - 1]
        case nodes.Getitem(node=value, arg=argument):
            return isinstance(value, nodes.Dict) or isinstance(argument, nodes.Const | nodes.Neg | nodes.Slice)
    return isinstance(node, NODES)


@dataclass(frozen=True)
class Outline:
    """A rendering in parts, of which some are the texts of messages."""

    parts: list[str]
    places: list[tuple[int, int, Callable[..., str], str | None]]
    """Of texts: the part, the message, and what trims it of which characters."""
    denied: set[tuple[int, Callable[[str, str], bool], str]]
    """What was asked of a message's text."""
    spans: list[Span]
    """Bounds of what generation tags enclose, counted in parts."""

    def filled(self, texts: Sequence[str]) -> tuple[str, list[Span]] | None:
        """The rendering with these texts, one for each message, and the characters that generation tags enclose. None
        where a text cannot deny what was asked.
        """
        for message, is_so, other in self.denied:
            if is_so(texts[message], other):
                return None
        parts = self.parts.copy()
        for part, message, trim, characters in self.places:
            parts[part] = trim(texts[message], characters)
        ends = [0, *itertools.accumulate(map(len, parts))] if self.spans else []
        return "".join(parts), [(ends[first], ends[end]) for first, end in self.spans]


def outline(template: Template, roles: Sequence[str], **variables: Any) -> Outline | None:
    """How a blind template writes messages of these roles whose texts are not blank; None where it looks into one."""
    asked = _Asked()
    messages = [{"role": role, "content": asked.text(i)} for i, role in enumerate(roles)]
    try:
        written = template.render(messages=messages, tools=None, documents=None, **variables)
    except (_LookedIntoError, Exception):  # templates run arbitrary expressions: on the texts themselves they may do
        return None
    parts, places, begins, spans = [], [], [], []
    for number, part in enumerate(PLACE.split(written)):
        if number % 2 == 0:
            parts.append(part)
        elif part == BEGIN:
            begins.append(len(parts))
        elif part == END:
            spans.append((begins.pop(), len(parts)))
        else:
            places.append((len(parts), *asked.places[int(part)]))
            parts.append("")
    return Outline(parts, places, asked.denied, spans)


class _LookedIntoError(BaseException):
    """A template asks what a text says. Some of jinja's tests take any `Exception` for an answer."""


def _refuse(*_: object) -> NoReturn:
    raise _LookedIntoError


@dataclass(frozen=True)
class _Asked:
    """What a template does with texts."""

    places: list[tuple[int, Callable[..., str], str | None]] = field(default_factory=list)
    denied: set[tuple[int, Callable[..., bool], str]] = field(default_factory=set)

    def text(self, message: int) -> "_Text":
        """Of a message."""
        return _Text(self._mark(message, _untrimmed, None), partial(self._trim, message), partial(self._deny, message))

    def _mark(self, *place: Any) -> str:
        self.places.append(place)
        return f"{MARK}{len(self.places) - 1}{MARK}"

    def _trim(self, message: int, trim: Callable[..., str], characters: str | None = None) -> "_Text":
        if characters is not None and (type(characters) is not str or characters.strip()):
            _refuse()  # what is left may be empty
        return _Text(self._mark(message, trim, characters))

    def _deny(self, message: int, is_so: Callable[..., bool], other: object) -> bool:
        self.denied.add((message, is_so, other if type(other) is str else _refuse()))
        return False


class _Text:
    """Stands for the text of a message, which is not blank, or with `written` alone for what became of it."""

    __class__ = property(lambda _: str)  # what isinstance sees; to C it is no text

    def __init__(
        self, written: str, trim: Callable[..., "_Text"] = _refuse, deny: Callable[..., bool] = _refuse
    ) -> None:
        self._written, self._trim, self._deny = written, trim, deny

    def __str__(self) -> str:
        return self._written

    def __bool__(self) -> bool:
        return True

    def __add__(self, other: object) -> "_Text":
        return _Text(self._written + _plain(other))

    def __radd__(self, other: object) -> "_Text":
        return _Text(_plain(other) + self._written)

    def __getattr__(self, name: str) -> Any:
        how = self._trim if name in TRIMS else self._deny if name in QUESTIONS else _refuse()
        return partial(how, getattr(str, name))

    def __contains__(self, other: object) -> bool:
        return self._deny(str.__contains__, other)

    def __eq__(self, other: object) -> bool:
        return self._deny(str.__eq__, other)

    __iter__ = __len__ = __getitem__ = __call__ = __hash__ = __repr__ = __format__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __int__ = __float__ = __index__ = _refuse


def _plain(value: object) -> str:
    return str(value) if type(value) in (str, _Text) else _refuse()


def _untrimmed(text: str, _: None) -> str:
    return text
