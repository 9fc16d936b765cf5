"""Export a committed checkpoint after its save, from its shards, on any machine."""

import dataclasses
import json
import os
from contextlib import suppress
from pathlib import Path

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    __version__,
)

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.base_weights import Adapter, digest
from trainer.checkpoint.export import OTHER_PARTS, ExportSource, plan_export, write_export
from trainer.checkpoint.lineage import BASE_WEIGHTS
from trainer.checkpoint.manifest import Manifest, verify_files
from trainer.checkpoint.model_card import FILE_NAME as CARD
from trainer.checkpoint.model_files import CONFIG, ModelFiles
from trainer.checkpoint.shards import ShardReader, read_torch
from trainer.config import ConfigError
from trainer.errors import CannotWriteError
from trainer.model import weights
from trainer.model.adapter_names import ADAPTER_CONFIG
from trainer.model.weights import WholeCheckpoint, stored_in

_WEIGHTS = (".safetensors", ".safetensors.index.json")


def export_from_shards(
    checkpoint: Path, target: Path, *, dtype: str, lora: str = "merged", base: Path | None = None
) -> None:
    """Make the new directory `target` from the shards of a committed checkpoint.

    lora: `adapter` or `merged`; base: the directory of the model that adapters were trained on.
    Needs no GPU and no process group, and may run while the run trains. All files are verified
    before use. `target` appears when it is whole. Raises `ConfigError` if the checkpoint is not
    committed or damaged, or if `target` cannot be a new directory, `CannotWriteError` if it cannot
    be written.
    """
    manifest = _require_exportable(checkpoint, target)
    adapter = _adapter_of(checkpoint, manifest, base)
    exported = checkpoint / layout.HUGGINGFACE
    files = ModelFiles.read(exported)
    architecture, model = known_architecture(exported if adapter is None else adapter.base)
    whole = None
    if adapter is not None:  # an adapter alone has no config.json
        adapter = dataclasses.replace(adapter, whole=model)
        config = ModelFiles.read(adapter.base).contents[CONFIG]
        files = dataclasses.replace(files, contents={**files.contents, CONFIG: config})
    if manifest.num_passed_through:
        whole = WholeCheckpoint(model, manifest.text_names, stored_in(exported / OTHER_PARTS))
    source = ExportSource(files, None, (), whole, adapter)

    # Mapped files stay readable when the run deletes them.
    buffers = read_torch(checkpoint / layout.extra_file(manifest.world_size, 0))["buffers"]
    reader = ShardReader(
        checkpoint,
        world_size=manifest.world_size,
        num_shards=manifest.num_shards,
        buffers=buffers,
    )
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
        write_export(plan, staging, reader, card=card)
        fsio.fsync_tree(staging)
        fsio.rename(staging, target)
    except BaseException as error:
        with suppress(OSError):
            fsio.remove_tree(staging)
        if isinstance(error, OSError):
            raise CannotWriteError(f"'{target}' cannot be made: {error}") from error
        raise


def _require_exportable(checkpoint: Path, target: Path) -> Manifest:
    """Verify the files that an export reads, and return the manifest. Weights of an earlier export
    are not among them.
    """
    info = layout.inspect(checkpoint)
    if info.manifest is None:
        raise ConfigError(f"'{checkpoint}' cannot be exported: {info.reason}")
    if os.path.lexists(target):
        raise ConfigError(f"'{target}' exists already: name a new directory")
    if not target.parent.is_dir():
        raise ConfigError(f"'{target}' cannot be made: there is no directory '{target.parent}'")
    if target.parent.resolve().is_relative_to(checkpoint.resolve()):
        raise ConfigError(
            f"'{target}' would be deleted with its checkpoint: name a directory outside of "
            f"'{checkpoint}'"
        )
    manifest = info.manifest
    needed = {
        *(layout.model_file(manifest.world_size, rank) for rank in range(manifest.num_shards)),
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
        raise ConfigError(f"'{checkpoint}' is damaged: {'; '.join(problems)}")
    return manifest


def _adapter_of(checkpoint: Path, manifest: Manifest, base: Path | None) -> Adapter | None:
    """Raises `ConfigError` if `base` is not what the adapters were trained on."""
    if not (checkpoint / ADAPTER_CONFIG).exists():
        return None
    settings = json.loads((checkpoint / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    adapter = Adapter(settings, base or Path(settings["base_model_name_or_path"]))
    if not adapter.base.is_dir() or digest(adapter.base) != manifest.fingerprints.get(BASE_WEIGHTS):
        raise ConfigError(
            f"'{adapter.base}' does not hold the weights that the adapters in '{checkpoint}' were "
            f"trained for.\nFix: name the directory that does, with --base"
        )
    return adapter


def known_architecture(directory: Path) -> tuple[PreTrainedModel | None, PreTrainedModel | None]:
    """Return the text model of a `config.json` on the meta device, and the whole model if it has
    more parts.

    Both are None if the architecture has its own code, which is never run here. Raises
    `ConfigError` if this version of transformers does not know it.
    """
    tree = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    if "auto_map" in tree and (
        any(directory.glob("*.py")) or tree.get("model_type") not in CONFIG_MAPPING
    ):
        return None, None
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        whole = weights.whole_model(config, str(directory))
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config if whole is None else weights.text_config(whole), trust_remote_code=False
            )
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"'{directory}' cannot be exported with transformers {__version__}: {error}"
        ) from error
    return model, whole
