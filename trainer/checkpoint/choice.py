"""Choose the checkpoint that a run continues from, by file names and sizes. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.layout import POINTER, CheckpointInfo, Pointer
from trainer.config import ConfigError, TrainerConfig
from trainer.errors import CannotWriteError


class NoUsableCheckpointError(ConfigError):
    """The run has checkpoints, but cannot continue from any of them. Exit code 2.

    The run never begins at step 0 instead.
    """


@dataclass(frozen=True)
class Selection:
    """`candidates`: the checkpoint to continue from, then older ones in case it is damaged.

    `notes` are warnings about the choice and about skipped checkpoints.
    """

    candidates: tuple[CheckpointInfo, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> CheckpointInfo | None:
        return self.candidates[0] if self.candidates else None


def select(run_dir: Path) -> Selection:
    """Choose the checkpoint that an interrupted run continues from; none in a new run directory.

    The pointer decides, with one exception. A newer committed checkpoint that the pointer never
    named is preferred, because the run died between commit and publish. If the pointer once named a
    newer checkpoint, a person moved it back. Raises `NoUsableCheckpointError` if the directory has
    checkpoints or a pointer, but no usable checkpoint.
    """
    found, pointer = layout.checkpoints(run_dir), layout.read_pointer(run_dir)
    usable = [info for info in reversed(found) if info.manifest]
    if not usable:
        _require_new(run_dir, found, pointer)
        return Selection()
    chosen, note = _choose(usable, pointer)
    notes = [note] if note else []
    notes += [f"skipped {i.path.name}: {i.reason}" for i in found if not i.manifest]
    return Selection(tuple(info for info in usable if info.step <= chosen.step), tuple(notes))


def _choose(usable: list[CheckpointInfo], pointer: Pointer) -> tuple[CheckpointInfo, str | None]:
    """Choose from `usable` (newest first). Add a note unless the pointer names the newest."""
    newest = usable[0]
    pointed = next((info for info in usable if info.step == pointer.step), None)
    if pointed is None:
        said = (
            "is missing" if pointer.raw is None else f"says {pointer.raw!r}: no usable checkpoint"
        )
        return newest, f"{POINTER} {said}; continuing from the newest, {newest.path.name}"
    unpublished = [info for info in usable if not info.published and info.step > pointed.step]
    if unpublished:
        first = unpublished[0]
        return first, f"{first.path.name} was committed just before the run died, unpublished"
    if newest is not pointed:
        return pointed, f"{POINTER} was moved back to {pointed.path.name}; newer ones are kept"
    return pointed, None


def _require_new(run_dir: Path, found: list[CheckpointInfo], pointer: Pointer) -> None:
    corrupt = [name for name in fsio.list_dir(run_dir) if name.startswith(layout.CORRUPT_PREFIX)]
    if not found and not corrupt and pointer.raw is None:
        return
    reasons = [f"{info.path.name}: {info.reason}" for info in found]
    reasons += [f"{name}: set aside as corrupt" for name in corrupt]
    reasons += [f"{POINTER}: {pointer.raw!r}"]
    raise NoUsableCheckpointError(
        f"no checkpoint in '{run_dir}' can be continued from ({'; '.join(reasons)}).\n"
        f"Fix: restore one of them, or start a new run with trainer.experiment_name=<new name>"
    )


def candidates_of(config: TrainerConfig) -> Selection:
    """Return the checkpoints that `resume_mode` lets the run continue from.

    Raises `ConfigError` if the mode forbids the existing checkpoints, or if none is usable.
    """
    run_dir = Path(config.default_local_dir)
    if config.resume_mode == "disable":
        if found := layout.checkpoints(run_dir):
            raise ConfigError(
                f"trainer.resume_mode=disable, but '{run_dir}' holds checkpoints up to step "
                f"{found[-1].step}, which are never overwritten.\nFix: resume_mode=auto "
                f"continues; another trainer.experiment_name starts a new run"
            )
        return Selection()
    if config.resume_mode == "auto":
        return select(run_dir)
    assert config.resume_from_path is not None
    path = Path(config.resume_from_path)
    if path.resolve().parent != run_dir.resolve() and (own := select(run_dir)).candidates:
        note = f"this run has checkpoints: continuing from them, not from {path}"
        return Selection(own.candidates, (*own.notes, note))
    info = layout.inspect(path)
    if not info.manifest:
        raise ConfigError(
            f"trainer.resume_from_path={path} is not a usable checkpoint: {info.reason}"
        )
    return Selection((info,))


def cannot_use(run_dir: Path, error: OSError) -> CannotWriteError:
    reason = error.strerror or error
    return CannotWriteError(
        f"cannot write to trainer.default_local_dir={run_dir}: {reason}; choose another directory"
    )
