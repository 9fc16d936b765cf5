"""Every exit code, with loader workers alive: the run leaves soon after its cause and gives
back what it holds.
"""

import errno
import functools
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from whole_runs import Attempt, started, tiny_model

from trainer.checkpoint import fsio, manager
from trainer.checkpoint.lock import LOCK
from trainer.tracking import events_file

LEFT_WITHIN_S = 30.0


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return (
        *tiny_model(tmp_path_factory.mktemp("exits")),
        "data.num_workers=1",
        "trainer.total_training_steps=4",
    )


def wait_for(text: str, attempt: Attempt, timeout_s: float = 60.0) -> None:
    """Until the run has printed it, or is over."""
    deadline = time.monotonic() + timeout_s
    while text not in attempt.output and not attempt.is_over():
        assert time.monotonic() < deadline, attempt.output
        time.sleep(0.005)


def assert_given_back(run_dir: Path, code: int) -> None:
    """The lock is empty, and the log says the exit code that the process returned."""
    assert (run_dir / LOCK).read_bytes() == b""
    events = events_file.read_events(run_dir / events_file.FILE_NAME)
    assert events and events[-1]["kind"] == "end" and events[-1]["exit_code"] == code, events[-1:]


# every code of the table
# ----------------------------------------------------------------------------------------------


def crash_in_third_step() -> None:
    from trainer.train import fit

    step = fit.training_step

    def training_step(run: Any, batch: Any) -> Any:
        if batch.step == 3:
            raise RuntimeError("something nobody thought of")
        return step(run, batch)

    fit.training_step = training_step


def refuse(number: int, *, kind: str, name: str) -> None:
    """From now on this kind of file operation fails, as on a full or a read-only disk."""

    def observe(operation: fsio.Operation) -> None:
        if operation.kind in kind.split() and name in str(operation.path):
            raise OSError(number, "simulated", str(operation.path))

    fsio.observer = observe


def impatient(before: Callable[[], None] | None = None) -> None:
    manager.REQUIRED_RETRY_AFTER_S = (0.1, 0.1)
    manager.CheckpointManager.__init__.__kwdefaults__["retry_after_s"] = (0.0, 0.0)
    if before is not None:
        before()


FULL_DISK = functools.partial(
    impatient, functools.partial(refuse, errno.ENOSPC, kind="write", name=".staging_global")
)
CODES: dict[int, tuple[tuple[str, ...], Callable[[], None] | None]] = {
    0: ((), None),
    1: ((), crash_in_third_step),
    2: (("trainer.guard.rules=[nonsense]",), None),
    65: (("data.val_files={rows}",), None),
    73: ((), FULL_DISK),
    75: (
        (
            "trainer.max_time=1s",
            "trainer.total_training_steps=100000",
            "optim.lr_warmup_steps_ratio=0",
        ),
        None,
    ),
    76: (("trainer.guard.rules=[{metric: train/loss, above: 0, do: stop}]",), None),
}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("code", CODES)
def test_every_exit_code_with_a_loader_worker(words, tmp_path, code, num_ranks):
    changes, before = CODES[code]
    (tmp_path / "rows.jsonl").write_text('{"messages": 3}\n')
    changes = tuple(change.replace("{rows}", str(tmp_path / "rows.jsonl")) for change in changes)
    run_dir = tmp_path / "run"
    place = f"trainer.default_local_dir={run_dir}"
    with started(
        num_ranks, *words, place, *changes, log=tmp_path / "log", before=before
    ) as attempt:
        assert attempt.wait(90) == code, attempt.output
        assert ("Traceback" in attempt.output) == (code == 1), attempt.output
    if code not in (2, 65):  # refused before the run directory is touched
        assert_given_back(run_dir, code)
        assert (run_dir / "report.html").exists() == (code in (0, 76))


# a save that the run ends with fails
# ----------------------------------------------------------------------------------

SLOW = ("trainer.total_training_steps=400", "trainer.save_freq=200", "trainer.test_freq=-1")
SYNC = "trainer.checkpoint.async_save=false"


def rename_away(run_dir: Path) -> None:
    run_dir.rename(run_dir.with_name("elsewhere"))


def leave_it(run_dir: Path) -> None:
    pass


NO_INODES = functools.partial(
    impatient, functools.partial(refuse, errno.ENOSPC, kind="mkdir", name="global")
)
READ_ONLY = functools.partial(
    impatient,
    functools.partial(refuse, errno.EROFS, kind="mkdir create rename unlink", name="global"),
)
ENDINGS: dict[
    str, tuple[tuple[str, ...], Callable[[], None], Callable[[Path], None] | None, int]
] = {
    "last save, full disk": ((), FULL_DISK, None, 73),
    "last save, no inodes": ((), NO_INODES, None, 73),
    "last save, read-only disk": ((), READ_ONLY, None, 73),
    "three in a row, in the way of training": (("trainer.save_freq=1", SYNC), FULL_DISK, None, 75),
    "three in a row, behind training": (("trainer.save_freq=1", *SLOW[:1]), FULL_DISK, None, 75),
    "save on SIGTERM": ((*SLOW, SYNC), FULL_DISK, leave_it, 73),
    "save on SIGTERM after one that failed behind training": (
        (*SLOW, "trainer.save_freq=2"),
        functools.partial(refuse, errno.ENOSPC, kind="write", name=".staging_global_step_2."),
        leave_it,
        75,
    ),
    "run directory deleted": (SLOW, impatient, shutil.rmtree, 73),
    "run directory renamed": (SLOW, impatient, rename_away, 73),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_run_whose_save_fails_ends(words, tmp_path, ending):
    """On two ranks. It hung until the watchdog's limit: an error kept the loader, whose worker
    ignores SIGTERM.
    """
    changes, before, disturb, code = ENDINGS[ending]
    run_dir = tmp_path / "run"
    place = f"trainer.default_local_dir={run_dir}"
    with started(2, *words, place, *changes, log=tmp_path / "log", before=before) as attempt:
        wait_for("step 2/", attempt)
        if disturb is not None:
            disturb(run_dir)
            attempt.send(signal.SIGTERM)
        assert attempt.wait(LEFT_WITHIN_S) == code, attempt.output
        assert "Traceback" not in attempt.output
        if "run directory" in ending:
            assert f"{run_dir} was deleted or renamed while this run" in attempt.output
    if "run directory" not in ending:
        assert_given_back(run_dir, code)
        assert not list(run_dir.glob(".staging*"))
