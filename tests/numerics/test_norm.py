"""The trainer's norm compared with float64 and with transformers' own norm.

`test_architectures.py` fails if the trainer replaces a norm that has a different formula.
"""

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from trainer.model.norm import rms_norm

SHAPE = (37, 64)
EPS = 1e-6


def outcome(norm, dtype):
    """(output, gradient of the input, of the weight), float64, of the same numbers in any dtype."""
    generator = torch.Generator().manual_seed(3)
    hidden = (3 * torch.randn(SHAPE, generator=generator)).to(dtype).requires_grad_()
    weight = (1 + 0.3 * torch.randn(SHAPE[-1:], generator=generator)).to(dtype).requires_grad_()
    grad = torch.randn(SHAPE, generator=generator)
    result = norm(hidden, weight)
    result.backward(grad.to(dtype))
    return result.detach().double(), hidden.grad.double(), weight.grad.double()


def plain(hidden, weight):
    return weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + EPS)


def theirs(hidden, weight):
    module = Qwen2RMSNorm(SHAPE[-1], EPS)
    return torch.func.functional_call(module, {"weight": weight}, (hidden,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_errors_are_no_larger_than_those_of_transformers(dtype, device):
    """The error relative to a float64 norm of the same rounded inputs may be a quarter larger by
    chance.

    On a GPU the norm is torch's own, which rounds once where transformers rounds twice.
    """

    def there(norm):
        return lambda hidden, weight: norm(hidden.to(device), weight.to(device)).cpu()

    def of_rounded_inputs(hidden, weight):
        return plain(hidden.to(dtype).double(), weight.to(dtype).double())

    exact = outcome(of_rounded_inputs, torch.float64)
    ours, own = (outcome(there(norm), dtype) for norm in (lambda h, w: rms_norm(h, w, EPS), theirs))
    for expected, found, other in zip(exact, ours, own, strict=True):
        error, allowed = ((value - expected).norm() / expected.norm() for value in (found, other))
        assert error <= 1.25 * allowed + 1e-8
