"""The number of ranks here, the place of this machine among several, its network interface, and the
environment of the ranks.

No torch: only a machine that may have a GPU asks torch, in another process.
"""

import json
import os
import re
import shutil
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
        torch.cuda.init()  # first: the count alone is the driver's, also of cards that torch cannot use
        number = torch.cuda.device_count()
    except Exception as error:
        reason = str(error).splitlines()[0]
print(json.dumps([number, reason]))
"""
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


@dataclass(frozen=True)
class Arguments:
    num_ranks: int | None
    overrides: list[str]


@dataclass(frozen=True)
class NodeLayout:
    """The place of this machine among several; a single machine needs no address."""

    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Split a command line into the number of ranks, if given, and overrides that include the
    recipe.

    Raises `ConfigError`.
    """
    num_ranks, overrides = None, list(argv)
    if overrides and re.fullmatch(r"[+-]?\d+", overrides[0]):
        num_ranks = int(overrides.pop(0))
        if num_ranks < 1:
            raise ConfigError(f"the number of ranks must be at least 1, got {num_ranks}{SEE_HELP}")
    elif overrides and "=" not in overrides[0] and not overrides[0].startswith(("-", "~")):
        raise ConfigError(
            f"'{overrides[0]}' is neither a number of ranks nor of the form key=value{SEE_HELP}"
        )
    return Arguments(num_ranks, with_recipe(overrides, os.environ))


def choose_num_ranks(asked: int | None, *, num_gpus: int) -> int:
    """Ranks to start here; `num_gpus` is 0 for a run on CPU. Raises `ConfigError` for more
    ranks than GPUs.
    """
    if asked is not None and 0 < num_gpus < asked:
        raise ConfigError(
            f"{asked} ranks asked for, but this machine has {num_gpus} GPUs. "
            f"Fix: start at most {num_gpus} ranks, or set trainer.device=cpu"
        )
    return asked or num_gpus or DEFAULT_NUM_CPU_RANKS


def gpus_for_run(device: str) -> int:
    """The GPUs that a run with `trainer.device` trains on; 0 for a run on CPUs.

    Without a driver torch is asked only for `cuda`, because importing it takes seconds. Raises
    `ConfigError` when torch sees no card although `device` is cuda or NVIDIA's driver is there.
    """
    has_driver = any(Path(driver).exists() for driver in GPU_DRIVERS)
    if device == "cpu" or (device == AUTO and not has_driver):
        return 0
    done = subprocess.run([sys.executable, "-c", ASK_TORCH], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ConfigError(
            f"{sys.executable} cannot import torch (its error stands above): repair this "
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
    """This machine's place, from `NNODES` and its companions or from SLURM. Raises `ConfigError`.

    Under SLURM the port follows from the job id; two multi-machine runs inside one job need
    `MASTER_PORT`.
    """
    if "NNODES" in env:
        names, port = ("NNODES", "NODE_RANK"), DEFAULT_MASTER_PORT
    else:
        names, port = ("SLURM_NNODES", "SLURM_NODEID"), 0
    num_nodes = _whole(env, names[0], minimum=1) if names[0] in env else 1
    if num_nodes == 1:
        return NodeLayout()
    node_rank = _whole(env, names[1])
    if "NNODES" in env:
        host = _needed(env, "MASTER_ADDR")
    elif env.get("SLURM_LOCALID", "0") != "0":
        raise ConfigError("SLURM started several tasks on this node: use srun --ntasks-per-node=1")
    else:
        host = env.get("MASTER_ADDR") or first_host(_needed(env, "SLURM_JOB_NODELIST"))
        port = SLURM_PORTS[_whole(env, "SLURM_JOB_ID") % len(SLURM_PORTS)]
    if node_rank >= num_nodes:
        raise ConfigError(
            f"{names[1]}={node_rank}, but {names[0]}={num_nodes}: machines count from 0"
        )
    if "MASTER_PORT" in env:
        port = _whole(env, "MASTER_PORT", minimum=1)
    return NodeLayout(num_nodes, node_rank, host, port)


def first_host(nodelist: str) -> str:
    """The first host of SLURM's list: `gpu[03-07,11]-a,cpu1` gives `gpu03-a`. Raises
    `ConfigError`.
    """
    if shutil.which("scontrol"):
        command = ["scontrol", "show", "hostnames", nodelist]
        shown = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if shown.returncode == 0 and shown.stdout.strip():
            return shown.stdout.split()[0]
    match = re.match(r"([^\[\],]+)(?:\[(\d+)[^\[\]]*\])?([^\[\],]*)(?:,|$)", nodelist)
    if match is None:
        raise ConfigError(
            f"cannot read SLURM_JOB_NODELIST={nodelist}: set MASTER_ADDR to the first machine"
        )
    return "".join(part or "" for part in match.groups())


def _needed(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise ConfigError(f"{name} is not set: a run on several machines needs it{SEE_HELP}")
    return env[name]


def _whole(env: Mapping[str, str], name: str, *, minimum: int = 0) -> int:
    text = _needed(env, name)
    if not text.isdecimal() or int(text) < minimum:
        raise ConfigError(f"{name} must be a whole number of at least {minimum}, got '{text}'")
    return int(text)


def rank_environment(
    env: Mapping[str, str], layout: NodeLayout, *, num_ranks: int, status: Status
) -> dict[str, str]:
    """Environment of the ranks; what the user has set stays."""
    added = {
        # torchrun would give each rank one thread
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_ranks)),
        # `-m` would look in the folder of the caller first, which may hold a package of this name
        "PYTHONSAFEPATH": "1",
        # the run says what a lost rank means; torch's warnings of it are stacks of C++
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if layout.num_nodes > 1 and "GLOO_SOCKET_IFNAME" not in env:
        added |= gloo_interface(layout.master_addr)
    return {**added, **env, VARIABLE: status.address}


ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses kept for documentation: the route to them is the default route."""
LOOPBACK = {"127.0.0.1", "::1"}


def gloo_interface(master_addr: str) -> dict[str, str]:
    """`GLOO_SOCKET_IFNAME` for the ranks, or nothing when no route tells.

    gloo would listen where the name of this machine leads, and on Debian and in containers that is
    127.0.1.1, which no other machine reaches. On the first machine its own address may lead there
    too; then the default route tells, or that there is only one interface to take.
    """
    interfaces = _outward_interfaces()
    for host in (master_addr, *ANYWHERE):
        for address in _own_addresses_to(host):
            if address in interfaces:
                return {"GLOO_SOCKET_IFNAME": interfaces[address]}
    names = set(interfaces.values())
    return {"GLOO_SOCKET_IFNAME": names.pop()} if len(names) == 1 else {}


def _own_addresses_to(host: str) -> Iterator[str]:
    """Yield the addresses of this machine from which the kernel would reach a host. Sends
    nothing.
    """
    try:
        resolved = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return
    for family, kind, protocol, _, address in resolved:
        with socket.socket(family, kind, protocol) as probe, suppress(OSError):
            probe.connect(address)
            yield probe.getsockname()[0]


def _outward_interfaces() -> dict[str, str]:
    """Interface by address, without the loopback."""
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
