"""The run directory: names, and what stands in it. Rank 0 only; no torch.

A checkpoint appears by one rename (`commit`) and becomes the one to continue from by `publish`; `retention` says how
long it stays.
Everything is recomputed from the disk each time; nothing is ordered by a clock or a modification time.
"""

import json
import logging
import re
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trainer.checkpoint import fsio
from trainer.checkpoint.manifest import MANIFEST, Manifest, ManifestError, parse_manifest
from trainer.config import ConfigError

POINTER = "latest_checkpointed_iteration.txt"
POINTER_BYTES = 2**16
"""More than any number needs."""
PUBLISHED, THINNED = ".published", ".thinned"
FSDP_CONFIG = "fsdp_config.json"
DATA = "data.pt"
HUGGINGFACE = "huggingface"
LORA_ADAPTER = "lora_adapter"
STAGING_PREFIX = ".staging_"
TRASH_PREFIX = ".trash_"
CORRUPT_PREFIX = ".corrupt_"

NO_OPTIMIZER = "its optimizer state was removed (trainer.checkpoint.keep_full)"
LORA_META = "lora_train_meta.json"
MEGATRON = {"dist_ckpt", "ckpt_contents.json"}
"""Of these a `global_step_N` of verl has one where Megatron saved it."""
USE_VERL = (
    "continue it in verl, or merge it with verl's model_merger and train from the result: "
    "model.partial_pretrain=<merged directory>"
)

_STEP_DIR = re.compile(r"global_step_(0|[1-9][0-9]*)")
_VERL_DATA = re.compile(r"data_(0|[1-9][0-9]*)\.pt")
_POINTER_TEXT = re.compile(r"(0|[1-9][0-9]{0,17})")
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")

logger = logging.getLogger(__name__)


def step_dir_name(step: int) -> str:
    return f"global_step_{step}"


def parse_step(name: str) -> int | None:
    match = _STEP_DIR.fullmatch(name)
    return int(match[1]) if match else None


def model_file(world_size: int, rank: int) -> str:
    return f"model_world_size_{world_size}_rank_{rank}.pt"


def optim_file(world_size: int, rank: int) -> str:
    return f"optim_world_size_{world_size}_rank_{rank}.pt"


def is_optimizer(name: str) -> bool:
    """Whether a file of a checkpoint holds what a resume alone needs, and only as long as it is to be exact."""
    return name.startswith("optim_world_size_")


def extra_file(world_size: int, rank: int) -> str:
    return f"extra_state_world_size_{world_size}_rank_{rank}.pt"


def is_export(path: str) -> bool:
    """Whether a file listed in a manifest belongs to the export alone, which no resume needs."""
    return path.startswith(f"{HUGGINGFACE}/")


def staging_dir(run_dir: Path, step: int) -> Path:
    """A new name for a checkpoint in the making, on the same file system as its final one."""
    return run_dir / f"{STAGING_PREFIX}{step_dir_name(step)}.{secrets.token_hex(4)}"


@dataclass(frozen=True)
class Pointer:
    """`raw` is what the pointer file says, or why it cannot be read; None = no file. `step` is None if it is none."""

    raw: str | None
    step: int | None


