"""`huggingface/`: the model as transformers and vLLM load it, made from the shards of a checkpoint.

Tensors are read from the shard files one by one, written as safetensors and read back. Nothing here needs the model,
a GPU or another rank, so it runs behind training, and on any machine afterwards.
"""

import copy
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.fsio import FileRecord, HashingFile
from trainer.checkpoint.manifest import verify_files
from trainer.checkpoint.shards import ShardReader, read_torch
from trainer.config import ConfigError

MAX_FILE_BYTES = 5 * 10**9
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)
_SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class ExportSource:
    """What the exported directory takes over: the files of the model trained from, and the template trained with."""

    model_dir: Path
    chat_template: str | None
    """Only when it is not the tokenizer's own; the tokenizer's files are copied byte for byte otherwise."""
    end_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class ExportPlan:
    """`layout`: exported name -> tensor without memory, in the order written; `files`: names by file.

    `own_names` maps exported names to those of the shards, and is None where transformers stores an architecture in
    other tensors than it computes with (one per expert): these are made from the whole model at once.
    """

    layout: dict[str, Tensor]
    files: dict[str, list[str]]
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
    groups = _split_by_size(stored)
    files = {_file_name(index, len(groups)): group for index, group in enumerate(groups)}
    return ExportPlan(stored, files, own_names, architecture, target_dtype)


def num_bytes(plan: ExportPlan) -> int:
    return sum(tensor.nbytes for tensor in plan.layout.values())


def unsharded_twin(model: PreTrainedModel) -> PreTrainedModel:
    """The architecture of a sharded model without weights, under its own class name."""
    original: Any = next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))
    with torch.device("meta"):
        twin: PreTrainedModel = original(copy.deepcopy(model.config))
    return twin


def known_architecture(directory: Path) -> PreTrainedModel | None:
    """The same from a `config.json`; None if the architecture comes with code of its own, which is never run here."""
    config = json.loads((directory / "config.json").read_text())
    if "auto_map" in config and any(directory.glob("*.py")):
        return None
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    return model


def write_weights(
    plan: ExportPlan, target: Path, reader: ShardReader, *, share: tuple[int, int] = (0, 1)
) -> list[FileRecord]:
    """Write this writer's share `(index, count)` of the files into the existing directory `target`; read them back."""
    index, count = share if plan.own_names is not None else (0, 1)
    if plan.own_names is None and share[0] != 0:
        return []  # the first writer has to make all tensors at once
    mine = {name: names for i, (name, names) in enumerate(plan.files.items()) if i % count == index}
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


def write_companions(plan: ExportPlan, target: Path, source: ExportSource, *, class_name: str) -> list[FileRecord]:
    """Everything beside the weights: config.json, generation_config.json, tokenizer, template, the model's own code."""
    records = [_write_json(target / "config.json", _config(source, plan.dtype, class_name))]
    records.append(_write_json(target / "generation_config.json", _generation_config(source)))
    names = [name for name in _TOKENIZER_FILES if (source.model_dir / name).is_file()]
    names += sorted(path.name for path in source.model_dir.glob("*.tiktoken"))
    names += sorted(path.name for path in source.model_dir.glob("*.py"))
    for name in names:
        if source.chat_template is not None and name in ("chat_template.jinja", "chat_template.json"):
            continue
        if source.chat_template is not None and name == "tokenizer_config.json":
            config = json.loads((source.model_dir / name).read_text()) | {"chat_template": source.chat_template}
            records.append(_write_json(target / name, config))
        else:
            records.append(fsio.copy_file(source.model_dir / name, target / name, root=target.parent))
    if source.chat_template is not None:
        text = source.chat_template.encode()
        records.append(fsio.write_file(target / "chat_template.jinja", text, root=target.parent))
    return records


