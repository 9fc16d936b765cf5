"""What is looked at on the machine; all but the cards before every run too (floor 5, no torch but for cards)."""

import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from trainer.checkpoint import fsio
from trainer.config import Config, ConfigError
from trainer.launch.ranks import NodeLayout, gloo_interface
from trainer.launch.requirements import unmet_requirements
from trainer.runtime.text import readable


@dataclass(frozen=True)
class Checked:
    """fail: the run would not do what it is asked for. `fix`: empty where `what`, an error's own words, has it."""

    level: Literal["ok", "warn", "fail"]
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Launch:
    """What would be started on this machine; `problem`: why that many ranks cannot be. `vllm_python`: the interpreter
    whose vLLM is to serve it.
    """

    config: Config
    num_ranks: int
    num_gpus: int = 0
    layout: NodeLayout = field(default_factory=NodeLayout)
    problem: str | None = None
    vllm_python: str = sys.executable


Check = Callable[[Launch], Iterator[Checked]]
"""Says what is wrong, and may say what is right; without a word all is well. Raises as a run would."""


CORES_PER_GPU_RANK = 4
MIN_OPEN_FILES = 1024
"""What Linux gives a process unless told otherwise."""
SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_BYTES = 1 << 30
"""What NCCL's documentation gives a container; Docker's own 64 MiB are too few for its buffers."""
RDMA_DEVICES = Path("/sys/class/infiniband")
DAY_S = 86400.0
MIN_FREE_SHARE = 0.9
"""Of a card's memory; its driver keeps some."""


def requirements(launch: Launch) -> Iterator[Checked]:
    for text in unmet_requirements():
        yield Checked("fail", f"{text} is not installed here", f"pip install '{text}'")


def cards(launch: Launch) -> Iterator[Checked]:
    if launch.problem is not None:
        yield Checked("fail", launch.problem)
    elif launch.num_gpus:
        yield from _cards(launch.num_ranks)
    elif launch.config.trainer.device == "cuda":
        yield Checked("warn", "trainer.device=cuda, but there is no card here", "ask again on the machine that trains")
    else:
        yield Checked("ok", f"{launch.num_ranks} ranks would train on this machine's CPUs")


def _cards(num_ranks: int) -> Iterator[Checked]:
    import torch

    for number in range(num_ranks):
        free_bytes, total_bytes = torch.cuda.mem_get_info(number)
        if free_bytes < MIN_FREE_SHARE * total_bytes:
            what = f"card {number} has {readable(free_bytes)} of {readable(total_bytes)} free: another process uses it"
            yield Checked("warn", what, "end it (nvidia-smi lists it), or choose cards with CUDA_VISIBLE_DEVICES")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    names = ", ".join(sorted({torch.cuda.get_device_name(number) for number in range(num_ranks)}))
    yield Checked("ok", f"{names}; torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}")


def cores(launch: Launch) -> Iterator[Checked]:
    """On a GPU machine a rank with its loader and saves needs some; SLURM gives one a task unless asked."""
    num_cores, wanted = len(os.sched_getaffinity(0)), CORES_PER_GPU_RANK * launch.num_ranks
    if launch.num_gpus and num_cores < wanted:
        what = f"{num_cores} CPU cores for {launch.num_ranks} GPU ranks: training may wait for the CPU"
        yield Checked("warn", what, f"give them {wanted} (SLURM: --cpus-per-task={wanted})")


def shared_memory(launch: Launch) -> Iterator[Checked]:
    free_bytes = fsio.free_bytes(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else 0
    if launch.num_gpus and launch.num_ranks > 1 and free_bytes < MIN_SHARED_BYTES:
        what = f"{SHARED_MEMORY} has {readable(free_bytes)} free, too little for NCCL between {launch.num_ranks} cards"
        yield Checked("warn", what, "start the container with --shm-size=1g or more, or --ipc=host")


def limits(launch: Launch) -> Iterator[Checked]:
    num_files, locked, core = (
        resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_CORE)
    )
    if resource.RLIM_INFINITY != num_files < MIN_OPEN_FILES:
        what = f"only {num_files} files may be open: many data files or ranks take more"
        yield Checked("warn", what, "ulimit -n 65536 (docker run --ulimit nofile=65536)")
    if launch.num_gpus and locked != resource.RLIM_INFINITY and any(RDMA_DEVICES.glob("*")):
        what = f"only {readable(locked)} of memory may be locked, and the buffers of RDMA are"
        yield Checked("warn", what, "ulimit -l unlimited (docker run --ulimit memlock=-1)")
    if launch.num_gpus and core == resource.RLIM_INFINITY:
        what = "a rank that crashes may write all its host memory to a core file"
        yield Checked("warn", what, "ulimit -c 0 (docker run --ulimit core=0)")


def clock(launch: Launch) -> Iterator[Checked]:
    now, installed = time.time(), Path(__file__).stat().st_mtime
    if now < installed - DAY_S:
        what = f"the clock says {time.strftime('%Y-%m-%d', time.gmtime(now))}, before this program was installed"
        yield Checked("warn", what, "set it: neither the Hub nor a tracker believes it, and logs are misdated")


def network(launch: Launch) -> Iterator[Checked]:
    for key in ("GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if launch.num_gpus else [])):
        wanted = os.environ.get(key, "")
        interfaces = list(psutil.net_if_addrs()) if wanted and wanted[0] != "^" else []  # ^: all but these
        if interfaces and not any(_is_meant(name, word, key) for name in interfaces for word in wanted.split(",")):
            what = f"{key}={wanted} names no network interface here; there are {', '.join(interfaces)}"
            yield Checked("fail", what, f"unset {key}, or name one of them")
    if launch.layout.num_nodes == 1:
        return
    master = launch.layout.master_addr
    try:
        socket.getaddrinfo(master, launch.layout.master_port)
    except OSError as error:
        fix = "give the first machine's name or address, unless it is still starting"
        yield Checked("warn", f"MASTER_ADDR={master} is not known here: {error.strerror or error}", fix)
        return
    if "GLOO_SOCKET_IFNAME" not in os.environ and not gloo_interface(master):
        fix = "if the ranks cannot connect, set GLOO_SOCKET_IFNAME to the one that the other machines reach"
        yield Checked("warn", f"no network interface leads to MASTER_ADDR={master}", fix)


def _is_meant(name: str, word: str, key: str) -> bool:
    """NCCL takes the beginning of a name, and `=name` for a whole one."""
    return name == word.removeprefix("=") or (key.startswith("NCCL") and name.startswith(word))


QUICK: dict[str, Check] = {
    "cores": cores,
    "/dev/shm": shared_memory,
    "limits": limits,
    "clock": clock,
    "network": network,
}


def require_machine(launch: Launch) -> None:
    """Says on stderr what may go wrong; raises `ConfigError` for what will."""
    for check in QUICK.values():
        for found in check(launch):
            if found.level == "fail":
                raise ConfigError(f"{found.what}: {found.fix}")
            if found.level == "warn":
                print(f"WARNING: {found.what}: {found.fix}", file=sys.stderr)
