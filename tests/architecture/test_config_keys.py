"""conf/sft.yaml, the schema, the code and the documentation name the same keys."""

from pathlib import Path

import pytest
import source_rules as rules
from config_table import PAGE, REPOSITORY, dead_links, keys_named_in, read_keys, replace_table
from test_floors import python_files

from trainer.config import known_keys

README = REPOSITORY / "README.md"
OWNER_NAMES = {"fsdp_config": ("fsdp",)}
"""Names that code gives to a section besides its own."""


@pytest.fixture(scope="module")
def yaml_text() -> str:
    return (REPOSITORY / "conf/sft.yaml").read_text(encoding="utf-8")


def dead_keys(keys: list[str], sources: list[str]) -> list[str]:
    """Keys that no source reads as `<section>.<key>` or `config.<key>`."""
    read = {attribute for source in sources for attribute in rules.attributes_read(source)}
    return [key for key in keys if not read & _spellings(key)]


def _spellings(key: str) -> set[str]:
    *_, section, name = key.split(".")
    return {f"{owner}.{name}" for owner in (section, "config", "_config", *OWNER_NAMES.get(section, ()))}


def test_the_file_and_the_schema_hold_the_same_keys_in_the_same_order(yaml_text: str) -> None:
    assert [key.dotted for key in read_keys(yaml_text)] == known_keys()


def test_every_key_has_a_comment(yaml_text: str) -> None:
    assert [key.dotted for key in read_keys(yaml_text) if not key.comment] == []


def test_no_key_is_dead() -> None:
    sources = [text for path, text in python_files("trainer").items() if path != "trainer/config.py"]
    assert dead_keys(known_keys(), sources) == []


def test_a_dead_key_is_caught() -> None:
    keys = ["data.train_files", "model.compile", "model.fsdp_config.cpu_offload", "optim.lr", "trainer.seed"]
    first = "a = config.data.train_files\nb = re.compile('x')"
    second = "if fsdp.cpu_offload: lr = 1\nself._config.lr\ntrainer.seed = 3"
    assert dead_keys(keys, [first, second]) == ["model.compile", "trainer.seed"]


def test_a_key_without_comment_is_caught() -> None:
    text = "defaults:\n  - _self_\n\ndata:\n  a: null\n  b: [1, 2] # two\n"
    keys = read_keys(text + "  c:\n    d: x\n              # below\ne:\n  f: 1.0e-8\n")
    assert [(key.dotted, key.default, key.comment) for key in keys] == [
        ("data.a", "null", ""),
        ("data.b", "[1, 2]", "two"),
        ("data.c.d", "x", "below"),
        ("e.f", "1.0e-8", ""),
    ]


def test_the_table_of_the_documentation_is_up_to_date(yaml_text: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert replace_table(page, yaml_text) == page, "run: python tests/architecture/config_table.py"
    assert replace_table(page, yaml_text.replace("train_batch_size: 32", "train_batch_size: 33")) != page
    assert len(keys_named_in(page)) >= len(known_keys())


@pytest.mark.parametrize("path", [README, *sorted(PAGE.parent.glob("*.md"))], ids=lambda path: path.name)
def test_a_page_names_only_keys_that_exist(path: Path) -> None:
    assert sorted(keys_named_in(path.read_text(encoding="utf-8")) - set(known_keys())) == []


def test_a_key_that_does_not_exist_is_caught() -> None:
    text = "set `data.train_batchsize=8`, see data.pt, `optim.*`, `python -m trainer.cli.plan` and trainer.tracking"
    assert keys_named_in(text) == {"data.train_batchsize"}


@pytest.mark.parametrize("path", [README, *sorted(PAGE.parent.glob("*.md"))], ids=lambda path: path.name)
def test_a_page_leads_only_to_files_that_exist(path: Path) -> None:
    assert dead_links(path.read_text(encoding="utf-8"), path.parent) == []


def test_a_dead_link_is_caught() -> None:
    text = "[a](docs/config.md) [b](docs/none.md#part) ![c](none.png) [d](https://x.y) [e](#part)"
    assert dead_links(text, REPOSITORY) == ["docs/none.md", "none.png"]
