"""Schedule, decay groups, gradient norm and clipping."""

import itertools
import math
from math import inf, nan

import pytest
import torch
from plain_training import muon_update
from torch import nn
from toy import optim_config, update

from trainer.config import OptimGroup
from trainer.optim import OPTIMIZERS, clip
from trainer.optim.schedule import LrSchedule

KINDS = ("cosine", "linear", "constant", "wsd")


def rates(kind, total_steps, *, warmup=0.0, min_lr=0.1):
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
def test_values_after_a_warm_up_of_two_steps(kind, after):
    """The decay would reach `min_lr_ratio` one step after the last, so no step is wasted on a rate
    of zero.
    """
    total_steps = 2 + len(after)
    found = rates(kind, total_steps, warmup=2 / total_steps)
    assert found == pytest.approx([0.5, 1.0, *after])


@pytest.mark.covers("S3.46:C")
@pytest.mark.parametrize(
    ("kind", "total_steps", "warmup", "min_lr"),
    list(itertools.product(KINDS, (1, 50), (0.0, 0.1, 1.0), (0.0, 1.0))),
)
def test_every_step_learns_and_none_exceeds_the_peak(kind, total_steps, warmup, min_lr):
    values = rates(kind, total_steps, warmup=warmup, min_lr=min_lr)
    num_warmup = int(total_steps * warmup)
    assert all(0 < value <= 1 + 1e-12 for value in values)
    assert values[:num_warmup] == pytest.approx([(i + 1) / num_warmup for i in range(num_warmup)])
    after = values[num_warmup:]
    assert after == sorted(after, reverse=True) and all(value >= min_lr - 1e-12 for value in after)
    assert not after or after[0] == 1.0


