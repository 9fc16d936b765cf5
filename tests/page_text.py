"""What a page says, and what is wrong with JSON by a schema: a few lines each, enough for the
reports.
"""

import re
from html.parser import HTMLParser
from typing import Any

TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}
VOID = {"meta", "br", "link", "img"}


class Page(HTMLParser):
    """`words`: the text outside of style sheets; `tags` with their attributes; every element is
    closed in order.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words, self.tags = "", list[tuple[str, dict[str, str | None]]]()
        self._open: list[str] = []
        self.feed(html.replace("<wbr>", ""))
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.words += f"{data} "


def numbers_in(text: str) -> set[str]:
    """Every word that holds a digit, without the marks around it."""
    return {word.strip("().,;:") for word in text.split() if re.search(r"\d", word)}


def schema_faults(value: Any, schema: dict[str, Any], place: str = "$") -> list[str]:
    """Where a value differs from a JSON schema of `type`, `const`, `enum`, `required`,
    `properties` and `items`.
    """
    if "const" in schema and value != schema["const"]:
        return [f"{place} is {value!r}, not {schema['const']!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{place} is {value!r}, none of {schema['enum']}"]
    if "type" in schema and not any(_is_of(value, name) for name in _as_list(schema["type"])):
        return [f"{place} is a {type(value).__name__}, not {schema['type']}"]
    faults = []
    if isinstance(value, dict):
        faults += [
            f"{place} lacks '{name}'" for name in schema.get("required", ()) if name not in value
        ]
        others = schema.get("additionalProperties", True)
        for name, inner in value.items():
            known = schema.get("properties", {}).get(name, others)
            if known is False:
                faults.append(f"{place} has an unknown '{name}'")
            elif isinstance(known, dict):
                faults += schema_faults(inner, known, f"{place}.{name}")
    if isinstance(value, list):
        for index, inner in enumerate(value):
            faults += schema_faults(inner, schema.get("items", {}), f"{place}[{index}]")
    return faults


def _is_of(value: Any, name: str) -> bool:
    if name == "null" or isinstance(value, bool):
        return value is None if name == "null" else name == "boolean"
    return isinstance(value, TYPES[name])


def _as_list(types: str | list[str]) -> list[str]:
    return [types] if isinstance(types, str) else types
