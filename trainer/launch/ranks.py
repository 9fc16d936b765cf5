"""How many ranks start here, which of several machines this is, over which network interface it
reaches the others, and what the ranks find in their environment.

No torch: it is asked in a process of its own, and only where there may be a GPU (floor 5).
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import AF_INET, AF_INET6

import psutil

from trainer.config import AUTO, ConfigError
from trainer.run.compose import USAGE, with_recipe
from trainer.runtime.status import VARIABLE, Status

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
    """Which of several machines this is; alone it needs no address."""

    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Split a command line into the number of ranks, if given, and overrides that include the
    recipe.

    Raises `ConfigError`.
    """
    first = argv[0] if argv else "="
    if re.fullmatch(r"[+-]?\d+", first):
        if int(first) < 1:
            raise ConfigError(f"the number of ranks must be at least 1, got {first}\n{USAGE}")
        return Arguments(int(first), with_recipe(list(argv[1:]), os.environ))
    if "=" not in first and not first.startswith(("-", "~")):
        raise ConfigError(
            f"'{first}' is neither a number of ranks nor of the form key=value\n{USAGE}"
        )
    return Arguments(None, with_recipe(list(argv), os.environ))


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
        num_nodes = _whole(env, "NNODES", minimum=1)
        if num_nodes == 1:
            return NodeLayout()
        port = _port(env, DEFAULT_MASTER_PORT)
        layout = NodeLayout(num_nodes, _whole(env, "NODE_RANK"), _needed(env, "MASTER_ADDR"), port)
    elif env.get("SLURM_NNODES", "1") != "1":
        if env.get("SLURM_LOCALID", "0") != "0":
            raise ConfigError(
                "SLURM started several tasks on this node: use srun --ntasks-per-node=1"
            )
        port = _port(env, SLURM_PORTS[_whole(env, "SLURM_JOB_ID") % len(SLURM_PORTS)])
        host = env.get("MASTER_ADDR") or first_host(_needed(env, "SLURM_JOB_NODELIST"))
        layout = NodeLayout(_whole(env, "SLURM_NNODES"), _whole(env, "SLURM_NODEID"), host, port)
    else:
        return NodeLayout()
    if layout.node_rank >= layout.num_nodes:
        raise ConfigError(
            f"NODE_RANK={layout.node_rank}, but NNODES={layout.num_nodes}: machines count from 0"
        )
    return layout


def first_host(nodelist: str) -> str:
    """The first host of SLURM's list: `gpu[03-07,11]-a,cpu1` gives `gpu03-a`. Raises
    `ConfigError`.
    """
    if shutil.which("scontrol"):
        shown = subprocess.run(
            ["scontrol", "show", "hostnames", nodelist], stdout=subprocess.PIPE, text=True
        )
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
        raise ConfigError(f"{name} is not set: a run on several machines needs it\n{USAGE}")
    return env[name]


def _whole(env: Mapping[str, str], name: str, *, minimum: int = 0) -> int:
    text = _needed(env, name)
    if not text.isdecimal() or int(text) < minimum:
        raise ConfigError(f"{name} must be a whole number of at least {minimum}, got '{text}'")
    return int(text)


def _port(env: Mapping[str, str], default: int) -> int:
    return _whole(env, "MASTER_PORT", minimum=1) if "MASTER_PORT" in env else default


def thread_count(num_ranks: int, *, num_cores: int) -> int:
    """CPU threads of one rank; torchrun would give it one."""
    return max(1, num_cores // num_ranks)


def rank_environment(
    env: Mapping[str, str], layout: NodeLayout, *, num_ranks: int, status: Status
) -> dict[str, str]:
    """Environment of the ranks; what the user has set stays."""
    threads = thread_count(num_ranks, num_cores=len(os.sched_getaffinity(0)))
    # `-m` would look in the folder of the caller first, which may hold a package of this name
    added = {"OMP_NUM_THREADS": str(threads), "PYTHONSAFEPATH": "1"}
    # what a lost rank means is said by the run; torch's warnings of it are stacks of C++
    added |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}
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
    for host in (master_addr, *ANYWHERE):
        if name := _interface_to(host):
            return {"GLOO_SOCKET_IFNAME": name}
    names = list(_outward_interfaces())
    return {"GLOO_SOCKET_IFNAME": names[0]} if len(names) == 1 else {}


def _interface_to(host: str) -> str | None:
    """The interface of the route to a host, unless that is this machine's loopback. Sends
    nothing.
    """
    try:
        resolved = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in resolved:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            own = probe.getsockname()[0]
        if name := next(
            (name for name, addresses in _outward_interfaces().items() if own in addresses), None
        ):
            return name
    return None


def _outward_interfaces() -> dict[str, set[str]]:
    """Addresses by interface, without the loopback and without those that nothing can reach."""
    found = {
        name: {
            entry.address.partition("%")[0]
            for entry in entries
            if entry.family in (AF_INET, AF_INET6)
        }
        for name, entries in psutil.net_if_addrs().items()
    }
    return {
        name: addresses
        for name, addresses in found.items()
        if addresses and not addresses & LOOPBACK
    }
