"""Choose the checkpoint that a run continues from, by names and sizes, before anything is built.
No torch.
"""

from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.layout import POINTER, CheckpointInfo, Pointer
from trainer.config import ConfigError, TrainerConfig
from trainer.errors import CannotWriteError


class NoUsableCheckpointError(ConfigError):
    """The run has checkpoints, and none can be continued from: never an excuse to begin at step
    0. Exit code 2.
    """


@dataclass(frozen=True)
class Selection:
    """`candidates`: the one to continue from, then older ones for the case that its contents do not
    verify.

    `notes` are for the log: why this one, and what was passed over; a note to worry about begins
    with `WARNING`.
    """

    candidates: tuple[CheckpointInfo, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> CheckpointInfo | None:
        return self.candidates[0] if self.candidates else None


def select(run_dir: Path) -> Selection:
    """Choose the checkpoint that an interrupted run continues from; none in a new run directory.

    The pointer is followed. A newer committed checkpoint goes before it if no pointer ever named
    it: the run died between commit and publish. One that was named before says that a person moved
    the pointer back. Raises `NoUsableCheckpointError` if there are checkpoints or a pointer, and
    nothing to continue from.
    """
    found, pointer = layout.checkpoints(run_dir), layout.read_pointer(run_dir)
    usable = [info for info in reversed(found) if info.status == "committed"]
    pointed = next((info for info in usable if info.step == pointer.step), None)
    if not usable:
        _require_new(run_dir, found, pointer)
        return Selection()
    chosen, note = _choose(usable, pointed, pointer)
    notes = [note] if note else []
    notes += [
        f"WARNING: passed over {i.path.name}: {i.reason}" for i in found if i.status == "incomplete"
    ]
    return Selection(tuple(info for info in usable if info.step <= chosen.step), tuple(notes))


def _choose(
    usable: list[CheckpointInfo], pointed: CheckpointInfo | None, pointer: Pointer
) -> tuple[CheckpointInfo, str | None]:
    """Choose among `usable` (newest first), and give the reason unless the pointer simply names
    the newest.
    """
    newest = usable[0]
    unpublished = [
        info
        for info in usable
        if not info.published and (pointed is None or info.step > pointed.step)
    ]
    never_pointed = pointer.raw is None and len(unpublished) == len(usable)
    if pointed is None and not never_pointed:
        said = f"says {pointer.raw!r}, which is no usable checkpoint"
        if pointer.raw is None:
            said = "is missing"
        return newest, f"WARNING: {POINTER} {said}: continuing from the newest, {newest.path.name}"
    if pointed is None or unpublished:
        first = unpublished[0]
        name = first.path.name
        return first, f"{name} was committed just before the run died, {POINTER} not yet moved"
    if newest is not pointed:
        name = pointed.path.name
        return pointed, f"{POINTER} was moved back to {name}: honoured, newer ones are kept"
    return pointed, None


def _require_new(run_dir: Path, found: list[CheckpointInfo], pointer: Pointer) -> None:
    corrupt = [name for name in fsio.list_dir(run_dir) if name.startswith(layout.CORRUPT_PREFIX)]
    if not found and not corrupt and pointer.raw is None:
        return
    lines = [f"  {info.path.name}: {info.reason}" for info in found]
    lines += [f"  {name}: set aside as corrupt" for name in corrupt]
    lines += [f"  {POINTER}: {'missing' if pointer.raw is None else repr(pointer.raw)}"]
    raise NoUsableCheckpointError(
        f"no checkpoint in '{run_dir}' can be continued from:\n"
        + "\n".join(lines)
        + "\nRestore one of them, "
        "or begin anew in another directory: trainer.experiment_name=<new name>"
    )


def candidates_of(config: TrainerConfig) -> Selection:
    """Return what the run may continue from, the first choice first, with notes. Raises
    `ConfigError`.
    """
    run_dir = Path(config.default_local_dir)
    if config.resume_mode == "disable":
        if found := layout.checkpoints(run_dir):
            raise ConfigError(
                f"trainer.resume_mode=disable, but '{run_dir}' holds checkpoints up to step "
                f"{found[-1].step}; they are not overwritten: use resume_mode=auto to continue, or "
                f"another trainer.experiment_name"
            )
        return Selection()
    if config.resume_mode == "resume_path":
        assert config.resume_from_path is not None
        path = Path(config.resume_from_path)
        is_own = path.resolve().parent == run_dir.resolve()
        if not is_own and (own := select(run_dir)).candidates:
            note = f"this run already has checkpoints of its own: continuing from them, not from {path}"
            return Selection(own.candidates, (*own.notes, note))
        info = layout.inspect(path)
        if info.status == "incomplete":
            raise ConfigError(
                f"trainer.resume_from_path={path} is no usable checkpoint: {info.reason}"
            )
        return Selection((info,))
    return select(run_dir)


def cannot_use(run_dir: Path, error: OSError) -> CannotWriteError:
    reason = error.strerror or error
    return CannotWriteError(
        f"cannot write to trainer.default_local_dir={run_dir}: {reason}; choose another directory"
    )
