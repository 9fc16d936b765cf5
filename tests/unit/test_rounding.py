"""Moments and parameters in bfloat16: rounding is unbiased, and does not depend on the sharding of
a tensor.
"""

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from toy import differing, optim_config, update

from trainer.optim import OPTIMIZERS, rounding
from trainer.runtime import seeding

UNIT = 2.0**-7
"""Values between two bfloat16 numbers, from 1 to 2."""
KINDS = {
    "states": {"state_dtype": "bfloat16"},
    "master and states": {"state_dtype": "bfloat16", "master_dtype": "bfloat16"},
    "master": {"master_dtype": "bfloat16"},
    "muon": {"name": "muon", "state_dtype": "bfloat16", "master_dtype": "bfloat16"},
}


@pytest.mark.parametrize("share", [0.0, 1 / 64, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rounding_is_right_on_average_over_keys_and_over_elements(share, sign):
    """A value is rounded up with probability `share`, within five standard deviations for this
    number of draws.
    """
    value = sign * (1 + share * UNIT)
    num_keys = 400
    num_elements = 1000
    values = torch.full((num_elements,), value)
    keys = [seeding.key("test", key) for key in range(num_keys)]
    draws = torch.stack([rounding.rounded(values, key, first=0).double() for key in keys])
    assert set(draws.unique().tolist()) <= {sign, sign * (1 + UNIT)}
    deviation = UNIT * (share * (1 - share)) ** 0.5
    for errors in (draws.mean() - value, draws.mean(0) - value, draws.mean(1) - value):
        num_draws = draws.numel() / errors.numel()
        assert float(errors.abs().max()) <= 5 * deviation / num_draws**0.5 + 1e-12


def test_draws_do_not_hang_together():
    """Neighbours, steps and distant elements have no correlation beyond chance."""
    values = torch.full((2**16,), 1 + UNIT / 2)
    here, next_step, next_seed = (
        (rounding.rounded(values, seeding.key("rounding", seed, step), 0) > 1).double() - 0.5
        for seed, step in ((1, 1), (1, 2), (2, 1))
    )
    far = [here.roll(distance) for distance in (1, 2**10, 2**15)]
    for other in (*far, next_step, next_seed, next_step.roll(1)):
        assert abs(float((here * other).mean()) * 4) < 5 / 2**8


@pytest.mark.parametrize(
    "value", [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 3.0, -0.375]
)
def test_what_bfloat16_holds_stays_as_it_is(value):
    kept = torch.full((64,), value).bfloat16().float()
    assert torch.equal(
        rounding.rounded(kept, 5, 0).view(torch.int16), kept.bfloat16().view(torch.int16)
    )


def test_no_bits_of_a_nan_become_a_number():
    values = torch.from_numpy(
        np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], dtype=np.uint32).view(np.float32)
    )
    for key in range(50):
        assert rounding.rounded(values, key, 0).isnan().all()


def updated(world, changes, num_steps=5):
    """Return whole parameters and moments after updates with gradients that depend on nothing else."""
    torch.manual_seed(0)
    changes = dict(changes)
    master = getattr(torch, changes.pop("master_dtype", "float32"))
    model = nn.Sequential(nn.Linear(37, 10), nn.Linear(10, 6), nn.Linear(6, 1)).to(master)
    mesh = world.mesh
    fully_shard(model, mesh=mesh)
    optimizer = OPTIMIZERS[changes.get("name", "adamw")](model, optim_config(**changes))
    generator = torch.Generator().manual_seed(1)
    for step in range(num_steps):
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = distribute_tensor(gradient, mesh, parameter.placements)
        key = seeding.key("rounding", 3, step)
        norm = torch.tensor(2.0, dtype=torch.float64)
        update(optimizer, norm, lr=0.01, max_norm=1.0, is_skipped=step == 2, key=key)
    found = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        found |= {f"{name}.{kind}": value for kind, value in optimizer.state[parameter].items()}
    return {name: value.detach().full_tensor() for name, value in found.items() if value.ndim}


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_is_bit_equal_on_any_number_of_ranks(kind, monkeypatch):
    """Uneven rows, ranks without rows, and HSDP; the third step is skipped."""
    expected = run_ranks(updated, 1, KINDS[kind])[0]
    dtypes = {name: str(value.dtype).removeprefix("torch.") for name, value in expected.items()}
    assert dtypes["0.weight"] == KINDS[kind].get("master_dtype", "float32")
    assert {dtype for name, dtype in dtypes.items() if name.count(".") > 1} == {
        KINDS[kind].get("state_dtype", "float32")
    }
    for world_size, mesh in ((2, {}), (4, {}), (4, {"fsdp_size": 2})):
        for found in run_ranks(updated, world_size, KINDS[kind], **mesh):
            assert differing(found, expected) == []
