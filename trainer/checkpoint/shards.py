"""Sharded state on disk, in one file per rank and kind, and whole tensors in safetensors files.

Any number of ranks can read the shard files. If a tensor is sharded over S ranks along dim 0, rank
i holds the rows [i*c, (i+1)*c) with c = ceil(rows / S), as in FSDP2.
"""

import hashlib
import json
import logging
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, cast

import torch
import torch.distributed.tensor  # registers the classes that weights_only loading needs
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_leaves
from transformers.modeling_utils import str_to_torch_dtype

from trainer.checkpoint import fsio
from trainer.checkpoint.fsio import FileRecord, HashingFile
from trainer.config import ConfigError
from trainer.model.adapter_names import is_adapter
from trainer.model.weights import StoredTensor, bytes_of, stored_in

# torch warns for every file that its mesh has no process group in this process. That is harmless,
# because only the local tensors are used.
logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)

StateDict = dict[str, Any]
"""The state of a part: nested containers of tensors and plain values, by name."""
RESTORE_MODEL = (
    "Fix: restore the model's settings, or start a new run with trainer.experiment_name=<new name>"
)


class CorruptShardError(ConfigError):
    """A shard file is unreadable or lacks data that is needed. Exit code 2.

    The message names the file or the tensor.
    """


def write_torch(path: Path, value: Any, *, root: Path) -> FileRecord:
    """Save `value` with `torch.save` to a new file of the unfinished checkpoint at `root`."""
    with HashingFile(path, root=root) as file:
        torch.save(value, cast(IO[bytes], file))
    return file.record


def read_torch(path: Path) -> Any:
    """Load a file without executing pickled code. Tensors stay on disk until they are used.

    Raises `CorruptShardError` if the file cannot be read.
    """
    try:
        return torch.load(
            path,
            weights_only=True,
            mmap=True,
            map_location="cpu",
        )
    except MemoryError:
        raise
    except Exception as error:  # torch's reader fails in many ways on a damaged file
        reason = f"cannot be read: {error}"
        if isinstance(error, pickle.UnpicklingError):
            reason = "contains a pickle that could run code, so it was not loaded"
        raise CorruptShardError(
            f"{path} {reason}.\n"
            f"Fix: move the checkpoint out of the run directory, and continue from an older one"
        ) from error


def saved_parameters(model: nn.Module, *, remove_duplicate: bool = True) -> dict[str, nn.Parameter]:
    """Return the parameters that a checkpoint holds.

    These are all parameters or, with adapters, the trained parameters, because the base weights
    never change.
    """
    named = dict(model.named_parameters(remove_duplicate=remove_duplicate))
    if not any(map(is_adapter, named)):
        return named
    return {name: parameter for name, parameter in named.items() if parameter.requires_grad}


def weight_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's persistent buffers, which are equal on all ranks.

    It excludes buffers that transformers computes whenever it builds the model.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: value.detach() for name, value in model.state_dict().items() if name not in parameters
    }


def num_bytes(tree: Any) -> int:
    """Return the total size in bytes of the local tensors in nested containers. Shared memory counts
    once.
    """
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in local_tensors(tree)}
    return sum(sizes.values())


def local_tensors(tree: Any) -> Iterator[Tensor]:
    """Yield this rank's part of every tensor in nested containers."""
    found = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in found)


@dataclass(frozen=True)
class Shards:
    """The saved state of a sharded part: the `state_dict` of each rank of one replica.

    The files are memory-mapped: only tensors that are read take memory.
    """

    directory: Path
    parts: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, directory: Path, names: Iterable[str]) -> Self:
        return cls(directory, [read_torch(directory / name) for name in names])

    def entries(self, name: str) -> list[Any]:
        """Return the pieces of a tensor, in rank order. Raises `CorruptShardError`."""
        if not all(name in part for part in self.parts):
            raise CorruptShardError(
                f"{self.directory.name} has no tensor '{name}': it belongs to a different "
                f"model.\n{RESTORE_MODEL}"
            )
        return [part[name] for part in self.parts]

    def whole(self, name: str) -> Tensor:
        """Return the whole tensor.

        Raises `CorruptShardError` if its pieces do not fit together.
        """
        pieces = list(_rows(self.entries(name), name))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def as_shard(parameter: Tensor, like: DTensor) -> Tensor:
    """Return a parameter as a DTensor.

    FSDP leaves a parameter unsharded if each rank holds all of it. This wraps it as one shard.
    """
    if isinstance(parameter, DTensor):
        return parameter
    return DTensor.from_local(
        parameter.detach(), like.device_mesh, like.placements, run_check=False
    )


def compact(value: Any) -> Any:
    """Return a tensor without autograd and without the padding after an uneven shard.

    The padding would otherwise be saved too.
    """
    if not isinstance(value, DTensor):
        return value.detach() if isinstance(value, Tensor) else value
    local = value.to_local().detach()
    if local.untyped_storage().nbytes() != local.numel() * local.element_size():
        local = local.clone()
    return with_local(value, local)


def with_local(value: DTensor, local: Tensor) -> DTensor:
    """Return a DTensor like `value` whose local tensor is `local`.

    `DTensor.from_local` would move it to the device of the mesh.
    """
    return DTensor(local, value._spec, requires_grad=False)


