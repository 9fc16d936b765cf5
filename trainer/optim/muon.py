"""Muon: momentum made orthogonal for the matrices of the layers, AdamW for all else.

Sources: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); the
step size, which lets AdamW's learning rate serve both, from "Muon is Scalable for LLM Training"
(arXiv 2502.16982).

Shape suffixes: A rows and B columns of a matrix; a leading E counts the experts that share one
parameter.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.config import OptimConfig
from trainer.optim import rounding
from trainer.optim.adamw import AdamW
from trainer.optim.clip import local
from trainer.optim.groups import is_decayed, parameter_groups, trainable
from trainer.runtime import seeding

MOMENTUM = 0.95
NUM_ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic with the largest slope at zero: five iterations bring singular values
to between 0.7 and 1.2.
"""
UPDATE_RMS = 0.2
"""Root mean square of AdamW's usual updates; Muon's updates are scaled to it."""


class Muon(AdamW):
    """AdamW plus groups of matrices that are updated by orthogonal momentum."""

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        ends = _ends(model)
        self._matrices = {
            p: name for p, name in trainable(model).items() if is_decayed(name, p) and p not in ends
        }
        super().__init__(model, config, others=self._matrices)
        dtype: torch.dtype = getattr(torch, config.state_dtype)
        for parameter in self._matrices:
            momentum = torch.zeros_like(parameter, requires_grad=False, dtype=dtype)
            self.state[parameter] = {"momentum_buffer": momentum}
        self._of_matrices = [
            {**group, "lr": 0.0, "momentum": MOMENTUM}
            for group in parameter_groups(model, self._matrices, config)
        ]
        self._of_adamw = self.param_groups
        self.param_groups = [*self._of_matrices, *self._of_adamw]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update. Collective: every matrix is gathered once."""
        everything, self.param_groups = self.param_groups, self._of_adamw
        super().step()
        self.param_groups = everything
        for group in self._of_matrices:
            for parameter in group["params"]:
                self._step_matrix(parameter, self._matrices[parameter], group)

    def _step_matrix(self, parameter: nn.Parameter, name: str, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        gradient, first = parameter.grad, rounding.first_element(parameter)
        targets = [
            local(tensor).detach()
            for tensor in (parameter, self.state[parameter]["momentum_buffer"])
        ]
        # no copies if they are float32
        weight, momentum = (target.float() for target in targets)
        local(gradient).div_(self.grad_scale)
        is_skipped = self.found_inf > 0
        # values that are not finite must not enter the momentum, not even times zero
        local(gradient).copy_(torch.where(is_skipped, momentum, local(gradient)))
        momentum.lerp_(local(gradient), 1 - group["momentum"])
        local(gradient).lerp_(momentum, group["momentum"])
        update = orthogonal_update(gradient)
        update.add_(weight, alpha=group["weight_decay"])
        update.masked_fill_(is_skipped, 0.0)
        weight.sub_(update, alpha=group["lr"])
        for which, target, value in zip("wm", targets, (weight, momentum), strict=True):
            key = seeding.key(self.rounding_key, name, which)
            rounding.store(target.view(-1), value.view(-1), key, first)


def orthogonal_update(momentum: Tensor) -> Tensor:
    """Return this rank's shard of the orthogonal matrix nearest to the whole one, with the size of
    AdamW's usual updates.

    The whole matrix is gathered and every rank does the same work, so the result does not depend on
    the number of ranks.
    """
    whole = momentum.full_tensor() if isinstance(momentum, DTensor) else momentum
    update = orthogonalized(whole).mul_(UPDATE_RMS * max(whole.shape[-2:]) ** 0.5)
    if not isinstance(momentum, DTensor):
        return update
    # every rank has the whole matrix, so nothing is sent
    return local(
        distribute_tensor(update, momentum.device_mesh, momentum.placements, src_data_rank=None)
    )


def orthogonalized(matrix_EAB: Tensor) -> Tensor:
    """Approximate U V^T of U S V^T by Newton-Schulz iterations.

    In float32: the iterations enlarge small singular values and their rounding up to 500 times; in
    bfloat16 the result would depend on the number of ranks.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix_EAB.shape[-2] > matrix_EAB.shape[-1]
    x = (matrix_EAB.mT if is_tall else matrix_EAB).float()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).contiguous()


def _ends(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights of embeddings and output head: their rows are tokens, not a map between
    hidden spaces.
    """
    modules: list[Any] = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return {module.weight for module in (*modules, head) if module is not None}
