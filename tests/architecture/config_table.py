"""conf/sft.yaml and the table of docs/config.md, written from the declarations in
trainer/config/schema.py.

`python tests/architecture/config_table.py` rewrites both; test_config_keys.py fails while they
differ.
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.config import Config, SourceConfig, known_keys
from trainer.config.keys import declared, keys_of

REPOSITORY = Path(__file__).resolve().parents[2]
SHEET, PAGE = REPOSITORY / "conf/sft.yaml", REPOSITORY / "docs/config.md"
TABLES = {"configuration": Config, "sources": SourceConfig}
"""What stands between `<!-- NAME: start -->` and `<!-- NAME: end -->`: the keys of a class."""
HEAD = """\
# Every key, with its default. Override on the command line: bash run_sft.sh 8 data.max_length=4096 optim.lr=2e-5
# experiment=NAME loads conf/experiment/NAME.yaml over this file.
"""
COLUMN, WIDTH = 33, 120
"""Where a comment starts, and where a line ends."""
_NAMED = re.compile(r"(?<![\w/.])(?:data|model|optim|trainer)\.[a-z][a-z_.]*[a-z]")


def written(own: "Field[Any]") -> str:
    """The default, as in YAML, on one line."""
    value = own.default if own.default_factory is MISSING else own.default_factory()
    if value is MISSING:
        return "required"
    return (
        str(yaml.safe_dump(value, default_flow_style=True, width=1000))
        .removesuffix("\n...\n")
        .rstrip("\n")
    )


def sheet(cls: type = Config) -> str:
    """The text of conf/sft.yaml."""
    groups = ("\n".join(_lines(own.type, name, depth=0)) for name, own in declared(cls).items())
    return "\n\n".join([HEAD.rstrip(), *groups]) + "\n"


def _lines(cls: type, name: str, depth: int) -> Iterator[str]:
    indent = "  " * (depth + 1)
    yield from _commented(f"{'  ' * depth}{name}:", _as_comment(cls.__doc__ or ""))
    for name, own in declared(cls).items():
        if is_dataclass(own.type):
            yield from _lines(own.type, name, depth + 1)
        else:
            yield from _commented(f"{indent}{name}: {written(own)}", own.metadata["meaning"])


def _commented(text: str, meaning: str) -> Iterator[str]:
    """A line with its comment behind it, which goes on in lines of its own."""
    start = max(COLUMN, len(text) + 1)
    first, *more = textwrap.wrap(
        meaning, WIDTH - start - 2, break_long_words=False, break_on_hyphens=False
    )
    rest = textwrap.wrap(
        " ".join(more), WIDTH - COLUMN - 2, break_long_words=False, break_on_hyphens=False
    )
    yield f"{text:<{start}}# {first}"
    yield from (f"{'':<{COLUMN}}# {line}" for line in rest)


def _as_comment(docstring: str) -> str:
    return docstring[0].lower() + docstring[1:].rstrip(".")


def table(cls: type = Config) -> str:
    """The keys as a Markdown table."""
    rows = [
        f"| `{dotted}` | `{_in_table(written(own))}` | {_in_table(own.metadata['meaning'])} |"
        for dotted, own in keys_of(cls).items()
    ]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


def _in_table(text: str) -> str:
    """Escape the character that separates cells; Markdown takes the backslash away again, in
    code too.
    """
    return text.replace("|", r"\|")


def replace_table(page: str, table: str, name: str = "configuration") -> str:
    """The page with the table between its two marks made anew."""
    start, end = f"<!-- {name}: start -->", f"<!-- {name}: end -->"
    before, after = page.split(start)[0], page.split(end)[1]
    return f"{before}{start}\n{table}\n{end}{after}"


def with_tables(page: str) -> str:
    for name, cls in TABLES.items():
        page = replace_table(page, table(cls), name)
    return page


def keys_named_in(markdown: str) -> set[str]:
    """Every `section.key` a text mentions, but for what is only the name of a module; two are
    files.
    """
    keys = known_keys()
    return {name for name in _NAMED.findall(markdown) if name in keys or not _is_module(name)} - {
        "data.pt",
        "data.md",
    }


def _is_module(name: str) -> bool:
    path = REPOSITORY / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def dead_links(markdown: str, directory: Path) -> list[str]:
    """Files that a page beside them leads to and that do not exist."""
    targets = re.findall(r"\]\((?![a-z]+:|#)([^)#]+)", markdown)
    return [target for target in targets if not (directory / target).exists()]


def missing_files(markdown: str) -> list[str]:
    """Files of the project that a page names and that do not exist."""
    named = re.findall(
        r"`((?:trainer|tests|conf|benchmarks|docs|examples)/[\w./-]*\.\w+)`", markdown
    )
    return [name for name in named if not (REPOSITORY / name).exists()]


if __name__ == "__main__":
    SHEET.write_text(sheet())
    PAGE.write_text(with_tables(PAGE.read_text()))
