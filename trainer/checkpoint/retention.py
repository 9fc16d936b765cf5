"""How long a checkpoint stays, and how much of it: old ones lose their optimizer state or go. Rank 0; no torch.

Who reads one holds off those who change it, by a lock that ends with its process. Room on the disk is asked for before
it is needed.
"""

import errno
import fcntl
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint import fsio, layout, rollback
from trainer.checkpoint.layout import PUBLISHED, THINNED, TRASH_PREFIX
from trainer.progress import History
from trainer.runtime.files import NO_FLOCK, try_lock
from trainer.runtime.text import readable

LEASE_PREFIX = ".lease_"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """What a run keeps. None: all.

    keep: its newest checkpoints; keep_full: those of them that keep their optimizer state. best_metric: what the best
    one is found by. rollback_delay: so many steps after its onset trouble is found at the latest that the run goes
    back for, None where it never does.
    """

    keep: int | None = None
    keep_full: int | None = None
    best_metric: str = "val/loss"
    rollback_delay: int | None = None


ALL = Retention()


def settle(
    run_dir: Path, step: int, kept: Retention, *, history: History | None = None, protect: Set[int] = frozenset()
) -> None:
    """Point to the committed checkpoint of `step`, then thin and delete what is no longer to be kept.

    `protect` stays whole. A failure is only logged: the checkpoint is committed, a resume finds and settles it again.
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
        if kept.keep_full is not None:
            needed = rollback.worth_going_back_to(run_dir, history, step=step, delay=kept.rollback_delay)
            thin(run_dir, keep_full=kept.keep_full, protect=protect | needed)
    except OSError as error:
        path = run_dir / layout.step_dir_name(step)
        text = "%s is committed; what follows (the pointer to it, and what goes for it) waits for the next save: %s"
        logger.warning(text, path, error)


def checkpoints_to_delete(run_dir: Path, *, keep: int | None, protect: Set[int]) -> list[Path]:
    """Committed checkpoints that may go, oldest first: all but the newest `keep`, the pointer's and the protected."""
    if keep is None:
        return []
    if keep < 1:
        raise ValueError(f"at least 1 must be kept, got {keep}: the newest checkpoint always stays whole")
    pointed, found = layout.read_pointer(run_dir).step, layout.committed(run_dir)
    spared = {*protect, *newest([info.step for info in found], keep, pointed)}
    return [info.path for info in found if info.step not in spared]


def newest(steps: list[int], keep: int, pointed: int | None) -> list[int]:
    """The newest `keep` of rising steps, and as many up to a pointer that was moved back: a run that goes on from there
    has none of the later ones to fall back on.
    """
    return steps[-keep:] + [step for step in steps if pointed is not None and step <= pointed][-keep:]


def checkpoints_to_thin(run_dir: Path, *, keep_full: int | None, protect: Set[int]) -> list[Path]:
    """The same for those whose optimizer state may go, as far as there is something left of it."""
    older = checkpoints_to_delete(run_dir, keep=keep_full, protect=protect)
    return [path for path in older if optimizer_files(path)]


def optimizer_files(path: Path) -> list[Path]:
    return [path / name for name in fsio.list_dir(path) if layout.is_optimizer(name)]


def rotate(run_dir: Path, *, keep: int | None, protect: Set[int] = frozenset()) -> list[Path]:
    """Delete old checkpoints; what cannot be deleted or is being read (which is returned) is tried again next time.

    Call it after `publish`, and on resume once the loaded checkpoint has verified: sizes alone do not prove that the
    newest is good. `protect` holds the step this run resumed from, until a newer one is published.
    """

    def delete(path: Path) -> None:
        trash = run_dir / f"{TRASH_PREFIX}{path.name}.{secrets.token_hex(4)}"
        fsio.rename(path, trash)
        fsio.remove_tree(trash)

    being_read = _change(checkpoints_to_delete(run_dir, keep=keep, protect=protect), delete, "deleted")
    for name in fsio.list_dir(run_dir):
        checkpoint = run_dir / name.removeprefix(LEASE_PREFIX)
        if name.startswith(LEASE_PREFIX) and not checkpoint.exists():  # set aside meanwhile, or its reader was killed
            with suppress(OSError), changing(checkpoint):
                pass
    return being_read


def thin(run_dir: Path, *, keep_full: int | None, protect: Set[int] = frozenset()) -> list[Path]:
    """The same for the optimizer states of old checkpoints.

    The mark is durable before a file goes: a crash leaves a checkpoint whole, or thinned with files that nothing reads.
    """

    def remove_optimizer(path: Path) -> None:
        layout.mark(path, THINNED)
        for file in optimizer_files(path):
            fsio.unlink(file)

    victims = checkpoints_to_thin(run_dir, keep_full=keep_full, protect=protect)
    return _change(victims, remove_optimizer, "thinned")


