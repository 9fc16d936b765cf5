"""Process group, device and mesh of one rank."""

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.config import AUTO, ConfigError
from trainer.runtime.environment import local_rank, rank_and_size
from trainer.runtime.heartbeat import Heartbeat

try:  # torch 2.15
    from torch.distributed import set_timeout  # type: ignore[attr-defined]
except ImportError:
    from torch.distributed.distributed_c10d import _set_pg_timeout as set_timeout

LATE_S = 30.0
"""Extra time that the process group waits. If ranks do not connect, the launcher therefore times
out first: it has their stacks and makes the run resumable.
"""
T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This rank's place among all ranks. A rank is a process with its device.

    A data rank trains its own part of each global batch. It is one rank, or `sequence_size`
    neighbouring ranks that split the positions of its samples. Parameters and checkpoints do not
    depend on data ranks: they are sharded over all ranks. Each token's loss is computed on one
    rank, and counts are summed over all.
    """

    device: torch.device
    mesh: DeviceMesh
    """The mesh of all ranks. Parameters are replicated along `ddp` and sharded along `fsdp`."""
    rank: int
    size: int
    num_shards: int
    """Number of shards of the parameters."""
    sequence_size: int = 1
    sequence_group: dist.ProcessGroup | None = None
    """The ranks of this data rank; None if it is one rank."""
    expert_mesh: DeviceMesh | None = None
    """All ranks as ("replica", "expert", "expert_shard"). Ranks along "expert" hold different
    experts; ranks along "expert_shard" hold parts of the same experts. None if every rank gathers
    all experts.
    """

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """{name of a mesh dimension: its size}."""
        return {name: self.mesh[name].size() for name in self.mesh.mesh_dim_names or ()}

    @property
    def num_replicas(self) -> int:
        """Number of ranks that hold the same parameter shard."""
        return self.size // self.num_shards

    @property
    def data_rank(self) -> int:
        return self.rank // self.sequence_size

    @property
    def num_data_ranks(self) -> int:
        return self.size // self.sequence_size

    @property
    def sequence_rank(self) -> int:
        """Index of the share of the positions that this rank holds."""
        return self.rank % self.sequence_size


def pick_device(name: str) -> torch.device:
    """Return this rank's device. `auto` means CUDA if there is one.

    Raises `ConfigError` if CUDA is requested but missing.
    """
    if name == "cpu" or (name == AUTO and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "trainer.device=cuda, but torch sees no CUDA device. Fix: trainer.device=cpu or auto"
        )
    return torch.device("cuda", local_rank())


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype that a key names. `auto` is bfloat16 if the hardware multiplies it natively,
    else float32: emulation is up to 100 times slower.
    """
    if name != AUTO:
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda":
        is_supported = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_supported = torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if is_supported else torch.float32


def start(
    device: torch.device,
    *,
    timeout_s: int,
    fsdp_size: int,
    heartbeat: Heartbeat,
    sequence_size: int = 1,
    expert_size: int = 1,
    facts: Mapping[str, str] = MappingProxyType({}),
) -> World:
    """Join the process group, build the mesh, and check that every rank responds on its device.

    `facts`: {name: value} that must be equal on all ranks (`train/start/agreement.py`).
    Collective; each process calls it once. Raises `ConfigError`.
    """
    rank, size = rank_and_size()
    # a single process waits for no other, and its store chooses a free port
    store = None if "RANK" in os.environ else dist.TCPStore("127.0.0.1", 0, is_master=True)
    backend = "gloo"
    card = None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
        card = str(torch.cuda.get_device_properties(device).uuid)
    timeout = timedelta(seconds=timeout_s + LATE_S)
    heartbeat.enter("meet", limit_s=timeout_s)
    dist.init_process_group(
        backend,
        timeout=timeout,
        rank=rank,
        world_size=size,
        store=store,
    )
    _require_all(device, size, card=card, facts=facts)
    world = make_world(
        device,
        fsdp_size=fsdp_size,
        sequence_size=sequence_size,
        expert_size=expert_size,
    )
    groups = [*world.mesh.get_all_groups(), world.sequence_group]
    if world.expert_mesh is not None:
        groups += world.expert_mesh.get_all_groups()
    # otherwise the groups of single dimensions would keep torch's default of half an hour
    for group in filter(None, groups):
        set_timeout(timeout, group)
    return world


