"""Measure the time from a kill to the next trained step, by phase, and the goodput of a job that is
killed again and again.

python benchmarks/recovery.py [--kills 5] [--ranks 2]: the quickstart trains with a save every 20
steps. After every 100 steps, before the save of the last one, SIGKILL ends the launcher and all
ranks, and the same command is started again at once. Goodput is the time that the steps take
undisturbed, divided by the time that they take with the kills.
"""

import argparse
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from measuring import REPOSITORY, header, middle, table, write_result

STEPS_BETWEEN_KILLS = 100
SAVE_FREQ = 20
MILESTONES = {
    "launcher": "start ",
    "imports, process group, data": "self-check ",
    "model and self-check": "model ",
    "load the checkpoint": "logs ",
    "first step": r"\S+ step ",
}
"""Phases of a start, each with the beginning of the console line that ends it."""
STEP_LINE = re.compile(r"step (\d+)/")


class Attempt:
    """One start of the command; `lines` yields its console lines with seconds since the start."""

    def __init__(self, run_dir: Path, num_ranks: int, num_steps: int) -> None:
        overrides = {
            "trainer.default_local_dir": run_dir,
            "data.cache_dir": run_dir.parent / "cache",
            "trainer.total_training_steps": num_steps,
            "trainer.save_freq": SAVE_FREQ,
            "trainer.test_freq": -1,
            "trainer.log_every": 1,
        }
        command = ["bash", str(REPOSITORY / "run_sft.sh"), str(num_ranks)]
        command += [f"{key}={value}" for key, value in overrides.items()]
        self._started = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def lines(self) -> Iterator[tuple[float, str]]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield time.perf_counter() - self._started, line

    def kill(self) -> None:
        """End every process of the attempt with SIGKILL."""
        everyone = [self._process, *psutil.Process(self._process.pid).children(recursive=True)]
        for process in everyone:
            os.kill(process.pid, signal.SIGKILL)
        self._process.wait()

    def require_done(self) -> None:
        if self._process.wait() != 0:
            raise RuntimeError(f"the run ended with exit code {self._process.returncode}")


@dataclass(frozen=True)
class Trained:
    """A finished run. `restarts`: for each restart, the seconds at which its phases ended."""

    seconds: float
    restarts: list[dict[str, float]]
    steps_lost: list[int]


def train(run_dir: Path, num_ranks: int, num_steps: int, *, is_killed: bool) -> Trained:
    """Train a run to its end."""
    began = time.perf_counter()
    restarts: list[dict[str, float]] = []
    steps_lost: list[int] = []
    last_step = 0
    while last_step < num_steps:
        attempt = Attempt(run_dir, num_ranks, num_steps)
        missing = dict(MILESTONES)
        reached: dict[str, float] = {}
        is_restart = last_step > 0
        next_kill = (last_step // STEPS_BETWEEN_KILLS + 1) * STEPS_BETWEEN_KILLS
        for seconds, line in attempt.lines():
            for phase in [name for name, start in missing.items() if re.match(start, line)]:
                reached[phase] = seconds
                del missing[phase]
            if (found := STEP_LINE.search(line)) is None:
                continue
            step = int(found[1])
            if is_restart:  # its first step
                steps_lost.append(last_step + 1 - step)
                restarts.append(reached)
                is_restart = False
            last_step = max(last_step, step)
            if is_killed and next_kill <= step < num_steps:
                attempt.kill()
                break
        else:
            attempt.require_done()
    return Trained(time.perf_counter() - began, restarts, steps_lost)


def phases_of(reached: dict[str, float]) -> dict[str, float]:
    """Return the seconds of each phase of a restart, and of the whole."""
    ends = [0.0, *(reached[phase] for phase in MILESTONES)]
    lengths = dict(zip(MILESTONES, (b - a for a, b in itertools.pairwise(ends)), strict=True))
    return lengths | {"kill to next step": ends[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    num_steps = (options.kills + 1) * STEPS_BETWEEN_KILLS
    with tempfile.TemporaryDirectory() as directory:
        undisturbed = train(Path(directory, "a"), options.ranks, num_steps, is_killed=False)
        killed = train(Path(directory, "b"), options.ranks, num_steps, is_killed=True)
    if len(killed.restarts) != options.kills:
        raise RuntimeError(f"{options.kills} kills, but {len(killed.restarts)} restarts")
    phases = [phases_of(reached) for reached in killed.restarts]
    rows = {name: middle(restart[name] for restart in phases) for name in phases[0]}
    step_s = undisturbed.seconds / num_steps
    lost = middle(killed.steps_lost)
    result = {
        **header(),
        "kills": len(phases),
        "phases_s": rows,
        "steps_lost": lost,
        "undisturbed_step_s": step_s,
        "goodput": undisturbed.seconds / killed.seconds,
    }
    write_result("recovery", result)
    columns = ["phase", "seconds, median", "min", "max"]
    lines = ([n, *(f"{r[key]:.2f}" for key in ("median", "min", "max"))] for n, r in rows.items())
    print(table(columns, lines))
    print(
        f"goodput {result['goodput']:.3f} at {step_s:.3f} s a step; steps lost {lost['median']:g}"
    )


if __name__ == "__main__":
    sys.exit(main())
