"""Reads quantized checkpoints as bfloat16 weights.

A weight is stored as codes (float8, or two 4-bit floats per byte) and scales, one for each block of
rows and columns. Readers of these tensors ask for slices in bfloat16, and only the codes of those
slices are read.

With blocks of P rows and Q columns, weight[r, c] = code[r, c] * scale[r // P, c // Q]. This also
holds for scales called `weight_scale_inv`. In gpt-oss checkpoints (MXFP4), `_blocks` has the shape
[experts, rows, groups, 16]. Each group is 32 columns in 16 bytes, and its scale is a power of two.

Shape suffixes: R rows and C columns of a weight.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.config import ConfigError
from trainer.model.weight_files import weight_files
from trainer.model.weights import StoredTensor, stored_in

QUANTIZATION_CONFIG = "quantization_config"
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_FOUR_BITS = ("I8", "U8")
_FOUR_BIT_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of a 4-bit float without its sign: 2 bits of exponent and 1 of mantissa (E2M1)."""
_MXFP4_BLOCKS = "_blocks"
_MXFP4_COLUMNS = 32
"""Columns of a block in gpt-oss checkpoints, which store each weight transposed."""
_OF_ACTIVATIONS = (".activation_scale", ".input_scale", ".qscale_act", ".k_scale", ".v_scale")


