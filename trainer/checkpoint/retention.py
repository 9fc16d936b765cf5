"""How long a checkpoint stays. Rank 0; no torch.

Room on the disk is asked for before it is needed.
"""

import errno
import logging
import secrets
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint import fsio, layout, rollback
from trainer.checkpoint.layout import PUBLISHED, TRASH_PREFIX
from trainer.progress import History
from trainer.runtime.text import readable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """What a run keeps: its newest `keep` checkpoints (None: all), and the best one by
    `best_metric`.
    """

    keep: int | None = None
    best_metric: str = "val/loss"


ALL = Retention()


def settle(
    run_dir: Path,
    step: int,
    kept: Retention,
    *,
    history: History | None = None,
    protect: Set[int] = frozenset(),
) -> None:
    """Point to the committed checkpoint of `step`, then delete what is no longer to be kept.

    `protect` stays whole. A failure is only logged: the checkpoint is committed, a resume finds and
    settles it again.
    """
    history = history or History()
    try:
        layout.publish(run_dir, step)
        for info in layout.committed(run_dir):
            if info.step < step and not info.published:
                # its own pointing failed: it must not look like the work of a later crash
                layout.mark(info.path, PUBLISHED)
        best = rollback.worth_keeping(run_dir, history, kept.best_metric)
        rotate(run_dir, keep=kept.keep, protect=protect | best)
    except OSError as error:
        path = run_dir / layout.step_dir_name(step)
        text = "%s is committed; what follows (the pointer to it, and what goes for it) waits for the next save: %s"
        logger.warning(text, path, error)


def checkpoints_to_delete(run_dir: Path, *, keep: int | None, protect: Set[int]) -> list[Path]:
    """Committed checkpoints that may go, oldest first: all but the newest `keep`, the pointer's
    and the protected.
    """
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
    """The newest `keep` of rising steps, and as many up to a pointer that was moved back: a run
    that goes on from there has none of the later ones to fall back on.
    """
    return (
        steps[-keep:] + [step for step in steps if pointed is not None and step <= pointed][-keep:]
    )


def rotate(run_dir: Path, *, keep: int | None, protect: Set[int] = frozenset()) -> None:
    """Delete old checkpoints; what cannot be deleted is tried again next time.

    Call it after `publish`, and on resume once the loaded checkpoint has verified: sizes alone do
    not prove that the newest is good. `protect` holds the step this run resumed from, until a newer
    one is published.
    """
    for path in checkpoints_to_delete(run_dir, keep=keep, protect=protect):
        trash = run_dir / f"{TRASH_PREFIX}{path.name}.{secrets.token_hex(4)}"
        try:
            fsio.rename(path, trash)
            fsio.remove_tree(trash)
        except OSError as error:
            logger.warning("%s, an old checkpoint, cannot be deleted: %s", path, error)


KEEP_FEWER = "lower trainer.max_ckpt_to_keep"
SPARE = 1.05
"""Space asked for before a save, over what is written: directories, logs, and other writers."""


def require_space(run_dir: Path, needed_bytes: int, kept: Retention = ALL) -> None:
    """Raise `OSError` with the numbers unless one more checkpoint of `needed_bytes` fits, with
    a little to spare.
    """
    free_bytes = fsio.free_bytes(run_dir)
    if free_bytes < needed_bytes * SPARE:
        num_here = len(layout.committed(run_dir))
        can_keep_fewer = num_here > 1 and kept.keep != 1
        fewer = f", or keep fewer than the {num_here} here: {KEEP_FEWER}" if can_keep_fewer else ""
        reason = f"a checkpoint needs {readable(needed_bytes)}, and {readable(free_bytes)} are free: free some space"
        raise OSError(errno.ENOSPC, reason + fewer, str(run_dir))


def warn_if_tight(run_dir: Path, needed_bytes: int, kept: Retention) -> None:
    """Log it if the disk fills before rotation begins: during a save there is one checkpoint
    more than are kept.
    """
    if kept.keep is None:
        return
    free_bytes, num_here = fsio.free_bytes(run_dir), len(layout.committed(run_dir))
    number = kept.keep + 1
    total_bytes = (number - num_here) * needed_bytes
    if free_bytes < total_bytes * SPARE:
        fewer = f", or {KEEP_FEWER}" if kept.keep > 1 else ""
        logger.warning(
            f"{run_dir} has {readable(free_bytes)} free, but {number - num_here} more checkpoints "
            f"of {readable(needed_bytes)} come before old ones are deleted "
            f"({readable(total_bytes)} more): free some space{fewer}"
        )


def existing_parent(directory: Path) -> Path:
    """Itself, or where it would be made."""
    directory = directory.absolute()
    return next(path for path in (directory, *directory.parents) if path.exists())