def mesh_dimensions(size: int, *, fsdp_size: int) -> dict[str, int]:
    """Return {name of a mesh dimension: its size}, outermost first. Raises `ConfigError`."""
    if fsdp_size in (-1, size):
        return {"fsdp": size}
    require_divisor("model.fsdp_config.fsdp_size", fsdp_size, size)
    return {"ddp": size // fsdp_size, "fsdp": fsdp_size}


def require_divisor(
    key: str,
    value: int,
    size: int,
    ranks: str = "ranks of this run",
) -> None:
    """Raise `ConfigError` unless the value of a key divides a number of ranks."""
    if size % value:
        raise ConfigError(
            f"{key}={value} does not divide the {size} {ranks}. Fix: set it to a divisor of {size}"
        )


def require_sizes(
    num_ranks: int,
    *,
    fsdp_size: int,
    sequence_size: int,
    expert_size: int,
) -> None:
    """Raise `ConfigError` unless the ranks can be divided into groups of these sizes."""
    require_divisor("model.ulysses_sequence_parallel_size", sequence_size, num_ranks)
    num_shards = mesh_dimensions(num_ranks, fsdp_size=fsdp_size)["fsdp"]
    ranks = "ranks that shard the model"
    require_divisor("model.expert_parallel_size", expert_size, num_shards, ranks)


def make_world(
    device: torch.device,
    *,
    fsdp_size: int,
    sequence_size: int = 1,
    expert_size: int = 1,
) -> World:
    """Build the mesh over the connected ranks. Collective. Raises `ConfigError`."""
    num_ranks = dist.get_world_size()
    dimensions = mesh_dimensions(num_ranks, fsdp_size=fsdp_size)
    num_shards = dimensions["fsdp"]
    expert_mesh = None
    if expert_size > 1:
        # A rank's own shards of the experts are among those it gathers: with 4 shards and groups of
        # 2, ranks 0 and 1 gather the first half of the experts, and ranks 2 and 3 the second half.
        # Tokens are exchanged between ranks 0 and 2, and between ranks 1 and 3.
        sizes = num_ranks // num_shards, expert_size, num_shards // expert_size
        names = "replica", "expert", "expert_shard"
        expert_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    mesh = init_device_mesh(
        device.type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions)
    )
    return World(
        device=device,
        mesh=mesh,
        rank=dist.get_rank(),
        size=num_ranks,
        num_shards=num_shards,
        sequence_size=sequence_size,
        sequence_group=dist.new_subgroups(sequence_size)[0] if sequence_size > 1 else None,
        expert_mesh=expert_mesh,
    )


def _require_all(
    device: torch.device,
    size: int,
    *,
    card: str | None,
    facts: Mapping[str, str],
) -> None:
    """Check that no two ranks share a GPU, that all have the same facts, and that a first sum over
    the devices is correct.

    Collective. Raises the same `ConfigError` on every rank.
    """
    found = gather((socket.gethostname(), card, dict(facts)))
    (host, shared), count = Counter((host, card) for host, card, _ in found).most_common(1)[0]
    if shared is not None and count > 1:
        raise ConfigError(
            f"{count} ranks on {host} use the same GPU, {shared}. Fix: start at most one rank per "
            f"GPU"
        )
    _require_equal([(host, own) for host, _, own in found])
    total = torch.ones((), device=device)
    dist.all_reduce(total)
    if int(total) != size:
        raise RuntimeError(
            f"a sum of 1 over {size} ranks returned {float(total):g}: the connection between them "
            f"corrupts data"
        )


def _require_equal(found: Sequence[tuple[str, Mapping[str, str]]]) -> None:
    """Raise `ConfigError` unless the facts of all ranks, given as (host, facts), are equal."""
    first_host, first = found[0]
    for rank, (host, facts) in enumerate(found):
        if facts == first:
            continue
        lines = [
            f"  {name}: {first.get(name, 'none')} on {first_host} (rank 0), "
            f"{facts.get(name, 'none')} on {host} (rank {rank})"
            for name in dict.fromkeys([*first, *facts])
            if first.get(name) != facts.get(name)
        ]
        raise ConfigError(
            "the ranks of this run have different inputs and would train on a mixture of them:\n"
            + "\n".join(lines)
            + "\nFix: give every machine the same command and the same files (data.train_files, "
            "model.partial_pretrain), and do not change them while a run is starting"
        )


def gather(value: T) -> list[T]:
    """Return every rank's value, in rank order. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def await_main(world: World, event: str, *, timeout_s: float) -> None:
    """Announce an event on the main rank. The other ranks wait for it, at most `timeout_s`.

    This is not a collective: it works even if some ranks are gone.
    """
    store = dist.distributed_c10d._get_default_store()
    if world.is_main:
        store.set(event, "")
    else:
        with contextlib.suppress(dist.DistError):  # too late, or the main rank is gone
            store.wait([event], timedelta(seconds=timeout_s))


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
