"""Chooses the checkpoint from which a run resumes, by file names and sizes. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.layout import POINTER, Checkpoint, CheckpointInfo, Pointer
from trainer.config import ConfigError, TrainerConfig
from trainer.errors import CannotWriteError
from trainer.runtime.environment import call


class NoUsableCheckpointError(ConfigError):
    """The run has checkpoints, but it cannot resume from any of them. Exit code 2.

    The run never falls back to step 0.
    """


@dataclass(frozen=True)
class Selection:
    """The checkpoint to resume from, and older ones as fallbacks.

    `candidates`: checkpoints in the order in which they are tried, until one is undamaged. `notes`:
    warnings about the choice and about skipped checkpoints.
    """

    candidates: tuple[CheckpointInfo, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> CheckpointInfo | None:
        return self.candidates[0] if self.candidates else None


def select(run_dir: Path) -> Selection:
    """Choose the checkpoint from which an interrupted run resumes; none in a new run directory.

    The pointer decides, with one exception: a newer committed checkpoint that the pointer never
    named takes precedence, because the run died between commit and publish. If the pointer once
    named a newer checkpoint, someone has moved the pointer back. Raises `NoUsableCheckpointError`
    if the directory has checkpoints or a pointer, but no usable checkpoint.
    """
    found = layout.checkpoints(run_dir)
    pointer = layout.read_pointer(run_dir)
    usable = [info for info in reversed(found) if info.manifest]
    if not usable:
        _require_new(run_dir, found, pointer)
        return Selection()
    chosen, notes = _choose(usable, pointer)
    notes += [f"skipped {i.path.name}: {i.reason}" for i in found if not i.manifest]
    return Selection(tuple(info for info in usable if info.step <= chosen.step), tuple(notes))


def _choose(usable: list[CheckpointInfo], pointer: Pointer) -> tuple[CheckpointInfo, list[str]]:
    """Choose from `usable` (newest first). A note explains the choice unless it is both the newest
    and the one that the pointer names.
    """
    newest = usable[0]
    pointed = next((info for info in usable if info.step == pointer.step), None)
    if pointed is None:
        problem = "is missing"
        if pointer.raw is not None:
            problem = f"names no usable checkpoint ({pointer.raw!r})"
        return newest, [
            f"{POINTER} {problem}; continuing from the newest checkpoint, {newest.path.name}"
        ]
    unpublished = [info for info in usable if not info.published and info.step > pointed.step]
    if unpublished:
        first = unpublished[0]
        note = f"the run died after saving {first.path.name}, but before updating {POINTER}"
        return first, [note]
    if newest is not pointed:
        note = f"{POINTER} was moved back to {pointed.path.name}; newer checkpoints are kept"
        return pointed, [note]
    return pointed, []


def _require_new(run_dir: Path, found: list[Checkpoint], pointer: Pointer) -> None:
    """Raise `NoUsableCheckpointError` if the directory has any trace of a checkpoint."""
    aside = [name for name in fsio.list_dir(run_dir) if name.startswith(layout.ASIDE_PREFIXES)]
    if not found and not aside and pointer.raw is None:
        return
    reasons = [f"{info.path.name}: {info.reason}" for info in found]
    reasons += [f"{name} was set aside" for name in aside]
    reasons += [f"{POINTER}: {pointer.raw!r}"]
    raise NoUsableCheckpointError(
        f"cannot resume from any checkpoint in '{run_dir}' ({'; '.join(reasons)}).\n"
        f"Fix: restore a checkpoint, or start a new run with trainer.experiment_name=<new name>"
    )


def candidates_of(config: TrainerConfig) -> Selection:
    """Return the checkpoints from which `trainer.resume_mode` allows the run to resume.

    Raises `ConfigError` if the mode forbids the existing checkpoints, or if none is usable.
    """
    run_dir = Path(config.default_local_dir)
    if config.resume_mode == "disable":
        if found := layout.checkpoints(run_dir):
            raise ConfigError(
                f"trainer.resume_mode=disable, but '{run_dir}' holds checkpoints up to step "
                f"{found[-1].step}, which are never overwritten.\nFix: continue with "
                f"trainer.resume_mode=auto, or start a new run with "
                f"trainer.experiment_name=<new name>"
            )
        return Selection()
    if config.resume_mode == "auto":
        return select(run_dir)
    assert config.resume_from_path is not None
    path = Path(config.resume_from_path)
    if path.resolve().parent == run_dir.resolve():
        raise ConfigError(
            f"trainer.resume_from_path={path} is a checkpoint of this run: each restart of the "
            f"command would go back to it and train the steps after it again.\n"
            f"Fix: trainer.resume_mode=auto continues from the newest checkpoint. To go back once, "
            f"write the step into {run_dir / POINTER} first. To keep the steps after it, add "
            f"trainer.experiment_name=<new name> to this command"
        )
    if (own := select(run_dir)).candidates:
        note = f"this run has its own checkpoints and continues from them, not from {path}"
        return Selection(own.candidates, (*own.notes, note))
    info = layout.inspect(path)
    if not info.manifest:
        raise ConfigError(
            f"trainer.resume_from_path={path} is not a usable checkpoint: {info.reason}.\n"
            f"Fix: choose a committed checkpoint; {call(f'checkpoint ls {path.parent}')} lists them"
        )
    return Selection((info,))


def cannot_use(run_dir: Path, error: OSError) -> CannotWriteError:
    """Return the error to raise if the run directory cannot be written."""
    return CannotWriteError(
        f"cannot write to trainer.default_local_dir={run_dir}: {error.strerror or error}.\n"
        f"Fix: make it writable, or choose a different trainer.default_local_dir"
    )
