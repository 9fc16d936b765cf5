"""What the step computes with on this device, beside plain formulas in float64 (floor 5).

Each check gives relative errors: norm of the difference over norm of what is expected, the largest of all results and
gradients. Shape suffixes: N query heads, T packed tokens, K head size, H hidden size, V vocabulary, S positions.
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen2Config
from transformers.models.qwen2 import modeling_qwen2

from trainer.config import OptimConfig
from trainer.losses import LOSSES
from trainer.model.attention import DocumentLengths, packed_attention
from trainer.model.head import CHUNK_TOKENS, LossHead
from trainer.model.norm import rms_norm
from trainer.optim.adamw import AdamW
from trainer.optim.clip import clipped_step, local_square_sum

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Rounding of results, and of gradients summed over hundreds of terms, gives up to half of it."""
SEQLENS, WINDOW = (7, 130, 1, 300, 64), 48
NUM_STEPS, MAX_NORM = 3, 0.5


def check_attention(device: torch.device, dtype: torch.dtype) -> float:
    """Packed documents, four query heads on two of keys, with and without a sliding window."""
    return max(_attention_error(device, dtype, window) for window in (None, WINDOW))


def _attention_error(device: torch.device, dtype: torch.dtype, window: int | None) -> float:
    total, lengths = sum(SEQLENS), DocumentLengths(SEQLENS)
    ours = query, key, value = [
        _leaf(1, num_heads, total, 64, seed=n, to=(device, dtype)) for n, num_heads in enumerate((4, 2, 2))
    ]
    output_1TNK, _ = packed_attention(nn.Identity(), query, key, value, None, sliding_window=window, lengths=lengths)
    theirs = _wide(ours)
    distance = torch.arange(total, device=device)[:, None] - torch.arange(total, device=device)
    document_T = torch.repeat_interleave(torch.tensor(SEQLENS)).to(device)
    mask = (distance >= 0) & (distance < (window or total)) & (document_T[:, None] == document_T)
    query, key, value = theirs[0], *(tensor.repeat_interleave(2, dim=1) for tensor in theirs[1:])
    scores = (query @ key.transpose(2, 3) / math.sqrt(64)).masked_fill(~mask, -math.inf)
    expected_1TNK = (scores.softmax(-1) @ value).transpose(1, 2)
    return _both_ways(output_1TNK, expected_1TNK, ours, theirs)