def _change(paths: list[Path], change: Callable[[Path], None], done: str) -> list[Path]:
    being_read = []
    for path in paths:
        try:
            with changing(path) as may_change:
                if may_change:
                    change(path)
                else:
                    being_read.append(path)
                    logger.info("%s is being read: it is %s at a later save", path, done)
        except OSError as error:
            logger.warning("%s, an old checkpoint, cannot be %s: %s", path, done, error)
    return being_read


SPARE = 1.05
"""Space asked for before a save, over what is written: directories, logs, and other writers."""


def require_space(run_dir: Path, needed_bytes: int, kept: Retention = ALL) -> None:
    """Raise `OSError` with the numbers unless one more checkpoint of `needed_bytes` fits, with a little to spare."""
    free_bytes = fsio.free_bytes(run_dir)
    if free_bytes < needed_bytes * SPARE:
        here = layout.committed(run_dir)
        way = _less(kept, is_some_whole=sum(not info.thinned for info in here) > 1) if len(here) > 1 else ""
        fewer = f", or keep less of the {len(here)} here: {way}" if way else ""
        reason = f"a checkpoint needs {readable(needed_bytes)}, and {readable(free_bytes)} are free: free some space"
        raise OSError(errno.ENOSPC, reason + fewer, str(run_dir))


def warn_if_tight(run_dir: Path, needed_bytes: int, *, optimizer_bytes: int, kept: Retention) -> None:
    """Log it if the disk fills before rotation begins: during a save there is one checkpoint more than are kept."""
    if kept.keep is None:
        return
    free_bytes, num_here = fsio.free_bytes(run_dir), len(layout.committed(run_dir))
    number = kept.keep + 1
    total_bytes = bytes_to_come(
        num_here, number, needed_bytes, optimizer_bytes=optimizer_bytes, keep_full=kept.keep_full
    )
    if free_bytes < total_bytes * SPARE:
        way = _less(kept, is_some_whole=kept.keep > 1)
        logger.warning(
            f"{run_dir} has {readable(free_bytes)} free, but {number - num_here} more checkpoints of "
            f"{readable(needed_bytes)} come before old ones are deleted ({readable(total_bytes)} more): free some "
            f"space{way and f', or {way}'}"
        )


def _less(kept: Retention, *, is_some_whole: bool) -> str:
    """What can still be lowered for checkpoints to take less room; the best one stays beside the newest."""
    can_be_lowered = {
        "trainer.max_ckpt_to_keep": kept.keep != 1,
        "trainer.checkpoint.keep_full": kept.keep_full != 1 and is_some_whole,
    }
    names = [name for name, can in can_be_lowered.items() if can]
    return f"lower {' or '.join(names)}" if names else ""


KEEP_LESS = _less(ALL, is_some_whole=True)


def bytes_to_come(
    num_here: int, number: int, checkpoint_bytes: int, *, optimizer_bytes: int, keep_full: int | None
) -> int:
    """Until there are `number` checkpoints, the last being written: it is whole, beside the newest `keep_full`."""
    num_thin, num_thin_here = (0 if keep_full is None else max(0, n - keep_full) for n in (number - 1, num_here))
    return (number - num_here) * checkpoint_bytes - (num_thin - num_thin_here) * optimizer_bytes


def existing_parent(directory: Path) -> Path:
    """Itself, or where it would be made."""
    directory = directory.absolute()
    return next(path for path in (directory, *directory.parents) if path.exists())


def _lease_file(checkpoint: Path) -> Path:
    """Beside the checkpoint and not in it: network file systems lock files that are open for writing, no directory."""
    return checkpoint.with_name(f"{LEASE_PREFIX}{checkpoint.name}")


@contextmanager
def reading(checkpoint: Path) -> Iterator[bool]:
    """The checkpoint is neither deleted nor thinned meanwhile; False where it is gone. Waits for who does that now.

    A file system without locks cannot hold anyone off: that is said, and the reader must see whether it is whole still.
    """
    path = _lease_file(checkpoint)
    is_ours = False
    while not is_ours:  # who changed it took the file away that was waited for
        with path.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH)
            except OSError as error:
                if error.errno not in NO_FLOCK:
                    raise
                logger.warning("%s: this file system has no locks: rotation may delete the checkpoint meanwhile", path)
            if is_ours := _is_current(file.fileno(), path):
                yield checkpoint.is_dir()
    if not checkpoint.is_dir():
        path.unlink(missing_ok=True)


@contextmanager
def changing(checkpoint: Path) -> Iterator[bool]:
    """Whether nobody reads it; who comes meanwhile waits, and sees what became of it."""
    path = _lease_file(checkpoint)
    if not path.exists():
        yield True
        return
    with path.open("a+", encoding="utf-8") as file:
        may_change = try_lock(file.fileno()) is not None
        yield may_change
        if may_change:
            path.unlink(missing_ok=True)


def _is_current(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False
