"""NF4: frozen weights of linear layers in 4.5 bits each, for LoRA on a small GPU.

Each block of 64 weights of a row is divided by its largest absolute value, and each weight becomes
the nearest of 16 levels, the quantiles of a normal distribution (Dettmers et al. 2023, QLoRA, arXiv
2305.14314, appendix E). Levels and blocks match bitsandbytes without double quantization.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 64
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""An exact zero is one of the levels, so there are 7 negative and 8 positive ones."""


class Nf4Linear(nn.Linear):
    """A linear layer whose frozen weight is a uint8 tensor of shape (out_features, in_features * 9
    / 16): for each row, the levels (two per byte), then the float32 scales of its blocks.

    The rows are independent, so FSDP can shard them.
    """

    levels: Tensor

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False, device="meta")
        num_bytes = plain.in_features // 2 + plain.in_features // BLOCK * 4
        weight = torch.empty(plain.out_features, num_bytes, dtype=torch.uint8, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = plain.bias
        self.register_buffer("levels", torch.tensor(LEVELS, device="cpu"), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight, self.bias, self.levels)


class _Product(torch.autograd.Function):
    """The product with the dequantized weight, which the backward pass dequantizes again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        stored: Tensor,
        bias: Tensor | None,
        levels: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(stored, levels)
        return F.linear(x, dequantized(stored, levels, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        stored, levels = ctx.saved_tensors
        return gradient @ dequantized(stored, levels, gradient.dtype), None, None, None


def is_nf4(parameter: Tensor) -> bool:
    return parameter.dtype == torch.uint8


def weight_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the weight that a parameter holds."""
    if not is_nf4(parameter):
        return tuple(parameter.shape)
    num_rows, num_bytes = parameter.shape
    return num_rows, num_bytes * 16 // 9


def num_weights(parameter: Tensor) -> int:
    """Return the number of weights that a parameter holds."""
    return math.prod(weight_shape(parameter))


def can_hold(layer: nn.Module) -> bool:
    """Return True for a plain linear layer whose rows consist of whole blocks."""
    return type(layer) is nn.Linear and layer.in_features % BLOCK == 0


def quantized(weight_OI: Tensor) -> Tensor:
    """Return the bytes that an `Nf4Linear` stores for these rows of a weight."""
    blocks_ONB = weight_OI.float().unflatten(1, (-1, BLOCK))
    scales_ON = blocks_ONB.abs().amax(2)
    shares_ONB = blocks_ONB / scales_ON[..., None].clamp(min=torch.finfo(torch.float32).tiny)
    levels = torch.tensor(LEVELS)
    # midpoints between levels: the place among them is the index of the nearest level
    bounds = (levels[1:] + levels[:-1]) / 2
    picks_OI = torch.bucketize(shares_ONB, bounds).flatten(1).to(torch.uint8)
    pairs = picks_OI[:, 0::2] << 4 | picks_OI[:, 1::2]
    return torch.cat([pairs, scales_ON.view(torch.uint8)], dim=1)


def dequantized(stored: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight, computed in float32 and rounded once."""
    # a row of I weights has I / 2 bytes of pairs and I / 16 bytes of scales
    num_pairs = stored.shape[1] * 8 // 9
    pairs = stored[:, :num_pairs]
    scales = stored[:, num_pairs:].contiguous().view(torch.float32)
    picks_OI = torch.stack([pairs >> 4, pairs & 15], dim=2).flatten(1)
    blocks_ONB = levels[picks_OI.int()].unflatten(1, (-1, BLOCK))
    return (blocks_ONB * scales[..., None]).flatten(1).to(dtype)
