"""The configuration table of docs/config.md, made from the comments of conf/sft.yaml.

`python tests/architecture/config_table.py` rewrites it; test_config_keys.py fails while the two differ.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from trainer.config import known_keys

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs/config.md"
START, END = "<!-- configuration: start -->", "<!-- configuration: end -->"
_LINE = re.compile(r"^(?P<indent> *)(?P<name>[a-z_]+):(?: +(?P<value>[^#\n]*?))?(?: *# (?P<comment>.*))?$")
_NAMED = re.compile(r"(?<![\w/.])(?:data|model|optim|trainer)\.[a-z][a-z_.]*[a-z]")
_CONTINUED = re.compile(r"^ +# (?P<comment>.*)$")


@dataclass(frozen=True)
class Key:
    """One leaf of conf/sft.yaml as it is written there."""

    dotted: str
    default: str
    comment: str


def read_keys(text: str) -> list[Key]:
    """All leaf keys with their default and comment; a comment may go on in lines of its own below its key."""
    keys: list[Key] = []
    groups: list[str] = []
    for line in text.splitlines():
        if keys and (more := _CONTINUED.match(line)):
            last = keys.pop()
            keys.append(Key(last.dotted, last.default, f"{last.comment} {more['comment']}".strip()))
        elif found := _LINE.match(line):
            groups = [*groups[: len(found["indent"]) // 2], found["name"]]
            if found["value"]:
                keys.append(Key(".".join(groups), found["value"], found["comment"] or ""))
    return keys


def keys_named_in(markdown: str) -> set[str]:
    """Every `section.key` a text mentions, but for what is only the name of a module; `data.pt` is a file."""
    keys = known_keys()
    return {name for name in _NAMED.findall(markdown) if name in keys or not _is_module(name)} - {"data.pt"}


def _is_module(name: str) -> bool:
    path = REPOSITORY / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def dead_links(markdown: str, directory: Path) -> list[str]:
    """Files that a page beside them leads to and that do not exist."""
    targets = re.findall(r"\]\((?![a-z]+:|#)([^)#]+)", markdown)
    return [target for target in targets if not (directory / target).exists()]


def table(text: str) -> str:
    """The keys of one configuration file as a Markdown table."""
    rows = [f"| `{key.dotted}` | `{key.default}` | {key.comment.replace('|', '/')} |" for key in read_keys(text)]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


def replace_table(page: str, text: str) -> str:
    """The page with the table between its two marks made anew."""
    before, after = page.split(START)[0], page.split(END)[1]
    return f"{before}{START}\n{table(text)}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text(), (REPOSITORY / "conf/sft.yaml").read_text()))