@torch.no_grad()
def copy_slice(
    saved: list[Any],
    live: Tensor,
    name: str,
    key: str,
    *,
    may_round: bool = False,
) -> None:
    """Fill this rank's part of `live` from the pieces in `saved`, which are in rank order.

    key: the configuration key of the dtype of `live`. may_round: allow a loss of precision. A
    frozen parameter is kept in its compute dtype, which may be narrower than the saved dtype.
    """
    piece = saved[0]
    if piece.shape != live.shape:
        raise CorruptShardError(
            f"'{name}' was saved as {tuple(piece.shape)}, but the model has {tuple(live.shape)}.\n"
            f"{RESTORE_MODEL}"
        )
    # A wider dtype loses nothing.
    if torch.promote_types(piece.dtype, live.dtype) != live.dtype and not may_round:
        raise ConfigError(
            f"'{name}' was saved as {piece.dtype}; loading it as {live.dtype} would lose precision.\n"
            f"Fix: set {key}=float32, or start a new run with trainer.experiment_name=<new name> "
            f"and model.partial_pretrain=<the checkpoint's huggingface/>"
        )
    if not isinstance(piece, DTensor) and not isinstance(live, DTensor):
        live.copy_(piece)
        return
    if isinstance(live, DTensor):
        local = live.to_local()
        _, (first, *_) = compute_local_shape_and_global_offset(
            live.shape, live.device_mesh, live.placements
        )
    else:  # FSDP left it unsharded, since each rank holds all of it
        local = live
        first = 0
    for rows in _rows(saved, name, first, first + len(local)):
        num_rows = len(rows)
        local[:num_rows].copy_(rows)
        local = local[num_rows:]


def _rows(
    saved: list[Any],
    name: str,
    begin: int = 0,
    end: int | None = None,
) -> Iterator[Tensor]:
    """Yield rows `begin` to `end` of a tensor as views of its pieces, given in rank order.

    Only the local tensors are used, because the mesh in a file belongs to the run that saved it.
    """
    if not isinstance(saved[0], DTensor):
        raise CorruptShardError(f"'{name}' is not a sharded tensor")
    placement = saved[0].placements[-1]
    shape = saved[0].shape
    if isinstance(placement, Replicate):
        whole = saved[0]._local_tensor
        yield whole if end is None else whole[begin:end]
        return
    if type(placement) is not Shard or placement.dim != 0:
        raise CorruptShardError(
            f"'{name}' has placement {placement}; only Shard(0) and Replicate() are supported"
        )
    num_rows = shape[0]
    end = num_rows if end is None else end
    chunk = -(-num_rows // len(saved))
    for index, entry in enumerate(saved):
        piece = entry._local_tensor
        first = min(index * chunk, num_rows)
        last = min(first + chunk, num_rows)
        expected = (last - first, *shape[1:])
        if piece.shape != expected:
            raise CorruptShardError(
                f"'{name}': piece {index} is {tuple(piece.shape)}, expected {expected}"
            )
        start = max(begin, first)
        if start < min(end, last):
            yield piece[start - first : end - first]


_DTYPE_NAMES = {dtype: name for name, dtype in str_to_torch_dtype.items()}
"""Dtype names in the header of a safetensors file."""


def write_tensors(
    path: Path,
    layout: Mapping[str, Tensor],
    tensors: Iterator[Tensor],
    *,
    root: Path,
) -> FileRecord:
    """Write a new safetensors file in the unfinished directory at `root`, and read it back.

    layout: name -> meta tensor, in the order of `tensors`. Raises `OSError` if the file
    reads back differently.
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


def write_stored(path: Path, tensors: Mapping[str, StoredTensor], *, root: Path) -> FileRecord:
    """Copy tensors into a new safetensors file, one at a time, like `write_tensors`."""
    contents = (tensor.whole() for tensor in tensors.values())
    return write_tensors(path, shapes_of(tensors), contents, root=root)


def shapes_of(tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Return meta tensors with the shapes and dtypes of the stored tensors."""
    return {
        name: torch.empty(tensor.shape, dtype=str_to_torch_dtype[tensor.dtype], device="meta")
        for name, tensor in tensors.items()
    }


def copied(tensors: Mapping[str, StoredTensor], directory: Path) -> dict[str, StoredTensor]:
    """Copy tensors into an unlinked file in `directory`, which no other process can change.

    The file stays readable while this process lives. Raises `OSError` if the copy fails.
    """
    path = fsio.temporary_path(directory / "model")
    try:
        write_stored(path, tensors, root=directory)
        return stored_in(path)
    finally:
        with suppress(FileNotFoundError):
            fsio.unlink(path)


def _header(layout: Mapping[str, Tensor]) -> bytes:
    """Return the header of a safetensors file.

    It consists of the table's length (8 bytes, little-endian) and the JSON table, padded to a
    multiple of 8 bytes.
    """
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
    """Compare every tensor in a file with the tensor that was written. Raises `OSError`."""
    with safe_open(path, framework="pt") as reader:
        if set(reader.keys()) != set(digests):
            raise OSError(f"{path}: the tensors read back are not the tensors that were written")
        for name, digest in digests.items():
            tensor = reader.get_tensor(name)
            expected = layout[name]
            has_layout = (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
            if not has_layout or hashlib.blake2b(bytes_of(tensor)).digest() != digest:
                raise OSError(f"{path}: tensor {name} differs from what was written")
