"""`fsdp-sft` or `bash run_sft.sh` lists every command, and each command shows its usage under the
name that was used.
"""

import re

import pytest
from processes import run_python

from trainer.cli import __main__ as commands
from trainer.launch import __main__ as launch


def test_all_commands_are_listed_with_an_example_that_ends_the_help_of_each(capsys):
    assert commands.main([]) == 0
    listed = capsys.readouterr().out
    lines = re.findall(r"^ +(bash run_sft\.sh (\S+) \S.*)$", listed, re.M)
    examples = {name: line for line, name in lines}
    assert examples.keys() == commands.COMMANDS.keys() and len(examples) > 6
    for name, example in examples.items():
        if name != commands.TRAIN:
            with pytest.raises(SystemExit):
                commands.main([name, "--help"])
            said = capsys.readouterr().out
            assert said.startswith(f"usage: bash run_sft.sh {name} ")
            assert said.endswith(f"example:\n  {example}\n")


def test_a_word_that_is_no_command_is_answered_with_those_there_are(capsys):
    assert launch.main(["pln", "8"]) == 2
    assert launch.main(["frobnicate"]) == 2
    near, far = capsys.readouterr().err.splitlines()
    assert near == "ERROR: unknown command 'pln'; did you mean 'plan'?"
    assert far.startswith("ERROR: unknown command 'frobnicate'; commands are ")
    assert "checkpoint" in far


def test_a_command_of_the_script_sets_up_its_log_and_signals_as_a_program():
    """A plain function call would not show this: `checkpoint ls | head` ended in a traceback, and a
    warning was lost.
    """
    call = "main(['checkpoint', 'ls', 'gone'], is_program=True)"
    words = f"import logging, signal; from trainer.launch.__main__ import main; code = {call}"
    check = "print(code, signal.getsignal(signal.SIGPIPE) is signal.SIG_DFL, bool(logging.root.handlers))"
    done = run_python("-c", f"{words}; {check}")
    assert done.stdout == "2 True True\n", done.stderr
