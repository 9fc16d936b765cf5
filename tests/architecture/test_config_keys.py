"""conf/sft.yaml and the documentation match the schema, and the code reads every key."""

import json

import jsonschema
import pytest
import source_rules as rules
import yaml
from config_table import (
    PAGE,
    REPOSITORY,
    SCHEMA,
    SHEET,
    keys_named_in,
    schema_text,
    sheet,
    with_tables,
)
from test_floors import python_files

from trainer.config import Config, keys_of

README = REPOSITORY / "README.md"
PAGES = [README, REPOSITORY / "CONTRIBUTING.md", *sorted(PAGE.parent.glob("*.md"))]
OWNER_NAMES = {"fsdp_config": ("fsdp",)}
"""Other names that code uses for a section."""


REWRITE = "run: python tests/architecture/config_table.py"


def test_the_file_says_what_the_schema_declares():
    assert SHEET.read_text(encoding="utf-8") == sheet(), REWRITE


def test_the_json_schema_says_what_the_declarations_say():
    assert SCHEMA.read_text(encoding="utf-8") == schema_text(), REWRITE


def test_recipes_of_the_package_follow_the_json_schema():
    validator = jsonschema.Draft202012Validator(json.loads(schema_text()))
    for path in SHEET.parent.rglob("*.yaml"):
        validator.validate(yaml.safe_load(path.read_text(encoding="utf-8")))


def test_no_key_is_dead():
    """No source reads a removed key as `<section>.<key>` or `config.<key>`."""
    files = python_files()
    del files["trainer/config/schema.py"]
    read = {attribute for text in files.values() for attribute in rules.attributes_read(text)}
    dead = []
    for key in keys_of(Config):
        *_, section, name = key.split(".")
        owners = (section, "config", "_config", *OWNER_NAMES.get(section, ()))
        if read.isdisjoint(f"{owner}.{name}" for owner in owners):
            dead.append(key)
    # `sources_of` reads these two by their names
    assert dead == ["data.train_files", "data.val_files"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_names_only_keys_that_exist(path):
    text = path.read_text(encoding="utf-8")
    if path.name == "coming_from.md":  # the other columns of its table hold other trainers' keys
        text = "\n".join(
            line.split("|")[1] if line.startswith("|") else line for line in text.splitlines()
        )
    assert sorted(keys_named_in(text) - set(keys_of(Config))) == []


def test_the_table_of_the_documentation_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, REWRITE
