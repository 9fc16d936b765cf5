"""Muon against the definition in float64 and torch's own, on whole and on sharded matrices."""

import pytest
import torch
from torch import nn
from toy import optim_config, update

from trainer.optim import OPTIMIZERS, clip
from trainer.optim.muon import orthogonalized

LR = 0.1


def by_definition(matrix: torch.Tensor) -> torch.Tensor:
    """The five quintic iterations on the singular values themselves, which is what they do to
    the matrix.
    """
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


@pytest.mark.parametrize("shape", [(6, 6), (24, 5), (5, 24)])
def test_iterations_act_on_singular_values_alone(shape):
    """float32 rounding, enlarged up to 500 times by the slope of the iterations at small
    singular values.
    """
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert (orthogonalized(matrix) - by_definition(matrix)).abs().max() < 5e-5


def step(layer: nn.Module, optimizer: clip.Optimizer, seed: int) -> None:
    """Update with random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    norm = clip.local_square_sum(list(layer.parameters())).sqrt()
    update(optimizer, norm, lr=LR)


def test_three_steps_are_those_of_torch():
    """torch iterates in bfloat16, whose rounding the iterations enlarge: some per cent of the
    way gone.
    """
    torch.manual_seed(0)
    layer = nn.Linear(5, 7)
    optimizer = OPTIMIZERS["muon"](layer, optim_config(weight_decay=0.2))
    start = layer.weight.detach().clone()
    theirs = nn.Parameter(layer.weight.detach().clone())
    reference = torch.optim.Muon([theirs], lr=LR, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    for seed in range(3):
        step(layer, optimizer, seed)
        theirs.grad = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed))
        reference.step()
        assert (layer.weight - theirs).norm() < 0.1 * (layer.weight - start).norm()


def test_a_model_of_which_no_matrix_is_trained_takes_its_steps_with_adamw():
    """As with `model.freeze` of all layers: embeddings, norms and the head are left."""
    embeddings = nn.Embedding(5, 3)
    optimizer = OPTIMIZERS["muon"](embeddings, optim_config())
    before = embeddings.weight.detach().clone()
    step(embeddings, optimizer, 0)
    assert not torch.equal(embeddings.weight, before)
