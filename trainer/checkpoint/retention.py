"""Deletes old checkpoints, and checks that the next one fits on the disk.

For rank 0 only; imports no torch.
"""

import logging
from collections.abc import Set
from pathlib import Path

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.layout import CheckpointInfo
from trainer.checkpoint.rollback import STEPS_BEFORE_ONSET
from trainer.errors import CannotWriteError
from trainer.runtime.evaluations import read_summaries, sign_of
from trainer.runtime.progress import History
from trainer.runtime.text import readable

logger = logging.getLogger(__name__)
KEEP_FEWER = "lower trainer.max_ckpt_to_keep"
SPARE = 1.05
"""Safety factor on the size of a save, because directories, logs and other writers need space too.
"""


def settle(
    run_dir: Path,
    step: int,
    *,
    keep: int | None,
    history: History,
    protect: Set[int] = frozenset(),
) -> None:
    """Point to the committed checkpoint of `step`, then delete old checkpoints.

    The newest `keep` checkpoints (None: all), the checkpoints that `worth_keeping` returns, and the
    steps in `protect` stay. A failure is only logged: the checkpoint is committed, and the next
    save or start tries again.
    """
    try:
        layout.publish(run_dir, step)
        found = layout.committed(run_dir)
        for info in found:
            if info.step < step and not info.published:
                # An earlier attempt to publish it failed. A later start must not prefer it to the
                # pointer's checkpoint.
                layout.mark_published(info.path)
        best = worth_keeping(run_dir, history, found)
        rotate(run_dir, keep=keep, protect=protect | best)
    except (OSError, MemoryError) as error:
        logger.warning(
            "%s is committed, but the pointer could not be updated or old checkpoints could not be "
            "deleted; the next save or start tries again: %s",
            run_dir / layout.step_dir_name(step),
            error,
        )


def rotate(run_dir: Path, *, keep: int | None, protect: Set[int] = frozenset()) -> None:
    """Delete old checkpoints. If one cannot be deleted, the next call tries again.

    Call this after `publish`, and on resume once the loaded checkpoint is verified, because sizes
    alone do not prove that the newest checkpoint is intact. `protect` contains the step that this
    run resumed from, until a newer checkpoint is published.
    """
    for path in checkpoints_to_delete(run_dir, keep=keep, protect=protect):
        layout.delete(path)


def checkpoints_to_delete(run_dir: Path, *, keep: int | None, protect: Set[int]) -> list[Path]:
    """Return committed checkpoints that may be deleted, oldest first."""
    if keep is None:
        return []
    pointed = layout.read_pointer(run_dir).step
    found = layout.committed(run_dir)
    spared = {*protect, *newest([info.step for info in found], keep, pointed)}
    return [info.path for info in found if info.step not in spared]


def newest(steps: list[int], keep: int, pointed: int | None) -> list[int]:
    """Return the newest `keep` of the sorted steps, and the newest `keep` up to the pointer.

    If the pointer was moved back, the run cannot fall back to checkpoints after it.
    """
    until_pointer = [step for step in steps if pointed is not None and step <= pointed]
    return steps[-keep:] + until_pointer[-keep:]


def worth_keeping(run_dir: Path, history: History, found: list[CheckpointInfo]) -> set[int]:
    """Return the steps of `found` (sorted by step) that rotation must not delete.

    These are the newest checkpoint up to the best validation (or the first after it, if there is
    none), the newest well before the last trouble, and the best checkpoint of each evaluation.
    """
    steps = [info.step for info in found]
    kept = set()
    if history.best_step is not None:
        until_best = [step for step in steps if step <= history.best_step]
        kept.update(until_best[-1:] or steps[:1])
    if history.episodes:
        onset, _ = history.episodes[-1]
        kept.update([step for step in steps if step <= onset - STEPS_BEFORE_ONSET][-1:])
    for name, rows in read_summaries(run_dir).items():
        sign = sign_of(name, rows)
        means = {
            info.step: sign * row["mean"]
            for info in found
            if (row := rows.get(info.step)) and info.nonce == row.get("nonce", "")
        }
        if means:
            kept.add(max(means, key=means.__getitem__))
    return kept


def require_space(run_dir: Path, needed_bytes: int) -> None:
    """Raise `CannotWriteError` unless one more checkpoint fits on the disk."""
    free_bytes = fsio.free_bytes(run_dir)
    if free_bytes < needed_bytes * SPARE:
        raise CannotWriteError(
            f"{run_dir}: a checkpoint needs {readable(needed_bytes)}, but only "
            f"{readable(free_bytes)} is free.\nFix: free some space, or {KEEP_FEWER}"
        )


def existing_parent(directory: Path) -> Path:
    """Return the directory itself if it exists, otherwise its nearest existing parent."""
    directory = directory.absolute()
    return next(path for path in (directory, *directory.parents) if path.exists())
