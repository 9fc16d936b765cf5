"""conf/sft.yaml, conf/sft.schema.json and the table of docs/config.md, written from the
declarations in trainer/config/schema.py.

`python tests/architecture/config_table.py` rewrites them; test_config_keys.py fails while they
differ.
"""

import json
import re
import textwrap
import types
from dataclasses import MISSING, is_dataclass
from pathlib import Path
from typing import Union, get_args, get_origin, get_type_hints

import yaml

from trainer.config import Config, OptimGroup, SourceConfig, keys_of
from trainer.config.keys import declared

REPOSITORY = Path(__file__).resolve().parents[2]
SHEET = REPOSITORY / "conf/sft.yaml"
PAGE = REPOSITORY / "docs/config.md"
SCHEMA = REPOSITORY / "conf/sft.schema.json"
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
INTERPOLATION = {"type": "string", "pattern": r"\$\{"}
"""Every key may refer to another key: `${trainer.seed}`."""
TABLES = {"configuration": Config, "sources": SourceConfig, "groups": OptimGroup}
"""The text between `<!-- NAME: start -->` and `<!-- NAME: end -->`: the keys of a class."""
HEAD = """\
# Every key, with its default. Override on the command line: bash run_sft.sh 8 data.max_length=4096 optim.lr=2e-5
# experiment=NAME loads conf/experiment/NAME.yaml over this file.
"""
COLUMN = 33
WIDTH = 120
"""The columns at which a comment starts and a line ends."""
_NAMED = re.compile(r"(?<![\w/.])(?:data|model|optim|trainer)\.[a-z][a-z0-9_.]*[a-z]")


def written(own):
    """Return the default as YAML on one line."""
    value = own.default if own.default_factory is MISSING else own.default_factory()
    if value is MISSING:
        return "required"
    return (
        str(yaml.safe_dump(value, default_flow_style=True, width=1000))
        .removesuffix("\n...\n")
        .rstrip("\n")
    )


def sheet():
    """Return the text of conf/sft.yaml."""
    groups = ("\n".join(_lines(own.type, name, depth=0)) for name, own in declared(Config).items())
    return "\n\n".join([HEAD.rstrip(), *groups]) + "\n"


def _lines(cls, name, depth):
    indent = "  " * (depth + 1)
    yield from _commented(f"{'  ' * depth}{name}:", _as_comment(cls.__doc__ or ""))
    for name, own in declared(cls).items():
        if is_dataclass(own.type):
            yield from _lines(own.type, name, depth + 1)
        else:
            yield from _commented(f"{indent}{name}: {written(own)}", own.metadata["meaning"])


def schema_text():
    """Return the JSON schema of a recipe, for editors."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "fsdp-sft recipe"}
    return json.dumps(head | _schema_of(Config), indent=1, ensure_ascii=False) + "\n"


def _schema_of(cls):
    hints = get_type_hints(cls)
    properties = {}
    for name, own in declared(cls).items():
        if is_dataclass(own.type):
            properties[name] = _schema_of(own.type)
        else:
            allowed = [a for check in own.metadata["checks"] for a in getattr(check, "allowed", ())]
            kinds = _kinds_of(hints[own.name], allowed)
            properties[name] = {"description": own.metadata["meaning"], "anyOf": kinds}
            properties[name]["anyOf"].append(INTERPOLATION)
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _kinds_of(hint, allowed):
    """Return the JSON schemas of the values that a key of this Python type takes."""
    origin = get_origin(hint)
    inner = get_args(hint)
    if origin in (Union, types.UnionType):
        return [kind for each in inner for kind in _kinds_of(each, allowed)]
    if is_dataclass(hint):
        return [_schema_of(hint)]
    if origin in (list, tuple):
        item = _kinds_of(inner[0], allowed)
        # A list of one may be written as its value.
        return [{"type": "array", "items": {"anyOf": item}}, *item]
    if hint is str and allowed:
        booleans = [text == "true" for text in allowed if text in ("true", "false")]
        return [{"enum": [*allowed, *booleans]}]
    return [{"type": JSON_TYPES[hint]}] if hint in JSON_TYPES else [{}]


def _commented(text, meaning):
    """Return a line followed by its comment, which continues on separate lines if necessary."""
    start = max(COLUMN, len(text) + 1)
    first, *more = textwrap.wrap(
        meaning, WIDTH - start - 2, break_long_words=False, break_on_hyphens=False
    )
    rest = textwrap.wrap(
        " ".join(more), WIDTH - COLUMN - 2, break_long_words=False, break_on_hyphens=False
    )
    yield f"{text:<{start}}# {first}"
    yield from (f"{'':<{COLUMN}}# {line}" for line in rest)


def _as_comment(docstring):
    return docstring[0].lower() + docstring[1:].rstrip(".")


def table(cls):
    """Return the keys as a Markdown table."""
    rows = [
        f"| `{dotted}` | `{_in_table(written(own))}` | {_in_table(own.metadata['meaning'])} |"
        for dotted, own in keys_of(cls).items()
    ]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


def _in_table(text):
    """Escape the character that separates cells. Markdown removes the backslash again, even in
    code.
    """
    return text.replace("|", r"\|")


def with_tables(page):
    """Return the page with new tables between the markers."""
    for name, cls in TABLES.items():
        start = f"<!-- {name}: start -->"
        end = f"<!-- {name}: end -->"
        before = page.split(start)[0]
        after = page.split(end)[1]
        page = f"{before}{start}\n{table(cls)}\n{end}{after}"
    return page


def keys_named_in(markdown):
    """Return every `section.key` in a text, except for names of modules; two of them are files."""
    keys = keys_of(Config)
    return {name for name in _NAMED.findall(markdown) if name in keys or not _is_module(name)} - {
        "data.pt",
        "data.md",
    }


def _is_module(name):
    path = REPOSITORY / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


if __name__ == "__main__":
    SHEET.write_text(sheet())
    SCHEMA.write_text(schema_text())
    PAGE.write_text(with_tables(PAGE.read_text()))
