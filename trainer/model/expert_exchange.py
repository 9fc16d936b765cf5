"""Expert parallelism: each rank holds whole experts, and tokens are sent to the experts chosen for
them.

Together, the ranks of a group hold all experts. Expert parameters stay `Shard(0)` over all shards
of the mesh, as with FSDP, so checkpoints, optimizers and exports do not depend on the group
size. With F shards and groups of G ranks, a rank computes E / G experts, which it gathers from F /
G neighbours. If G equals F, nothing is gathered.

Tokens go to their experts' ranks and results return, once in the forward pass and once in the
backward pass, as in GShard (Lepikhin et al., 2020). Unlike GShard, no token is dropped: ranks first
tell each other how many tokens they send.

Shape suffixes: S (token, expert) pairs on the token's rank, R pairs on the expert's rank, E
experts, H hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from trainer.config import ConfigError


class ExpertExchange:
    """Send tokens to the ranks of their experts, and results back."""

    def __init__(self, mesh: DeviceMesh, dtype: torch.dtype) -> None:
        """`mesh` has the dimensions ("replica", "expert", "expert_shard"). `dtype` is the dtype of
        the experts' products.
        """
        self.mesh = mesh
        self.dtype = dtype
        self.group = mesh.get_group("expert")
        self.size = mesh["expert"].size()

    def send(
        self, rows_SH: Tensor, tokens_E: Tensor
    ) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """Send rows to the ranks of their experts. Collective.

        `rows_SH`: sorted by expert. `tokens_E`: number of rows for each expert. Return the received
        rows, the index of each row's expert among this rank's experts, and the number of rows sent to
        and received from each rank.
        """
        # Each rank holds consecutive experts, so `tokens_E` has one chunk for each rank. `counts`
        # holds the rows for this rank's experts, one chunk for each rank that sends them.
        counts = torch.empty_like(tokens_E)
        dist.all_to_all_single(counts, tokens_E, group=self.group)
        num_sent, num_received = torch.stack(
            [each.view(self.size, -1).sum(1) for each in (tokens_E, counts)]
        ).tolist()  # waits for the device: the exchange needs the sizes on the host
        rows_RH = self.exchange(rows_SH, num_received, num_sent)
        num_own = len(tokens_E) // self.size
        own_ids = torch.arange(num_own, device=counts.device).repeat(self.size)
        ids_R = own_ids.repeat_interleave(counts, output_size=sum(num_received))
        return rows_RH, ids_R, num_sent, num_received

    def exchange(
        self,
        rows: Tensor,
        num_received: list[int],
        num_sent: list[int],
    ) -> Tensor:
        """Send rows to the ranks of the group; gradients return the same way. Collective."""
        return all_to_all_single_autograd(rows.contiguous(), num_received, num_sent, self.group)

    def gather(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's experts, in the dtype of their products. Collective."""
        return _Gather.apply(parameter, self)

    def gather_all(self, parameter: nn.Parameter) -> Tensor:
        """Return all experts on every rank. Collective."""
        # each rank's gradient is a part of the sum along "expert"; `gather` reduces the other sums
        own = DTensor.from_local(
            self.gather(parameter), self.mesh["expert"], [Shard(0)], run_check=False
        )
        return own.full_tensor(grad_placements=[Partial()])


class _Gather(torch.autograd.Function):
    """Gather the neighbours' shards; sum the gradient in float32, as FSDP does.

    Ranks along "expert" hold different experts, and the exchange has already brought them all
    tokens of their group. So the gradient is summed only along "expert_shard" and "replica".
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, exchange: ExpertExchange) -> Tensor:
        ctx.layout = (parameter.device_mesh, parameter.placements)
        ctx.mesh = exchange.mesh
        own = parameter.to_local().to(exchange.dtype)
        neighbours = exchange.mesh["expert_shard"]
        if neighbours.size() == 1:
            return own.view_as(own)
        gathered = own.new_empty(len(own) * neighbours.size(), *own.shape[1:])
        dist.all_gather_into_tensor(gathered, own.contiguous(), group=neighbours.get_group())
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        neighbours = ctx.mesh["expert_shard"]
        replicas = ctx.mesh["replica"]
        own = gradient.float()
        if neighbours.size() > 1:
            whole = own.contiguous()
            own = own.new_empty(len(own) // neighbours.size(), *own.shape[1:])
            dist.reduce_scatter_tensor(own, whole, group=neighbours.get_group())
        if replicas.size() > 1:
            dist.all_reduce(own, group=replicas.get_group())
        return DTensor.from_local(own, *ctx.layout, run_check=False), None


def require_even(modules: Sequence[Any], num_shards: int, *, expert_size: int) -> None:
    """Raise `ConfigError` unless the ranks that shard the model can hold equal numbers of experts."""
    for module in modules:
        if module.num_experts % num_shards:
            raise ConfigError(
                f"model.expert_parallel_size={expert_size}: {module.num_experts} experts cannot be "
                f"divided evenly among the {num_shards} ranks that shard the model.\nFix: set "
                f"model.fsdp_config.fsdp_size to a divisor of {module.num_experts}, or "
                f"model.expert_parallel_size=1"
            )


def distribute(
    modules: Sequence[Any],
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh,
    dtype: torch.dtype,
) -> set[nn.Parameter]:
    """Let these expert modules exchange tokens. Return their parameters, which FSDP must ignore.

    `mesh`: the device mesh that shards the other parameters. Raises `ConfigError` if the shards
    cannot hold equal numbers of experts.
    """
    exchange = ExpertExchange(expert_mesh, dtype)
    found = set[nn.Parameter]()
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    require_even(modules, mesh["fsdp"].size(), expert_size=exchange.size)
    for module in modules:
        module.exchange = exchange
        for name, parameter in [*module.named_parameters(recurse=False)]:
            sharded = distribute_tensor(parameter.data, mesh, placements, src_data_rank=None)
            held = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
            module.register_parameter(name, held)
            found.add(held)
    return found