def read_pointer(run_dir: Path) -> Pointer:
    try:
        raw = fsio.read_bytes(run_dir / POINTER, limit_bytes=POINTER_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return Pointer(None, None)
    except OSError as error:
        return Pointer(f"unreadable: {error.strerror}", None)
    match = _POINTER_TEXT.fullmatch(raw.strip())
    return Pointer(raw[:80], int(match[1]) if match else None)


@dataclass(frozen=True)
class VerlCheckpoint:
    """All that a `global_step_N` of verl 0.9.1 needs. `data_files` are in the order of the data-parallel ranks, or the
    legacy `data.pt` alone.
    """

    path: Path
    step: int
    world_size: int
    rank_files: tuple[str, ...]
    data_files: tuple[str, ...]

    @property
    def torch_files(self) -> tuple[str, ...]:
        return (*self.rank_files, *self.data_files)


@dataclass(frozen=True)
class CheckpointInfo:
    """What stands in one `global_step_N`. `published`: the pointer has named it once. `thinned`: it has no optimizer
    state any more, so `manifest` lists none.
    """

    step: int
    path: Path
    reason: str = ""
    published: bool = False
    thinned: bool = False
    manifest: Manifest | None = None
    verl: VerlCheckpoint | None = None

    @property
    def status(self) -> Literal["committed", "foreign", "incomplete"]:
        """committed: its manifest and the sizes of all files that a resume needs agree (contents are proven by
        `verify_files`). foreign: verl's, which has no manifest. incomplete: neither, for the `reason` given.
        """
        return "committed" if self.manifest else "foreign" if self.verl else "incomplete"


def inspect(path: Path) -> CheckpointInfo:
    """Judge one directory from names and sizes. Raises `ConfigError` if it is not called `global_step_N`."""
    step = parse_step(path.name)
    if step is None:
        raise ConfigError(f"'{path}' is not a checkpoint: give a directory called global_step_<step>")
    try:
        fsio.require_dir(path)
        names = fsio.list_dir(path)
        if MANIFEST not in names:
            if PUBLISHED in names:
                raise OSError(f"its {MANIFEST} was removed")
            return CheckpointInfo(step, path, verl=_open_verl(path, step, names))
        manifest, thinned = parse_manifest(fsio.read_bytes(path / MANIFEST)), THINNED in names
        if thinned:
            manifest = replace(manifest, files=tuple(file for file in manifest.files if not is_optimizer(file.path)))
        if manifest.step != step:
            raise ManifestError(f"it belongs to step {manifest.step}")
        for record in manifest.files:
            if not is_export(record.path) and (problem := fsio.size_problem(path, record)):
                raise OSError(problem)
    except ManifestError as error:
        return CheckpointInfo(step, path, f"{MANIFEST}: {error}")
    except OSError as error:
        file_name = "" if error.filename is None else f"{Path(str(error.filename)).name}: "
        return CheckpointInfo(step, path, f"{file_name}{error.strerror or error}")
    reason = NO_OPTIMIZER if thinned else ""
    return CheckpointInfo(step, path, reason, published=PUBLISHED in names, thinned=thinned, manifest=manifest)


def _open_verl(path: Path, step: int, names: list[str]) -> VerlCheckpoint:
    """Raises `OSError` that says what is missing, or why it cannot be continued."""
    if found := MEGATRON.intersection(names):
        raise OSError(f"it was saved with verl's Megatron engine ({min(found)}), whose layout is not read; {USE_VERL}")
    if FSDP_CONFIG not in names:
        raise OSError(f"it has neither {MANIFEST} nor {FSDP_CONFIG}: its save did not finish")
    try:
        config = json.loads(fsio.read_bytes(path / FSDP_CONFIG))
        version, world_size = config["FSDP_version"], config["world_size"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise OSError(f"it has no {MANIFEST}, and {FSDP_CONFIG} does not name FSDP_version and world_size") from error
    if type(world_size) is not int or world_size < 1:
        raise OSError(f"it has no {MANIFEST}, and {FSDP_CONFIG} names world_size {world_size!r:.40}")
    if version != 2:
        reason = f"FSDP_version is {version!r:.40}: only FSDP2 saves an optimizer state that other ranks can read"
        raise OSError(f"{reason}; {USE_VERL}")
    if world_size > len(names):  # before their names are made, which may be billions
        raise OSError(f"it has no {MANIFEST}, and files of its {world_size} ranks are missing")
    if LORA_META in names:
        raise OSError(f"it holds LoRA adapters beside a whole model ({LORA_META}), which is not read; {USE_VERL}")
    kinds = (model_file, optim_file, extra_file)
    rank_files = tuple(file(world_size, rank) for file in kinds for rank in range(world_size))
    _require_filled(path, rank_files)
    data_files = _verl_data_files(names, world_size)
    _require_filled(path, data_files)
    return VerlCheckpoint(path, step, world_size, rank_files, data_files)


def _verl_data_files(names: list[str], world_size: int) -> tuple[str, ...]:
    """One per data-parallel rank; sequence parallelism lets several ranks share one."""
    ranks = sorted(int(match[1]) for name in names if (match := _VERL_DATA.fullmatch(name)))
    if (DATA in names) == bool(ranks):
        found = f"both {DATA} and data_0.pt" if ranks else "no data_0.pt"
        raise OSError(f"{found}: the position in the data is unknown; {USE_VERL}")
    if ranks and (ranks != list(range(len(ranks))) or world_size % len(ranks)):
        raise OSError(f"its data files are those of data ranks {ranks}, of {world_size} ranks: some are missing")
    return tuple(f"data_{rank}.pt" for rank in ranks) or (DATA,)


def _require_filled(path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if fsio.size_within(path, name) == 0:
            raise OSError(f"{name} is empty")


def checkpoints(run_dir: Path) -> list[CheckpointInfo]:
    """Everything called `global_step_N`, whatever its state, by rising step."""
    names = [name for name in fsio.list_dir(run_dir) if parse_step(name) is not None]
    return sorted((inspect(run_dir / name) for name in names), key=lambda info: info.step)


def committed(run_dir: Path) -> list[CheckpointInfo]:
    return [info for info in checkpoints(run_dir) if info.status == "committed"]


def commit(staging: Path, step: int, *, nonce: str) -> Path:
    """Give a finished staging directory, whose manifest has the `nonce`, its final name: from now on it exists.

    Its files must be synced (`fsio.fsync_tree`). What already has the name, left by a corrupt or an abandoned
    attempt at this step, is set aside. Raises `FileExistsError` instead if the pointer names it and it is whole: no
    crash may leave the run without it, and a step that is saved need not be saved again.
    """
    final = staging.parent / step_dir_name(step)
    if final.name in fsio.list_dir(final.parent):
        if read_pointer(final.parent).step == step and inspect(final).status != "incomplete":
            raise FileExistsError(f"'{final}' is the checkpoint this run continues from: it is never replaced")
        quarantine(final, "this step is being written anew")
    try:
        fsio.rename_unsynced(staging, final)
    except OSError:
        # a network file system that lost the answer to a rename it carried out reports an error on the second try
        found = inspect(final).manifest
        if staging.exists() or found is None or found.nonce != nonce:
            raise
    fsio.fsync_dir(final.parent)
    return final


def publish(run_dir: Path, step: int) -> None:
    """Point to `step`, then mark it as named once. Repairs what a crash left; writes nothing if all is right.

    A foreign checkpoint gets no mark: with one and without a manifest it would be one of ours that lost it.
    """
    step_dir = run_dir / step_dir_name(step)
    names = fsio.list_dir(step_dir)
    unmarked = MANIFEST in names and PUBLISHED not in names
    if unmarked or read_pointer(run_dir).step != step:
        fsio.atomic_write(run_dir / POINTER, str(step).encode())
    if unmarked:
        mark(step_dir, PUBLISHED)


def is_published(run_dir: Path, info: CheckpointInfo) -> bool:
    """Whether `publish` has nothing left to do for a checkpoint of this run."""
    return (info.published or info.manifest is None) and read_pointer(run_dir).step == info.step


def mark(step_dir: Path, name: str) -> None:
    """Make an empty file, which is durable on return also where an earlier attempt to make it was cut short."""
    if name not in fsio.list_dir(step_dir):
        fsio.write_file(step_dir / name, b"", root=step_dir)
    fsio.fsync_dir(step_dir)


def quarantine(path: Path, reason: str) -> Path:
    """Set a checkpoint aside as `.corrupt_global_step_N.<k>`; it is never deleted automatically."""
    taken = fsio.list_dir(path.parent)
    name = next(name for k in range(len(taken) + 1) if (name := f"{CORRUPT_PREFIX}{path.name}.{k}") not in taken)
    fsio.rename(path, path.parent / name)
    logger.warning("set %s aside as %s: %s", path, name, reason)
    return path.parent / name


def clean_leftovers(run_dir: Path) -> None:
    """Remove what an earlier crash left half-written or half-deleted. Only under the run's lock.

    Directories of a temporary name are exports under way, which need no lock.
    """
    for name in fsio.list_dir(run_dir):
        is_file = _TEMPORARY.fullmatch(name) and not (run_dir / name).is_dir()
        if name.startswith((STAGING_PREFIX, TRASH_PREFIX)) or is_file:
            try:
                fsio.remove_tree(run_dir / name)
            except OSError as error:
                logger.warning("cannot remove the leftover %s: %s", run_dir / name, error)
