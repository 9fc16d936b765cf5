"""Delete old checkpoints and leftovers of a run that does not train, never what a resume needs (floor 5, no torch)."""

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint import choice, fsio, layout
from trainer.checkpoint.layout import CORRUPT_PREFIX, TRASH_PREFIX, CheckpointInfo
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint_tools.listing import LEFTOVERS, prove, require_run
from trainer.config import ConfigError
from trainer.errors import CannotWriteError

LOCK_TIMEOUT_S = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pruning:
    """What stays of a run and what goes, given that `keep` checkpoints stay and whether damaged ones go too.

    `proofs` must verify before any of `to_delete` goes: the newest checkpoint, and the one a resume takes.
    """

    run_dir: Path
    keep: int
    is_corrupt_deleted: bool
    kept: list[str]
    proofs: list[CheckpointInfo]
    to_delete: list[Path]


def plan_pruning(run_dir: Path, *, keep: int, is_corrupt_deleted: bool) -> Pruning:
    """Raises `ConfigError` naming the holder while the run trains, and where a resume would find nothing."""
    require_run(run_dir)
    with _locked(run_dir):
        return _plan(run_dir, keep, is_corrupt_deleted)


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Raises `ConfigError` naming the holder. Not held while hashing: a run that starts then need not wait."""
    lock = RunLock(run_dir)
    lock.acquire(timeout_s=LOCK_TIMEOUT_S)
    try:
        yield
    finally:
        lock.release()


def _plan(run_dir: Path, keep: int, is_corrupt_deleted: bool) -> Pruning:
    """Raises `ConfigError` where a resume would find nothing: what looks left over may be all that is left."""
    chosen = choice.select(run_dir).chosen
    protect = {chosen.step} if chosen else set()
    old = layout.checkpoints_to_delete(run_dir, keep=keep, protect=protect)
    kept = [info for info in layout.checkpoints(run_dir) if info.path not in old]
    committed = [info for info in kept if info.status == "committed"]
    proofs = [info for info in committed if info is committed[-1] or info.step in protect]
    prefixes = tuple(prefix for prefix in LEFTOVERS if prefix != CORRUPT_PREFIX or is_corrupt_deleted)
    leftovers = [run_dir / name for name in fsio.list_dir(run_dir) if name.startswith(prefixes)]
    if not proofs and any(path.name.startswith(CORRUPT_PREFIX) for path in leftovers):
        raise ConfigError(f"'{run_dir}' has no checkpoint that can be proven: leave out --corrupt")
    names = [info.path.name if info in committed else f"{info.path.name} ({info.status})" for info in kept]
    return Pruning(run_dir, keep, is_corrupt_deleted, names, proofs, old + leftovers)


def prune(pruning: Pruning) -> None:
    """Raises `OSError` before anything is deleted if a proof fails, `CannotWriteError` for what cannot be deleted."""
    run_dir, asked = pruning.run_dir, (pruning.run_dir, pruning.keep, pruning.is_corrupt_deleted)
    for info in pruning.proofs:
        found = prove(info.path)
        for problem in filter(layout.is_export, found):
            logger.warning("%s: %s; a resume does not need it, and 'export' makes another", info.path, problem)
        if problems := [problem for problem in found if not layout.is_export(problem)]:
            raise OSError(
                f"nothing was deleted, because '{info.path}' is damaged: {'; '.join(problems)}. Start the run (it sets "
                "the checkpoint aside and continues from an older one) or move it away, then prune again"
            )
    with _locked(run_dir):
        if _plan(*asked) != pruning:
            raise ConfigError(f"nothing was deleted, because '{run_dir}' changed meanwhile: prune again")
        layout.rotate(run_dir, keep=pruning.keep, protect={info.step for info in pruning.proofs})
        for path in pruning.to_delete:
            if path.name.startswith(CORRUPT_PREFIX):
                try:
                    fsio.rename(path, run_dir / f"{TRASH_PREFIX}{path.name}.{secrets.token_hex(4)}")
                except OSError as error:
                    logger.warning("cannot delete %s: %s", path, error)
        layout.clean_leftovers(run_dir)
        if left := [path.name for path in _plan(*asked).to_delete]:
            raise CannotWriteError(f"cannot delete all of it (reasons above), still in '{run_dir}': {', '.join(left)}")
