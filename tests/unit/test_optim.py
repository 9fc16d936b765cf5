"""Schedule, decay groups, gradient norm and clipping."""

import itertools
import math
from dataclasses import fields
from math import inf, nan
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from toy import optim_config, update

from trainer.optim import OPTIMIZERS, clip
from trainer.optim.schedule import LrSchedule

KINDS = ("cosine", "linear", "constant", "wsd")


def rates(kind: str, total_steps: int, *, warmup: float = 0.0, min_lr: float = 0.1) -> list[float]:
    """Shares of the peak rate, step by step."""
    config = optim_config(lr_scheduler=kind, lr_warmup_steps_ratio=warmup, min_lr_ratio=min_lr)
    schedule = LrSchedule.from_config(config, peak_lr=2e-3, total_steps=total_steps)
    return [schedule.lr_at(step) / 2e-3 for step in range(1, total_steps + 1)]


COSINE = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(8)]
LINEAR = [0.1 + 0.9 * (1 - i / 8) for i in range(8)]
WSD = [1.0] * 37 + [0.1 + 0.9 * share for share in (0.75, 0.5, 0.25)]


@pytest.mark.covers("S2.34:C")
@pytest.mark.parametrize(
    ("kind", "after"),
    [("cosine", COSINE), ("linear", LINEAR), ("constant", [1.0] * 8), ("wsd", WSD)],
)
def test_values_after_a_warm_up_of_two_steps(kind: str, after: list[float]) -> None:
    """The decay reaches `min_lr_ratio` where the next step would be, so no step is wasted on a
    rate of zero.
    """
    total_steps = 2 + len(after)
    found = rates(kind, total_steps, warmup=2 / total_steps)
    assert found == pytest.approx([0.5, 1.0, *after])


@pytest.mark.covers("S3.46:C")
@pytest.mark.parametrize(
    ("kind", "total_steps", "warmup", "min_lr"),
    list(itertools.product(KINDS, (1, 2, 50), (0.0, 0.1, 1.0), (0.0, 0.1, 1.0))),
)
def test_every_step_learns_and_none_exceeds_the_peak(
    kind: str, total_steps: int, warmup: float, min_lr: float
) -> None:
    values = rates(kind, total_steps, warmup=warmup, min_lr=min_lr)
    num_warmup = int(total_steps * warmup)
    assert all(0 < value <= 1 + 1e-12 for value in values)
    assert values[:num_warmup] == pytest.approx([(i + 1) / num_warmup for i in range(num_warmup)])
    after = values[num_warmup:]
    assert after == sorted(after, reverse=True) and all(value >= min_lr - 1e-12 for value in after)
    assert not after or after[0] == 1.0


@pytest.mark.parametrize(("given", "expected"), [(None, 2), (-1, 2), (0, 0), (3, 3)])
def test_steps_of_warm_up_go_before_their_share(given: int | None, expected: int) -> None:
    config = optim_config(lr_warmup_steps_ratio=0.5, lr_warmup_steps=given)
    assert LrSchedule.from_config(config, peak_lr=1.0, total_steps=4).warmup_steps == expected


def test_the_saved_schedule_has_every_field() -> None:
    """A resume compares what was saved: a field that is left out could change unnoticed."""
    schedule = LrSchedule.from_config(
        optim_config(lr_scheduler="wsd"), peak_lr=2e-3, total_steps=100
    )
    assert schedule.state_dict() == {
        field.name: getattr(schedule, field.name) for field in fields(LrSchedule)
    }


def test_apply_sets_every_group() -> None:
    optimizer = torch.optim.SGD(
        [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(2)], lr=7.0
    )
    schedule = LrSchedule.from_config(
        optim_config(lr_warmup_steps_ratio=0.5), peak_lr=1.0, total_steps=4
    )
    assert schedule.apply(optimizer, step=1, factor=1.0) == 0.5
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 3)
        self.input_layernorm = nn.LayerNorm(4)
        self.q_norm = nn.LayerNorm((2, 4))
        self.expert_bias = nn.Parameter(torch.zeros(2, 3))
        self.experts = nn.Parameter(torch.zeros(2, 3, 4))
        self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)


