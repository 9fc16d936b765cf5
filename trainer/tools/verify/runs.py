"""Trains a recipe for a few steps in a temporary directory.

A run is uninterrupted, has changed settings, or is killed and resumed. This module imports no
torch. Every process that it starts ends with the call or with this process.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from trainer.checkpoint import layout
from trainer.config import Config
from trainer.errors import EXIT_CRASH, EXIT_DONE
from trainer.runtime.processes import die_with_parent, kill_tree
from trainer.tracking.metrics_file import FILE_NAME, read_metrics
from trainer.train.start.compose import as_word, load_config

NUM_STEPS = 10
SAVE_FREQ = 4
KILL_AFTER = 5
NUM_COMPARED = 4
"""Number of steps to compare between two computations; rounding errors grow from step to step."""
NUM_WARMUP_STEPS = 2
MAX_KILLS = 3
"""Number of attempts to kill a run before its last save."""
POLL_S = 0.02
NUM_LOG_LINES = 20


def logged(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Return the logged rows of one kind, sorted by step; [] without a log."""
    path = run_dir / FILE_NAME
    rows = read_metrics(path) if path.exists() else []
    return [row for row in rows if row["kind"] == kind]


class RunFailedError(RuntimeError):
    """A run failed; the message contains the end of its log."""


@dataclass(frozen=True)
class ShortRun:
    """A run directory, with the log next to it."""

    run_dir: Path

    @property
    def log(self) -> Path:
        return self.run_dir.with_suffix(".log")

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def rows(self) -> list[dict[str, Any]]:
        """Return the logged training steps."""
        return logged(self.run_dir, "train")

    def last_step(self) -> int:
        return max((row["step"] for row in self.rows()), default=0)

    def saved_step(self) -> int:
        return layout.read_pointer(self.run_dir).step or 0

    def is_in_the_middle(self) -> bool:
        return self.last_step() >= KILL_AFTER and self.saved_step() > 0


@dataclass
class Runs:
    """Runs of a recipe, given by the user's overrides, on `num_ranks` ranks. They write only in
    `directory`.

    `planned_gib` predicts a rank's memory from a configuration and a number of ranks.
    """

    overrides: Sequence[str]
    num_ranks: int
    directory: Path
    is_on_gpu: bool
    planned_gib: Callable[[Config, int], float]

    @cached_property
    def all_overrides(self) -> list[str]:
        """Return defaults (few rows, and a separate cache), followed by the user's overrides, which
        may replace them.
        """
        batch_size = load_config(list(self.overrides)).data.train_batch_size
        first = [
            f"data.train_max_samples={2 * NUM_STEPS * batch_size}",
            f"data.cache_dir={as_word(str(self.directory / 'cache'))}",
        ]
        if self.is_on_gpu:
            first.append("trainer.deterministic=true")
        else:
            first += ["trainer.device=cpu", "model.fsdp_config.param_dtype=float32"]
        return [*first, *self.overrides]

    @property
    def config(self) -> Config:
        """The recipe with the settings of these runs."""
        return load_config(self.all_overrides)

    @cached_property
    def straight(self) -> ShortRun:
        """A run without an interruption. On a GPU it is deterministic."""
        return self.train("straight")

    @cached_property
    def timed(self) -> ShortRun:
        """A run at full speed. On a GPU it does not use deterministic kernels."""
        if not self.is_on_gpu:
            return self.straight
        return self.train("timed", "trainer.deterministic=false", until=NUM_STEPS - 1)

    def train(
        self,
        name: str,
        *overrides: str,
        num_ranks: int | None = None,
        until: int = NUM_STEPS + 1,
    ) -> ShortRun:
        """Train to the end, or kill the run once step `until` is logged. Raises `RunFailedError`."""
        run = ShortRun(self.directory / name)
        self._start(run, lambda: run.last_step() >= until, overrides, num_ranks)
        return run

    def train_killed(self) -> tuple[ShortRun, int, int] | None:
        """Kill a run with SIGKILL before its last save, and start it again.

        Returns the run, the step saved before the kill, and the step from which it resumed; None if
        every run ended before it could be killed. Raises `RunFailedError`.
        """
        for number in range(MAX_KILLS):
            run = ShortRun(self.directory / f"killed_{number}")
            is_killed = self._start(run, run.is_in_the_middle)
            saved_step = run.saved_step()
            if is_killed and saved_step < NUM_STEPS:
                self._start(run, lambda: False)
                rows = run.rows()
                newest = max(row["attempt"] for row in rows)
                first_step = min(row["step"] for row in rows if row["attempt"] == newest)
                return run, saved_step, first_step - 1
        return None

    def _start(
        self,
        run: ShortRun,
        is_due: Callable[[], bool],
        overrides: Sequence[str] = (),
        num_ranks: int | None = None,
    ) -> bool:
        """Start the run. Return True if it was killed because `is_due` returned True, False if it
        ended on its own.

        All its processes end with it. Raises `RunFailedError`.
        """
        words = [str(num_ranks or self.num_ranks), *self.all_overrides, *overrides]
        words += [f"trainer.default_local_dir={as_word(str(run.run_dir))}", *FORCED]
        with run.log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "trainer.launch", *words],
                env={**os.environ, "TMPDIR": str(self.directory), "USE_WANDB": "false"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid(), code=EXIT_CRASH),
            )
        try:
            while process.poll() is None:
                if is_due():
                    return True
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                kill_tree(process.pid)
                process.wait()
        if process.returncode != EXIT_DONE:
            code = f"the {run.run_dir.name} run ended with exit code {process.returncode}"
            lines = run.said().splitlines()[-NUM_LOG_LINES:]
            raise RunFailedError("\n  ".join([f"{code}; the end of its log:", *lines]))
        return False


FORCED = (
    f"trainer.total_training_steps={NUM_STEPS}",
    f"trainer.save_freq={SAVE_FREQ}",
    f"trainer.test_freq={SAVE_FREQ}",
    "data.val_files=null",  # validate on a share of the few training rows
    "trainer.max_ckpt_to_keep=1",  # the least disk, and a resume has nothing older to fall back on
    "trainer.resume_mode=auto",
    "trainer.max_time=null",
    "trainer.checkpoint.mirror=null",
    "trainer.logger=[console]",
)
"""Overrides that replace the user's, so that the files of the user's run are neither read nor
written.
"""
