"""States of a run directory, and functions to inspect it, for the tests of the checkpoint commands."""

import os
from collections.abc import Callable

import pytest
from checkpoint_fakes import commit, save, stage

from trainer.checkpoint.layout import POINTER
from trainer.checkpoint.lock import LOCK
from trainer.cli import checkpoint as cli

LEFT = {".staging_global_step_8.ab", ".trash_global_step_1.ab", ".corrupt_global_step_3.0"}

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run_dir(tmp_path):
    """A run with three good checkpoints."""
    (path := tmp_path / "run").mkdir()
    save(path, 2, 4, 6)
    return path


@pytest.fixture
def call(capsys):
    """Exit code, stdout and stderr of a command."""
    return lambda *words: (cli.main([str(word) for word in words]), *capsys.readouterr())


def rows(text):
    """Return the lines of the table with single spaces."""
    return [" ".join(line.split()) for line in text.splitlines() if line[:9].strip().isdecimal()]


def names(run_dir):
    return set(os.listdir(run_dir)) - {POINTER, LOCK}


def leave_behind(run_dir):
    """Add an interrupted save, an interrupted deletion, and a checkpoint that was set aside."""
    stage(run_dir, 8).rename(run_dir / ".staging_global_step_8.ab")
    commit(run_dir, 1).rename(run_dir / ".trash_global_step_1.ab")
    commit(run_dir, 3).rename(run_dir / ".corrupt_global_step_3.0")