def test_only_matrices_decay() -> None:
    """Not by the number of dimensions alone: norms over heads and biases of fused experts have
    two.
    """
    layer = _Layer()
    optimizer = OPTIMIZERS["adamw"](layer, optim_config(weight_decay=0.3))
    names = {parameter: name for name, parameter in layer.named_parameters()}
    decayed, plain = ({names[p] for p in group["params"]} for group in optimizer.param_groups)
    assert decayed == {"proj.weight", "experts"}
    assert plain == set(names.values()) - decayed - {"frozen"}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].shape == parameter.shape and state["step"].item() == 0.0
    assert len(optimizer.state) == len(decayed | plain)
    before = {parameter: parameter.detach().clone() for parameter in names}
    for parameter in optimizer.state:
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    update(optimizer, torch.tensor(0.0), lr=0.1)
    for parameter, name in names.items():
        expected = before[parameter] if name == "frozen" else torch.ones_like(parameter)
        expected = expected * (1 - 0.1 * 0.3) if name in decayed else expected
        torch.testing.assert_close(parameter.detach(), expected)


def sharded_step(
    world: Any, max_norm: float
) -> tuple[float, float, list[torch.Tensor], list[torch.Tensor]]:
    """One clipped update of two equal models, by hand and by the kernel.

    (sum of squares over all ranks, the same in float64 from whole gradients, parameters by hand, by
    the kernel).
    """
    updated = []
    for is_by_hand in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 1))
        model[2].bias.requires_grad_(False)
        fully_shard(model, mesh=world.mesh)
        parameters = list(model.parameters())
        optimizer = OPTIMIZERS["adamw"](model, optim_config())
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.1
        generator = torch.Generator().manual_seed(1)
        for parameter, size in zip(parameters, (1e-6, 1.0, 1e6, 1.0, 1e-3, 1.0), strict=True):
            whole = torch.randn(parameter.shape, generator=generator) * size
            if parameter.requires_grad:
                parameter.grad = torch.distributed.tensor.distribute_tensor(
                    whole, world.mesh, parameter.placements
                )
        grads = [p.grad for p in parameters if p.grad is not None]
        exact = sum(float(grad.full_tensor().double().square().sum()) for grad in grads)
        square_sum = clip.local_square_sum(parameters)
        assert square_sum.dtype == torch.float64
        torch.distributed.all_reduce(square_sum)
        norm = square_sum.sqrt()
        if is_by_hand:
            for grad in grads:
                grad.mul_(min(1.0, max_norm / norm.item()))
            optimizer.step()
        else:
            update(optimizer, norm, lr=0.1, max_norm=max_norm)
        updated.append([p.full_tensor().detach() for p in parameters])
    return square_sum.item(), exact, updated[0], updated[1]


@pytest.mark.covers("S3.8")
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("max_norm", [2.0, 1e9])
def test_norm_and_clipped_update_over_uneven_shards_are_exact(
    world_size: int, max_norm: float
) -> None:
    """Rows that do not divide, and fewer rows than ranks: some ranks hold nothing of a
    parameter.
    """
    for square_sum, exact, by_hand, by_kernel in run_ranks(sharded_step, world_size, max_norm):
        assert square_sum == pytest.approx(exact, rel=1e-14)
        for expected, found in zip(by_hand, by_kernel, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def one_step(
    gradient: list[float], *, max_norm: float, is_skipped: bool = False
) -> tuple[nn.Parameter, dict[str, Any]]:
    """A parameter of zeros after one update at rate 0.1, and the optimizer's state of it."""
    layer = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(layer.weight)
    optimizer = OPTIMIZERS["adamw"](layer, optim_config())
    layer.weight.grad = torch.tensor([gradient])
    norm = clip.local_square_sum([layer.weight]).sqrt()
    update(optimizer, norm, lr=0.1, max_norm=max_norm, is_skipped=is_skipped)
    return layer.weight, optimizer.state[layer.weight]


@pytest.mark.covers("S2.31:C")
@pytest.mark.parametrize(("max_norm", "scale"), [(2.5, 0.5), (5.0, 1.0), (100.0, 1.0)])
@pytest.mark.parametrize("gradient", [[3.0, 4.0], [0.0, 0.0]])
def test_clipping_scales_down_only(gradient: list[float], max_norm: float, scale: float) -> None:
    """The first moment after one step is (1 - beta1) times the gradient that the update saw. A
    gradient of zero is no reason to skip.
    """
    _, state = one_step(gradient, max_norm=max_norm)
    expected = torch.tensor([gradient]) * scale * 0.1
    torch.testing.assert_close(state["exp_avg"], expected, rtol=1e-6, atol=0)
    assert state["step"] == 1


@pytest.mark.covers("S2.38")
@pytest.mark.parametrize("gradient", [[nan, 1.0], [inf, 1.0], [3.0, 4.0], [nan, 0.0]])
def test_a_step_left_out_changes_nothing(gradient: list[float]) -> None:
    weight, state = one_step(gradient, max_norm=1.0, is_skipped=True)
    changed = (weight, state["step"], state["exp_avg"], state["exp_avg_sq"])
    assert not any(value.any() for value in changed)
