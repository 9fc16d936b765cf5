"""Muon: orthogonalized momentum for the layers' matrices, AdamW for all other parameters.

Sources: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); for a
step size that lets Muon and AdamW share one learning rate, "Muon is Scalable for LLM Training"
(arXiv 2502.16982).

Shape suffixes: A rows and B columns of a matrix; a leading E counts the experts that share one
parameter.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.config import OptimConfig
from trainer.model.weights import local
from trainer.optim import rounding
from trainer.optim.adamw import AdamW
from trainer.optim.groups import is_decayed, parameter_groups, trainable
from trainer.runtime import seeding

MOMENTUM = 0.95
NUM_ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of the quintic with the largest slope at zero. In each iteration, a singular
value s becomes a s + b s^3 + c s^5. Five iterations bring values from 0.002 to 1 to between 0.68
and 1.21. Smaller values grow by a factor of at most a^5 = 485.
"""
UPDATE_RMS = 0.2
"""Muon's updates are scaled to this root mean square, which is typical of AdamW's updates."""


class Muon(AdamW):
    """AdamW, with groups of matrices that are updated with orthogonalized momentum."""

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        ends = _ends(model)
        self._matrices = {
            p: name for p, name in trainable(model).items() if is_decayed(name, p) and p not in ends
        }
        super().__init__(model, config, others=self._matrices)
        dtype: torch.dtype = getattr(torch, config.state_dtype)
        for parameter in self._matrices:
            momentum = torch.zeros_like(parameter, dtype=dtype)
            self.state[parameter] = {"momentum_buffer": momentum}
        self._of_matrices = parameter_groups(model, self._matrices, config)
        self._of_adamw = self.param_groups
        self.param_groups = [*self._of_matrices, *self._of_adamw]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters. Collective: every matrix is sent to its owner, and its update is
        sent back.
        """
        everything = self.param_groups
        self.param_groups = self._of_adamw
        super().step()
        self.param_groups = everything
        group_of = {p: group for group in self._of_matrices for p in group["params"]}
        gradients = {parameter: self._with_momentum(parameter) for parameter in group_of}
        for parameter, update in orthogonal_updates(gradients):
            self._apply(parameter, update, group_of[parameter])

    def _with_momentum(self, parameter: nn.Parameter) -> Tensor:
        """Update the momentum. Return the gradient with Nesterov's look-ahead, in place."""
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        state = local(self.state[parameter]["momentum_buffer"])
        momentum = state.float()  # no copy if it is float32
        gradient.div_(self.grad_scale)
        # Values that are not finite must not enter the momentum, not even times zero. The momentum
        # takes their place, so the average below does not change it.
        gradient.copy_(torch.where(self.found_inf > 0, momentum, gradient))
        momentum.lerp_(gradient, 1 - MOMENTUM)
        gradient.lerp_(momentum, MOMENTUM)
        self._store(parameter, state, momentum, "m")
        return parameter.grad

    def _apply(
        self,
        parameter: nn.Parameter,
        update: Tensor,
        group: dict[str, Any],
    ) -> None:
        """Apply this rank's shard of the update to its shard of the parameter."""
        target = local(parameter).detach()
        weight = target.float()
        update.add_(weight, alpha=group["weight_decay"])
        update.masked_fill_(self.found_inf > 0, 0.0)
        weight.sub_(update, alpha=group["lr"])
        self._store(parameter, target, weight, "w")

    def _store(
        self,
        parameter: nn.Parameter,
        target: Tensor,
        value: Tensor,
        which: str,
    ) -> None:
        key = seeding.key(self.rounding_key, self._matrices[parameter], which)
        first = rounding.first_element(parameter)
        rounding.store(target.view(-1), value.view(-1), key, first)


def orthogonal_updates(
    matrices: Mapping[nn.Parameter, Tensor],
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield this rank's shard of each matrix's update. Collective.

    The update is the orthogonal matrix nearest to the given one, scaled to the usual size of an
    AdamW update. Each matrix has one owner among the ranks that share it. The others send their
    shards to the owner, which does the work and sends the shards of the result back. Ranks work on
    different matrices at the same time, and the result does not depend on their number.
    """
    parameters = sorted(matrices, key=lambda p: p.numel() * min(p.shape[-2:]), reverse=True)
    meshes = {matrix.device_mesh for matrix in matrices.values() if isinstance(matrix, DTensor)}
    if not meshes:
        for parameter in parameters:
            yield parameter, orthogonal_update(matrices[parameter])
        return
    (mesh,) = meshes
    group = mesh.get_group(mesh.ndim - 1)
    # up to one matrix for each rank at a time, the costliest first
    for start in range(0, len(parameters), group.size()):
        owned = parameters[start : start + group.size()]
        shards = [local(matrices[parameter]) for parameter in owned]
        yield from zip(owned, _updates_by_owners(shards, owned, group), strict=True)


def _updates_by_owners(
    shards: list[Tensor], parameters: list[nn.Parameter], group: dist.ProcessGroup
) -> list[Tensor]:
    """Return this rank's shards of the updates; rank i of the group owns matrix i.

    Shards are blocks of rows in rank order. An owner therefore receives the elements of its matrix
    in order, and sends the result back with the counts of the two directions exchanged. A rank
    without a matrix sends its shards, but receives nothing.
    """
    rank = group.rank()
    num_ranks = group.size()
    num_sent = [shard.numel() for shard in shards] + [0] * (num_ranks - len(shards))
    sent = torch.cat([shard.reshape(-1) for shard in shards])
    shape = parameters[rank].shape if rank < len(parameters) else torch.Size([0])
    num_received = [end - start for start, end in pairwise(rounding.shard_starts(shape, num_ranks))]
    whole = sent.new_empty(shape)
    dist.all_to_all_single(whole.view(-1), sent, num_received, num_sent, group=group)
    if whole.numel():
        whole = orthogonal_update(whole)
    back = torch.empty_like(sent)
    dist.all_to_all_single(back, whole.view(-1), num_sent, num_received, group=group)
    parts = back.split(num_sent[: len(shards)])
    return [part.view(shard.shape) for part, shard in zip(parts, shards, strict=True)]


def orthogonal_update(matrix_EAB: Tensor) -> Tensor:
    """Return the update for a whole matrix: U V^T of U S V^T, approximated by Newton-Schulz
    iterations, and scaled.

    With G = X X^T, an iteration replaces X by a X + (b G + c G^2) X, which changes only the
    singular values. Dividing by the Frobenius norm first brings all of them to at most 1.

    An orthogonal matrix has min(A, B) singular values of 1, so the mean square of its elements is
    min(A, B) / (A B) = 1 / max(A, B). The last factor makes its root mean square `UPDATE_RMS`.

    This runs in float32, because the iterations enlarge small singular values and their rounding
    errors up to 500 times. In bfloat16 the result would depend on the number of ranks.
    """
    a, b, c = COEFFICIENTS
    # transposed if necessary, so that G has the size of the shorter side
    is_tall = matrix_EAB.shape[-2] > matrix_EAB.shape[-1]
    x = (matrix_EAB.mT if is_tall else matrix_EAB).float()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    update_EAB = (x.mT if is_tall else x).contiguous()
    return update_EAB.mul_(UPDATE_RMS * max(matrix_EAB.shape[-2:]) ** 0.5)


def _ends(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights of the embeddings and the output head. They map tokens to hidden states
    and back, not one hidden space to another.
    """
    modules: list[Any] = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return {module.weight for module in (*modules, head) if module is not None}