def weights_in(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors in the safetensors files of a model directory, quantized ones as bfloat16.

    The quantization must be one that `require_supported` accepts. Raises `ConfigError` for files
    that cannot be read.
    """
    stored: dict[str, StoredTensor] = {}
    for file in weight_files(directory):
        stored |= sorted(stored_in(file).items())
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for part in (config, config.get("text_config") or {}):
        if settings := part.get(QUANTIZATION_CONFIG):
            return dequantized(stored, _block_size(settings))
    return stored


def require_supported(settings: Mapping[str, Any], name: str) -> None:
    """Raise `ConfigError`, whose message begins with the checkpoint's `name`, unless the weights
    can be dequantized.
    """
    method = settings.get("quant_method")
    is_supported = method in ("fp8", "mxfp4")
    if method == "compressed-tensors":
        kinds = [group.get("weights") or {} for group in _groups(settings)]
        is_supported = all(
            (kind.get("type"), kind.get("num_bits")) == ("float", 8) for kind in kinds
        )
    if not is_supported:
        raise ConfigError(
            f"{name} is quantized ({QUANTIZATION_CONFIG} in config.json: {method}, "
            f"{settings.get('format', 'no format')}); only fp8, mxfp4 and the float8 formats of "
            f"compressed-tensors can be dequantized while loading.\n"
            f"Fix: use the model's bfloat16 or float32 weights"
        )


def dequantized(
    stored: Mapping[str, StoredTensor], block_size: tuple[int, int] | None
) -> dict[str, StoredTensor]:
    """Replace each pair of codes and scales by one bfloat16 tensor, and drop activation scales.

    `block_size`: rows and columns that share a scale, if the checkpoint states them. Raises
    `ConfigError` for codes without scales, and for scales that do not fit.
    """
    tensors = {
        name: tensor for name, tensor in stored.items() if not name.endswith(_OF_ACTIVATIONS)
    }
    for name, codes in [*tensors.items()]:
        if name not in tensors or codes.dtype not in _FLOAT8 + _FOUR_BITS:
            continue  # scales whose codes came earlier, or not quantized
        names = [scales for scales in _names_of_scales(name) if scales in tensors]
        if names:
            del tensors[name]
            scales = tensors.pop(names[0])
            tensors[name.removesuffix(_MXFP4_BLOCKS)] = _paired(codes, scales, block_size, name)
        elif codes.dtype in _FLOAT8:
            raise ConfigError(f"{codes.file}: {name} is float8, but its scales are missing")
    return tensors


def _names_of_scales(name: str) -> list[str]:
    """Return the names under which checkpoints store the scales of a weight."""
    stem = name.removesuffix(".weight")
    of_mxfp4 = f"{name.removesuffix(_MXFP4_BLOCKS)}_scales"
    return [
        f"{name}_scale_inv",
        f"{name}_scale",
        f"{stem}.scale",
        f"{stem}.qscale_weight",
        of_mxfp4,
    ]


def _groups(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list((settings.get("config_groups") or {}).values())


def _block_size(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    found = settings.get("weight_block_size")
    for group in _groups(settings):
        found = found or group["weights"].get("block_structure")
    return (int(found[0]), int(found[1])) if found else None


def _grid(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, int]:
    """Return the number of blocks down and across; the last ones may be incomplete."""
    return math.ceil(shape[-2] / block[0]), math.ceil(shape[-1] / block[1])


def _paired(
    codes: StoredTensor,
    scales: StoredTensor,
    block_size: tuple[int, int] | None,
    name: str,
) -> StoredTensor:
    """Return the weight as if it were an unquantized tensor in a file. Raise `ConfigError` if the
    scales do not fit the codes.

    MXFP4 codes have one more dimension, and store the weight transposed.
    """
    is_mxfp4 = len(codes.shape) == 4
    shape = codes.shape
    if is_mxfp4:
        shape = (*shape[:2], math.prod(shape[2:]))
    if codes.dtype in _FOUR_BITS:
        shape = (*shape[:-1], 2 * shape[-1])
    grid = (1, 1) if math.prod(scales.shape) == 1 else scales.shape[-2:]
    blocks: list[tuple[int, int]] = []
    if is_mxfp4:
        blocks = [(1, _MXFP4_COLUMNS)]
    elif len(shape) > 1 and len(grid) == 2:
        even = (shape[-2] // grid[0], shape[-1] // grid[1])
        blocks = [even] if block_size is None else [block_size, even]
    for block in blocks:
        if min(block) and _grid(shape, block) == tuple(grid):
            *outer, rows, columns = shape
            stored_shape = (*outer, columns, rows) if is_mxfp4 else shape
            return StoredTensor(
                codes.file, stored_shape, "BF16", partial(_read, codes, scales, block)
            )
    raise ConfigError(
        f"{codes.file}: {name} has shape {codes.shape}, but its scales have shape {scales.shape}: "
        f"no block size fits both.\nFix: use the model's bfloat16 weights"
    )


def _read(
    codes: StoredTensor,
    scales: StoredTensor,
    block: tuple[int, int],
    where: tuple[slice, ...],
) -> Tensor:
    """Return the slices `where` of a weight, computed in float32 and rounded once.

    `block`: the number of rows and columns that share a scale.
    """
    *outer, rows, columns = where
    is_mxfp4 = len(codes.shape) == 4
    if is_mxfp4:
        rows, columns = columns, rows
    shape = [part.stop - part.start for part in (*outer, rows, columns)]
    made = torch.empty(shape, dtype=torch.bfloat16)
    row_R = torch.arange(rows.start, rows.stop) // block[0]
    for place in np.ndindex(*shape[:-2]):  # one matrix at a time
        picked = [
            slice(part.start + index, part.start + index + 1)
            for part, index in zip(outer, place, strict=True)
        ]
        values_RC = _values(codes, picked, rows)
        scales_RC = _scales(scales, picked)[row_R].repeat_interleave(block[1], 1)
        values_RC *= scales_RC[:, : values_RC.shape[1]]
        made[place] = values_RC[:, columns]
    return made.transpose(-2, -1).contiguous() if is_mxfp4 else made


def _values(codes: StoredTensor, picked: list[slice], rows: slice) -> Tensor:
    """Return some rows of one matrix in float32, unscaled and with all columns."""
    every = [slice(0, size) for size in codes.shape[len(picked) + 1 :]]
    codes_RC = codes.read((*picked, rows, *every)).reshape(rows.stop - rows.start, -1)
    return _unpacked(codes_RC) if codes.dtype in _FOUR_BITS else codes_RC.float()


def _scales(stored: StoredTensor, picked: list[slice]) -> Tensor:
    """Return the scales of one matrix in float32."""
    if math.prod(stored.shape) == 1:
        scales = stored.whole().reshape(1, 1)
    else:
        every = [slice(0, size) for size in stored.shape[-2:]]
        scales = stored.read((*picked, *every)).reshape(stored.shape[-2:])
    if scales.dtype == torch.uint8:  # only an exponent; 255 is NaN
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.float()


def _unpacked(codes_RC: Tensor) -> Tensor:
    """Return the two 4-bit floats (E2M1) of each byte in float32, the lower bits first."""
    # the highest of the four bits is the sign, so codes 8 to 15 are negative
    values = torch.tensor([*_FOUR_BIT_VALUES, *(-value for value in _FOUR_BIT_VALUES)])
    bytes_RC = codes_RC.view(torch.uint8)
    pairs_RC2 = torch.stack([bytes_RC & 15, bytes_RC >> 4], dim=-1)
    return values[pairs_RC2.int()].flatten(1)
