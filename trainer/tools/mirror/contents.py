"""Reads the contents of a mirror, and chooses the checkpoint from which a run resumes.

A mirror has the layout of a run directory, so a copy of it is a run directory:

    run.json                            project, experiment and id of the run
    uploader.json                       the process that uploads it
    latest_checkpointed_iteration.txt   the step of the run; a later checkpoint was rolled back
    global_step_N/…                     the files of the checkpoint
    global_step_N/run.tar.gz            logs and identity of the run at the time of the upload
    global_step_N/run.newer.tar.gz      the same of a later time, if there were results since then
    global_step_N/manifest.json         written last; its presence commits the checkpoint
"""

import json
import uuid
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint import layout
from trainer.checkpoint.layout import POINTER
from trainer.checkpoint.manifest import MANIFEST, Manifest, ManifestError, parse_manifest
from trainer.checkpoint.storage import KEY, Storage, StorageError
from trainer.config import ConfigError, TrainerConfig
from trainer.runtime.files import atomic_write
from trainer.runtime.json_lines import parsed, read_object
from trainer.tools.mirror import STATE
from trainer.tracking import run_info

RUN_FILES = "run.tar.gz"
NEWER_FILES = "run.newer.tar.gz"
UPLOADER = "uploader.json"


@dataclass(frozen=True)
class MirrorState:
    """The checkpoints in a mirror, by step.

    `whole`: manifests of committed checkpoints in which every file has the right size.
    `incomplete`: the reason why a checkpoint with a manifest is not complete. `steps`: all steps
    with any file.
    """

    pointer: int | None
    whole: dict[int, Manifest]
    incomplete: dict[int, str]
    steps: Set[int]

    @property
    def candidates(self) -> list[Manifest]:
        """The checkpoints that a run may continue from, best choice first."""
        steps = sorted(self.whole, reverse=True)
        until_pointer = [step for step in steps if self.pointer is None or step <= self.pointer]
        return [self.whole[step] for step in until_pointer or steps]


def look(storage: Storage) -> MirrorState:
    """Read the state of a mirror, judging files by name and size. Raises `StorageError`."""
    sizes = storage.sizes()
    steps = {step for name in sizes if (step := layout.parse_step(name.split("/")[0])) is not None}
    whole: dict[int, Manifest] = {}
    incomplete: dict[int, str] = {}
    for step in steps:
        place = layout.step_dir_name(step)
        text = _read(storage, f"{place}/{MANIFEST}", sizes)
        if text is None:
            continue
        try:
            manifest = parse_manifest(text, step=step)
        except ManifestError as error:
            incomplete[step] = f"{MANIFEST}: {error}"
            continue
        for record in manifest.files:
            if sizes.get(f"{place}/{record.path}") != record.size_bytes:
                incomplete[step] = f"{record.path} is missing or truncated"
                break
        else:
            whole[step] = manifest
    pointer = (_read(storage, POINTER, sizes) or b"") if sizes else b""
    is_whole = pointer.endswith(b"\n")  # otherwise it was cut short, or is missing
    pointed_step = layout.pointed_step(pointer.decode(errors="replace")) if is_whole else None
    return MirrorState(pointed_step, whole, incomplete, steps)


def claim(trainer: TrainerConfig, storage: Storage) -> str:
    """Write names and a random id of the run into a new mirror, and return the id.

    The id distinguishes runs with equal names. A run directory stores the id once it has a
    checkpoint; before that, the run can still resume from a checkpoint in the mirror. A directory
    with a different id is refused unless it has a checkpoint from the mirror.

    Raises `ConfigError` if the mirror belongs to a different run or is the run directory, and
    `StorageError`.
    """
    run_dir = Path(trainer.default_local_dir)
    if storage.is_at(run_dir):
        raise ConfigError(
            f"{KEY}={storage.url} is the run directory '{run_dir}': the mirror would delete the run's "
            f"own checkpoints.\nFix: use a URL on different storage"
        )
    elsewhere = (
        f"give each run its own mirror, {KEY}=…/${{trainer.project_name}}/"
        f"${{trainer.experiment_name}}"
    )
    text = storage.read(run_info.FILE_NAME) or b""
    if not text.endswith(b"\n"):  # missing or cut short
        text = _read(storage, run_info.FILE_NAME, storage.sizes()) or b""
    found = parsed(text)
    if not isinstance(found, dict):
        found = {}
    own = {"project_name": trainer.project_name, "experiment_name": trainer.experiment_name}
    claimed = {name: found.get(name) for name in own}
    is_named = None not in claimed.values()
    if is_named and claimed != own:
        raise ConfigError(
            f"'{storage.url}' mirrors the run '{claimed['experiment_name']}' of project "
            f"'{claimed['project_name']}', not '{trainer.experiment_name}' of "
            f"'{trainer.project_name}'.\n"
            f"Fix: {elsewhere}"
        )
    own_id = read_object(run_dir / STATE).get("id")
    run_id = found.get("id") or own_id or uuid.uuid4().hex
    nonces = {info.nonce for info in layout.committed(run_dir)}
    # a power cut may have lost the directory's id, so a directory without one is not refused
    is_foreign = own_id not in (None, run_id)
    if not is_named or (nonces and is_foreign):
        held = look(storage)
        is_shared = any(manifest.nonce in nonces for manifest in held.whole.values())
        if (held.whole or held.incomplete) and not is_shared:
            problem = "belongs to a different run with the same name"
            way_out = f"move '{run_dir}' away to continue the mirror's run"
            if not is_named:
                problem = f"has no {run_info.FILE_NAME} that names the run"
                way_out = f"write {json.dumps(own)} to {storage.url}/{run_info.FILE_NAME}"
            raise ConfigError(
                f"'{storage.url}' and '{run_dir}' have no checkpoint in common, and the mirror "
                f"{problem}.\n"
                f"Fix: {elsewhere}; or {way_out}"
            )
    if found.get("id") != run_id or not is_named:
        text = (json.dumps({**found, **own, "id": run_id}) + "\n").encode()
        storage.write(run_info.FILE_NAME, text)
        if (storage.read(run_info.FILE_NAME) or text) != text:  # it may not be shown yet
            raise StorageError(f"{storage.url}/{run_info.FILE_NAME} differs from what was written")
    if nonces and own_id != run_id:
        note(run_dir, storage, id=run_id)
    return run_id


def uploader_of(storage: Storage) -> str | None:
    """Return the process that last began to upload to the mirror; None if unknown."""
    found = parsed(storage.read(UPLOADER) or b"")
    return found.get("process") if isinstance(found, dict) else None


def take_over(storage: Storage, process: str) -> None:
    """Record that `process` uploads to the mirror from now on."""
    storage.write(UPLOADER, (json.dumps({"process": process}) + "\n").encode())


def note(run_dir: Path, storage: Storage, **changes: object) -> None:
    """Record the state of the mirror in the run directory, also for `checkpoint ls`."""
    path = run_dir / STATE
    state = {"steps": [], **read_object(path), "url": storage.url, **changes}
    with suppress(OSError):
        atomic_write(path, json.dumps(state))


def _read(storage: Storage, name: str, sizes: Mapping[str, int]) -> bytes | None:
    """Read a file that the listing may not show yet. Raises `StorageError` for a truncated read."""
    data = storage.read(name)
    if data is not None and len(data) != sizes.get(name, len(data)):
        raise StorageError(
            f"{storage.url}/{name} has {sizes[name]} bytes, but {len(data)} were read"
        )
    return data
