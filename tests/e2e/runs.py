"""Real runs of `run_sft.sh` for tests: start, watch, kill, read results."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from processes import wait_until
from repository import REPOSITORY
from whole_runs import curve

SMALL = (
    "data.train_max_samples=96",
    "data.train_batch_size=4",
    "model.fsdp_config.param_dtype=float32",
    "trainer.total_training_steps=12",
    "trainer.save_freq=3",
    "trainer.test_freq=6",
    "trainer.project_name=e2e",
)
"""A small quickstart: 12 steps of 4 samples, with a checkpoint every third step."""


def command(num_ranks, *overrides):
    return ["bash", str(REPOSITORY / "run_sft.sh"), str(num_ranks), *overrides]


def environment(**changes):
    """One thread per rank, so that runs on 1, 2 and 4 ranks compute with the same kernels."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **changes}


def _options(cwd, env):
    """Text output with errors included, and no input."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return {"cwd": cwd, "env": environment(**env), "text": True, **streams}


def run(cwd, num_ranks, *overrides, timeout_s=240.0, **env):
    """Run the command to its end, with output and errors together in `stdout`."""
    return subprocess.run(command(num_ranks, *overrides), timeout=timeout_s, **_options(cwd, env))


@contextmanager
def started(cwd, num_ranks, *overrides, redirection="2>&1", **env):
    """Start a run in a separate process group, and end it with the block. A shell applies the
    `redirection`, such as `2>&1`.
    """
    shell = ["bash", "-c", f'exec "$@" {redirection}', "bash"]
    options = {**_options(cwd, env), "stderr": subprocess.PIPE}
    process = subprocess.Popen(
        [*shell, *command(num_ranks, *overrides)], start_new_session=True, **options
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for_step(run_dir, step, process):
    """Wait until the log of the run has a row of `step`."""
    wait_until(
        lambda: max(curve(run_dir), default=0) >= step or process.poll() is not None,
        timeout_s=180.0,
    )
    assert max(curve(run_dir), default=0) >= step, f"no step {step}; exit code {process.poll()}"


def processes_of(run_dir):
    """Return the processes that work in a directory, such as those that a killed run left behind."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and Path(process.cwd()) == run_dir.resolve():
                found.append(process.pid)
    return found
