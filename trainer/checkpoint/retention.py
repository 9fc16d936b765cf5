"""Delete old checkpoints, and check the room for the next one. Rank 0; no torch."""

import errno
import logging
import secrets
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.layout import PUBLISHED, TRASH_PREFIX, CheckpointInfo
from trainer.checkpoint.rollback import STEPS_BEFORE_ONSET
from trainer.runtime.evaluations import read_summaries
from trainer.runtime.progress import History
from trainer.runtime.text import readable

logger = logging.getLogger(__name__)
KEEP_FEWER = "lower trainer.max_ckpt_to_keep"
SPARE = 1.05
"""Space asked for before a save, over what is written: directories, logs, and other writers."""


@dataclass(frozen=True)
class Retention:
    """A run keeps its newest `keep` checkpoints (None: all)."""

    keep: int | None = None


ALL = Retention()


def settle(
    run_dir: Path,
    step: int,
    kept: Retention,
    *,
    history: History | None = None,
    protect: Set[int] = frozenset(),
) -> None:
    """Point to the committed checkpoint of `step`, then delete old checkpoints except `protect`.

    A failure is only logged: the checkpoint is committed, a resume finds and settles it again.
    """
    try:
        layout.publish(run_dir, step)
        found = layout.committed(run_dir)
        for info in found:
            if info.step < step and not info.published:
                # its own publishing failed: it must not look like the work of a later crash
                layout.mark(info.path, PUBLISHED)
        best = worth_keeping(run_dir, history or History(), found)
        rotate(run_dir, keep=kept.keep, protect=protect | best)
    except (OSError, MemoryError) as error:
        logger.warning(
            "%s is committed, but the pointer or the rotation failed and waits for the next save: "
            "%s",
            run_dir / layout.step_dir_name(step),
            error,
        )


def rotate(run_dir: Path, *, keep: int | None, protect: Set[int] = frozenset()) -> None:
    """Delete old checkpoints; what cannot be deleted is tried again next time.

    Call it after `publish`, and on resume once the loaded checkpoint has verified: sizes alone do
    not prove that the newest is good. `protect` holds the step this run resumed from, until a newer
    one is published.
    """
    for path in checkpoints_to_delete(run_dir, keep=keep, protect=protect):
        delete(path)


def delete(path: Path) -> bool:
    """Give a directory a temporary name, then remove it; return False after logging a failure."""
    trash = path.with_name(f"{TRASH_PREFIX}{path.name}.{secrets.token_hex(4)}")
    try:
        fsio.rename(path, trash)
        fsio.remove_tree(trash)
    except OSError as error:
        logger.warning("cannot delete %s: %s", path, error)
        return False
    return True


def checkpoints_to_delete(run_dir: Path, *, keep: int | None, protect: Set[int]) -> list[Path]:
    """Return committed checkpoints that may go, oldest first."""
    if keep is None:
        return []
    if keep < 1:
        raise ValueError(
            f"at least 1 must be kept, got {keep}: the newest checkpoint always stays whole"
        )
    pointed, found = layout.read_pointer(run_dir).step, layout.committed(run_dir)
    spared = {*protect, *newest([info.step for info in found], keep, pointed)}
    return [info.path for info in found if info.step not in spared]


def newest(steps: list[int], keep: int, pointed: int | None) -> list[int]:
    """Return the newest `keep` of rising steps, and as many up to the pointer.

    A run whose pointer was moved back has none of the later ones to fall back on.
    """
    until_pointer = [step for step in steps if pointed is not None and step <= pointed]
    return steps[-keep:] + until_pointer[-keep:]


def worth_keeping(run_dir: Path, history: History, found: list[CheckpointInfo]) -> set[int]:
    """Return the steps of `found` (by rising step) that rotation spares.

    These are the checkpoint of the best validation, the newest before the last trouble, and the
    best of each evaluation.
    """
    limits = [] if history.best_step is None else [history.best_step]
    if history.episodes:
        limits.append(history.episodes[-1][0] - STEPS_BEFORE_ONSET)
    kept = set()
    for limit in limits:
        kept.update([info.step for info in found if info.step <= limit][-1:])
    for rows in read_summaries(run_dir).values():
        means = {
            info.step: row["mean"]
            for info in found
            if (row := rows.get(info.step)) and info.nonce == row.get("nonce", "")
        }
        if means:
            kept.add(max(means, key=means.__getitem__))
    return kept


def require_space(run_dir: Path, needed_bytes: int, kept: Retention = ALL) -> None:
    """Raise `OSError` unless one more checkpoint fits, with a little to spare."""
    free_bytes = fsio.free_bytes(run_dir)
    if free_bytes < needed_bytes * SPARE:
        num_here = len(layout.committed(run_dir))
        fewer = f", or {KEEP_FEWER} (there are {num_here} here)"
        advice = fewer if num_here > 1 and kept.keep != 1 else ""
        raise OSError(
            errno.ENOSPC,
            f"a checkpoint needs {readable(needed_bytes)}, and {readable(free_bytes)} are free: "
            f"free some space{advice}",
            str(run_dir),
        )


def warn_if_tight(run_dir: Path, needed_bytes: int, kept: Retention) -> None:
    """Warn if the disk fills before rotation begins: a save needs room for one more than stay."""
    if kept.keep is None:
        return
    free_bytes = fsio.free_bytes(run_dir)
    num_more = kept.keep + 1 - len(layout.committed(run_dir))
    total_bytes = num_more * needed_bytes
    if free_bytes < total_bytes * SPARE:
        fewer = f", or {KEEP_FEWER}" if kept.keep > 1 else ""
        logger.warning(
            f"{run_dir} has {readable(free_bytes)} free, but {num_more} more checkpoints of "
            f"{readable(needed_bytes)} come before old ones are deleted ({readable(total_bytes)} "
            f"more): free some space{fewer}"
        )


def existing_parent(directory: Path) -> Path:
    """Return the directory itself, or the nearest one above it that exists."""
    directory = directory.absolute()
    return next(path for path in (directory, *directory.parents) if path.exists())
