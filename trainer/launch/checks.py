"""Checks of a configuration and a machine before a run: one list, for every start, `doctor` and
`plan` (floor 5).

No torch, except in `architecture`.
"""

import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from trainer.checkpoint import fsio
from trainer.config import Config, ConfigError
from trainer.launch.ranks import (
    DEFAULT_NUM_CPU_RANKS,
    NodeLayout,
    choose_num_ranks,
    count_gpus,
    gloo_interface,
    node_layout,
)
from trainer.run import preflight
from trainer.runtime.text import readable

if TYPE_CHECKING:
    from trainer.model.packed_lm import ModelSource

CORES_PER_GPU_RANK = 4
MIN_OPEN_FILES = 1024
"""Linux's default limit of a process."""
SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_BYTES = 1 << 30
"""What NCCL's documentation gives a container; Docker's 64 MiB are too small for its buffers."""
RDMA_DEVICES = Path("/sys/class/infiniband")
DAY_S = 86400.0


@dataclass(frozen=True)
class Checked:
    """One finding. fail: the run would not do what it is asked for. skip: it could not be checked
    here.

    `fix` is empty where `what` already contains it.
    """

    level: Literal["ok", "warn", "fail", "skip"]
    what: str
    fix: str = ""

    def line(self, name: str) -> str:
        fix = f"\n      fix: {self.fix}" if self.fix else ""
        return f"{self.level:4}  {name}: {self.what}{fix}"


@dataclass(frozen=True)
class Launch:
    """A start on this machine. `problem`: why that number of ranks is impossible. `vllm_python`:
    the interpreter whose vLLM is to serve the model.
    """

    config: Config
    num_ranks: int
    num_gpus: int = 0
    layout: NodeLayout = field(default_factory=NodeLayout)
    problem: str | None = None
    vllm_python: str = sys.executable


Check = Callable[[Launch], Iterator[Checked]]
"""Yields findings; nothing means that all is well. Raises what a start would raise."""


def launch_of(config: Config, asked: int | None) -> Launch:
    """The start of `asked` ranks here."""
    try:
        num_gpus = 0 if config.trainer.device == "cpu" else count_gpus()
        num_ranks = choose_num_ranks(asked, num_gpus=num_gpus)
        return Launch(config, num_ranks, num_gpus, node_layout(os.environ))
    except ConfigError as error:
        return Launch(config, asked or DEFAULT_NUM_CPU_RANKS, problem=str(error))


def run_checks(checks: Mapping[str, Check], launch: Launch) -> None:
    """Run checks for a start: print warnings on stderr, raise the first failure. Raises
    `ConfigError`, `DataError`, `CannotWriteError`.
    """
    for check in checks.values():
        for found in check(launch):
            if found.level == "fail":
                raise ConfigError(f"{found.what}: {found.fix}")
            if found.level == "warn":
                print(f"WARNING: {found.what}: {found.fix}", file=sys.stderr)


def _of_config(name: str, launch: Launch) -> Iterator[Checked]:
    preflight.CHECKS[name](launch.config)
    return iter(())


def files(launch: Launch) -> Iterator[Checked]:
    found = preflight.find_files(launch.config)
    for side, sources in (("train", found.train), ("validation", found.validation)):
        paths = [path for _, files in sources for path in files]
        if not paths:
            yield Checked("ok", f"{side}: no files of its own")
            continue
        size = readable(sum(path.stat().st_size for path in paths))
        noun = "file" if len(paths) == 1 else "files"
        yield Checked("ok", f"{side}: {len(paths)} {noun}, {size}")


def run_directory(launch: Launch) -> Iterator[Checked]:
    """Whether the run may use its directory: it is no other run's, a resume is possible, it can
    be written.
    """
    yield from _of_config("run directory", launch)
    preflight.require_usable(launch.config)


def cores(launch: Launch) -> Iterator[Checked]:
    """A rank on a GPU needs cores for its loader and its saves; SLURM gives a task one core by
    default.
    """
    num_cores = len(os.sched_getaffinity(0))
    wanted = CORES_PER_GPU_RANK * launch.num_ranks
    if launch.num_gpus and num_cores < wanted:
        what = (
            f"{num_cores} CPU cores for {launch.num_ranks} GPU ranks: training may wait for the CPU"
        )
        yield Checked("warn", what, f"give them {wanted} (SLURM: --cpus-per-task={wanted})")


