"""QLoRA: NF4 weights by their definition. `test_meetings.py` trains on them."""

import pytest
import torch

from trainer.model import nf4


def defined(weight):
    """Return the nearest level of each weight times the scale of its block, in float64."""
    blocks = weight.double().reshape(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    levels = torch.tensor(nf4.LEVELS, dtype=torch.float64)
    distances = (blocks[..., None] - levels * scales[..., None]).abs()
    return (levels[distances.argmin(-1)] * scales).reshape(weight.shape)


def stored_and_back(weight):
    return nf4.dequantized(nf4.quantized(weight), torch.tensor(nf4.LEVELS), weight.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_the_nearest_level_times_the_scale_of_its_block(dtype):
    weight = (0.02 * torch.randn(96, 256, generator=torch.Generator().manual_seed(0))).to(dtype)
    weight[3, :64] = 0.0
    weight[5, 7] = 100.0
    assert torch.equal(stored_and_back(weight), defined(weight).float().to(dtype))
    assert nf4.quantized(weight).nbytes * 8 == 4.5 * weight.numel()
    assert torch.equal(nf4.quantized(weight)[32:], nf4.quantized(weight[32:])), "rows stand alone"


def test_a_layer_computes_with_the_dequantized_weight_and_its_bias():
    plain = torch.nn.Linear(128, 32)
    layer = nf4.Nf4Linear(plain)
    layer.weight = torch.nn.Parameter(nf4.quantized(plain.weight.data), requires_grad=False)
    plain.weight.data = stored_and_back(plain.weight.data)
    found = []
    for module in (layer, plain):
        x = torch.linspace(-1, 1, 3 * 128).view(3, 128).requires_grad_()
        output = module(x)
        output.square().sum().backward()
        found.append((output, x.grad))
    torch.testing.assert_close(*found)
