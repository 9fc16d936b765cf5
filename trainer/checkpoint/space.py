"""Room on the disk, asked for before it is needed."""

import errno
import logging
from pathlib import Path

from trainer.checkpoint import fsio, layout

SPARE = 1.05
"""Space asked for before a save, over what is written: directories, logs, and other writers."""

logger = logging.getLogger(__name__)


def require_space(run_dir: Path, needed_bytes: int) -> None:
    """Raise `OSError` with the numbers unless one more checkpoint of `needed_bytes` fits, with a little to spare."""
    free_bytes = fsio.free_bytes(run_dir)
    if free_bytes < needed_bytes * SPARE:
        num_kept = len(layout.committed(run_dir))
        fewer = f", or keep fewer than the {num_kept} here (a lower trainer.max_ckpt_to_keep)" if num_kept > 1 else ""
        reason = f"a checkpoint needs {readable(needed_bytes)}, and {readable(free_bytes)} are free: free some space"
        raise OSError(errno.ENOSPC, reason + fewer, str(run_dir))


def warn_if_tight(run_dir: Path, needed_bytes: int, *, keep: int | None) -> None:
    """Log it if the disk fills before rotation begins: during a save there is one checkpoint more than are kept."""
    if keep is None:
        return
    free_bytes, num_to_come = fsio.free_bytes(run_dir), keep + 1 - len(layout.committed(run_dir))
    if free_bytes < num_to_come * needed_bytes * SPARE:
        logger.warning(
            f"{run_dir} has {readable(free_bytes)} free, but {num_to_come} more checkpoints of "
            f"{readable(needed_bytes)} come before old ones are deleted: free some space, or lower "
            f"trainer.max_ckpt_to_keep={keep}"
        )


def existing_parent(directory: Path) -> Path:
    """Itself, or where it would be made."""
    directory = directory.absolute()
    return next(path for path in (directory, *directory.parents) if path.exists())


def readable(size_bytes: float) -> str:
    """`512 B`, `54.2 MiB`, `16.1 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.3g} TiB"
