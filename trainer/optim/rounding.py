"""Stochastic rounding of float32 results to bfloat16: up or down at random, unbiased on average.

Rounding to nearest loses every change below half a unit of the last place (1/512 of the value). A
weight with a small learning rate, or a second moment with beta2 = 0.999, would never change (P.
Zamirai et al., "Revisiting BFloat16 Training", arXiv 2010.06192). The noise is a hash of (key,
global index of the element), so it is the same on any number of ranks and after a restart, and
needs no generator.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

_NOISE_BITS = 16
"""Number of bits that a float32 has and a bfloat16 lacks."""
_MULTIPLIERS = (0x9E3779B1, 0x7FEB352D, 0x846CA68B)
"""2^32 / golden ratio, and the multipliers of C. Wellons' `lowbias32`, which were found by search
(nullprogram.com, "Prospecting for Hash Functions").
"""


def store(
    target: Tensor,
    values: Tensor,
    key: int,
    first: int,
) -> None:
    """Write float32 `values` into `target`. If `target` is bfloat16, round them with the noise of
    `key`.

    Both are flat. `first` is the index of their first element in the whole tensor.
    """
    target.copy_(values if target.dtype == values.dtype else rounded(values, key, first))


def rounded(values: Tensor, key: int, first: int) -> Tensor:
    """Round flat float32 values to bfloat16. The probability of rounding up is the fraction of a
    unit that is cut off.

    A bfloat16 is the upper half of a float32. Adding a uniform 16-bit number to the lower half
    carries into the upper half with the probability lower half / 2^16. Then the lower half is
    cleared. The sign is a separate bit, so "up" means away from zero.
    """
    noise = _hash(len(values), key, first, values.device).bitwise_and_(2**_NOISE_BITS - 1)
    bits = noise.add_(values.view(torch.int32)).bitwise_and_(-(2**_NOISE_BITS))
    # noise could overflow a NaN of all ones into zero
    return torch.where(values.isnan(), values, bits.view(torch.float32)).bfloat16()


def shard_starts(shape: torch.Size, num_shards: int) -> list[int]:
    """Return the index in the whole tensor at which each shard begins, and the end of the last.

    FSDP2 shards by rows, rounded up: the last shards may be smaller, or empty.
    """
    num_rows = shape[0]
    row_numel = shape[1:].numel()
    rows_per_shard = -(-num_rows // num_shards)
    return [min(num_rows, n * rows_per_shard) * row_numel for n in range(num_shards + 1)]


def first_element(tensor: Tensor) -> int:
    """Return the index in the whole tensor of the first element of this rank's shard.

    Rows are sharded over the last mesh dimension, as in `parallelize`.
    """
    if not isinstance(tensor, DTensor):
        return 0
    mesh = tensor.device_mesh
    last = mesh.ndim - 1
    assert tensor.placements[last] == Shard(0) and all(
        map(Placement.is_replicate, tensor.placements[:last])
    )
    return shard_starts(tensor.shape, mesh.size(last))[mesh.get_local_rank(last)]


def _hash(
    numel: int,
    key: int,
    first: int,
    device: torch.device,
) -> Tensor:
    """Return int32 values in which every bit depends on all bits of the key and of the index modulo
    2^32. Sums and products wrap.
    """
    golden, odd, even = (_signed(multiplier) for multiplier in _MULTIPLIERS)
    x = torch.arange(numel, dtype=torch.int32, device=device)
    x = x.add_(_signed(first)).mul_(golden).add_(_signed(key))
    x = _xor_shifted(x, 16).mul_(odd).bitwise_xor_(_signed(key >> 32))
    x = _xor_shifted(x, 15).mul_(even)
    return _xor_shifted(x, 16)


def _xor_shifted(x: Tensor, count: int) -> Tensor:
    """Return x ^ (x >> count) for unsigned numbers: the sign bits that an int32 shift brings in are
    removed.
    """
    return x.bitwise_xor_((x >> count).bitwise_and_(2 ** (32 - count) - 1))


def _signed(value: int) -> int:
    """Return the low 32 bits as an int32."""
    return ((value + 2**31) % 2**32) - 2**31
