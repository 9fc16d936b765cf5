"""`huggingface/`: the model as transformers and vLLM load it, written tensor by tensor and read back before commit."""

import copy
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from trainer.checkpoint import fsio
from trainer.checkpoint.fsio import FileRecord, HashingFile

DIRECTORY = "huggingface"
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


def write_export(
    model: PreTrainedModel, target: Path, source: ExportSource, *, dtype: torch.dtype, is_writer: bool
) -> list[FileRecord]:
    """Gather the model tensor by tensor and write it. Collective; only the rank with `is_writer` touches the disk.

    Returns the files written. Raises `OSError` after all tensors are gathered, so that no rank is left waiting.
    """
    layout, tensors = _export(model, dtype, is_writer=is_writer)
    try:
        if not is_writer:
            return []
        fsio.make_dir(target)
        records = _write_weights(tensors, layout, target)
        return records + _write_companions(model, target, source, dtype)
    finally:
        for _ in tensors:
            pass


def write_companions_only(
    model: PreTrainedModel, target: Path, source: ExportSource, *, dtype: torch.dtype
) -> list[FileRecord]:
    """Config, tokenizer and generation config without weights, for runs that do not save `hf_model`."""
    fsio.make_dir(target)
    return _write_companions(model, target, source, dtype)


def _export(
    model: PreTrainedModel, dtype: torch.dtype, *, is_writer: bool
) -> tuple[dict[str, Tensor], Iterator[tuple[str, Tensor]]]:
    """(file name of each tensor -> shape and dtype, the tensors in that order; iterating is collective).

    transformers stores some architectures under other names or in other tensors (one per expert) than it computes
    with. New names are streamed like the rest; new tensors need the whole model in the writer's memory.
    """
    layout = _layout(model, dtype)
    original = _unsharded_twin(model)
    stored = revert_weight_conversion(original, layout)
    names = {id(tensor): name for name, tensor in stored.items()}
    if len(stored) == len(layout) and all(id(tensor) in names for tensor in layout.values()):
        new_names = {name: names[id(tensor)] for name, tensor in layout.items()}
        renamed = {new_names[name]: tensor for name, tensor in layout.items()}
        return renamed, ((new_names[name], tensor) for name, tensor in _gathered(model, layout))
    whole = {name: tensor.cpu() for name, tensor in _gathered(model, layout) if is_writer}
    converted = revert_weight_conversion(original, whole) if is_writer else {}
    return converted, iter(converted.items())


def _layout(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """What is exported, as tensors without memory: every parameter once (a tied head is absent) in `dtype`, then the
    buffers that belong to the weights in their own.
    """
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    layout = {name: torch.empty(p.shape, dtype=dtype, device="meta") for name, p in model.named_parameters()}
    buffers = {name: tensor.to("meta") for name, tensor in model.state_dict().items() if name not in aliases}
    return layout | buffers


def _unsharded_twin(model: PreTrainedModel) -> PreTrainedModel:
    """The architecture without weights under its own class name, by which transformers finds its conversions."""
    original: Any = next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))
    with torch.device("meta"):
        twin: PreTrainedModel = original(copy.deepcopy(model.config))
    return twin


def _gathered(model: PreTrainedModel, layout: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the layout under its own name, whole. Collective per item."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, expected in layout.items():
        value = tensors[name].detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        yield name, whole.to(expected.dtype)


def _write_weights(tensors: Iterator[tuple[str, Tensor]], layout: dict[str, Tensor], target: Path) -> list[FileRecord]:
    """Safetensors files of at most `MAX_FILE_BYTES`, streamed: the header is written from the layout alone."""
    groups = _split_by_size(layout)
    records, weight_map, digests = [], {}, {}
    for index, group in enumerate(groups, start=1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{index:05d}-of-{len(groups):05d}.safetensors"
        with HashingFile(target / name, root=target.parent) as file:
            file.write(_header({key: layout[key] for key in group}))
            for expected in group:
                key, tensor = next(tensors)
                if key != expected:
                    raise RuntimeError(f"tensor {key} arrived where {expected} was due")
                data = _bytes(tensor)
                file.write(data)
                digests[key] = hashlib.blake2b(data).digest()
        records.append(file.record)
        weight_map.update(dict.fromkeys(group, name))
    if len(groups) > 1:
        total = sum(tensor.nbytes for tensor in layout.values())
        index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
        records.append(_write_json(target / "model.safetensors.index.json", index_json))
    _read_back(target, weight_map, layout, digests)
    return records


def _split_by_size(layout: dict[str, Tensor]) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    size_bytes = 0
    for name, tensor in layout.items():
        if groups[-1] and size_bytes + tensor.nbytes > MAX_FILE_BYTES:
            groups.append([])
            size_bytes = 0
        groups[-1].append(name)
        size_bytes += tensor.nbytes
    return groups


def _header(layout: dict[str, Tensor]) -> bytes:
    """Length (8 bytes, little-endian) and JSON table of a safetensors file, padded to a multiple of 8."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in layout.items():
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


def _read_back(target: Path, weight_map: dict[str, str], layout: dict[str, Tensor], digests: dict[str, bytes]) -> None:
    """Open the files as a reader would and compare every tensor with what was sent to the disk."""
    for file_name in sorted(set(weight_map.values())):
        with safe_open(target / file_name, framework="pt") as reader:
            names = set(reader.keys())
            if names != {name for name, file in weight_map.items() if file == file_name}:
                raise OSError(f"{target / file_name}: read back other tensors than were written")
            for name in names:
                tensor = reader.get_tensor(name)
                is_same = hashlib.blake2b(_bytes(tensor)).digest() == digests[name]
                if tensor.shape != layout[name].shape or tensor.dtype != layout[name].dtype or not is_same:
                    raise OSError(f"{target / file_name}: tensor {name} read back differently from what was written")


def _write_companions(
    model: PreTrainedModel, target: Path, source: ExportSource, dtype: torch.dtype
) -> list[FileRecord]:
    """config.json, generation_config.json, tokenizer files, template, and the model's own code if it has any."""
    records = [_write_json(target / "config.json", _config(model, source, dtype))]
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


def _config(model: PreTrainedModel, source: ExportSource, dtype: torch.dtype) -> dict[str, object]:
    """The source's own config with the dtype that was written; `torch_dtype` is the key every reader knows."""
    config: dict[str, object] = json.loads((source.model_dir / "config.json").read_text())
    name = str(dtype).removeprefix("torch.")
    config["torch_dtype"] = name
    if "dtype" in config:
        config["dtype"] = name
    config.setdefault("architectures", [type(model).__name__.removeprefix("FSDP")])
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
