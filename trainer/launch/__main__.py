"""The launcher, called by `run_sft.sh`: checks configuration and machine, starts the ranks, and
returns the exit code of the run.

It imports no torch, so that a mistyped key fails at once. It imports numpy, and all modules that
import it, only after `main` has blocked the stop signals: numpy starts threads, and a signal that
one of them received would kill the launcher.
"""

import os
import re
import shutil
import signal
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint.layout import POINTER
from trainer.config import ConfigError
from trainer.errors import (
    EXIT_CRASH,
    EXIT_DONE,
    EXIT_RESUMABLE,
    CannotWriteError,
    DataError,
)
from trainer.launch.supervise import supervise
from trainer.launch.watchdog import Watchdog
from trainer.runtime.exit_codes import code_of
from trainer.runtime.log import keep_streams_safe, labelled
from trainer.runtime.signals import heeded_signals
from trainer.runtime.status import ABORTED, new_status

if TYPE_CHECKING:
    from trainer.launch.checks import Launch
    from trainer.launch.ranks import NodeLayout

NUMA_NODES = Path("/sys/devices/system/node")


def main(argv: list[str], *, is_program: bool = False) -> int:
    if argv and re.fullmatch("[a-z][a-z-]*", argv[0]):
        from trainer.cli.__main__ import main as run_command

        return run_command(argv, is_program=is_program)
    signal.pthread_sigmask(signal.SIG_BLOCK, heeded_signals())  # `supervise` receives them
    try:
        return _launch(argv)
    except (ConfigError, DataError, CannotWriteError) as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return code_of(error)


def _launch(argv: list[str]) -> int:
    """Check and train. Return the exit code. Raises the errors of a run that cannot start."""
    from trainer.__main__ import main as run_here
    from trainer.launch.mirroring import mirrored, warn_if_behind
    from trainer.launch.ranks import choose_num_ranks, gpus_for_run, node_layout, parse_arguments
    from trainer.train.start.compose import load_config

    asked, overrides = parse_arguments(argv)
    if {"--help", "-h", "--cfg"} & set(overrides):
        return run_here(overrides)
    config = load_config(overrides)
    from trainer.launch import checks
    from trainer.train.start.preflight import CHECKS, already_complete

    for require in CHECKS.values():
        require(config)
    layout = node_layout(os.environ)
    num_gpus = gpus_for_run(config.trainer.device)
    num_ranks = choose_num_ranks(asked, num_gpus=num_gpus)
    if layout.num_nodes == 1 and (message := already_complete(config)):
        print(message)
        warn_if_behind(config)
        return EXIT_DONE
    with mirrored(config, layout) as code:
        if code is None:
            launch = checks.Launch(config, num_ranks, num_gpus, layout)
            checks.run_checks(checks.OF_MACHINE, launch)
            code = _train(launch, overrides)
    if code == EXIT_RESUMABLE:
        trainer = config.trainer
        # with several machines, only the first may see the run directory; a mirror may hold steps
        is_elsewhere = layout.num_nodes > 1 or trainer.checkpoint.mirror is not None
        is_saved = is_elsewhere or Path(trainer.default_local_dir, POINTER).exists()
        hint = "resume with" if is_saved else "nothing has been saved yet; start over with"
        print(f"{hint} the same command", flush=True)
    return code


def _train(launch: "Launch", overrides: list[str]) -> int:
    """Start the ranks and return the exit code of the run."""
    from trainer.launch.ranks import rank_environment

    config = launch.config
    layout = launch.layout
    num_ranks = launch.num_ranks
    has_peers = layout.num_nodes > 1
    if has_peers:
        place = f"{layout.node_rank} of {layout.num_nodes}"
        meeting = f"{layout.master_addr}:{layout.master_port}"
        print(labelled("machine", f"{place}, rendezvous at {meeting}"), flush=True)
    devices = "GPUs" if launch.num_gpus else "CPU"
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    # to stderr: if stdout is broken, a rank reports that
    print(labelled("start", f"{ranks} on {devices}"), file=sys.stderr, flush=True)
    run_dir = Path(config.trainer.default_local_dir)
    command = agent_command(
        num_ranks,
        layout,
        overrides,
        timeout_s=config.trainer.dist_timeout_s,
        binds_numa=launch.num_gpus > 0 and can_bind_numa(),
    )
    with new_status(num_ranks) as status:
        code = supervise(
            command,
            env=rank_environment(os.environ, layout, num_ranks=num_ranks, status=status),
            status=status,
            watchdog=Watchdog(status, run_dir=run_dir, has_peers=has_peers),
        )
    has_nccl_peers = launch.num_gpus > 0 and num_ranks > 1
    if code == ABORTED and (has_peers or has_nccl_peers):
        from trainer.launch.aborts import exit_code_after_abort

        return exit_code_after_abort(run_dir, layout.node_rank)
    return EXIT_CRASH if code == ABORTED else code


def can_bind_numa() -> bool:
    """Return True on a machine with several NUMA nodes and with numactl, which torchrun calls."""
    nodes = list(NUMA_NODES.glob("node[0-9]*"))
    return len(nodes) > 1 and shutil.which("numactl") is not None


def agent_command(
    num_ranks: int,
    layout: "NodeLayout",
    overrides: Sequence[str],
    *,
    timeout_s: int,
    binds_numa: bool = False,
) -> list[str]:
    """Return the command line of torchrun's agent. `timeout_s`: the time that the agent waits for
    the other machines. `binds_numa`: each rank runs on the CPUs next to its GPU.

    On a single machine the agent picks a free port, so that runs on one host never meet.
    """
    if layout.num_nodes == 1:
        meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
        meeting += [f"--rdzv-id={uuid.uuid4().hex}"]
    else:
        meeting = [f"--node-rank={layout.node_rank}", f"--master-addr={layout.master_addr}"]
        meeting += [f"--master-port={layout.master_port}", f"--rdzv-conf=timeout={timeout_s}"]
    return [
        *(sys.executable, "-m", "trainer.launch.agent"),
        f"--nnodes={layout.num_nodes}",
        f"--nproc-per-node={num_ranks}",
        "--max-restarts=0",
        *meeting,
        *(["--numa-binding=node"] if binds_numa else []),
        "--signals-to-handle=",  # the launcher stops the ranks
        f"--log-dir={os.devnull}",  # it would leave files in TMPDIR
        *("-m", "trainer", *overrides),
    ]


if __name__ == "__main__":
    keep_streams_safe(reports_loss=False)  # the rank that writes most reports a broken stdout
    sys.exit(main(sys.argv[1:], is_program=True))
