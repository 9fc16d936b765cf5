"""`huggingface/` made afterwards, from the shards of a committed checkpoint, on any machine."""

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

from trainer import weights
from trainer.adapter_names import ADAPTER_CONFIG
from trainer.checkpoint import fsio, layout
from trainer.checkpoint.base_weights import Adapter, digest
from trainer.checkpoint.export import (
    OTHER_PARTS,
    ExportSource,
    Plans,
    num_bytes,
    plan_export,
    plan_lora,
    write_export,
)
from trainer.checkpoint.lineage import BASE_WEIGHTS
from trainer.checkpoint.manifest import Manifest, verify_files
from trainer.checkpoint.model_files import CONFIG, ModelFiles
from trainer.checkpoint.shards import ShardReader, read_torch, weight_buffers
from trainer.config import ConfigError
from trainer.errors import CannotWriteError
from trainer.runtime.text import readable
from trainer.weights import WholeCheckpoint, stored_in

_WEIGHTS = (".safetensors", ".safetensors.index.json")


def export_from_shards(
    checkpoint: Path, target: Path, *, dtype: str, lora: str = "merged", base: Path | None = None
) -> None:
    """Make the new directory `target` from the shards of a committed checkpoint, proving what is
    read.

    Of adapters: what `lora` says, and `base` is the directory of the model they were trained for.

    Needs no GPU and no process group, and takes nothing from a run that goes on meanwhile. `target`
    appears when it is whole. Raises `ConfigError` if the checkpoint is not committed, damaged, or
    `target` cannot be taken as a name, `CannotWriteError` if it cannot be written.
    """
    manifest = _require_exportable(checkpoint, target)
    adapter = _adapter_of(checkpoint, manifest, base)
    plans, reader = _open_shards(checkpoint, manifest, adapter, dtype=dtype, lora=lora)
    source = ExportSource(_files_of(checkpoint, adapter), None, (), None, adapter)
    size_bytes, staging = num_bytes(plans), fsio.temporary_path(target)
    try:
        if (free_bytes := fsio.free_bytes(target.parent)) < size_bytes:
            raise OSError(f"it needs {readable(size_bytes)}, and {readable(free_bytes)} are free")
        for directory in ("", *filter(None, plans)):
            fsio.make_dir(staging / directory)
        write_export(plans, staging, reader, source)
        fsio.fsync_tree(staging)
        fsio.rename(staging, target)
    except BaseException as error:
        with suppress(OSError):
            fsio.remove_tree(staging)
        if isinstance(error, OSError):
            raise CannotWriteError(f"'{target}' cannot be made: {error}") from error
        raise


def _require_exportable(checkpoint: Path, target: Path) -> Manifest:
    """The manifest, once the files an export reads are proven; weights exported before are not
    among them.
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
            f"'{target}' would go when its checkpoint does: name a directory outside of "
            f"'{checkpoint}'"
        )
    manifest = info.manifest
    size = manifest.world_size
    shards = {
        layout.extra_file(size, 0),
        *(layout.model_file(size, rank) for rank in range(manifest.num_shards)),
    }
    companions = {
        record.path
        for record in manifest.files
        if layout.is_export(record.path)
        and (record.path.endswith(f"/{OTHER_PARTS}") or not record.path.endswith(_WEIGHTS))
    }
    files = tuple(
        record for record in manifest.files if record.path in shards | companions | {ADAPTER_CONFIG}
    )
    if problems := verify_files(checkpoint, dataclasses.replace(manifest, files=files)):
        raise ConfigError(f"'{checkpoint}' is damaged: {'; '.join(problems)}")
    return manifest


def _adapter_of(checkpoint: Path, manifest: Manifest, base: Path | None) -> Adapter | None:
    """What a checkpoint says of its adapters. Raises `ConfigError` if `base` is not what they
    were trained for.
    """
    if not (checkpoint / ADAPTER_CONFIG).exists():
        return None
    settings = json.loads((checkpoint / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    adapter = Adapter(settings, base or Path(settings["base_model_name_or_path"]))
    if not adapter.base.is_dir() or digest(adapter.base) != manifest.fingerprints.get(BASE_WEIGHTS):
        raise ConfigError(
            f"'{adapter.base}' does not hold the weights that the adapters in '{checkpoint}' were "
            f"trained for: name the directory that does, with --base"
        )
    return adapter


def _files_of(checkpoint: Path, adapter: Adapter | None) -> ModelFiles:
    """Those of the export that the save made; an adapter alone has no config.json, which its
    base has then.
    """
    files = ModelFiles.read(checkpoint / layout.HUGGINGFACE)
    if adapter is None:
        return files
    base = ModelFiles.read(adapter.base)
    return dataclasses.replace(files, contents={**files.contents, CONFIG: base.contents[CONFIG]})


def _open_shards(
    checkpoint: Path, manifest: Manifest, adapter: Adapter | None, *, dtype: str, lora: str
) -> tuple[Plans, ShardReader]:
    """What to write, and the mapped files to make it from: they stay readable when a running
    job deletes them.
    """
    size, num_shards = manifest.world_size, manifest.num_shards
    exported = checkpoint / layout.HUGGINGFACE
    architecture, model = None, None
    if adapter is None or lora != "adapter":
        architecture, model = known_architecture(exported if adapter is None else adapter.base)
    whole = None
    if manifest.num_passed_through:
        whole = WholeCheckpoint(model, manifest.text_names, stored_in(exported / OTHER_PARTS))
    buffers = read_torch(checkpoint / layout.extra_file(size, 0)).get("buffers", {})
    expected = weight_buffers(architecture) if architecture is not None and adapter is None else {}
    if absent := sorted(set(expected) - set(buffers)):
        text = f"'{checkpoint}' cannot be exported: it was saved by a version that left out {absent[0]}"
        raise ConfigError(f"{text}; export one that the run saves from now on")
    shapes = {
        name: torch.empty(info.shape, device="meta") for name, info in manifest.tensors.items()
    }
    if adapter is not None:
        plans = plan_lora(shapes, adapter, architecture, dtype=dtype, lora=lora)
    else:
        plans = {"": plan_export(shapes, buffers, architecture, dtype=dtype, whole=whole)}
    reader = ShardReader(
        checkpoint, world_size=size, num_shards=num_shards, parameters=shapes, buffers=buffers
    )
    if dtype == "float16":
        for name in shapes:
            if not torch.isfinite(reader.whole(name).half()).all():
                raise ConfigError(
                    f"'{name}' has values beyond the range of float16: export in bfloat16 or "
                    f"float32"
                )
    return plans, reader


def known_architecture(directory: Path) -> tuple[PreTrainedModel | None, PreTrainedModel | None]:
    """The same from a `config.json`, and the class of the whole where that has more parts than the
    text; None if the architecture comes with code of its own, which is never run here.

    Raises `ConfigError` if this version of transformers does not know it.
    """
    tree = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if "auto_map" in tree and (
        any(directory.glob("*.py")) or tree.get("model_type") not in CONFIG_MAPPING
    ):
        return None, None
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        whole = weights.whole_model(config)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config if whole is None else weights.text_config(whole), trust_remote_code=False
            )
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"'{directory}' cannot be exported with transformers {__version__}: {error}"
        ) from error
    return model, whole
