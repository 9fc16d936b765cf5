"""No command hangs or crashes on odd files in a run directory: FIFOs, devices, directories,
huge or nested content.
"""

import os
import socket
from contextlib import suppress

import pytest
from checkpoint_fakes import save, write_unfinished
from processes import time_limit
from sweeps import short_or_full

from trainer.checkpoint import choice, finished, rollback
from trainer.checkpoint.layout import FSDP_CONFIG
from trainer.checkpoint.lock import RunLock
from trainer.cli import checkpoint, report
from trainer.config import ConfigError
from trainer.errors import CannotWriteError
from trainer.runtime import heartbeat
from trainer.runtime.files import atomic_write
from trainer.tracking import Tracking
from trainer.train.start import preflight
from trainer.train.start.compose import load_config

WITHIN_S = 5.0


def make_socket(path):
    # its name is limited to 108 bytes
    with socket.socket(socket.AF_UNIX) as made, suppress(OSError):
        made.bind(str(path))


def make_huge(path):
    path.touch()
    os.truncate(path, 2**40)


KINDS = {
    "FIFO": os.mkfifo,
    "directory": os.mkdir,
    "socket": make_socket,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "huge file": make_huge,
    "nested JSON": lambda path: path.write_text("[" * 100_000),
    "another object": lambda path: path.write_text(
        '{"steps": 7, "run_ids": 7, "rollbacks": 7, "world_size": "7", "files": 7}'
    ),
}
IN_RUN = (
    "latest_checkpointed_iteration.txt", "metrics.jsonl", "events.jsonl", "evaluations.jsonl", "run.json",
    ".mirror.json", "rollbacks.json", ".train.lock",
)  # fmt: skip
IN_CHECKPOINT = (
    "manifest.json", finished.FILE_NAME, FSDP_CONFIG, "data.pt", "model_world_size_2_rank_0.pt",
)  # fmt: skip
NAMES = (
    *IN_RUN,
    *(f"global_step_4/{name}" for name in IN_CHECKPOINT),
    f"global_step_9/{FSDP_CONFIG}",
)


@pytest.fixture
def run_dir(tmp_path):
    """A run with checkpoints, one of them without a manifest, and with logs."""
    path = tmp_path / "run"
    path.mkdir()
    tracking = Tracking("project", "experiment", [], {}, run_dir=path)
    for step in range(1, 5):
        tracking.log({"train/loss": 1.0 / step}, step)
    tracking.finish(0)
    save(path, 2, 4)
    write_unfinished(path, 9)
    return path


def open_tracking(run_dir):
    tracking = Tracking("project", "experiment", [], {}, run_dir=run_dir)
    try:
        tracking.start(4)
    finally:
        tracking.finish(0)


def lock(run_dir):
    held = RunLock(run_dir)
    held.acquire(timeout_s=0)
    held.release()


def launch(run_dir):
    """Read a run directory as the launcher does."""
    config = load_config([f"trainer.default_local_dir={run_dir}"])
    preflight.already_complete(config)
    heartbeat.is_live(run_dir)


COMMANDS = {
    "ls": checkpoint.main,
    "ls --json": checkpoint.main,
    "verify": checkpoint.main,
    "prune --keep 1": checkpoint.main,
    "": report.main,
}
"""{arguments before the run directory: command}."""
PARTS = {
    "the launcher": launch,
    "the choice of a checkpoint": choice.select,
    "the rollbacks": rollback.read,
    "the lock": lock,
    "tracking": open_tracking,
}
"""Errors of a start, which have documented exit codes."""


PAIRS = [(name, kind) for name in NAMES for kind in KINDS]


@pytest.mark.parametrize(("name", "kind"), short_or_full(PAIRS[::3], full=PAIRS))
def test_no_odd_file_holds_a_command_up_or_crashes_it(run_dir, kind, name, capsys):
    (run_dir / name).unlink(missing_ok=True)
    KINDS[kind](run_dir / name)
    for command, call in COMMANDS.items():
        with time_limit(command, WITHIN_S):
            code = call([*command.split(), str(run_dir)])
        said = "".join(capsys.readouterr())
        assert code in (0, 1, 2, 4, 73) and "Traceback" not in said, f"{command}: {code}, {said}"
    for part, start in PARTS.items():
        with time_limit(part, WITHIN_S), suppress(ConfigError, CannotWriteError):
            start(run_dir)


def test_a_file_is_replaced_without_following_a_link_of_its_temporary_name(tmp_path):
    path = tmp_path / "run.json"
    temporary = tmp_path / "run.json.tmp"
    (tmp_path / "precious").write_text("precious")
    path.symlink_to("precious")
    temporary.symlink_to("precious")
    atomic_write(path, "{}")
    found = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert found == {"precious": "precious", "run.json": "{}"}
    temporary.write_text("left by a kill")
    atomic_write(path, "{1}")
    assert not temporary.exists()
