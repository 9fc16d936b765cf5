"""Decide where a run begins, and verify its checkpoint, before a model is built.

The main rank decides; the other ranks follow.
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
from trainer.checkpoint.lineage import compare
from trainer.checkpoint.lock import RunLock, has_ended_in_order
from trainer.checkpoint.manifest import verify_files
from trainer.config import ConfigError, TrainerConfig
from trainer.errors import CannotWriteError
from trainer.runtime import distributed
from trainer.runtime.distributed import World
from trainer.runtime.json_lines import flat
from trainer.runtime.progress import Position, Rollbacks

logger = logging.getLogger(__name__)
SHARED_WITHIN_S = 60.0
T = TypeVar("T")


@dataclass(frozen=True)
class Start:
    """The point where a run begins.

    `checkpoint`: the verified checkpoint to continue from; None for a new run. `is_complete`: True
    if the run has already ended and has nothing left to do. `lock`: the run lock, on the main rank.
    """

    checkpoint: CheckpointInfo | None
    is_complete: bool
    lock: RunLock | None
    rollbacks: Rollbacks = field(default_factory=Rollbacks)
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of this run, which its checkpoints record."""

    @property
    def position(self) -> Position:
        return position_of(self.checkpoint)


def decide_start(
    config: TrainerConfig,
    fingerprints: Mapping[str, str],
    world: World,
    *,
    selection: Selection,
    total_steps: int,
) -> Start:
    """Decide where to begin. Collective.

    `fingerprints`: fingerprints of this run; `selection`: the result of `choose`; `total_steps`:
    number of steps of the whole run, if it continues from the selected checkpoint.

    If the run has already ended, nothing is written, not even the lock. A run that was killed while
    it shut down resumes with no steps left and repeats the shutdown. Raises the same error on every
    rank: `ConfigError` for a run that cannot be continued as configured, `CannotWriteError` if the
    run directory cannot be written.
    """
    last = selection.chosen
    if last is not None and _is_complete(config, fingerprints, last, total_steps, world):
        _log(selection)
        _log_changes(last, fingerprints, config)
        return Start(last, is_complete=True, lock=None)
    lock = RunLock(Path(config.default_local_dir), needs_flock=config.checkpoint.require_lock)
    try:
        return _begin(config, fingerprints, world, lock)
    except BaseException:
        lock.release()
        raise


def _begin(
    config: TrainerConfig,
    fingerprints: Mapping[str, str],
    world: World,
    lock: RunLock,
) -> Start:
    """Take the lock on the main rank, then decide where to begin.

    1. Create and lock the run directory, remove leftovers, and complete an interrupted rollback.
    2. Check that all ranks see the files of the main rank.
    3. Choose a checkpoint by names and sizes. Verify the candidates until one is undamaged.
    4. Compare its fingerprints with those of this run.
    5. Read the rollbacks that precede it. Their skipped steps must still train the same batches.
    """
    run_dir = Path(config.default_local_dir)

    def take_run_dir() -> None:
        fsio.make_dirs(run_dir)
        lock.acquire()
        layout.clean_leftovers(run_dir)
        rollback.complete(run_dir)

    on_main(take_run_dir, run_dir, world)
    _require_shared(run_dir, world)
    selection = choose(config, world)
    _log(selection)
    checkpoint = _first_verified(selection.candidates, run_dir, world)
    if checkpoint is not None:
        _log_changes(checkpoint, fingerprints, config)
    recall = partial(rollback.take_over, run_dir, checkpoint)
    if checkpoint is not None and is_own(checkpoint, run_dir):
        recall = partial(rollback.read, run_dir)
    rollbacks = on_main(recall, run_dir, world)
    if checkpoint is not None and not rollback.has_same_batches(checkpoint, fingerprints):
        _require_no_skips(rollbacks, checkpoint)
    return Start(
        checkpoint,
        is_complete=False,
        lock=lock if world.is_main else None,
        rollbacks=rollbacks,
        fingerprints=fingerprints,
    )


def _log_changes(
    checkpoint: CheckpointInfo, fingerprints: Mapping[str, str], config: TrainerConfig
) -> None:
    """Log how this run differs from a checkpoint. Raises `ConfigError` for a refused difference."""
    saved = checkpoint.manifest.fingerprints
    for change in compare(saved, fingerprints, allow=config.resume_allow):
        logger.warning("changed since %s: %s", checkpoint.path.name, change)


def _require_no_skips(rollbacks: Rollbacks, checkpoint: CheckpointInfo) -> None:
    """Raise `ConfigError` if a rollback skips steps after the checkpoint that now train other
    batches.
    """
    if ahead := [step for step in rollbacks.skipped_steps if step > checkpoint.step]:
        raise ConfigError(
            f"a rollback skips the batches of steps {min(ahead)} to {max(ahead)}, but these steps "
            f"now train other samples, because {' or '.join(rollback.BATCHES)} has changed.\n"
            f"Fix: restore these values until step {max(ahead)} is saved, or start a new run with "
            f"trainer.experiment_name=<new name>"
        )


