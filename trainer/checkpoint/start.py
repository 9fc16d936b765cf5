"""Where a run begins: decided once by the main rank from the run directory, before a model is built."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.layout import CheckpointInfo
from trainer.checkpoint.lock import RunLock
from trainer.config import ConfigError, TrainerConfig
from trainer.protocols import CannotWriteError
from trainer.runtime.distributed import World

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Start:
    """`candidates`: what to continue from, best first; none for a fresh run. `lock` is held by the main rank."""

    candidates: tuple[CheckpointInfo, ...]
    is_complete: bool
    lock: RunLock | None


def decide_start(config: TrainerConfig, *, total_steps: int, world: World) -> Start:
    """Collective. Raises `ConfigError` or `CannotWriteError` on every rank.

    A run that already reached `total_steps` is complete: nothing is written, not even the lock.
    """
    outcome: list[Any] = [None, None]
    lock: RunLock | None = None
    if world.is_main:
        try:
            candidates = _candidates(config)
            is_complete = bool(candidates) and candidates[0].step >= total_steps
            if not is_complete:
                lock = _take_run_dir(Path(config.default_local_dir))
                candidates = _candidates(config)
            outcome[0] = (candidates, is_complete)
        except (ConfigError, CannotWriteError) as error:
            outcome[1] = error
        except OSError as error:
            outcome[1] = _cannot_use(Path(config.default_local_dir), error)
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    candidates, is_complete = outcome[0]
    return Start(candidates, is_complete, lock)


def _take_run_dir(run_dir: Path) -> RunLock:
    try:
        fsio.make_dirs(run_dir)
        lock = RunLock(run_dir)
        lock.acquire()
        layout.clean_leftovers(run_dir)
    except ConfigError:
        raise
    except OSError as error:
        raise _cannot_use(run_dir, error) from error
    return lock


def _cannot_use(run_dir: Path, error: OSError) -> CannotWriteError:
    reason = error.strerror or error
    return CannotWriteError(f"cannot write to trainer.default_local_dir={run_dir}: {reason}; choose another directory")


def _candidates(config: TrainerConfig) -> tuple[CheckpointInfo, ...]:
    run_dir = Path(config.default_local_dir)
    if config.resume_mode == "disable":
        if found := layout.checkpoints(run_dir):
            raise ConfigError(
                f"trainer.resume_mode=disable, but '{run_dir}' holds checkpoints up to step {found[-1].step}; they are "
                f"not overwritten: use resume_mode=auto to continue, or another trainer.experiment_name"
            )
        return ()
    if config.resume_mode == "resume_path":
        assert config.resume_from_path is not None
        path = Path(config.resume_from_path)
        own = _own(run_dir)
        if own and path.resolve().parent != run_dir.resolve():
            logger.info("this run already has checkpoints of its own: continuing from them, not from %s", path)
            return own
        info = layout.inspect(path)
        if info.status != "committed":
            raise ConfigError(f"trainer.resume_from_path={path} is no usable checkpoint: {info.reason or info.status}")
        return (info,)
    return _own(run_dir)


def _own(run_dir: Path) -> tuple[CheckpointInfo, ...]:
    selection = layout.select(run_dir)
    for note in selection.notes:
        is_warning = note.startswith("WARNING: ")
        (logger.warning if is_warning else logger.info)(note.removeprefix("WARNING: "))
    return selection.candidates