class Model(nn.Module):
    """Every kind of parameter that an optimizer treats differently."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.q_norm = nn.LayerNorm((2, 4))
        self.proj = nn.Linear(4, 3)
        self.experts = nn.Parameter(torch.randn(5, 3, 4))
        self.expert_bias = nn.Parameter(torch.randn(5, 3))
        self.head = nn.Linear(4, 9, bias=False)
        self.frozen = nn.Parameter(torch.randn(3, 3), requires_grad=False)

    def get_output_embeddings(self):
        return self.head


MATRICES = {"proj.weight", "experts"}
"""The parameters that Muon makes orthogonal. AdamW updates all others."""
DECAYED = {*MATRICES, "embed.weight", "head.weight"}
"""The number of dimensions is not enough: norms over heads and biases of fused experts have two."""
GROUPS = [
    OptimGroup("embed", lr_scale=0.1, weight_decay=0.0),
    OptimGroup("norm", weight_decay=0.2),
    OptimGroup(r"^proj\.|embed", lr_scale=3.0),
]
GROUPED = {
    "embed.weight": (0.1, 0.0),
    "q_norm.weight": (1.0, 0.2),
    "q_norm.bias": (1.0, 0.2),
    "proj.weight": (3.0, 0.3),
    "proj.bias": (3.0, 0.0),
}
"""Return the factor of the learning rate and the weight decay in these groups."""


def plain_steps(values, gradients, rates, *, decay, is_matrix):
    """Return a parameter after some steps with torch's AdamW, or with the definition of Muon in
    float64.
    """
    parameter = nn.Parameter(values.double())
    adamw = torch.optim.AdamW([parameter], betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)
    momentum = torch.zeros_like(parameter)
    for gradient, rate in zip(gradients, rates, strict=True):
        adamw.param_groups[0]["lr"] = rate
        parameter.grad = gradient.double()
        if not is_matrix:
            adamw.step()
            continue
        update = muon_update(parameter.grad, momentum)
        parameter.data -= rate * (update + decay * parameter.detach())
    return parameter.detach()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("groups", [[], GROUPS], ids=["usual", "groups"])
@pytest.mark.parametrize(
    ("state_dtype", "is_chunked", "tolerance"),
    [("float32", False, 1e-4), ("float32", True, 1e-4), ("bfloat16", True, 2e-2)],
)
def test_every_parameter_has_its_own_rate_and_decay(
    kind, groups, state_dtype, is_chunked, tolerance
):
    """This holds even if it is updated in chunks, as for moments in bfloat16. Gradients are clipped
    to half.
    """
    torch.manual_seed(0)
    model = Model()
    config = optim_config(
        name=kind,
        weight_decay=0.3,
        groups=groups,
        state_dtype=state_dtype,
        lr_warmup_steps_ratio=0.7,
    )
    optimizer = OPTIMIZERS[kind](model, config)
    optimizer._is_rounded = is_chunked
    schedule = LrSchedule.from_config(config, peak_lr=0.1, total_steps=3)
    named = dict(model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    gradients = {name: [torch.randn(p.shape) for _ in range(3)] for name, p in named.items()}
    rates = [0.5 * schedule.lr_at(step) for step in (1, 2, 3)]
    for step in range(3):
        for name, parameter in named.items():
            parameter.grad = 2 * gradients[name][step]
        assert schedule.apply(optimizer, step=step + 1, factor=0.5) == rates[step]
        clip.clipped_step(
            optimizer,
            total_norm=torch.tensor(4.0),
            is_skipped=torch.tensor(False),
            max_norm=2.0,
            rounding_key=step,
        )
    assert torch.equal(named.pop("frozen"), before["frozen"])
    assert len(optimizer.state) == len(named)
    for name, parameter in named.items():
        is_matrix = kind == "muon" and name in MATRICES
        moments = {"momentum_buffer"} if is_matrix else {"step", "exp_avg", "exp_avg_sq"}
        assert set(optimizer.state[parameter]) == moments, name
        usual = 1.0, 0.3 * (name in DECAYED)
        scale, decay = GROUPED.get(name, usual) if groups else usual
        expected = plain_steps(
            before[name],
            gradients[name],
            [scale * rate for rate in rates],
            decay=decay,
            is_matrix=is_matrix,
        )
        moved = (expected - before[name]).norm()
        assert (parameter.detach() - expected).norm() < tolerance * moved, name


def test_a_tied_weight_is_matched_by_either_of_its_names():
    model = Model()
    model.head.weight = model.embed.weight
    optimizer = OPTIMIZERS["adamw"](model, optim_config(groups=[OptimGroup("head", lr_scale=2.0)]))
    scaled = [group["params"] for group in optimizer.param_groups if group["lr_scale"] == 2.0]
    assert len(scaled) == 1 and len(scaled[0]) == 1 and scaled[0][0] is model.embed.weight


MOMENTA = {"adamw": ("exp_avg", 0.1), "muon": ("momentum_buffer", 0.05)}
"""Return the first moment, and the share of the first gradient that it contains after one step."""


def step(layer, optimizer, gradient, **how):
    """Update the matrix with this gradient, at the rate 0.1."""
    layer.weight.grad = torch.tensor([gradient])
    layer.bias.grad = torch.zeros(1)
    norm = clip.local_square_sum(list(layer.parameters())).sqrt()
    update(optimizer, norm, lr=0.1, **how)


@pytest.mark.covers("S2.31:C")
@pytest.mark.parametrize("kind", MOMENTA)
@pytest.mark.parametrize(("max_norm", "scale"), [(2.5, 0.5), (5.0, 1.0), (100.0, 1.0)])
@pytest.mark.parametrize("gradient", [[3.0, 4.0], [0.0, 0.0]])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_clipping_scales_down_only(kind, is_chunked, gradient, max_norm, scale):
    """The first moment contains the gradient that the update received. A zero gradient is no reason
    to skip.
    """
    layer = nn.Linear(2, 1)
    moment, share = MOMENTA[kind]
    optimizer = OPTIMIZERS[kind](layer, optim_config())
    optimizer._is_rounded = is_chunked
    step(layer, optimizer, gradient, max_norm=max_norm)
    expected = torch.tensor([gradient]) * scale * share
    found = optimizer.state[layer.weight][moment]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert optimizer.state[layer.bias]["step"] == 1


@pytest.mark.covers("S2.38")
@pytest.mark.parametrize("kind", MOMENTA)
@pytest.mark.parametrize("gradient", [[nan, 1.0], [inf, 1.0], [3.0, 4.0]])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_step_left_out_changes_nothing(kind, gradient, state_dtype):
    layer = nn.Linear(2, 1)
    optimizer = OPTIMIZERS[kind](layer, optim_config(state_dtype=state_dtype))
    for _ in range(2):
        states = [value for state in optimizer.state.values() for value in state.values()]
        before = [value.clone() for value in (*layer.parameters(), *states)]
        step(layer, optimizer, gradient, is_skipped=True)
        for old, new in zip(before, (*layer.parameters(), *states), strict=True):
            assert torch.equal(old, new)
        step(layer, optimizer, [3.0, 4.0])


def test_a_model_without_trained_matrices_takes_its_steps_with_adamw():
    """This happens with `model.freeze` for all layers: only embeddings, norms and the head remain."""
    embeddings = nn.Embedding(5, 3)
    optimizer = OPTIMIZERS["muon"](embeddings, optim_config())
    before = embeddings.weight.detach().clone()
    embeddings.weight.grad = torch.ones(5, 3)
    update(optimizer, torch.tensor(1.0), lr=0.1)
    assert not torch.equal(embeddings.weight, before)
