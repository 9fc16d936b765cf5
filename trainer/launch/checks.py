"""Checks a configuration and a machine. Every start, `doctor` and `plan` use these checks.

A check is a function that takes a `Launch` and returns findings, none if nothing is wrong. It
raises the errors that the training command would raise. Only `architecture` imports torch.
"""

import os
import resource
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from trainer.checkpoint import fsio
from trainer.config import AUTO, Config, ConfigError
from trainer.launch.ranks import (
    DEFAULT_NUM_CPU_RANKS,
    NodeLayout,
    choose_num_ranks,
    gloo_interface,
    gpus_for_run,
    node_layout,
)
from trainer.runtime.text import readable
from trainer.train.start import preflight

if TYPE_CHECKING:
    from trainer.model.pretrained import ModelSource

CORES_PER_GPU_RANK = 4
SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_BYTES = 1 << 30
"""The size that NCCL's documentation recommends for containers. Docker's default of 64 MiB is too
small.
"""
RDMA_DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Checked:
    """One finding of a check. fail: the run would not do what the user requested. skip: this
    machine cannot check it. `fix` is empty if `what` contains the fix.
    """

    level: Literal["ok", "warn", "fail", "skip"]
    what: str
    fix: str = ""

    def line(self, name: str) -> str:
        fix = f"\n      fix: {self.fix}" if self.fix else ""
        return f"{self.level:4}  {name}: {self.what}{fix}"


@dataclass(frozen=True)
class Launch:
    """A start on this machine. `problem`: the reason why this number of ranks is impossible."""

    config: Config
    num_ranks: int
    num_gpus: int = 0
    layout: NodeLayout = field(default_factory=NodeLayout)
    problem: str | None = None


Check = Callable[[Launch], Iterator[Checked]]


def launch_of(config: Config, asked: int | None) -> Launch:
    """Return the `Launch` of `asked` ranks on this machine."""
    try:
        num_gpus = 0 if config.trainer.device == "cpu" else gpus_for_run(AUTO)
        num_ranks = choose_num_ranks(asked, num_gpus=num_gpus)
        return Launch(config, num_ranks, num_gpus, node_layout(os.environ))
    except ConfigError as error:
        return Launch(config, asked or DEFAULT_NUM_CPU_RANKS, problem=str(error))


def run_checks(checks: Mapping[str, Check], launch: Launch) -> None:
    """Run checks before training: print warnings to stderr, and raise the first failure.

    Raises `ConfigError`, `DataError`, `CannotWriteError`.
    """
    for check in checks.values():
        for found in check(launch):
            if found.level == "fail":
                raise ConfigError(f"{found.what}. Fix: {found.fix}")
            if found.level == "warn":
                print(f"WARNING: {found.what}. Fix: {found.fix}", file=sys.stderr)


def _of_config(require: Callable[[Config], object]) -> Check:
    """Make a check from a function that raises an error for a wrong configuration."""

    def check(launch: Launch) -> Iterator[Checked]:
        require(launch.config)
        return iter(())

    return check


def cores(launch: Launch) -> Iterator[Checked]:
    """Warn if the GPU ranks have too few CPU cores for loader and saves. By default, SLURM gives a
    task one core.
    """
    num_cores = len(os.sched_getaffinity(0))
    wanted = CORES_PER_GPU_RANK * launch.num_ranks
    if launch.num_gpus and num_cores < wanted:
        what = f"{num_cores} CPU cores for {launch.num_ranks} GPU ranks: training may wait for them"
        yield Checked("warn", what, f"use {wanted} cores (SLURM: --cpus-per-task={wanted})")


