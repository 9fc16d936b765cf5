"""`huggingface/`: the model as transformers and vLLM load it, written tensor by tensor and read back before commit."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

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
_SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


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
    tensors = _gathered(model, dtype)
    if _is_converted(model):
        whole = {name: tensor.cpu() if is_writer else tensor.new_empty(0) for name, tensor in tensors}
        tensors = iter(revert_weight_conversion(model, whole).items()) if is_writer else iter(())
        shapes = None
    else:
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if not is_writer:
        for _ in tensors:
            pass
        return []
    try:
        fsio.make_dir(target)
        if shapes is None:
            tensors_list = list(tensors)
            shapes, tensors = {name: tuple(t.shape) for name, t in tensors_list}, iter(tensors_list)
        records = _write_weights(tensors, shapes, target, dtype)
        records += _write_companions(model, target, source, dtype)
    finally:
        for _ in tensors:
            pass
    return records


def write_companions_only(
    model: PreTrainedModel, target: Path, source: ExportSource, *, dtype: torch.dtype
) -> list[FileRecord]:
    """Config, tokenizer and generation config without weights, for runs that do not save `hf_model`."""
    fsio.make_dir(target)
    return _write_companions(model, target, source, dtype)


def _gathered(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every parameter once under its own name (a tied head is absent), whole, in `dtype`. Collective per item."""
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        yield name, whole.to(dtype)


def _is_converted(model: PreTrainedModel) -> bool:
    """Whether transformers stores this architecture under other tensors than it computes with (fused experts)."""
    converters = [m for m in get_model_conversion_mapping(model, add_legacy=False) if isinstance(m, WeightConverter)]
    return bool(converters)


def _write_weights(
    tensors: Iterator[tuple[str, Tensor]], shapes: dict[str, tuple[int, ...]], target: Path, dtype: torch.dtype
) -> list[FileRecord]:
    """Safetensors files of at most `MAX_FILE_BYTES`, streamed: the header is written from the shapes alone."""
    groups = _split_by_size(shapes, dtype.itemsize)
    records, weight_map, digests = [], {}, {}
    for index, group in enumerate(groups, start=1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{index:05d}-of-{len(groups):05d}.safetensors"
        with HashingFile(target / name, root=target.parent) as file:
            file.write(_header({key: shapes[key] for key in group}, dtype))
            for expected in group:
                key, tensor = next(tensors)
                if key != expected:
                    raise RuntimeError(f"tensor {key} arrived where {expected} was due")
                data = tensor.contiguous().cpu().view(torch.uint8).numpy().data
                file.write(data)
                digests[key] = hashlib.blake2b(data).digest()
        records.append(file.record)
        weight_map.update(dict.fromkeys(group, name))
    if len(groups) > 1:
        total = sum(_num_elements(shape) for shape in shapes.values()) * dtype.itemsize
        index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
        records.append(_write_json(target / "model.safetensors.index.json", index_json))
    _read_back(target, weight_map, shapes, digests)
    return records


def _split_by_size(shapes: dict[str, tuple[int, ...]], itemsize: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    size_bytes = 0
    for name, shape in shapes.items():
        tensor_bytes = _num_elements(shape) * itemsize
        if groups[-1] and size_bytes + tensor_bytes > MAX_FILE_BYTES:
            groups.append([])
            size_bytes = 0
        groups[-1].append(name)
        size_bytes += tensor_bytes
    return groups


def _header(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    """Length (8 bytes, little-endian) and JSON table of a safetensors file, padded to a multiple of 8."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + _num_elements(shape) * dtype.itemsize
        table[name] = {"dtype": _SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _num_elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _read_back(
    target: Path, weight_map: dict[str, str], shapes: dict[str, tuple[int, ...]], digests: dict[str, bytes]
) -> None:
    """Open the files as a reader would and compare every tensor with what was sent to the disk."""
    for file_name in sorted(set(weight_map.values())):
        with safe_open(target / file_name, framework="pt") as reader:
            names = set(reader.keys())
            if names != {name for name, file in weight_map.items() if file == file_name}:
                raise OSError(f"{target / file_name}: read back other tensors than were written")
            for name in names:
                tensor = reader.get_tensor(name)
                same = hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy().data).digest() == digests[name]
                if tuple(tensor.shape) != shapes[name] or not same:
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
