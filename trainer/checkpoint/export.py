"""`huggingface/`: the model as transformers and vLLM load it, made from the shards of a checkpoint.

Tensors are read from the shard files one by one, written as safetensors and read back. Nothing here needs the model,
a GPU or another rank, so it runs behind training, and on any machine afterwards.
"""

import copy
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from safetensors import safe_open
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel, __version__
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import str_to_torch_dtype

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.fsio import FileRecord, HashingFile
from trainer.checkpoint.manifest import Manifest, verify_files
from trainer.checkpoint.shards import ShardReader, read_torch, weight_buffers
from trainer.checkpoint.space import readable
from trainer.config import ConfigError
from trainer.errors import CannotWriteError

MAX_FILE_BYTES = 5 * 10**9
_INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", _INDEX)
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "spiece.model", "*.tiktoken", "*.py")
_VOCABULARIES = ("vocab.json", "vocab.txt", "merges.txt")
_DTYPE_NAMES = {dtype: name for name, dtype in str_to_torch_dtype.items()}
"""As the header of a safetensors file calls them."""


@dataclass(frozen=True)
class ExportSource:
    """What the exported directory takes over: the files of the model trained from, and the template trained with."""

    model_dir: Path
    chat_template: str | None
    """Only when it is not the tokenizer's own; the tokenizer's files are copied byte for byte otherwise."""
    end_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class ExportPlan:
    """`layout`: exported name -> tensor without memory, in the order written; `split`: into which files.

    `own_names` maps exported names to those of the shards, and is None where transformers stores an architecture in
    other tensors than it computes with (one per expert): these are made from the whole model at once.
    """

    layout: dict[str, Tensor]
    split: StateDictSplit
    own_names: dict[str, str] | None
    architecture: PreTrainedModel | None
    dtype: torch.dtype


def plan_export(
    shapes: Mapping[str, Tensor], buffers: Mapping[str, Tensor], architecture: PreTrainedModel | None, *, dtype: str
) -> ExportPlan:
    """Which tensors go into which file. `shapes`: every parameter once (a tied head is absent).

    Parameters are exported in `dtype`, buffers in their own.
    `architecture` is the model on the meta device, by which transformers finds how it stores these tensors; None
    stores them as they are.
    """
    target_dtype: torch.dtype = getattr(torch, dtype)
    own = {name: torch.empty(t.shape, dtype=target_dtype, device="meta") for name, t in shapes.items()}
    own |= {name: tensor.to("meta") for name, tensor in buffers.items()}
    stored = dict(own) if architecture is None else revert_weight_conversion(architecture, own)
    names = {id(tensor): name for name, tensor in own.items()}
    own_names = None
    if len(stored) == len(own) and all(id(tensor) in names for tensor in stored.values()):
        own_names = {name: names[id(tensor)] for name, tensor in stored.items()}
        order = list(own)
        stored = dict(sorted(stored.items(), key=lambda item: order.index(own_names[item[0]])))
    split = split_state_dict_into_shards_factory(
        stored,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_FILE_BYTES,
    )
    return ExportPlan(stored, split, own_names, architecture, target_dtype)


def num_bytes(plan: ExportPlan) -> int:
    return int(plan.split.metadata["total_size"])


def meta_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The architecture of a sharded model without weights, under its own class name."""
    original: Any = next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))
    with torch.device("meta"):
        meta_model: PreTrainedModel = original(copy.deepcopy(model.config))
    return meta_model


def known_architecture(directory: Path) -> PreTrainedModel | None:
    """The same from a `config.json`; None if the architecture comes with code of its own, which is never run here.

    Raises `ConfigError` if this version of transformers does not know it.
    """
    tree = json.loads((directory / "config.json").read_text())
    if "auto_map" in tree and (any(directory.glob("*.py")) or tree.get("model_type") not in CONFIG_MAPPING):
        return None
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        raise ConfigError(f"'{directory}' cannot be exported with transformers {__version__}: {error}") from error
    return model


def write_weights(
    plan: ExportPlan, target: Path, reader: ShardReader, *, share: tuple[int, int] = (0, 1)
) -> list[FileRecord]:
    """Write this writer's share `(index, count)` of the files into the existing directory `target`; read them back."""
    index, count = share
    if plan.own_names is None:  # the first writer has to make all tensors at once
        if index != 0:
            return []
        count = 1
    mine = {name: names for i, (name, names) in enumerate(plan.split.filename_to_tensors.items()) if i % count == index}
    tensors = _exported(plan, reader, [name for names in mine.values() for name in names])
    records = []
    for file_name, names in mine.items():
        digests = {}
        with HashingFile(target / file_name, root=target.parent) as file:
            file.write(_header({name: plan.layout[name] for name in names}))
            for name in names:
                data = _bytes(next(tensors))
                file.write(data)
                digests[name] = hashlib.blake2b(data).digest()
        _read_back(target / file_name, plan.layout, digests)
        records.append(file.record)
    return records