def shared_memory(launch: Launch) -> Iterator[Checked]:
    free_bytes = fsio.free_bytes(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else 0
    if launch.num_gpus and launch.num_ranks > 1 and free_bytes < MIN_SHARED_BYTES:
        what = (
            f"{SHARED_MEMORY} has {readable(free_bytes)} free, too little for NCCL between "
            f"{launch.num_ranks} GPUs"
        )
        yield Checked("warn", what, "start the container with --shm-size=1g or more, or --ipc=host")


def limits(launch: Launch) -> Iterator[Checked]:
    locked_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    has_rdma = launch.num_gpus > 0 and any(RDMA_DEVICES.glob("*"))
    if has_rdma and locked_bytes != resource.RLIM_INFINITY:
        what = f"this process can lock only {readable(locked_bytes)} of memory, but RDMA locks its buffers"
        yield Checked("warn", what, "ulimit -l unlimited (docker run --ulimit memlock=-1)")


def network(launch: Launch) -> Iterator[Checked]:
    """Check the network interfaces named in the environment and, with several machines, the route
    to the first one.
    """
    interfaces = list(psutil.net_if_addrs())
    for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = os.environ.get(key, "")
        is_unused = key.startswith("NCCL") and not launch.num_gpus
        if not wanted or wanted.startswith("^") or is_unused:  # ^: all interfaces except these
            continue
        # NCCL takes prefixes, and `=name` for a whole name
        prefixes = tuple(word.removeprefix("=") for word in wanted.split(","))
        if not any(name.startswith(prefixes) for name in interfaces):
            what = f"{key}={wanted} is not a network interface of this machine ({', '.join(interfaces)})"
            yield Checked("fail", what, f"unset {key}, or set it to one of them")
    if launch.layout.num_nodes == 1:
        return
    master = launch.layout.master_addr
    try:
        socket.getaddrinfo(master, launch.layout.master_port)
    except OSError as error:
        what = f"this machine cannot resolve MASTER_ADDR={master}: {error.strerror or error}"
        fix = "set MASTER_ADDR to the name or address of the first machine; if that machine is still starting, wait"
        yield Checked("warn", what, fix)
        return
    if "GLOO_SOCKET_IFNAME" not in os.environ and not gloo_interface(master):
        what = f"no network interface has a route to MASTER_ADDR={master}"
        fix = "set GLOO_SOCKET_IFNAME to the interface that the other machines can reach"
        yield Checked("warn", what, fix)


def architecture(launch: Launch, source: "ModelSource | None" = None) -> Iterator[Checked]:
    """Read config.json, and check whether the model can be trained, whether documents are packed,
    and whether engines will refuse it.

    `source`: the place of config.json if the model has no tokenizer.
    """
    from trainer.model import packed_lm
    from trainer.train.start.inputs import require_trainable, source_without_weights

    source = source or source_without_weights(launch.config)
    reason = require_trainable(launch.config, source).reason
    found = source.config
    name = ", ".join(getattr(found, "architectures", None) or [found.model_type])
    how = "are packed" if reason is None else f"run one by one (slower): {reason}"
    yield Checked("ok", f"{name}: documents {how}")
    longest = getattr(found, "max_position_embeddings", None)
    asked = launch.config.data.max_length
    if isinstance(longest, int) and asked > longest:
        what = f"data.max_length={asked}, but engines serve at most the {longest} positions of config.json"
        fix = f"set data.max_length={longest}, or set RoPE scaling in config.json"
        yield Checked("warn", what, fix)
    if getattr(found, "auto_map", None):
        what = (
            "the model needs custom code (auto_map in config.json), which engines refuse by default"
        )
        yield Checked("warn", what, "pass the engine's flag (vLLM: --trust-remote-code)")
    for note in packed_lm.notes(found):
        yield Checked("ok", note)


OF_CONFIG: dict[str, Check] = {
    name: _of_config(require) for name, require in preflight.CHECKS.items()
}
"""The checks that every start runs first, then `OF_MACHINE`."""
OF_MACHINE: dict[str, Check] = {
    "cores": cores,
    "/dev/shm": shared_memory,
    "limits": limits,
    "network": network,
}
