"""Whole runs through the project's launcher: trained in one piece, or killed and started again (floor 5, no torch).

Nothing that is started here outlives its block, or this process.
"""

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from trainer.checkpoint import layout
from trainer.errors import EXIT_CRASH, EXIT_DONE
from trainer.runtime.processes import die_with_parent, status_of
from trainer.tracking.metrics_file import FILE_NAME, read_metrics

LAUNCHER = ("-m", "trainer.launch")
POLL_S = 0.05
SIGNAL_POLL_S = 0.002
STOPPED_S = 1.0
GONE_S = 30.0
GONE = ("",)
NUM_LOG_LINES = 20


class RunFailedError(RuntimeError):
    """A run ended in a way that leaves nothing to compare; `code` is this command's exit code."""

    def __init__(self, message: str, *, name: str, code: int) -> None:
        super().__init__(message)
        self.name, self.code = name, code


@dataclass(frozen=True)
class Moment:
    """Kill `delay_s` after the row of `step` was seen."""

    step: int
    delay_s: float


@dataclass(frozen=True)
class Kill:
    """The last step the run had logged when it was killed, the last one it had saved, and the one it went on from."""

    at_step: int
    saved_step: int
    resumed_from: int

    def __str__(self) -> str:
        return f"after step {self.at_step}, with step {self.saved_step} saved: resumed from step {self.resumed_from}"

    @property
    def has_lost_checkpoint(self) -> bool:
        return self.resumed_from < self.saved_step


@dataclass(frozen=True)
class KilledRun:
    """A run of the launcher with `words` that name `run_dir`; the log lies beside it, temporary files in `scratch`."""

    name: str
    work: Path
    words: tuple[str, ...]
    scratch: Path
    good_codes: tuple[int, ...] = (EXIT_DONE,)

    @property
    def run_dir(self) -> Path:
        return self.work / self.name

    @property
    def log(self) -> Path:
        return self.work / f"{self.name}.log"

    @property
    def step_s(self) -> float:
        """Median wall time of a step."""
        return statistics.median(row["train/time(s)"] for row in self.rows())

    def rows(self) -> list[dict[str, Any]]:
        """Of training, the newest attempt of each step; none before the first."""
        path = self.run_dir / FILE_NAME
        return [row for row in read_metrics(path) if row["kind"] == "train"] if path.exists() else []

    def train(self, until: int | None = None) -> None:
        """In one piece; ended once step `until` is logged, where its rows are all that is wanted.

        Raises `RunFailedError`.
        """
        started = time.monotonic()
        self._say("started")
        with self._started() as process:
            self._wait(process, lambda: until is not None and self._newest()[2] >= until)
        self._say(f"done in {time.monotonic() - started:.1f} s")

    def train_with_kills(self, moments: Iterable[Moment]) -> list[Kill]:
        """Killed at the moments and started again until it is complete. Raises `RunFailedError`."""
        started, kills = time.monotonic(), []
        killed_at = saved_step = 0
        self._say("started")
        for moment in (*moments, None):
            attempt = self._newest()[0]
            with self._started() as process:
                self._wait(process, partial(self._has_begun, attempt))
                if killed_at:
                    kills.append(Kill(killed_at, saved_step, self._resumed_from(attempt)))
                    self._say(f"resumed from step {kills[-1].resumed_from}")
                self._wait(process, partial(self._is_due, moment))
                time.sleep(moment.delay_s if moment else 0.0)
                if process.poll() is not None:
                    break
                kill_tree(process)
            killed_at, saved_step = self._newest()[2], self._saved_step
            self._say(f"killed after step {killed_at}")
        self._require_no_failure(process)
        self._say(f"done in {time.monotonic() - started:.1f} s" + (" before the next kill" if moment else ""))
        if not kills:
            text = "the run was complete before the first kill, so nothing is proven: give more --steps"
            raise RunFailedError(text, name=self.name, code=EXIT_CRASH)
        return kills

    def _wait(self, process: subprocess.Popen, condition: Callable[[], bool]) -> None:
        """Until the condition holds or the run has ended. Raises `RunFailedError`."""
        while process.poll() is None and not condition():
            time.sleep(POLL_S)
        self._require_no_failure(process)

    def _has_begun(self, attempt: int) -> bool:
        """Whether an attempt after `attempt` has finished a step."""
        return self._newest()[0] > attempt

    def _is_due(self, moment: Moment | None) -> bool:
        """Not before the first checkpoint: to begin anew proves nothing about resuming. `None` = never."""
        return moment is not None and self._newest()[2] >= moment.step and self._saved_step > 0

    @property
    def _saved_step(self) -> int:
        return layout.read_pointer(self.run_dir).step or 0

    def _newest(self) -> tuple[int, int, int]:
        """Number of the newest attempt, its first and its last step; zeros before the first row."""
        rows = self.rows()
        attempt = max((row["attempt"] for row in rows), default=0)
        steps = [row["step"] for row in rows if row["attempt"] == attempt]
        return attempt, min(steps, default=0), max(steps, default=0)

    def _resumed_from(self, attempt: int) -> int:
        """Where the attempt after `attempt` began; one that found the run complete has no row."""
        newest, first, _ = self._newest()
        return first - 1 if newest > attempt else self._saved_step

    def _started(self) -> AbstractContextManager[subprocess.Popen]:
        return started([*LAUNCHER, *self.words], {"TMPDIR": str(self.scratch), "USE_WANDB": "false"}, self.log)

    def _require_no_failure(self, process: subprocess.Popen) -> None:
        if process.poll() in (None, *self.good_codes):
            return
        code = process.returncode if process.returncode > 0 else EXIT_CRASH
        lines = self.log.read_text(errors="replace", encoding="utf-8").splitlines()[-NUM_LOG_LINES:]
        text = f"the run '{self.name}' ended with exit code {process.returncode}; the end of its log:"
        raise RunFailedError("\n  ".join([text, *lines]), name=self.name, code=code)

    def _say(self, text: str) -> None:
        print(f"{self.name}: {text}", flush=True)


@contextmanager
def started(words: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen]:
    """A Python program in a process group of its own, nothing of which outlives the block."""
    child_setup = partial(die_with_parent, os.getpid(), code=EXIT_CRASH)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=child_setup,
        )
    try:
        yield process
    finally:
        kill_tree(process)


def kill_tree(process: subprocess.Popen) -> None:
    """SIGKILL to a running process group and to all processes below it, and wait until they are gone."""
    if process.poll() is not None:
        return
    found = [psutil.Process(process.pid)]
    for member in found:  # grows meanwhile
        with suppress(psutil.Error):
            member.suspend()
            _wait_for(member, (psutil.STATUS_STOPPED, *GONE), timeout_s=STOPPED_S)
            found += member.children()  # only now: it starts no more of them
    os.killpg(process.pid, signal.SIGKILL)
    for member in found:
        with suppress(psutil.Error):
            member.kill()
    process.wait()
    deadline = time.monotonic() + GONE_S
    for member in found:
        _wait_for(member, GONE, timeout_s=deadline - time.monotonic())


def _wait_for(process: psutil.Process, statuses: tuple[str, ...], *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while status_of(process) not in statuses and time.monotonic() < deadline:
        time.sleep(SIGNAL_POLL_S)