def export_from_shards(checkpoint: Path, target: Path, *, dtype: str) -> None:
    """Make the new directory `target` from the shards of a committed checkpoint, proving what is read.

    Needs no GPU and no process group, and takes nothing from a run that goes on meanwhile. `target` appears when it
    is whole. Raises `ConfigError` if the checkpoint is not committed, damaged, or `target` exists.
    """
    info = layout.inspect(checkpoint)
    if info.manifest is None:
        raise ConfigError(f"'{checkpoint}' cannot be exported: {info.reason or info.status}")
    if target.exists():
        raise ConfigError(f"'{target}' exists already: name a new directory")
    manifest = info.manifest
    num_shards = manifest.mesh.get("fsdp", manifest.world_size)
    extra = layout.extra_file(manifest.world_size, 0)
    needed = {extra, *(layout.model_file(manifest.world_size, rank) for rank in range(num_shards))}
    files = tuple(r for r in manifest.files if r.path in needed or r.path.startswith(f"{layout.HUGGINGFACE}/"))
    if problems := verify_files(checkpoint, dataclasses.replace(manifest, files=files)):
        raise ConfigError(f"'{checkpoint}' is damaged: {'; '.join(problems)}")
    buffers = read_torch(checkpoint / extra)["buffers"]
    shapes = {name: torch.empty(info.shape, device="meta") for name, info in manifest.tensors.items()}
    companions = checkpoint / layout.HUGGINGFACE
    plan = plan_export(shapes, buffers, known_architecture(companions), dtype=dtype)
    reader = ShardReader(
        checkpoint, world_size=manifest.world_size, num_shards=num_shards, parameters=shapes, buffers=buffers
    )
    staging = fsio.temporary_path(target)
    fsio.make_dir(staging)
    try:
        write_weights(plan, staging, reader)
        write_index(plan, staging)
        source = ExportSource(companions, None, ())
        class_name = type(plan.architecture).__name__ if plan.architecture else ""
        write_companions(plan, staging, source, class_name=class_name)
        fsio.fsync_tree(staging)
        fsio.rename(staging, target)
    except BaseException:
        fsio.remove_tree(staging)
        raise


def write_index(plan: ExportPlan, target: Path) -> list[FileRecord]:
    """Which file holds which tensor, where there are several."""
    if len(plan.files) == 1:
        return []
    weight_map = {name: file for file, names in plan.files.items() for name in names}
    index = {"metadata": {"total_size": num_bytes(plan)}, "weight_map": weight_map}
    return [_write_json(target / "model.safetensors.index.json", index)]


def _file_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _split_by_size(tensors: dict[str, Tensor]) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    size_bytes = 0
    for name, tensor in tensors.items():
        if groups[-1] and size_bytes + tensor.nbytes > MAX_FILE_BYTES:
            groups.append([])
            size_bytes = 0
        groups[-1].append(name)
        size_bytes += tensor.nbytes
    return groups


def _header(tensors: dict[str, Tensor]) -> bytes:
    """Length (8 bytes, little-endian) and JSON table of a safetensors file, padded to a multiple of 8."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        dtype = _SAFETENSORS_DTYPES[tensor.dtype]
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


def _config(source: ExportSource, dtype: torch.dtype, class_name: str) -> dict[str, object]:
    """The source's own config with the dtype that was written; `torch_dtype` is the key every reader knows."""
    config: dict[str, object] = json.loads((source.model_dir / "config.json").read_text())
    name = str(dtype).removeprefix("torch.")
    config["torch_dtype"] = name
    if "dtype" in config:
        config["dtype"] = name
    config.setdefault("architectures", [class_name])
    return config


def _generation_config(source: ExportSource) -> dict[str, object]:
    """The source's, its end tokens completed by those that the model was trained to end a turn with."""
    path = source.model_dir / "generation_config.json"
    config: dict[str, object] = json.loads(path.read_text()) if path.is_file() else {}
    known = config.get("eos_token_id", [])
    ids = (
        [known]
        if isinstance(known, int)
        else [i for i in known if isinstance(i, int)]
        if isinstance(known, list)
        else []
    )
    merged = ids + [i for i in source.end_token_ids if i not in ids]
    if merged:
        config["eos_token_id"] = merged if len(merged) > 1 else merged[0]
    return config


def _write_json(path: Path, value: dict[str, object]) -> FileRecord:
    return fsio.write_file(
        path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(), root=path.parent.parent
    )
