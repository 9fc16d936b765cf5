"""What a run may continue from, as configured; judged by names and sizes, before anything is built. No torch."""

from pathlib import Path

from trainer.checkpoint import layout
from trainer.checkpoint.layout import CheckpointInfo
from trainer.config import ConfigError, TrainerConfig
from trainer.errors import CannotWriteError


def candidates_of(config: TrainerConfig) -> tuple[tuple[CheckpointInfo, ...], tuple[str, ...]]:
    """What the run may continue from, the first choice first, with notes on the choice. Raises `ConfigError`."""
    run_dir = Path(config.default_local_dir)
    if config.resume_mode == "disable":
        if found := layout.checkpoints(run_dir):
            raise ConfigError(
                f"trainer.resume_mode=disable, but '{run_dir}' holds checkpoints up to step {found[-1].step}; they are "
                f"not overwritten: use resume_mode=auto to continue, or another trainer.experiment_name"
            )
        return (), ()
    if config.resume_mode == "resume_path":
        assert config.resume_from_path is not None
        path = Path(config.resume_from_path)
        own = layout.select(run_dir)
        if own.candidates and path.resolve().parent != run_dir.resolve():
            note = f"this run already has checkpoints of its own: continuing from them, not from {path}"
            return own.candidates, (*own.notes, note)
        info = layout.inspect(path)
        if info.status == "incomplete":
            raise ConfigError(f"trainer.resume_from_path={path} is no usable checkpoint: {info.reason or info.status}")
        return (info,), ()
    selection = layout.select(run_dir)
    return selection.candidates, selection.notes


def cannot_use(run_dir: Path, error: OSError) -> CannotWriteError:
    reason = error.strerror or error
    return CannotWriteError(f"cannot write to trainer.default_local_dir={run_dir}: {reason}; choose another directory")
