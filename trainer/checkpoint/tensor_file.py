"""safetensors files, written tensor by tensor and read back."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from transformers.modeling_utils import str_to_torch_dtype

from trainer.checkpoint.fsio import FileRecord, HashingFile
from trainer.weights import bytes_of

_DTYPE_NAMES = {dtype: name for name, dtype in str_to_torch_dtype.items()}
"""As the header of a safetensors file calls them."""


def write_tensors(path: Path, layout: Mapping[str, Tensor], tensors: Iterator[Tensor], *, root: Path) -> FileRecord:
    """Write a new file of the directory that is being made at `root`, and read it back.

    layout: name -> tensor without memory, in the order in which `tensors` gives them.
    """
    digests = {}
    with HashingFile(path, root=root) as file:
        file.write(_header(layout))
        for name in layout:
            data = bytes_of(next(tensors))
            file.write(data)
            digests[name] = hashlib.blake2b(data).digest()
            del data
    _read_back(path, layout, digests)
    return file.record


def _header(layout: Mapping[str, Tensor]) -> bytes:
    """Length (8 bytes, little-endian) and JSON table of a safetensors file, padded to a multiple of 8."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in layout.items():
        end = offset + tensor.nbytes
        dtype = _DTYPE_NAMES[tensor.dtype]
        table[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_back(path: Path, layout: Mapping[str, Tensor], digests: Mapping[str, bytes]) -> None:
    """Open a file as a reader would and compare every tensor with what was sent to the disk."""
    with safe_open(path, framework="pt") as reader:
        if set(reader.keys()) != set(digests):
            raise OSError(f"{path}: read back other tensors than were written")
        for name, digest in digests.items():
            tensor = reader.get_tensor(name)
            is_same = hashlib.blake2b(bytes_of(tensor)).digest() == digest
            if tensor.shape != layout[name].shape or tensor.dtype != layout[name].dtype or not is_same:
                raise OSError(f"{path}: tensor {name} read back differently from what was written")
