"""The number of ranks on this machine, the machine's place among several, its network interface,
and the ranks' environment.

Nothing here imports torch. If the machine may have a GPU, a separate process asks torch.
"""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socket import AF_INET, AF_INET6

import psutil

from trainer.config import AUTO, ConfigError
from trainer.runtime.status import VARIABLE, Status
from trainer.train.start.compose import SEE_HELP, with_recipe

DEFAULT_NUM_CPU_RANKS = 2
DEFAULT_MASTER_PORT = 29500
SLURM_PORTS = range(20000, 30000)
ASK_TORCH = """
import json
import torch
number, reason = 0, f"torch {torch.__version__} is built without CUDA"
if torch.backends.cuda.is_built():
    try:
        torch.cuda.init()  # first: the driver alone also counts cards that torch cannot use
        number = torch.cuda.device_count()
    except Exception as error:
        reason = str(error).splitlines()[0]
print(json.dumps([number, reason]))
"""
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
LOOPBACK = {"127.0.0.1", "::1"}
ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses reserved for documentation: the route to them is the default route."""


@dataclass(frozen=True)
class NodeLayout:
    """The position of this machine in a run on several machines. A single machine needs no address."""

    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0


def parse_arguments(argv: Sequence[str]) -> tuple[int | None, list[str]]:
    """Split a command line. Return the number of ranks, if given, and the overrides, with the
    default recipe if they name none.

    Raises `ConfigError`.
    """
    num_ranks = None
    overrides = list(argv)
    if overrides and re.fullmatch(r"[+-]?\d+", overrides[0]):
        num_ranks = int(overrides.pop(0))
        if num_ranks < 1:
            raise ConfigError(f"the number of ranks must be at least 1, got {num_ranks}{SEE_HELP}")
    elif overrides and "=" not in overrides[0] and not overrides[0].startswith(("-", "~")):
        raise ConfigError(
            f"'{overrides[0]}' is neither a number of ranks nor of the form key=value{SEE_HELP}"
        )
    return num_ranks, with_recipe(overrides)


def choose_num_ranks(asked: int | None, *, num_gpus: int) -> int:
    """Return the number of ranks to start here; `num_gpus` is 0 for a run on CPUs.

    Raises `ConfigError` for more ranks than GPUs.
    """
    if asked is not None and 0 < num_gpus < asked:
        raise ConfigError(
            f"cannot start {asked} ranks: this machine has {num_gpus} GPUs. "
            f"Fix: start at most {num_gpus} ranks, or set trainer.device=cpu"
        )
    return asked or num_gpus or DEFAULT_NUM_CPU_RANKS


def gpus_for_run(device: str) -> int:
    """Return the number of GPUs that a run with `trainer.device` uses; 0 for a run on CPUs.

    Without a driver, torch is imported only for `cuda`, because the import takes seconds. Raises
    `ConfigError` if torch sees no GPU although `device` is cuda or NVIDIA's driver is installed.
    """
    has_driver = any(Path(driver).exists() for driver in GPU_DRIVERS)
    if device == "cpu" or (device == AUTO and not has_driver):
        return 0
    done = subprocess.run([sys.executable, "-c", ASK_TORCH], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ConfigError(
            f"{sys.executable} cannot import torch (its error is above). Fix: repair this "
            f"environment"
        )
    number, reason = json.loads(done.stdout.splitlines()[-1])
    if number == 0 and (device == "cuda" or Path(GPU_DRIVERS[0]).exists()):
        raise ConfigError(
            f"torch sees no GPU on this machine: {reason}. Fix: update the driver, install a torch "
            f"built for it (pytorch.org), or train on CPUs with trainer.device=cpu"
        )
    return int(number)


def node_layout(env: Mapping[str, str]) -> NodeLayout:
    """Return this machine's place, from `NNODES` and its companions or from SLURM's variables.

    Under SLURM the port follows from the job id: two multi-machine runs inside one job need
    `MASTER_PORT`. Raises `ConfigError`.
    """
    is_slurm = "NNODES" not in env
    size, rank = ("SLURM_NNODES", "SLURM_NODEID") if is_slurm else ("NNODES", "NODE_RANK")
    num_nodes = _whole(env, size, minimum=1) if size in env else 1
    if num_nodes == 1:
        return NodeLayout()
    node_rank = _whole(env, rank)
    if node_rank >= num_nodes:
        raise ConfigError(
            f"{rank}={node_rank} must be less than {size}={num_nodes}: machines count from 0"
        )
    if is_slurm and env.get("SLURM_LOCALID", "0") != "0":
        raise ConfigError(
            "SLURM started several tasks on this node. Fix: use srun --ntasks-per-node=1"
        )
    port = DEFAULT_MASTER_PORT
    if "MASTER_PORT" in env:
        port = _whole(env, "MASTER_PORT", minimum=1)
    elif is_slurm:
        port = SLURM_PORTS[_whole(env, "SLURM_JOB_ID") % len(SLURM_PORTS)]
    if is_slurm and not env.get("MASTER_ADDR"):
        return NodeLayout(num_nodes, node_rank, first_host(_text(env, "SLURM_JOB_NODELIST")), port)
    return NodeLayout(num_nodes, node_rank, _text(env, "MASTER_ADDR"), port)


def first_host(nodelist: str) -> str:
    """Return the first host of SLURM's list: `gpu[03-07,11]-a,cpu1` gives `gpu03-a`."""
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", nodelist).partition(",")[0]


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise ConfigError(f"{name} is not set: a run on several machines needs it{SEE_HELP}")
    return env[name]


