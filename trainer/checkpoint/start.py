"""Decide where a run begins, and prove its checkpoint, before a model is built. The main rank
decides, the others follow.
"""

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from trainer.checkpoint import finished, fsio, layout, rollback
from trainer.checkpoint.choice import (
    NoUsableCheckpointError,
    Selection,
    candidates_of,
    cannot_use,
)
from trainer.checkpoint.layout import CheckpointInfo
from trainer.checkpoint.lineage import Lineage, compare
from trainer.checkpoint.lock import RunLock, is_given_back
from trainer.checkpoint.manifest import verify_files
from trainer.config import ConfigError, TrainerConfig
from trainer.runtime import distributed
from trainer.runtime.distributed import World
from trainer.runtime.progress import Position, Rollbacks

logger = logging.getLogger(__name__)
SHARED_WITHIN_S = 60.0
T = TypeVar("T")


@dataclass(frozen=True)
class Start:
    """`checkpoint`: what to continue from, its contents proven; None for a fresh run. `lock`: held
    by the main rank.

    `is_complete`: the run has ended, and nothing of its end is left to do.
    """

    checkpoint: CheckpointInfo | None
    position: Position
    is_complete: bool
    lock: RunLock | None
    rollbacks: Rollbacks = field(default_factory=Rollbacks)
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of this run, for its checkpoints."""


def decide_start(
    config: TrainerConfig,
    lineage: Lineage,
    world: World,
    *,
    selection: Selection,
    total_steps: int,
) -> Start:
    """Decide where to begin. Collective.

    `lineage`: what the run descends from. `selection`: what `choose` found. `total_steps`: steps of
    the whole run if it continues from there.

    A run that has ended is complete: nothing is written, not even the lock. One that was killed at
    its end is not: it goes on with no step left, and ends again. Raises on every rank alike:
    `ConfigError` for a run that cannot be continued as configured, `CannotWriteError`.
    """
    if selection.chosen is not None:
        position = position_of(selection.chosen)
        if _is_complete(selection.chosen, config, position, total_steps, world):
            _say(selection.notes)
            return Start(selection.chosen, position, is_complete=True, lock=None)
    lock = RunLock(Path(config.default_local_dir), needs_flock=config.checkpoint.require_lock)
    try:
        return _begin(lock, config, lineage, world)
    except BaseException:
        lock.release()
        raise


def _begin(lock: RunLock, config: TrainerConfig, lineage: Lineage, world: World) -> Start:
    """Decide the start under the lock, which the main rank takes first."""
    _on_main(partial(_take_run_dir, config, lock), config, world)
    _require_shared(config, world)
    selection = choose(config, world)
    _say(selection.notes)
    checkpoint = _first_proven(selection.candidates, config, world)
    if checkpoint is not None:
        _require_same_run(checkpoint, lineage)
    rollbacks = _on_main(partial(rollback.read, Path(config.default_local_dir)), config, world)
    return Start(
        checkpoint,
        position_of(checkpoint),
        is_complete=False,
        lock=lock if world.is_main else None,
        rollbacks=rollbacks,
        fingerprints=lineage.fingerprints,
    )


def choose(config: TrainerConfig, world: World) -> Selection:
    """Choose the checkpoint to continue from, on the main rank. Collective."""
    return _on_main(partial(candidates_of, config), config, world)


def _on_main(action: Callable[[], T], config: TrainerConfig, world: World) -> T:
    return distributed.on_main(
        action, world, describe=partial(cannot_use, Path(config.default_local_dir))
    )


def _is_complete(
    candidate: CheckpointInfo,
    config: TrainerConfig,
    position: Position,
    total_steps: int,
    world: World,
) -> bool:
    """Return True if a run has ended and left all that it should. A manifest is asked before it is
    proven: that takes long.
    """
    end = _on_main(partial(finished.read, candidate.path), config, world)
    ended_early = end is not None and end.ended_early and position.step > 0
    has_ended = ended_early or position.step >= total_steps
    if not has_ended or verify(candidate, world):
        return False
    missing = _on_main(partial(_missing_at_end, candidate, config), config, world)
    if end is None and _is_own(candidate, config):
        missing.append(f"{finished.FILE_NAME} is not written")
    if missing:
        logger.info(
            "%s was the last step, but the run did not end: %s", candidate.path, ", ".join(missing)
        )
    return not missing


def _missing_at_end(candidate: CheckpointInfo, config: TrainerConfig) -> list[str]:
    """Name what the end of a run in its own directory still lacks."""
    run_dir = Path(config.default_local_dir)
    missing: list[str] = []
    if not _is_own(candidate, config):
        return missing
    if not layout.is_published(run_dir, candidate):
        missing.append(f"{layout.POINTER} names another step")
    if not is_given_back(run_dir):
        missing.append("its lock is not given back")
    return missing


def _is_own(checkpoint: CheckpointInfo, config: TrainerConfig) -> bool:
    """Return True unless the checkpoint belongs to another run directory."""
    return checkpoint.path.resolve().parent == Path(config.default_local_dir).resolve()


def position_of(checkpoint: CheckpointInfo | None) -> Position:
    """Return where a run continues from a checkpoint; the beginning without one."""
    if checkpoint is None:
        return Position()
    assert checkpoint.manifest is not None, "a candidate is committed"
    return checkpoint.manifest.position


def _first_proven(
    candidates: tuple[CheckpointInfo, ...], config: TrainerConfig, world: World
) -> CheckpointInfo | None:
    """The first candidate whose every byte is as written; damaged ones of this run are set
    aside. Collective.
    """
    for candidate in candidates:
        problems = verify(candidate, world)
        if not problems:
            return candidate
        logger.warning("%s is damaged: %s", candidate.path, "; ".join(problems[:3]))
        if _is_own(candidate, config):
            aside = partial(layout.quarantine, candidate.path, "its contents do not verify")
            _on_main(aside, config, world)
    if candidates:
        raise NoUsableCheckpointError(
            f"every checkpoint in {config.default_local_dir} to continue from is damaged (set aside as .corrupt_*); "
            f"begin anew in another directory: trainer.experiment_name=<new name>"
        )
    return None


def verify(candidate: CheckpointInfo, world: World) -> list[str]:
    """Name what is wrong with a checkpoint; each rank reads its share. Collective."""
    assert candidate.manifest is not None, "a candidate is committed"
    own = verify_files(candidate.path, candidate.manifest, share=(world.rank, world.size))
    reports: list[Any] = [None] * world.size
    dist.all_gather_object(reports, own)
    problems = [problem for report in reports for problem in report]
    for problem in filter(layout.is_export, problems):
        text = "the export of %s cannot be served, 'checkpoint export' makes another; the run continues from it: %s"
        logger.warning(text, candidate.path, problem)
    return [problem for problem in problems if not layout.is_export(problem)]


def _require_same_run(checkpoint: CheckpointInfo, now: Lineage) -> None:
    assert checkpoint.manifest is not None, "a candidate is committed"
    for change in compare(checkpoint.manifest.fingerprints, now):
        logger.warning("changed since %s: %s", checkpoint.path.name, change)


def _take_run_dir(config: TrainerConfig, lock: RunLock) -> None:
    run_dir = Path(config.default_local_dir)
    fsio.make_dirs(run_dir)
    lock.acquire()
    layout.clean_leftovers(run_dir)
    rollback.complete(run_dir)


def _require_shared(config: TrainerConfig, world: World) -> None:
    """Every rank must see what the main rank writes, or its shards would be scattered over
    machines. Collective.
    """
    run_dir = Path(config.default_local_dir)
    name = f"{layout.STAGING_PREFIX}probe.{secrets.token_hex(4)}"
    probe = run_dir / _on_main(lambda: _write_probe(run_dir / name), config, world)
    deadline = time.monotonic() + SHARED_WITHIN_S
    while not (is_seen := probe.exists()) and time.monotonic() < deadline:
        time.sleep(fsio.VISIBILITY_POLL_S)
    seen: list[Any] = [None] * world.size
    dist.all_gather_object(seen, is_seen)
    _on_main(lambda: fsio.remove_tree(probe), config, world)
    if blind := [rank for rank, rank_sees in enumerate(seen) if not rank_sees]:
        raise ConfigError(
            f"ranks {blind} do not see what rank 0 writes to trainer.default_local_dir={run_dir}: "
            f"it must be on a file system that all machines share"
        )


def _write_probe(path: Path) -> str:
    fsio.write_file(path, b"", root=path.parent)
    fsio.fsync_dir(path.parent)
    return path.name


def _say(notes: tuple[str, ...]) -> None:
    for note in notes:
        is_warning = note.startswith("WARNING: ")
        (logger.warning if is_warning else logger.info)(note.removeprefix("WARNING: "))
