"""The interface for scripts and notebooks.

from trainer.api import load_config, read_metrics, train
run = train("experiment=mine.yaml", "optim.lr=1e-5", num_ranks=8)
print(run.export, run.metrics()[-1]["val/loss"])
"""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint import choice
from trainer.config import Config, ConfigError
from trainer.errors import EXIT_DONE
from trainer.tracking.metrics_file import FILE_NAME, read_metrics
from trainer.train.start import compose

__all__ = ["ConfigError", "RunDirectory", "TrainingError", "load_config", "read_metrics", "train"]


class TrainingError(RuntimeError):
    """A run ended with an exit code other than 0 (the exit codes of the command line)."""

    def __init__(self, run_dir: Path, exit_code: int) -> None:
        super().__init__(f"the run in {run_dir} ended with exit code {exit_code}; see its output")
        self.run_dir = run_dir
        self.exit_code = exit_code


@dataclass(frozen=True)
class RunDirectory:
    """The directory of a run, which may still be training."""

    directory: Path

    def metrics(self) -> list[dict[str, Any]]:
        """Return a row for each logged step, except for steps that a resume or rollback undid.

        Training and validation have separate rows.
        """
        return read_metrics(self.directory / FILE_NAME)

    @property
    def checkpoint(self) -> Path | None:
        """Return the checkpoint from which the run would resume, if there is one."""
        chosen = choice.select(self.directory).chosen
        return None if chosen is None else chosen.path

    @property
    def export(self) -> Path | None:
        """Return the directory of the model in `checkpoint`, for transformers and vLLM."""
        return None if self.checkpoint is None else self.checkpoint / "huggingface"


def load_config(*words: str) -> Config:
    """Return the checked configuration of `key=value` and `experiment=…`. Raises `ConfigError`."""
    return compose.load_config(list(words))


def train(*words: str, num_ranks: int | None = None) -> RunDirectory:
    """Start or continue the run with these overrides, like `fsdp-sft train [num_ranks] [words …]`.

    `num_ranks`: by default the number of GPUs, or 2 without a GPU. The run prints to this process's
    output. A stop signal to this process group, or an interrupt of this call, makes the run save a
    checkpoint and end. Raises `ConfigError` before anything starts, and `TrainingError` if the run
    does not end with exit code 0.
    """
    asked = compose.with_recipe(list(words))
    run_dir = Path(load_config(*asked).trainer.default_local_dir)
    command = [
        sys.executable,
        "-m",
        "trainer.launch",
        *([] if num_ranks is None else [str(num_ranks)]),
        *asked,
    ]
    with subprocess.Popen(command, env={**os.environ, "PYTHONSAFEPATH": "1"}) as launcher:
        try:
            code = launcher.wait()
        except KeyboardInterrupt:
            launcher.send_signal(signal.SIGINT)  # a notebook interrupts only this process
            launcher.wait()
            raise
    if code != EXIT_DONE:
        raise TrainingError(run_dir, code)
    return RunDirectory(run_dir)
