"""conf/sft.yaml and the documentation say what the schema declares, and the code reads every key."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import source_rules as rules
from config_table import (
    PAGE,
    REPOSITORY,
    SHEET,
    dead_links,
    keys_named_in,
    missing_files,
    replace_table,
    sheet,
    table,
    with_tables,
    written,
)
from test_floors import python_files

from trainer.config import Config, TrainerConfig, known_keys
from trainer.config.keys import Check, group, key, keys_of, one_of
from trainer.run.compose import PARTS, load_config

README = REPOSITORY / "README.md"
PAGES = [README, REPOSITORY / "CONTRIBUTING.md", *sorted(PAGE.parent.glob("*.md"))]
OWNER_NAMES = {"fsdp_config": ("fsdp",)}
"""Names that code gives to a section besides its own."""


REWRITE = "run: python tests/architecture/config_table.py"


@dataclass(frozen=True)
class Small:
    """Few keys."""

    rate: float | None = key(1e-8, "a share | of all")


@dataclass(frozen=True)
class Whole:
    """All there is."""

    switch: str = key("off", f"how it is: {'on, ' * 30}off")
    small: Small = group(Small)


@dataclass(frozen=True)
class Outer:
    whole: Whole = group(Whole)


def dead_keys(keys: list[str], sources: list[str]) -> list[str]:
    """Keys that no source reads as `<section>.<key>` or `config.<key>`."""
    read = {attribute for source in sources for attribute in rules.attributes_read(source)}
    return [key for key in keys if not read & _spellings(key)]


def _spellings(key: str) -> set[str]:
    *_, section, name = key.split(".")
    return {f"{owner}.{name}" for owner in (section, "config", "_config", *OWNER_NAMES.get(section, ()))}


def unmentioned(meaning: str, choices: Iterable[str]) -> list[str]:
    return [choice for choice in choices if not re.search(rf"\b{choice}\b", meaning)]


def choices_of(checks: Iterable[Check]) -> tuple[str, ...]:
    """What a value may be, as the error says it that a wrong one gets."""
    problems = [check("no such choice") for check in checks if check.__qualname__.startswith(one_of.__name__)]
    return tuple(problems[0].removeprefix("must be one of ").partition(";")[0].split(", ")) if problems else ()


def test_the_file_says_what_the_schema_declares() -> None:
    assert SHEET.read_text(encoding="utf-8") == sheet(), REWRITE


def test_the_file_is_read_back_as_the_defaults_of_the_schema() -> None:
    default_dir = TrainerConfig(default_local_dir="checkpoints/sft/quickstart")
    assert load_config([]) == Config(trainer=default_dir)


def test_a_declaration_is_written_with_its_default_and_meaning() -> None:
    lines = sheet(Outer).split("\n\n", 1)[1].splitlines()
    assert lines[0] == f"{'whole:':<33}# all there is"
    assert lines[1].startswith(f"{'  switch: ' + repr('off'):<33}# how it is: on, on")
    assert lines[2].startswith(f"{'':<33}# on") and lines[2].endswith("off")
    assert lines[3:] == [f"{'  small:':<33}# few keys", f"{'    rate: 1.0e-08':<33}# a share | of all"]
    assert table(Outer).splitlines()[3] == r"| `whole.small.rate` | `1.0e-08` | a share \| of all |"


def test_every_key_has_a_meaning_that_names_every_choice() -> None:
    keys = keys_of(Config)
    assert [name for name, own in keys.items() if not own.metadata["meaning"]] == []
    choices = {name: PARTS.get(name) or choices_of(own.metadata["checks"]) for name, own in keys.items()}
    choices["model.enable_gradient_checkpointing"] = ("selective",)  # a bool needs no words
    assert len([name for name, allowed in choices.items() if allowed]) > 20
    assert {
        name: found for name, own in keys.items() if (found := unmentioned(own.metadata["meaning"], choices[name]))
    } == {}
    assert unmentioned("error | left (cut)", choices_of([one_of("error", "left", "righ")])) == ["righ"]


def test_no_key_is_dead() -> None:
    sources = [text for path, text in python_files("trainer").items() if path != "trainer/config/schema.py"]
    assert dead_keys(known_keys(), sources) == []


def test_a_dead_key_is_caught() -> None:
    keys = ["data.train_files", "model.compile", "model.fsdp_config.cpu_offload", "optim.lr", "trainer.seed"]
    first = "a = config.data.train_files\nb = re.compile('x')"
    second = "if fsdp.cpu_offload: lr = 1\nself._config.lr\ntrainer.seed = 3"
    assert dead_keys(keys, [first, second]) == ["model.compile", "trainer.seed"]


def test_the_table_of_the_documentation_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, REWRITE
    assert replace_table(page, table(Outer)) != page
    assert len(keys_named_in(page)) >= len(known_keys())


def test_the_page_shows_defaults_and_meanings_as_they_are() -> None:
    """A value in a table is copied from there: `|`, which separates cells, must not come out as another character."""
    rows = [re.split(r"(?<!\\)\|", line) for line in table(Config).splitlines()[2:]]
    shown = {cells[1].strip(" `"): [cell.strip().replace(r"\|", "|") for cell in cells[2:-1]] for cells in rows}
    declared = {name: [f"`{written(own)}`", own.metadata["meaning"]] for name, own in keys_of(Config).items()}
    assert shown == declared


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_names_only_keys_that_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.name == "coming_from.md":  # the other columns of its table hold other trainers' keys
        text = "\n".join(line.split("|")[1] if line.startswith("|") else line for line in text.splitlines())
    assert sorted(keys_named_in(text) - set(known_keys())) == []


def test_a_key_that_does_not_exist_is_caught() -> None:
    text = "set `data.train_batchsize=8`, see data.pt, `optim.*`, `python -m trainer.cli.plan` and trainer.tracking"
    assert keys_named_in(text) == {"data.train_batchsize"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_leads_only_to_files_that_exist(path: Path) -> None:
    assert dead_links(path.read_text(encoding="utf-8"), path.parent) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_names_only_files_that_exist(path: Path) -> None:
    assert missing_files(path.read_text(encoding="utf-8")) == []


def test_a_file_that_does_not_exist_is_caught() -> None:
    assert missing_files("see `trainer/none.py`, `trainer/loop/step.py`, `step.py`") == ["trainer/none.py"]


def test_a_dead_link_is_caught() -> None:
    text = "[a](docs/config.md) [b](docs/none.md#part) ![c](none.png) [d](https://x.y) [e](#part)"
    assert dead_links(text, REPOSITORY) == ["docs/none.md", "none.png"]
