"""Muon against its definition in float64: five iterations on the singular values."""

import pytest
import torch
from torch import nn
from toy import optim_config, update

from trainer.optim import OPTIMIZERS
from trainer.optim.muon import orthogonalized


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


def test_a_model_without_trained_matrices_takes_its_steps_with_adamw():
    """As with `model.freeze` of all layers: embeddings, norms and the head are left."""
    embeddings = nn.Embedding(5, 3)
    optimizer = OPTIMIZERS["muon"](embeddings, optim_config())
    before = embeddings.weight.detach().clone()
    embeddings.weight.grad = torch.ones(5, 3)
    update(optimizer, torch.tensor(1.0), lr=0.1)
    assert not torch.equal(embeddings.weight, before)
