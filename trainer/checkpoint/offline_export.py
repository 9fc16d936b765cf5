"""Export a committed checkpoint later, from its shards, on any machine."""

import dataclasses
import os
from contextlib import suppress
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel, __version__

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.base_weights import Adapter, digest
from trainer.checkpoint.export import OTHER_PARTS, ExportSource, plan_export, write_export
from trainer.checkpoint.layout import CheckpointInfo
from trainer.checkpoint.lineage import BASE_WEIGHTS
from trainer.checkpoint.manifest import Manifest, verify_files
from trainer.checkpoint.model_card import FILE_NAME as CARD
from trainer.checkpoint.model_files import CONFIG, ModelFiles
from trainer.checkpoint.shards import read_torch
from trainer.checkpoint.state import read_shards
from trainer.config import ConfigError
from trainer.errors import CannotWriteError
from trainer.model.adapter_names import ADAPTER_CONFIG
from trainer.model.pretrained import ModelSource
from trainer.model.source import find_model
from trainer.model.weights import WholeCheckpoint, stored_in
from trainer.runtime.environment import call
from trainer.runtime.json_lines import read_object

_WEIGHTS = (".safetensors", ".safetensors.index.json")


def export_from_shards(
    checkpoint: Path,
    target: Path,
    *,
    dtype: str,
    lora: str | None = None,
    base: Path | None = None,
) -> None:
    """Create the directory `target` with an export made from the shards of a committed checkpoint.

    lora: `adapter` or `merged` (the default), for a run that trains adapters; base: the directory
    of the model that the adapters were trained on, if that model was moved. This needs no GPU and
    no process group, and works while the run trains. All files are verified before use. `target`
    appears only when it is complete. Raises `ConfigError` if the checkpoint is damaged or not
    committed, if it lacks the adapters that `lora` or `base` require, or if `target` cannot be a
    new directory, and `CannotWriteError` if `target` cannot be written.
    """
    info = _require_exportable(checkpoint, target)
    manifest = info.manifest
    adapter = _adapter_of(checkpoint, manifest, base)
    if adapter is None and (lora or base):
        raise ConfigError(
            f"'{checkpoint}' holds a whole model, not adapters: the run was trained without "
            f"model.lora_rank.\nFix: remove --lora and --base"
        )
    lora = lora or "merged"
    exported = checkpoint / layout.HUGGINGFACE
    files = ModelFiles.read(exported)
    architecture, model = known_architecture(exported if adapter is None else adapter.base)
    whole = None
    if adapter is not None:  # an adapter export has no config.json
        adapter = dataclasses.replace(adapter, whole=model)
        config = ModelFiles.read(adapter.base).contents[CONFIG]
        files = dataclasses.replace(files, contents={**files.contents, CONFIG: config})
    if manifest.num_passed_through:
        whole = WholeCheckpoint(model, manifest.text_names, stored_in(exported / OTHER_PARTS))
    source = ExportSource(files, None, (), whole, adapter)

    # Memory-mapped files stay readable after the run deletes them.
    buffers = read_torch(checkpoint / layout.extra_file(manifest.world_size, 0))["buffers"]
    shards = read_shards(info, layout.model_file)
    shapes = {
        name: torch.empty(info.shape, device="meta") for name, info in manifest.tensors.items()
    }
    plan = plan_export(shapes, buffers, architecture, source, dtype=dtype, lora=lora)
    card = None
    is_adapter = (exported / ADAPTER_CONFIG).is_file()
    if (exported / CARD).is_file() and (adapter is None or is_adapter == (lora == "adapter")):
        card = (exported / CARD).read_bytes()
    staging = fsio.temporary_path(target)
    try:
        fsio.make_dir(staging)
        write_export(plan, staging, shards, buffers, card=card)
        fsio.fsync_tree(staging)
        fsio.rename(staging, target)
    except BaseException as error:
        with suppress(OSError):
            fsio.remove_tree(staging)
        if isinstance(error, OSError):
            raise CannotWriteError(
                f"'{target}' cannot be created: {error}.\nFix: choose a writable directory with "
                f"enough space"
            ) from error
        raise


def _require_exportable(checkpoint: Path, target: Path) -> CheckpointInfo:
    """Verify the files that an export reads, and return the checkpoint.

    The weights of an earlier export are not verified. Raises `ConfigError`.
    """
    info = layout.inspect(checkpoint)
    if info.manifest is None:
        raise ConfigError(
            f"'{checkpoint}' cannot be exported: {info.reason}.\nFix: choose a committed checkpoint; "
            f"{call(f'checkpoint ls {checkpoint.parent}')} lists them"
        )
    if os.path.lexists(target):
        raise ConfigError(f"'{target}' already exists.\nFix: choose a new directory")
    if not target.parent.is_dir():
        raise ConfigError(
            f"'{target}' cannot be created: there is no directory '{target.parent}'.\n"
            f"Fix: create it, or choose a different directory"
        )
    if target.parent.resolve().is_relative_to(checkpoint.resolve()):
        raise ConfigError(
            f"'{target}' is inside the checkpoint and would be deleted with it.\n"
            f"Fix: choose a directory outside of '{checkpoint}'"
        )
    manifest = info.manifest
    needed = {
        *manifest.shard_files(layout.model_file),
        layout.extra_file(manifest.world_size, 0),
        ADAPTER_CONFIG,
        f"{layout.HUGGINGFACE}/{OTHER_PARTS}",
    }
    files = tuple(
        record
        for record in manifest.files
        if record.path in needed
        or (layout.is_export(record.path) and not record.path.endswith(_WEIGHTS))
    )
    if problems := verify_files(checkpoint, dataclasses.replace(manifest, files=files)):
        raise ConfigError(
            f"'{checkpoint}' is damaged: {'; '.join(problems)}.\nFix: export a different checkpoint"
        )
    return info


def _adapter_of(checkpoint: Path, manifest: Manifest, base: Path | None) -> Adapter | None:
    """Return the checkpoint's adapters, if it has any.

    Raises `ConfigError` if `base` does not contain the weights on which they were trained.
    """
    settings = read_object(checkpoint / ADAPTER_CONFIG)
    if not settings:
        return None
    name = settings["base_model_name_or_path"]  # a path, or an id that the Hub's cache knows
    if base is None:
        is_path = Path(name).is_absolute()
        base = Path(name if is_path else find_model(name, random_weights=False))
    adapter = Adapter(settings, base)
    if not base.is_dir() or digest(base) != manifest.fingerprints.get(BASE_WEIGHTS):
        raise ConfigError(
            f"'{base}' does not contain the weights on which the adapters in '{checkpoint}' were "
            f"trained.\nFix: pass the directory that contains them with --base"
        )
    return adapter


def known_architecture(directory: Path) -> tuple[PreTrainedModel | None, PreTrainedModel | None]:
    """Return the language model of a `config.json` on the meta device, and the whole model.

    The whole model is None if it has no other components. Both are None if the architecture has its
    own code, which this function never runs. Raises `ConfigError` if this version of transformers
    does not know the architecture.
    """
    tree = read_object(directory / CONFIG)
    if "auto_map" in tree and (
        any(directory.glob("*.py")) or tree.get("model_type") not in CONFIG_MAPPING
    ):
        return None, None
    source = ModelSource(str(directory))
    try:
        return source.text, source.whole
    except (ConfigError, ValueError, KeyError) as error:
        raise ConfigError(
            f"'{directory}' cannot be exported with transformers {__version__}: {error}"
        ) from error
