"""`python -m trainer.cli`: names every command, and every command calls itself as it is called."""

import re
from pathlib import Path

import pytest

from trainer.cli import __main__ as commands
from trainer.cli import checkpoint

CLI = Path(commands.__file__).parent


def test_all_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main([]) == 0
    listed = set(re.findall(r"python -m trainer\.cli\.(\w+)", capsys.readouterr().out))
    programs = {path.stem for path in CLI.glob("*.py") if f'"python -m trainer.cli.{path.stem}"' in path.read_text()}
    assert listed == programs and len(listed) > 6


def test_a_command_as_a_word_is_answered_with_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["report", "some/run"]) == 2
    assert capsys.readouterr().err.startswith("ERROR: a command is called as: python -m trainer.cli.report\n")


def test_verify_resume_calls_itself_as_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        checkpoint.main(["verify-resume", "--help"])
    assert capsys.readouterr().out.startswith("usage: python -m trainer.cli.checkpoint verify-resume [N]")
