"""`fsdp-sft`, or `bash run_sft.sh`: names every command, and every command calls itself as it is called."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import trainer
from trainer.cli import __main__ as commands
from trainer.cli import checkpoint
from trainer.launch import __main__ as launch

CLI = Path(commands.__file__).parent


def test_all_commands_are_listed_and_call_themselves_as_they_are_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main([]) == 0
    listed = set(re.findall(r"bash run_sft\.sh (\w+) \S", capsys.readouterr().out)) - {"train", "COMMAND"}
    programs = {path.stem for path in CLI.glob("*.py") if re.search(rf"call\(.{path.stem}.\)", path.read_text())}
    assert listed == programs and len(listed) > 6


def test_a_word_that_is_no_command_is_answered_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["pln", "8"]) == 2
    words = capsys.readouterr().err
    assert words.startswith("ERROR: there is no command 'pln': did you mean 'plan'?\n") and "checkpoint" in words


def test_the_script_and_the_console_call_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["metrics", "train/loss"]) == 0
    said = capsys.readouterr().out
    assert commands.main(["metrics", "train/loss"]) == 0 and capsys.readouterr().out == said
    with pytest.raises(SystemExit):
        commands.main(["plan", "--help"])
    assert capsys.readouterr().out.startswith("usage: bash run_sft.sh plan [N]")
    assert commands.main(["--version"]) == 0 and capsys.readouterr().out == f"{trainer.__version__}\n"


def test_verify_resume_calls_itself_as_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        checkpoint.main(["verify-resume", "--help"])
    assert capsys.readouterr().out.startswith("usage: bash run_sft.sh checkpoint verify-resume [N]")


def test_a_command_of_the_script_sets_up_its_log_and_signals_as_a_program() -> None:
    """As a function it would not: `checkpoint ls | head` ended in a traceback, and a warning was not shown."""
    call = "main(['checkpoint', 'ls', 'gone'], is_program=True)"
    words = f"import logging, signal; from trainer.launch.__main__ import main; code = {call}"
    check = "print(code, signal.getsignal(signal.SIGPIPE) is signal.SIG_DFL, bool(logging.root.handlers))"
    done = subprocess.run([sys.executable, "-c", f"{words}; {check}"], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 True True\n", done.stderr