def _exported(plan: ExportPlan, reader: ShardReader, names: list[str]) -> Iterator[Tensor]:
    """The named tensors whole, in the dtype they are exported in."""
    if plan.own_names is not None:
        for name in names:
            yield reader.whole(plan.own_names[name]).to(plan.layout[name].dtype)
        return
    assert plan.architecture is not None
    whole = {name: reader.whole(name) for name in reader.names}
    whole = {name: value.to(plan.dtype) if name in reader.parameters else value for name, value in whole.items()}
    converted = revert_weight_conversion(plan.architecture, whole)
    for name in names:
        yield converted[name]


def write_companions(plan: ExportPlan, target: Path, source: ExportSource) -> list[FileRecord]:
    """Everything beside the weights: config.json, generation_config.json, tokenizer, template, the model's own code."""
    records = [_write_json(target / "config.json", _config(source, plan))]
    records.append(_write_json(target / "generation_config.json", _generation_config(source)))
    copied = (*_TOKENIZER_FILES, *_VOCABULARIES, *(_TEMPLATES if source.chat_template is None else ()))
    for path in sorted({path for pattern in copied for path in source.model_dir.glob(pattern) if path.is_file()}):
        if source.chat_template is not None and path.name == "tokenizer_config.json":
            config = json.loads(path.read_text()) | {"chat_template": source.chat_template}
            records.append(_write_json(target / path.name, config))
        else:
            records.append(fsio.copy_file(path, target / path.name, root=target.parent))
    if source.chat_template is not None:
        text = source.chat_template.encode()
        records.append(fsio.write_file(target / "chat_template.jinja", text, root=target.parent))
    return records


def export_from_shards(checkpoint: Path, target: Path, *, dtype: str) -> None:
    """Make the new directory `target` from the shards of a committed checkpoint, proving what is read.

    Needs no GPU and no process group, and takes nothing from a run that goes on meanwhile. `target` appears when it
    is whole. Raises `ConfigError` if the checkpoint is not committed, damaged, or `target` cannot be taken as a name,
    `CannotWriteError` if it cannot be written.
    """
    manifest = _require_exportable(checkpoint, target)
    plan, reader = _open_shards(checkpoint, manifest, dtype=dtype)
    source, staging = ExportSource(checkpoint / layout.HUGGINGFACE, None, ()), fsio.temporary_path(target)
    try:
        if (free_bytes := fsio.free_bytes(target.parent)) < num_bytes(plan):
            raise OSError(f"it needs {readable(num_bytes(plan))}, and {readable(free_bytes)} are free")
        fsio.make_dir(staging)
        write_companions(plan, staging, source)
        write_weights(plan, staging, reader)
        write_index(plan, staging)
        fsio.fsync_tree(staging)
        fsio.rename(staging, target)
    except BaseException as error:
        with suppress(OSError):
            fsio.remove_tree(staging)
        if isinstance(error, OSError):
            raise CannotWriteError(f"'{target}' cannot be made: {error}") from error
        raise


def _require_exportable(checkpoint: Path, target: Path) -> Manifest:
    """The manifest, once the files an export reads are proven; weights exported before are not among them."""
    info = layout.inspect(checkpoint)
    if info.manifest is None:
        reason = info.reason or "it was written by verl, without a manifest; use verl's model_merger"
        raise ConfigError(f"'{checkpoint}' cannot be exported: {reason}")
    if os.path.lexists(target):
        raise ConfigError(f"'{target}' exists already: name a new directory")
    if not target.parent.is_dir():
        raise ConfigError(f"'{target}' cannot be made: there is no directory '{target.parent}'")
    if target.parent.resolve().is_relative_to(checkpoint.resolve()):
        raise ConfigError(f"'{target}' would go when its checkpoint does: name a directory outside of '{checkpoint}'")
    manifest = info.manifest
    size = manifest.world_size
    shards = {layout.extra_file(size, 0), *(layout.model_file(size, rank) for rank in range(manifest.num_shards))}
    companions = {r.path for r in manifest.files if layout.is_export(r.path) and not r.path.endswith(_WEIGHTS)}
    files = tuple(record for record in manifest.files if record.path in shards | companions)
    if problems := verify_files(checkpoint, dataclasses.replace(manifest, files=files)):
        raise ConfigError(f"'{checkpoint}' is damaged: {'; '.join(problems)}")
    return manifest


