"""What the step computes with on this device, beside plain formulas in float64 (floor 5).

Each check gives a relative error (norm of the difference over norm of what is expected, the largest of all results and
gradients) as a share of what rounding may be: what the same plain formula loses on the same device and inputs in the
kernel's own dtype, several times over. Shape suffixes: N query heads, T packed tokens, K head size, H hidden size,
V vocabulary, S positions.
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen2Config
from transformers.models.qwen2 import modeling_qwen2

from trainer.acceptance import NUM_ROUNDINGS
from trainer.config import OptimConfig
from trainer.losses import LOSSES
from trainer.model.attention import DocumentLengths, packed_attention
from trainer.model.head import BLOCK_TOKENS, LossHead
from trainer.model.norm import rms_norm
from trainer.optim.adamw import AdamW
from trainer.optim.clip import clipped_step, local_square_sum

LEAST_TOLERANCE = 16 * torch.finfo(torch.float32).eps
"""In float32 sums of another order weigh as much as what the formula itself rounds."""
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
    distance = torch.arange(total, device=device)[:, None] - torch.arange(total, device=device)
    document_T = torch.repeat_interleave(torch.tensor(SEQLENS)).to(device)
    mask = (distance >= 0) & (distance < (window or total)) & (document_T[:, None] == document_T)

    def formula(query: Tensor, *keys_and_values: Tensor) -> Tensor:
        key, value = (tensor.repeat_interleave(2, dim=1) for tensor in keys_and_values)
        scores = (query @ key.transpose(2, 3) / math.sqrt(64)).masked_fill(~mask, -math.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2)

    return _both_ways(output_1TNK, formula, ours)


def check_norm(device: torch.device, dtype: torch.dtype) -> float:
    ours = hidden_TH, weight_H = [_leaf(*shape, seed=1, to=(device, dtype)) for shape in ((200, 256), (256,))]

    def formula(hidden_TH: Tensor, weight_H: Tensor) -> Tensor:
        return weight_H * hidden_TH / (hidden_TH.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    return _both_ways(rms_norm(hidden_TH, weight_H, 1e-6), formula, ours)


def check_rotary(device: torch.device, dtype: torch.dtype) -> float:
    """As transformers applies it on this device: angles come from products in float32, or wrongly in less."""
    size, theta, length = 64, 1e6, 4096
    parameters = {"rope_type": "default", "rope_theta": theta}
    config = Qwen2Config(hidden_size=size, num_attention_heads=1, rope_parameters=parameters)
    rotary = modeling_qwen2.Qwen2RotaryEmbedding(config).to(device)
    ours = [_leaf(1, 1, length, size, seed=n, to=(device, dtype)) for n in (1, 2)]
    cos, sin = rotary(ours[0], torch.arange(length, device=device)[None])
    rotated = modeling_qwen2.apply_rotary_pos_emb(*ours, cos, sin)

    def formula(*tensors: Tensor) -> Tensor:
        wide = torch.promote_types(tensors[0].dtype, torch.float32)
        pair = torch.arange(size // 2, dtype=wide, device=device)
        angle = torch.arange(length, dtype=wide, device=device)[:, None] * theta ** (-2 * pair / size)
        cos, sin = (turn.to(tensors[0].dtype) for turn in (angle.cos(), angle.sin()))
        halves = (tensor.chunk(2, -1) for tensor in tensors)
        return torch.cat([torch.cat((a * cos - b * sin, b * cos + a * sin), -1) for a, b in halves])

    return _both_ways(torch.cat(rotated), formula, ours)


def check_head(device: torch.device, dtype: torch.dtype) -> float:
    """Cross-entropy in the output head, over more than one block."""
    num_positions = BLOCK_TOKENS + 100
    hidden = _leaf(num_positions, 64, seed=1, to=(device, dtype))
    labels_S = torch.arange(num_positions, device=device) * 7 % 1000
    linear = nn.Linear(64, 1000, bias=False, device=device, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(_random(1000, 64, seed=2))
    ours = [hidden, linear.weight]
    output = LossHead.from_linear(linear, LOSSES["cross_entropy"])(hidden, labels_S)
    assert not isinstance(output, Tensor)

    def formula(hidden_SH: Tensor, weight_VH: Tensor) -> Tensor:
        return F.cross_entropy(hidden_SH @ weight_VH.T, labels_S, reduction="sum")

    return _both_ways(output.loss_sum, formula, ours)


def check_adamw(device: torch.device, dtype: torch.dtype) -> float:
    """Some fused updates, with gradients that are not clipped; the change of the parameter is compared."""
    return _share(*_update_errors(device, [0.1] * NUM_STEPS))


def check_clip(device: torch.device, dtype: torch.dtype) -> float:
    """The norm, and an update between two of which one is clipped and one left out."""
    gradient = _gradient(0).to(device)
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    norm_error = _error(local_square_sum([parameter]), gradient.double().square().sum())
    error, rounding = _update_errors(device, [0.1, 5.0, math.inf, 0.1])
    return _share(max(norm_error, error), rounding)


def _update_errors(device: torch.device, norms: list[float]) -> tuple[float, float]:
    """After one step for each norm that the gradient is said to have; one that is not finite is left out. The update's
    error, and that of the formula in float32.
    """
    config, lr = OptimConfig(betas=[0.9, 0.95], eps=1e-8, weight_decay=0.01), 0.1
    start = _random(100, 30, seed=9).to(device)
    parameter = nn.Parameter(start.clone())
    optimizer = AdamW([("weight", parameter)], config)
    optimizer.param_groups[0]["lr"] = lr
    for index, norm in enumerate(norms):
        gradient = _gradient(index).to(device)
        parameter.grad = gradient.clone()
        total_norm = torch.tensor(norm, dtype=torch.float64, device=device)
        is_skipped = ~total_norm.isfinite()
        clipped_step(optimizer, total_norm=total_norm, is_skipped=is_skipped, max_norm=MAX_NORM, rounding_key=0)

    def formula(value: Tensor) -> Tensor:
        mean, square, (beta, gamma) = torch.zeros_like(value), torch.zeros_like(value), value.new_tensor(config.betas)
        finite = [(index, norm) for index, norm in enumerate(norms) if math.isfinite(norm)]
        for num_steps, (index, norm) in enumerate(finite, start=1):
            clipped = _gradient(index).to(value) * min(1.0, MAX_NORM / norm)
            mean = beta * mean + (1 - beta) * clipped
            square = gamma * square + (1 - gamma) * clipped.square()
            root = (square / (1 - gamma**num_steps)).sqrt() + 1e-8
            value = value * (1 - lr * 0.01) - lr * mean / (1 - beta**num_steps) / root
        return value

    before = start.double()
    change = formula(before) - before
    error, rounding = (_error(found.double() - before, change) for found in (parameter.detach(), formula(start)))
    return error, rounding


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
            errors[name] = max(check(device, dtype) for dtype in of_check)
        except Exception as error:  # whatever a kernel that is no good raises
            reasons[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return errors, reasons


def _leaf(*shape: int, seed: int, to: tuple[torch.device, torch.dtype]) -> Tensor:
    return _random(*shape, seed=seed).to(*to).requires_grad_()


def _both_ways(output: Tensor, formula: Callable[..., Tensor], ours: list[Tensor]) -> float:
    """Of a result and of the gradients of a random product with it."""
    direction = _random(*output.shape, seed=3).to(ours[0])
    found = [_with_gradients(output, direction, ours)]
    for dtype in (ours[0].dtype, torch.float64):
        theirs = [tensor.detach().to(dtype, copy=True).requires_grad_() for tensor in ours]
        found.append(_with_gradients(formula(*theirs), direction, theirs))
    *rounded, exact = found
    error, rounding = (max(map(_error, results, exact)) for results in rounded)
    return _share(error, rounding)


def _with_gradients(output: Tensor, direction: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [output, *torch.autograd.grad(output, leaves, direction.to(output.dtype))]


def _share(error: float, rounding: float) -> float:
    """Of what is allowed. The formula rounds every intermediate result; a sound kernel rounds fewer."""
    return error / max(NUM_ROUNDINGS * rounding, LEAST_TOLERANCE)


def _error(found: Tensor, expected: Tensor) -> float:
    error = ((found.detach().double() - expected).norm() / expected.norm()).item()
    if not math.isfinite(error):
        raise ArithmeticError("it gives what is no number")
    return error


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
