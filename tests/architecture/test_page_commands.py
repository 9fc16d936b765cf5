"""Every command that a page shows is one that the product takes: its words are parsed, its configuration composed.

All lines of ```bash blocks, and code inside a sentence that calls the program. tests/e2e/test_pages.py executes blocks.
"""

import argparse
import ast
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from page_commands import MORE_PAGES, NEEDS, OURS, REPOSITORY, blocks_of, commands_on
from page_commands import PAGES as COMMAND_PAGES

from trainer.cli import __main__ as commands
from trainer.config import ConfigError
from trainer.launch.ranks import parse_arguments
from trainer.run.compose import load_config

PAGES = [*COMMAND_PAGES, *MORE_PAGES]
RECIPES = sorted((REPOSITORY / "conf/experiment").glob("*.yaml"))
OWN_RECIPES = ("mine.yaml", "conf/experiment/mine.yaml")
"""Files of readers, of which pages speak as if they were there."""


class Parsed(BaseException):
    """Stands in for all that a command does behind its parser."""

    def __init__(self, words: list[str]) -> None:
        super().__init__()
        self.words = words


@pytest.fixture(autouse=True)
def _only_parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def parsed(parse: Callable[..., argparse.Namespace]) -> Callable[..., None]:
        def parse_and_stop(*arguments: Any) -> None:
            raise Parsed(getattr(parse(*arguments), "words", []))

        return parse_and_stop

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, parsed(getattr(argparse.ArgumentParser, name)))
    for name in OWN_RECIPES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("optim: {lr: 1.0e-5}\n")
    monkeypatch.chdir(tmp_path)


def check(command: str) -> None:
    """Raises what the program answers to words that it does not take, or `AssertionError`."""
    words = [word.replace("…", "") for word in shlex.split(command, comments=True) if not word.endswith("=…")]
    words = ["1" if word in ("N", "STEP") else word for word in words if word]
    while re.match(r"[A-Z_]+=", words[0]):  # of the environment
        del words[0]
    is_excused, command = NEEDS.search(command), " ".join(words)
    words = words[: next((place for place, word in enumerate(words) if word in (">", "|")), None)]
    if re.match(rf"{OURS}\b", command):
        _check_own(words[1 if words[0] == "fsdp-sft" else 2 :], has_train=words[0] != "fsdp-sft")
    elif words[:2] == ["pip", "install"]:
        _check_extras(words[-1] if "-c" not in words else words[words.index("-c") - 1])
    elif not is_excused:
        program, *options = words[1:]
        assert words[0] in ("bash", "python"), f"neither ours nor named with a reason: {command}"
        if program == "-c":
            compile(options[0], "page", "exec")
            return
        text = (REPOSITORY / program).read_text()
        unknown = [word for word in options if word.startswith("--") and word != "--full" and f'"{word}"' not in text]
        assert unknown == [], command


def _check_own(words: list[str], *, has_train: bool) -> None:
    name, *rest = words or ["2"]
    if has_train and not re.fullmatch("[a-z][a-z-]*", name):
        name, rest = commands.TRAIN, words
    if name in ("COMMAND", "--help", "--version"):
        return
    if name == commands.TRAIN:
        overrides = rest
    elif all(re.fullmatch("[a-z-]+", word) for word in words):  # the command alone, as a sentence names it
        with pytest.raises(SystemExit, match=r"^0$"):
            assert commands.main([*words, "--help"]) == 0
        return
    else:
        with pytest.raises(Parsed) as parsed:
            assert commands.main(words) == 0, "refused: the reason is on stderr"
        overrides = parsed.value.words
    overrides = [word for word in overrides if word not in ("--cfg", "job", "--help", "key=value")]
    if any(not word.isupper() for word in overrides):
        load_config(parse_arguments(overrides).overrides)


def _check_extras(requirement: str) -> None:
    known = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    extras = re.findall(r"\[(.*)\]", requirement)
    assert {extra for group in extras for extra in group.split(",")} <= known.keys()
    assert not requirement.endswith(".whl") or requirement.startswith("fsdp_sft-")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_command_on_a_page_is_taken(page: Path) -> None:
    for command in commands_on(page.read_text(encoding="utf-8")):
        try:
            check(command)
        except BaseException as error:
            raise AssertionError(f"{page.name}: {command}") from error


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_command_in_a_recipe_is_taken(recipe: Path) -> None:
    shown = re.findall(r"^# +(bash run_sft\.sh .*)$", recipe.read_text(encoding="utf-8"), re.M)
    assert shown, "how it is called"
    for command in shown:
        check(command)


def test_every_example_of_the_help_is_taken() -> None:
    for command in re.findall(rf"^ +({OURS} .*)$", commands.listing(), re.M):
        check(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_what_a_page_imports_is_there(page: Path) -> None:
    for block in blocks_of(page.read_text(encoding="utf-8"), "python"):
        tree = ast.parse(block)
        tree.body = [line for line in tree.body if isinstance(line, ast.Import | ast.ImportFrom)]
        exec(compile(tree, page.name, "exec"), {})


def test_the_pages_show_every_command() -> None:
    shown = [command for page in PAGES for command in commands_on(page.read_text(encoding="utf-8"))]
    assert len(shown) > 60
    called = {name for name in commands.COMMANDS if any(re.match(rf"{OURS} {name}\b", text) for text in shown)}
    assert set(commands.COMMANDS) - called <= {commands.TRAIN}, "what no page shows"


@pytest.mark.parametrize(
    "command",
    [
        "bash run_sft.sh pln 8",
        "bash run_sft.sh 8 optim.lrr=1",
        "bash run_sft.sh experiment=none",
        "bash run_sft.sh plan 8 data.max_len=1",
        "bash run_sft.sh checkpoint prune RUN --keeep 1",
        "fsdp-sft data previw",
        "bash run_sft.sh evaluate RUN --scores exec",
        "python tests/none.py",
        "python tests/faults/kills.py --deaths 3",
        "pip install -e '.[gpus]'",
        "unknown program",
    ],
)
def test_a_command_that_nothing_takes_is_caught(command: str) -> None:
    with pytest.raises((AssertionError, ConfigError, FileNotFoundError)):
        check(command)


def test_commands_are_found() -> None:
    page = "say `bash run_sft.sh report RUN [--json]`\n```bash\na \\\n  b  # c\n# d\npython -c 'x\ny'\n```\n`run`"
    assert commands_on(page) == ["a    b  # c", "python -c 'x\ny'", "bash run_sft.sh report RUN"]


def anchors_of(markdown: str) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", markdown, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_anchors(page: Path) -> list[str]:
    links = re.findall(r"\]\((?![a-z]+:)([^)#]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    return [
        f"{name}#{anchor}"
        for name, anchor in links
        if anchor not in anchors_of((page.parent / name if name else page).read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_link_leads_to_a_heading(page: Path) -> None:
    assert dead_anchors(page) == []


def test_a_link_to_no_heading_is_caught(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# One, `two`\n[a](#one-two) [b](#three) [c](page.md#none)\n")
    assert dead_anchors(tmp_path / "page.md") == ["#three", "page.md#none"]