def check_norm(device: torch.device, dtype: torch.dtype) -> float:
    ours = hidden_TH, weight_H = [_leaf(*shape, seed=1, to=(device, dtype)) for shape in ((200, 256), (256,))]
    wide_TH, wide_H = theirs = _wide(ours)
    expected_TH = wide_H * wide_TH / (wide_TH.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return _both_ways(rms_norm(hidden_TH, weight_H, 1e-6), expected_TH, ours, theirs)


def check_rotary(device: torch.device, dtype: torch.dtype) -> float:
    """As transformers applies it on this device: angles come from products in float32, or wrongly in less."""
    size, theta, length = 64, 1e6, 4096
    parameters = {"rope_type": "default", "rope_theta": theta}
    config = Qwen2Config(hidden_size=size, num_attention_heads=1, rope_parameters=parameters)
    rotary = modeling_qwen2.Qwen2RotaryEmbedding(config).to(device)
    ours = [_leaf(1, 1, length, size, seed=n, to=(device, dtype)) for n in (1, 2)]
    cos, sin = rotary(ours[0], torch.arange(length, device=device)[None])
    rotated = modeling_qwen2.apply_rotary_pos_emb(*ours, cos, sin)
    theirs = _wide(ours)
    pair = torch.arange(size // 2, dtype=torch.float64, device=device)
    angle = torch.arange(length, dtype=torch.float64, device=device)[:, None] * theta ** (-2 * pair / size)
    expected = []
    for tensor in theirs:
        first, second = tensor.chunk(2, -1)
        turned = first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()
        expected.append(torch.cat(turned, -1))
    return _both_ways(torch.cat(rotated), torch.cat(expected), ours, theirs)


def check_head(device: torch.device, dtype: torch.dtype) -> float:
    """Cross-entropy in the output head, over more than one chunk."""
    num_positions = CHUNK_TOKENS + 100
    hidden = _leaf(num_positions, 64, seed=1, to=(device, dtype))
    labels_S = torch.arange(num_positions, device=device) * 7 % 1000
    linear = nn.Linear(64, 1000, bias=False, device=device, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(_random(1000, 64, seed=2))
    ours = [hidden, linear.weight]
    output = LossHead.from_linear(linear, LOSSES["cross_entropy"])(hidden, labels_S)
    assert not isinstance(output, Tensor)
    hidden_SH, weight_VH = theirs = _wide(ours)
    expected = F.cross_entropy(hidden_SH @ weight_VH.T, labels_S, reduction="sum")
    return _both_ways(output.loss_sum, expected, ours, theirs)


def check_adamw(device: torch.device, dtype: torch.dtype) -> float:
    """Some fused updates, with gradients that are not clipped; the change of the parameter is compared."""
    return _update_error(device, [0.1] * NUM_STEPS)


def check_clip(device: torch.device, dtype: torch.dtype) -> float:
    """The norm, and an update between two of which one is clipped and one left out."""
    gradient = _gradient(0).to(device)
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    norm_error = _error(local_square_sum([parameter]), gradient.double().square().sum())
    return max(norm_error, _update_error(device, [0.1, 5.0, math.inf, 0.1]))


def _update_error(device: torch.device, norms: list[float]) -> float:
    """After one step for each norm that the gradient is said to have; one that is not finite is left out."""
    config, lr = OptimConfig(betas=[0.9, 0.95], eps=1e-8, weight_decay=0.01), 0.1
    start = _random(100, 30, seed=9).to(device)
    parameter = nn.Parameter(start.clone())
    optimizer = AdamW([("weight", parameter)], config)
    optimizer.param_groups[0]["lr"] = lr
    expected = start.double()
    mean, square, num_steps = torch.zeros_like(expected), torch.zeros_like(expected), 0
    for index, norm in enumerate(norms):
        gradient = _gradient(index).to(device)
        parameter.grad = gradient.clone()
        total_norm = torch.tensor(norm, dtype=torch.float64, device=device)
        is_skipped = ~total_norm.isfinite()
        clipped_step(optimizer, total_norm=total_norm, is_skipped=is_skipped, max_norm=MAX_NORM, rounding_key=0)
        if not math.isfinite(norm):
            continue
        num_steps += 1
        clipped = gradient.double() * min(1.0, MAX_NORM / norm)
        mean = 0.9 * mean + 0.1 * clipped
        square = 0.95 * square + 0.05 * clipped.square()
        root = (square / (1 - 0.95**num_steps)).sqrt() + 1e-8
        expected = expected * (1 - lr * 0.01) - lr * mean / (1 - 0.9**num_steps) / root
    return _error(parameter.detach().double() - start.double(), expected - start.double())


def _gradient(index: int) -> Tensor:
    return _random(100, 30, seed=20 + index)


Check = Callable[[torch.device, torch.dtype], float]
CHECKS: dict[str, Check] = {
    "attention": check_attention,
    "norm": check_norm,
    "rotary": check_rotary,
    "head": check_head,
    "adamw": check_adamw,
    "clip": check_clip,
}
FLOAT32_ONLY = ("adamw", "clip")
"""Parameters and gradients are float32, whatever is computed with."""


def measure(device: torch.device, dtypes: Iterable[torch.dtype]) -> tuple[dict[str, float], dict[str, str]]:
    """({check: its error as a share of what is allowed, the largest of the dtypes}, {check: why it has none})."""
    errors, reasons = {}, {}
    for name, check in CHECKS.items():
        of_check = (torch.float32,) if name in FLOAT32_ONLY else dtypes
        try:
            errors[name] = max(check(device, dtype) / TOLERANCE[dtype] for dtype in of_check)
        except Exception as error:  # whatever a kernel that is no good raises
            reasons[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return errors, reasons


def _leaf(*shape: int, seed: int, to: tuple[torch.device, torch.dtype]) -> Tensor:
    return _random(*shape, seed=seed).to(*to).requires_grad_()


def _wide(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().to(torch.float64).requires_grad_() for tensor in tensors]


def _both_ways(output: Tensor, expected: Tensor, ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Of a result and of the gradients of a random product with it."""
    direction = _random(*expected.shape, seed=3).to(expected.device)
    output.backward(direction.to(output.dtype))
    expected.backward(direction.to(output.dtype).double())
    pairs = [(output, expected), *((mine.grad, other.grad) for mine, other in zip(ours, theirs, strict=True))]
    return max(_error(found, wanted) for found, wanted in pairs if found is not None and wanted is not None)


def _error(found: Tensor, expected: Tensor) -> float:
    error = ((found.detach().double() - expected).norm() / expected.norm()).item()
    if not math.isfinite(error):
        raise ArithmeticError("it gives what is no number")
    return error


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
