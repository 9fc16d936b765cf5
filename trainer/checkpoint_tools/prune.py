"""Delete old checkpoints and leftovers of a run that does not train, never what a resume needs (floor 5, no torch)."""

import argparse
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.layout import CORRUPT_PREFIX, TRASH_PREFIX, CheckpointInfo
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.space import readable
from trainer.checkpoint_tools.listing import LEFTOVERS, printable, prove, require_run, tree_bytes
from trainer.config import ConfigError
from trainer.errors import EXIT_DONE, CannotWriteError

LOCK_TIMEOUT_S = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """`proofs` must verify before any of `doomed` goes: the newest checkpoint, and the one a resume takes."""

    kept: list[str]
    proofs: list[CheckpointInfo]
    doomed: list[Path]


def prune(arguments: argparse.Namespace) -> int:
    """The command: `run_dir`, `keep`, `corrupt` and `yes` are its arguments."""
    run_dir = arguments.run_dir
    require_run(run_dir)
    with _locked(run_dir):
        plan = _plan(arguments)
    sizes_bytes = {path: tree_bytes(path) for path in plan.doomed}
    lines = [f"{run_dir} keeps {', '.join(plan.kept) or 'no checkpoint'}"]
    verb = "delete" if arguments.yes else "would delete"
    lines += [f"  {verb} {path.name}  {readable(size_bytes)}" for path, size_bytes in sizes_bytes.items()]
    print("\n".join(map(printable, lines)), flush=True)
    total = readable(sum(sizes_bytes.values()))
    if not plan.doomed or not arguments.yes:
        print(f"{total}; nothing is deleted without --yes" if plan.doomed else "nothing to delete")
        return EXIT_DONE
    _delete(arguments, plan)
    print(f"deleted {total}")
    return EXIT_DONE


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Raises `ConfigError` naming the holder. Not held while hashing: a run that starts then need not wait."""
    lock = RunLock(run_dir)
    lock.acquire(timeout_s=LOCK_TIMEOUT_S)
    try:
        yield
    finally:
        lock.release()


def _plan(arguments: argparse.Namespace) -> Plan:
    """Raises `ConfigError` where a resume would find nothing: what looks left over may be all that is left."""
    run_dir = arguments.run_dir
    chosen = layout.select(run_dir).chosen
    protect = {chosen.step} if chosen else set()
    victims = layout.rotation_victims(run_dir, keep=arguments.keep, protect=protect)
    kept = [info for info in layout.checkpoints(run_dir) if info.path not in victims]
    committed = [info for info in kept if info.status == "committed"]
    proofs = [info for info in committed if info is committed[-1] or info.step in protect]
    prefixes = tuple(prefix for prefix in LEFTOVERS if prefix != CORRUPT_PREFIX or arguments.corrupt)
    leftovers = [run_dir / name for name in fsio.list_dir(run_dir) if name.startswith(prefixes)]
    if not proofs and any(path.name.startswith(CORRUPT_PREFIX) for path in leftovers):
        raise ConfigError(f"'{run_dir}' has no checkpoint that can be proven: leave out --corrupt")
    names = [info.path.name if info in committed else f"{info.path.name} ({info.status})" for info in kept]
    return Plan(names, proofs, victims + leftovers)


def _delete(arguments: argparse.Namespace, plan: Plan) -> None:
    """Raises `OSError` before anything is deleted if a proof fails, `CannotWriteError` for what cannot be deleted."""
    run_dir = arguments.run_dir
    for info in plan.proofs:
        found = prove(info.path)
        for problem in filter(layout.is_export, found):
            logger.warning("%s: %s; a resume does not need it, and 'export' makes another", info.path, problem)
        if problems := [problem for problem in found if not layout.is_export(problem)]:
            raise OSError(
                f"nothing was deleted, because '{info.path}' is damaged: {'; '.join(problems)}. Start the run (it sets "
                "the checkpoint aside and continues from an older one) or move it away, then prune again"
            )
    with _locked(run_dir):
        if _plan(arguments) != plan:
            raise ConfigError(f"nothing was deleted, because '{run_dir}' changed meanwhile: prune again")
        layout.rotate(run_dir, keep=arguments.keep, protect={info.step for info in plan.proofs})
        for path in plan.doomed:
            if path.name.startswith(CORRUPT_PREFIX):
                try:
                    fsio.rename(path, run_dir / f"{TRASH_PREFIX}{path.name}.{secrets.token_hex(4)}")
                except OSError as error:
                    logger.warning("cannot delete %s: %s", path, error)
        layout.clean_leftovers(run_dir)
        if left := [path.name for path in _plan(arguments).doomed]:
            raise CannotWriteError(f"cannot delete all of it (reasons above), still in '{run_dir}': {', '.join(left)}")