def shared_memory(launch: Launch) -> Iterator[Checked]:
    free_bytes = fsio.free_bytes(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else 0
    if launch.num_gpus and launch.num_ranks > 1 and free_bytes < MIN_SHARED_BYTES:
        what = f"{SHARED_MEMORY} has {readable(free_bytes)} free, too little for NCCL between {launch.num_ranks} cards"
        yield Checked("warn", what, "start the container with --shm-size=1g or more, or --ipc=host")


def limits(launch: Launch) -> Iterator[Checked]:
    num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if num_files != resource.RLIM_INFINITY and num_files < MIN_OPEN_FILES:
        what = f"this process may open only {num_files} files: many data files or ranks need more"
        yield Checked("warn", what, "ulimit -n 65536 (docker run --ulimit nofile=65536)")
    if not launch.num_gpus:
        return
    locked_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked_bytes != resource.RLIM_INFINITY and any(RDMA_DEVICES.glob("*")):
        what = f"this process may lock only {readable(locked_bytes)} of memory, and RDMA locks its buffers"
        yield Checked("warn", what, "ulimit -l unlimited (docker run --ulimit memlock=-1)")
    if resource.getrlimit(resource.RLIMIT_CORE)[0] == resource.RLIM_INFINITY:
        what = "a rank that crashes may write all its host memory to a core file"
        yield Checked("warn", what, "ulimit -c 0 (docker run --ulimit core=0)")


def clock(launch: Launch) -> Iterator[Checked]:
    now = time.time()
    if now < Path(__file__).stat().st_mtime - DAY_S:
        day = time.strftime("%Y-%m-%d", time.gmtime(now))
        what = f"the clock says {day}, before this program was installed"
        yield Checked(
            "warn",
            what,
            "set it: the Hub and trackers refuse a wrong time, and logs get wrong dates",
        )


def network(launch: Launch) -> Iterator[Checked]:
    keys = ["GLOO_SOCKET_IFNAME"]
    if launch.num_gpus:
        keys.append("NCCL_SOCKET_IFNAME")
    for key in keys:
        wanted = os.environ.get(key, "")
        if not wanted or wanted.startswith("^"):  # ^: every interface but these
            continue
        interfaces = list(psutil.net_if_addrs())
        is_found = any(_names(word, name, key) for name in interfaces for word in wanted.split(","))
        if interfaces and not is_found:
            what = (
                f"{key}={wanted} names no network interface here; there are {', '.join(interfaces)}"
            )
            yield Checked("fail", what, f"unset {key}, or name one of them")
    if launch.layout.num_nodes > 1:
        yield from _way_to(launch.layout)


def _names(word: str, interface: str, key: str) -> bool:
    """Whether the variable's word means the interface: NCCL takes a prefix, and `=name` for a
    whole name.
    """
    if interface == word.removeprefix("="):
        return True
    return key.startswith("NCCL") and interface.startswith(word)


def _way_to(layout: NodeLayout) -> Iterator[Checked]:
    master = layout.master_addr
    try:
        socket.getaddrinfo(master, layout.master_port)
    except OSError as error:
        fix = "give the first machine's name or address, unless it is still starting"
        yield Checked(
            "warn", f"MASTER_ADDR={master} is not known here: {error.strerror or error}", fix
        )
        return
    if "GLOO_SOCKET_IFNAME" not in os.environ and not gloo_interface(master):
        fix = "if the ranks cannot connect, set GLOO_SOCKET_IFNAME to the interface that the other machines reach"
        yield Checked("warn", f"no network interface leads to MASTER_ADDR={master}", fix)


def architecture(launch: Launch, source: "ModelSource | None" = None) -> Iterator[Checked]:
    """What config.json says: whether the model can be trained, packed or not, and what engines may
    refuse.

    `source`: where config.json is, if there need be no tokenizer.
    """
    from trainer.model import packed_lm
    from trainer.run.inputs import require_trainable, source_without_weights

    config = launch.config
    source = source or source_without_weights(config)
    reason = require_trainable(config, source)
    found = packed_lm.read_config(source)
    name = ", ".join(getattr(found, "architectures", None) or [found.model_type])
    how = "packed" if reason is None else f"one by one (slower): {reason}"
    yield Checked("ok", f"{name}: documents run {how}")
    longest = getattr(found, "max_position_embeddings", None)
    key = "data.max_length"
    if isinstance(longest, int) and config.data.max_length > longest:
        what = f"{key}={config.data.max_length}, but config.json has {longest} positions: engines serve no more"
        yield Checked(
            "warn",
            what,
            f"{key}={longest}, or a config.json with the scaling that it is to be served with",
        )
    if getattr(found, "auto_map", None):
        what = "code comes with the model (auto_map in config.json): engines load its export only if told to trust it"
        yield Checked("warn", what, "give the engine its flag (vLLM: --trust-remote-code)")
    for note in packed_lm.notes(found):
        yield Checked("ok", note)


OF_CONFIG: dict[str, Check] = {
    **{name: partial(_of_config, name) for name in preflight.CHECKS if name != "run directory"},
    "files": files,
    "run directory": run_directory,
}
"""Every start runs these first, and then those of the machine."""
OF_MACHINE: dict[str, Check] = {
    "cores": cores,
    "/dev/shm": shared_memory,
    "limits": limits,
    "clock": clock,
    "network": network,
}