def _open_shards(checkpoint: Path, manifest: Manifest, *, dtype: str) -> tuple[ExportPlan, ShardReader]:
    """What to write, and the mapped files to make it from: they stay readable when a running job deletes them."""
    size = manifest.world_size
    architecture = known_architecture(checkpoint / layout.HUGGINGFACE)
    buffers = read_torch(checkpoint / layout.extra_file(size, 0)).get("buffers", {})
    if absent := sorted(set(weight_buffers(architecture) if architecture else ()) - set(buffers)):
        raise ConfigError(f"'{checkpoint}' cannot be exported: it was saved by a version that left out {absent[0]}")
    shapes = {name: torch.empty(info.shape, device="meta") for name, info in manifest.tensors.items()}
    plan = plan_export(shapes, buffers, architecture, dtype=dtype)
    reader = ShardReader(
        checkpoint, world_size=size, num_shards=manifest.num_shards, parameters=shapes, buffers=buffers
    )
    if plan.dtype is torch.float16:
        for name in shapes:
            if not torch.isfinite(reader.whole(name).to(plan.dtype)).all():
                raise ConfigError(f"'{name}' has values beyond the range of float16: export in bfloat16 or float32")
    return plan, reader


def write_index(plan: ExportPlan, target: Path) -> list[FileRecord]:
    """Which file holds which tensor, where there are several."""
    if not plan.split.is_sharded:
        return []
    index: dict[str, object] = {"metadata": plan.split.metadata, "weight_map": plan.split.tensor_to_filename}
    return [_write_json(target / _INDEX, index)]


def _header(tensors: dict[str, Tensor]) -> bytes:
    """Length (8 bytes, little-endian) and JSON table of a safetensors file, padded to a multiple of 8."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        dtype = _DTYPE_NAMES[tensor.dtype]
        table[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> memoryview:
    view: memoryview = tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data
    return view


def _read_back(path: Path, tensors: Mapping[str, Tensor], digests: Mapping[str, bytes]) -> None:
    """Open a file as a reader would and compare every tensor with what was sent to the disk."""
    with safe_open(path, framework="pt") as reader:
        if set(reader.keys()) != set(digests):
            raise OSError(f"{path}: read back other tensors than were written")
        for name, digest in digests.items():
            tensor = reader.get_tensor(name)
            is_same = hashlib.blake2b(_bytes(tensor)).digest() == digest
            if tensor.shape != tensors[name].shape or tensor.dtype != tensors[name].dtype or not is_same:
                raise OSError(f"{path}: tensor {name} read back differently from what was written")


def _config(source: ExportSource, plan: ExportPlan) -> dict[str, object]:
    """The source's own config with the dtype that was written; `torch_dtype` is the key every reader knows."""
    config: dict[str, object] = json.loads((source.model_dir / "config.json").read_text())
    name = str(plan.dtype).removeprefix("torch.")
    config["torch_dtype"] = name
    if "dtype" in config:
        config["dtype"] = name
    config.setdefault("architectures", [type(plan.architecture).__name__])
    return config


def _generation_config(source: ExportSource) -> dict[str, object]:
    """The source's, its end tokens completed by those that the model was trained to end a turn with."""
    path = source.model_dir / "generation_config.json"
    config: dict[str, object] = json.loads(path.read_text()) if path.is_file() else {}
    known = config.get("eos_token_id", [])
    ids = [i for i in (known if isinstance(known, list) else [known]) if isinstance(i, int)]
    merged = ids + [i for i in source.end_token_ids if i not in ids]
    if merged:
        config["eos_token_id"] = merged if len(merged) > 1 else merged[0]
    return config


def _write_json(path: Path, value: dict[str, object]) -> FileRecord:
    return fsio.write_file(
        path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(), root=path.parent.parent
    )
