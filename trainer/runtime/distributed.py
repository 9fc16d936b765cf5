"""Process group, device and mesh of one rank (floor 1)."""

import contextlib
import functools
import os
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from trainer.config import AUTO, ConfigError
from trainer.errors import CannotWriteError
from trainer.runtime.environment import local_rank, rank_and_size
from trainer.runtime.heartbeat import Heartbeat

LATE_S = 30.0
"""The launcher gives up first when ranks do not meet in time: it knows their stacks, and that the run is resumable."""
T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Who this rank is. `mesh` is `("fsdp",)`, or `("ddp", "fsdp")` when a copy of the parameters spans fewer ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @functools.cached_property
    def num_replicas(self) -> int:
        """How many ranks hold the same parameter shard."""
        return self.mesh["ddp"].size() if "ddp" in (self.mesh.mesh_dim_names or ()) else 1

    @property
    def mesh_shape(self) -> dict[str, int]:
        return {name: self.mesh[name].size() for name in self.mesh.mesh_dim_names or ()}


def pick_device(name: str) -> torch.device:
    """`auto` takes CUDA when there is one. Raises `ConfigError` when CUDA is asked for and absent."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda, but torch sees no CUDA device; use trainer.device=cpu or auto")
    return torch.device("cuda", local_rank())


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it, else float32: emulation is up to 100 times slower."""
    if name != AUTO:
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def start(device: torch.device, *, timeout_s: int, fsdp_size: int, heartbeat: Heartbeat) -> World:
    """Join the process group, build the mesh, and see that every rank answers on its device.

    Collective: every rank calls it once. Raises `ConfigError`.
    """
    rank, size = rank_and_size()
    fsdp_size = size if fsdp_size == -1 else fsdp_size
    if size % fsdp_size:
        raise ConfigError(f"model.fsdp_config.fsdp_size={fsdp_size} does not divide the {size} ranks of this run")
    if "RANK" not in os.environ:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), RANK="0", WORLD_SIZE="1")
    backend, card = "gloo", None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
        card = str(torch.cuda.get_device_properties(device).uuid)
    timeout = timedelta(seconds=timeout_s + LATE_S)
    heartbeat.enter("meet", limit_s=timeout_s)
    dist.init_process_group(backend, timeout=timeout, rank=rank, world_size=size)
    _require_all(device, size, card=card)
    if fsdp_size == size:
        mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("fsdp",))
    else:
        mesh = init_device_mesh(device.type, (size // fsdp_size, fsdp_size), mesh_dim_names=("ddp", "fsdp"))
        for group in mesh.get_all_groups():  # else they have torch's own half hour
            _set_pg_timeout(timeout, group)
    return World(rank=rank, size=size, device=device, mesh=mesh)


def _require_all(device: torch.device, size: int, *, card: str | None) -> None:
    """A first sum over all ranks on the device; no two of them may share a card. Raises `ConfigError`. Collective."""
    if card is not None:
        cards: list[Any] = [None] * size
        dist.all_gather_object(cards, (socket.gethostname(), card))
        (host, shared), count = Counter(cards).most_common(1)[0]
        if count > 1:
            raise ConfigError(f"{count} ranks use the same card of {host}, {shared}: start at most one rank a card")
    total = torch.ones((), device=device)
    dist.all_reduce(total)
    if int(total) != size:
        raise RuntimeError(f"a sum of 1 over {size} ranks gave {float(total):g}: their connection is not sound")


def on_main(action: Callable[[], T], world: World, *, describe: Callable[[OSError], CannotWriteError]) -> T:
    """The main rank's result on every rank, or its error; `describe` words a failure of the disk. Collective."""
    outcome: list[Any] = [None, None]
    if world.is_main:
        try:
            outcome[0] = action()
        except (ConfigError, CannotWriteError) as error:
            outcome[1] = error
        except OSError as error:
            outcome[1] = describe(error)
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def await_main(world: World, event: str, *, timeout_s: float) -> None:
    """The main rank says that it has come so far; the others wait for that, no longer than `timeout_s`.

    No collective: it works between ranks of which some may be gone.
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