def _whole(env: Mapping[str, str], name: str, *, minimum: int = 0) -> int:
    text = _text(env, name)
    if not text.isdecimal() or int(text) < minimum:
        raise ConfigError(f"{name} must be a whole number of at least {minimum}, got '{text}'")
    return int(text)


def rank_environment(
    env: Mapping[str, str],
    layout: NodeLayout,
    *,
    num_ranks: int,
    status: Status,
) -> dict[str, str]:
    """Return the environment of the ranks. Variables that the user has set stay unchanged."""
    added = {
        # torchrun would give each rank one thread
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_ranks)),
        # else `-m` looks in the caller's directory first, which may hold a package `trainer`
        "PYTHONSAFEPATH": "1",
        # the run itself explains a lost rank; torch's warnings about it are C++ stacks
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if layout.num_nodes > 1 and "GLOO_SOCKET_IFNAME" not in env:
        added |= gloo_interface(layout.master_addr)
    return {**added, **env, VARIABLE: status.address}


def gloo_interface(master_addr: str) -> dict[str, str]:
    """Return `GLOO_SOCKET_IFNAME` for the ranks, or {} if no route determines it.

    By default gloo listens on the address of this machine's name. On Debian and in containers this
    is 127.0.1.1, which other machines cannot reach. On the first machine, `master_addr` may resolve
    to that address too. Then the interface of the default route is used, or the only interface.
    """
    interfaces = _outward_interfaces()
    for host in (master_addr, *ANYWHERE):
        for address in _own_addresses_to(host):
            if address in interfaces:
                return {"GLOO_SOCKET_IFNAME": interfaces[address]}
    names = set(interfaces.values())
    return {"GLOO_SOCKET_IFNAME": names.pop()} if len(names) == 1 else {}


def _own_addresses_to(host: str) -> Iterator[str]:
    """Yield the addresses of this machine from which the kernel would reach a host. Nothing is
    sent.
    """
    for family in (AF_INET, AF_INET6):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            yield probe.getsockname()[0]


def _outward_interfaces() -> dict[str, str]:
    """Return {address: interface}, without the loopback."""
    found: dict[str, str] = {}
    for name, entries in psutil.net_if_addrs().items():
        addresses = {
            entry.address.partition("%")[0]
            for entry in entries
            if entry.family in (AF_INET, AF_INET6)
        }
        if not addresses & LOOPBACK:
            found |= dict.fromkeys(addresses, name)
    return found
