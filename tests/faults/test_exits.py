"""Every exit code, with loader workers alive: the run exits soon after the cause and releases its
resources.
"""

import errno
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from processes import wait_until
from whole_equality import logged_exit_code
from whole_runs import before_steps, started, tiny_model

from trainer.checkpoint import fsio, manager
from trainer.checkpoint.lock import is_given_back

LEFT_WITHIN_S = 30.0
SLOW = ("trainer.total_training_steps=400", "trainer.save_freq=200", "trainer.test_freq=-1")
IN_TRAINING = "trainer.checkpoint.async_save=false"
Before = Callable[[], None]


@pytest.fixture(scope="module")
def words(root):
    return (*tiny_model(root), "data.num_workers=1", "trainer.total_training_steps=4")


def assert_given_back(run_dir, code):
    """The lock is empty, and the log has the exit code of the process."""
    assert is_given_back(run_dir) and logged_exit_code(run_dir) == code


def crash_in_third_step():
    def crash(run, step):
        if step == 3:
            raise RuntimeError("something nobody thought of")

    before_steps(crash)


def refuse(number, kinds, name="global", *, is_patient=False):
    """From now on these kinds of file operations fail, as on a full or read-only disk. Unless it is
    patient, the run retries at once.
    """

    def observe(operation):
        if operation.kind in kinds.split() and name in str(operation.path):
            raise OSError(number, "simulated", str(operation.path))

    fsio.observer = observe
    if not is_patient:
        be_impatient()


def be_impatient():
    manager.REQUIRED_RETRY_AFTER_S = (0.1, 0.1)
    manager.RETRY_AFTER_S = (0.0, 0.0)


FULL_DISK = partial(refuse, errno.ENOSPC, "write", ".staging_global")
READ_ONLY = partial(refuse, errno.EROFS, "mkdir create rename unlink")
FOR_A_SECOND = (
    "trainer.max_time=1s",
    "trainer.total_training_steps=100000",
    "optim.lr_warmup_steps_ratio=0",
)
CODES = {
    0: ((), None),
    1: ((), crash_in_third_step),
    2: (("trainer.guard.rules=[nonsense]",), None),
    65: (("data.val_files={rows}",), None),
    73: ((), FULL_DISK),
    75: (FOR_A_SECOND, None),
    76: (("trainer.guard.rules=[{metric: train/loss, above: 0, do: stop}]",), None),
}


@pytest.mark.parametrize(("code", "num_ranks"), [*((code, 2) for code in CODES), (1, 1), (75, 1)])
def test_every_exit_code_with_a_loader_worker(words, tmp_path, code, num_ranks):
    changes, before = CODES[code]
    rows = tmp_path / "rows.jsonl"
    run_dir = tmp_path / "run"
    rows.write_text('{"messages": 3}\n')
    changes = tuple(change.replace("{rows}", str(rows)) for change in changes)
    words = (*words, f"trainer.default_local_dir={run_dir}", *changes)
    with started(num_ranks, *words, log=tmp_path / "log", before=before) as attempt:
        assert attempt.wait(90) == code, attempt.output
        assert ("Traceback" in attempt.output) == (code == 1), attempt.output
    if code not in (2, 65):  # refused before the run directory is touched
        assert_given_back(run_dir, code)
        assert (run_dir / "report.html").exists() == (code in (0, 76))


@dataclass(frozen=True)
class Ending:
    """`before` fails in every rank. With `disturb`, the run directory is disturbed in a step and
    the run is asked to stop.
    """

    code: int
    before: Before
    changes: tuple[str, ...] = ()
    disturb: Callable[[Path], object] | None = None


def leave_it(run_dir): ...


def rename_away(run_dir):
    run_dir.rename(run_dir.with_name("elsewhere"))


EVERY_STEP = "trainer.save_freq=1"
SECOND_SAVE = partial(refuse, errno.ENOSPC, "write", ".staging_global_step_2.", is_patient=True)
ENDINGS = {
    "last save, full disk": Ending(73, FULL_DISK),
    "last save, read-only disk": Ending(73, READ_ONLY),
    "three in a row, in the way of training": Ending(75, FULL_DISK, (EVERY_STEP, IN_TRAINING)),
    "three in a row, in the background": Ending(75, FULL_DISK, (EVERY_STEP, SLOW[0])),
    "save on SIGTERM": Ending(73, FULL_DISK, (*SLOW, IN_TRAINING), leave_it),
    "save on SIGTERM after a failed one in the background": Ending(
        75, SECOND_SAVE, (*SLOW, "trainer.save_freq=2"), leave_it
    ),
    "run directory renamed": Ending(73, be_impatient, SLOW, rename_away),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_run_whose_save_fails_ends(words, tmp_path, name):
    """A run on two ranks hung until the watchdog's limit: an error kept the loader alive, whose
    worker ignores SIGTERM.
    """
    ending = ENDINGS[name]
    run_dir = tmp_path / "run"
    words = (*words, f"trainer.default_local_dir={run_dir}", *ending.changes)
    with started(2, *words, log=tmp_path / "log", before=ending.before) as attempt:
        assert wait_until(lambda: "step 2/" in attempt.output or attempt.is_over(), timeout_s=60)
        if ending.disturb is not None:
            ending.disturb(run_dir)
            attempt.send(signal.SIGTERM)
        assert attempt.wait(LEFT_WITHIN_S) == ending.code, attempt.output
        assert "Traceback" not in attempt.output
        if ending.before is be_impatient:
            assert f"{run_dir} was deleted, or another run has taken it" in attempt.output
            return
    assert_given_back(run_dir, ending.code)
    assert not list(run_dir.glob(".staging*"))