def _is_complete(
    config: TrainerConfig,
    fingerprints: Mapping[str, str],
    last: CheckpointInfo,
    total_steps: int,
    world: World,
) -> bool:
    """Return True if a run ended cleanly with the checkpoint `last`.

    A run that ended early is complete only for the same patience and validation rows. Otherwise the
    loop decides again. The step is checked first, because verifying the files takes long.
    """
    run_dir = Path(config.default_local_dir)
    end = on_main(lambda: finished.read(last.path), run_dir, world)
    has_ended = last.step >= total_steps
    if end is not None and end.ended_early:
        saved = last.manifest.fingerprints
        patience = flat(end.config).get("trainer.early_stop_patience")
        is_same = saved.get("validation") == fingerprints.get("validation")
        has_ended |= is_same and patience == config.early_stop_patience
    if not has_ended or verify(last, world):
        return False
    if not is_own(last, run_dir):
        return True
    if end is not None and on_main(partial(has_ended_in_order, run_dir, last), run_dir, world):
        return True
    logger.info("%s is the last step's checkpoint, but the run did not end cleanly", last.path)
    return False


def is_own(checkpoint: CheckpointInfo, run_dir: Path) -> bool:
    """Return True if the checkpoint is in this run's directory."""
    return checkpoint.path.resolve().parent == run_dir.resolve()


def _first_verified(
    candidates: tuple[CheckpointInfo, ...], run_dir: Path, world: World
) -> CheckpointInfo | None:
    """Return the first undamaged candidate. Damaged checkpoints of this run are set aside.

    Raises `NoUsableCheckpointError` if every candidate is damaged.
    """
    for candidate in candidates:
        problems = verify(candidate, world)
        if not problems:
            return candidate
        logger.warning("%s is damaged: %s", candidate.path, "; ".join(problems[:3]))
        if is_own(candidate, run_dir):
            set_aside = partial(layout.quarantine, candidate.path, "it is damaged")
            on_main(set_aside, run_dir, world)
    if candidates:
        raise NoUsableCheckpointError(
            f"every usable checkpoint in {run_dir} is damaged and was renamed to "
            f".corrupt_*.\nFix: start a new run with trainer.experiment_name=<new name>"
        )
    return None


def choose(config: TrainerConfig, world: World) -> Selection:
    """Choose the checkpoint to continue from, on the main rank. Collective."""
    return on_main(partial(candidates_of, config), Path(config.default_local_dir), world)


def position_of(checkpoint: CheckpointInfo | None) -> Position:
    """Return the position from which a run continues."""
    return Position() if checkpoint is None else checkpoint.manifest.position


def on_main(action: Callable[[], T], run_dir: Path, world: World) -> T:
    """Run `action` on the main rank, and return its result or raise its error on every rank.

    An `OSError` becomes a `CannotWriteError`. Collective.
    """
    outcome: list[Any] = [None, None]
    if world.is_main:
        try:
            outcome[0] = action()
        except (ConfigError, CannotWriteError) as error:
            outcome[1] = error
        except OSError as error:
            outcome[1] = cannot_use(run_dir, error)
    dist.broadcast_object_list(outcome, src=0)
    result, failure = outcome
    if failure is not None:
        raise failure
    return result


def _require_shared(run_dir: Path, world: World) -> None:
    """Raise `ConfigError` unless every rank sees the files that the main rank writes. Collective.

    Otherwise each machine would have only some of the shards.
    """
    name = f"{layout.STAGING_PREFIX}probe.{secrets.token_hex(4)}"

    def write_probe() -> str:
        fsio.write_file(run_dir / name, b"", root=run_dir)
        fsio.fsync_dir(run_dir)
        return name

    probe = run_dir / on_main(write_probe, run_dir, world)
    deadline = time.monotonic() + SHARED_WITHIN_S
    while not (is_seen := probe.exists()) and time.monotonic() < deadline:
        time.sleep(fsio.VISIBILITY_POLL_S)
    seen = distributed.gather(is_seen)
    on_main(lambda: fsio.remove_tree(probe), run_dir, world)
    if blind := [rank for rank, rank_sees in enumerate(seen) if not rank_sees]:
        raise ConfigError(
            f"ranks {blind} do not see the files that rank 0 writes to "
            f"trainer.default_local_dir={run_dir}.\n"
            f"Fix: choose a directory on a file system that all machines share"
        )


def verify(candidate: CheckpointInfo, world: World) -> list[str]:
    """Return the problems found in a checkpoint. Each rank reads its share. Collective.

    A damaged export is only logged, because resuming does not need it.
    """
    own = verify_files(candidate.path, candidate.manifest, share=(world.rank, world.size))
    reports = distributed.gather(own)
    problems = [problem for report in reports for problem in report]
    for problem in filter(layout.is_export, problems):
        logger.warning(
            "the export in %s is damaged: %s. The run continues; use `checkpoint export` to "
            "export the checkpoint again",
            candidate.path,
            problem,
        )
    return [problem for problem in problems if not layout.is_export(problem)]


def _log(selection: Selection) -> None:
    for note in selection.notes:
        logger.warning(note)
