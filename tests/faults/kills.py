"""Kill and preempt real training runs at random moments, as often as asked, and prove each time that nothing is lost.

`python tests/faults/kills.py --kills 1000 --seed 1` writes benchmarks/results/kills.json. A trial is fixed by its seed
up to the moment within the run, which is the machine's. Ranks are real processes with the project's own parts (gloo,
toy model); what the launcher does when a rank is lost, this file does. A strike that meets no living rank is repeated.
"""

import argparse
import collections
import json
import logging
import os
import platform
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from ranks import run_ranks, started_ranks
from toy import write_model_config
from toy_runs import Recipe, read_trace, run

from trainer.checkpoint import layout
from trainer.checkpoint.manifest import verify_files
from trainer.runtime.distributed import World
from trainer.runtime.signals import StopRequest

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "kills.json"
ACKS = "acks.txt"
WORLD_SIZES = (2, 2, 2, 2, 2, 1, 3, 4)
TOTAL_STEPS = 20
GONE_WITHIN_S = 30.0
NOT_STRUCK = "over before the strike"


class Acks(logging.Handler):
    """Remembers on disk which checkpoints were announced as saved, before anybody can be killed again."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self._file = os.open(run_dir / ACKS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("saved "):
            step = layout.parse_step(Path(str(record.args[0])).name)  # type: ignore[index]
            os.write(self._file, f"{step}\n".encode())


def train(world: World, run_dir: Path, source: Any, recipe: Recipe) -> int:
    """One rank of one start of the run; its exit code."""
    logger = logging.getLogger("trainer.checkpoint.manager")
    logger.setLevel(logging.INFO)
    if world.is_main:
        logger.addHandler(Acks(run_dir))
    stop = StopRequest()
    stop.install()
    return run(world, run_dir, source, recipe, stop=stop).exit_code


@dataclass(frozen=True)
class Trial:
    """What is done to one start of a run: strike `after` a share of an undisturbed run's time, or in the next save."""

    seed: int
    world_size: int
    recipe: Recipe
    how: str
    victims: tuple[int, ...]
    after: float
    in_save_after_s: float | None

    @classmethod
    def draw(cls, seed: int, world_size: int, how: str) -> "Trial":
        rng = random.Random(seed)
        recipe = Recipe(
            total_steps=TOTAL_STEPS,
            save_freq=rng.choice((1, 2, 3)),
            keep=rng.choice((1, 2, 3)),
            async_save=rng.random() < 0.6,
            has_trace=True,
        )
        everyone = tuple(range(world_size))
        victims = everyone if rng.random() < 0.3 else (rng.randrange(world_size),)
        in_save_after_s = rng.uniform(0.0, 0.06) if rng.random() < 0.5 else None
        return cls(seed, world_size, recipe, how, victims, rng.uniform(0.0, 0.9), in_save_after_s)


class Campaign:
    """A sequence of trials on run directories that are used until their run is complete."""

    def __init__(self, root: Path, *, seed: int) -> None:
        self._root, self._seed = root, seed
        model_dir = root / "model"
        model_dir.mkdir()
        self._source = write_model_config(model_dir, vocab_size=163, intermediate_size=97)
        self._straight: dict[int, dict[int, str]] = {}
        self._duration_s: dict[int, float] = {}
        self._num_runs = 0
        self._current: tuple[Path, int] | None = None
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []

    def run_trial(self, number: int, how: str) -> bool:
        """Start the current run, disturb it, and check what it left. Findings go to `faults`; whether it was struck."""
        run_dir, world_size = self._current or self._new_run(number)
        self._current = (run_dir, world_size)
        trial = Trial.draw(self._seed * 1_000_000 + number, world_size, how)
        before = len(read_trace(run_dir))
        moment = self._disturb(trial, run_dir)
        self.counts[f"{how}: {moment}"] += 1
        for fault in self._check(trial, run_dir, before, moment):
            self.faults.append(f"trial {number} ({trial.how}, seed {trial.seed}, {run_dir.name}): {fault}")
        chosen = layout.select(run_dir).chosen
        if chosen is not None and chosen.step >= TOTAL_STEPS:
            self._current = None
            self.counts["runs completed"] += 1
        return moment != NOT_STRUCK

    def _new_run(self, number: int) -> tuple[Path, int]:
        world_size = random.Random(self._seed * 7919 + number).choice(WORLD_SIZES)
        if world_size not in self._straight:
            for name in (f"warmup{world_size}", f"straight{world_size}"):
                started = time.monotonic()
                straight = self._root / name
                straight.mkdir()
                run_ranks(train, world_size, straight, self._source, Recipe(total_steps=TOTAL_STEPS, has_trace=True))
            self._duration_s[world_size] = time.monotonic() - started
            self._straight[world_size] = {row["step"]: json.dumps(row) for row in read_trace(straight)}
        self._num_runs += 1
        run_dir = self._root / f"run{self._num_runs}"
        run_dir.mkdir()
        return run_dir, world_size

    def _disturb(self, trial: Trial, run_dir: Path) -> str:
        """Start all ranks, strike, and wait until they are gone; where the strike fell."""
        number = signal.SIGKILL if trial.how == "kill" else signal.SIGTERM
        with started_ranks(train, trial.world_size, run_dir, self._source, trial.recipe) as ranks:
            processes = [process for process, _ in ranks]
            deadline = time.monotonic() + trial.after * self._duration_s[trial.world_size]
            is_due = False
            while not is_due and any(process.is_alive() for process in processes):
                time.sleep(0.002)
                is_due = time.monotonic() >= deadline
                if is_due and trial.in_save_after_s is not None and self._moment(run_dir) == "elsewhere":
                    is_due = False
            time.sleep(trial.in_save_after_s or 0.0)
            moment = self._moment(run_dir)
            if not all(processes[victim].is_alive() for victim in trial.victims):
                return NOT_STRUCK
            for victim in trial.victims:
                if processes[victim].pid is not None and processes[victim].is_alive():
                    os.kill(processes[victim].pid, number)  # type: ignore[arg-type]
            return moment if _are_gone(processes, random.Random(trial.seed + 1).uniform(0.0, 0.3)) else "hung"

    def _moment(self, run_dir: Path) -> str:
        names = os.listdir(run_dir)
        if any(name.startswith(layout.STAGING_PREFIX) and "probe" not in name for name in names):
            return "while saving"
        if any(name.startswith(layout.TRASH_PREFIX) for name in names):
            return "while rotating"
        return "elsewhere"

    def _check(self, trial: Trial, run_dir: Path, before: int, moment: str) -> list[str]:
        trace, found = read_trace(run_dir), []
        for row in trace[before:]:
            if json.dumps(row) != self._straight[trial.world_size][row["step"]]:
                found.append(f"step {row['step']} diverged: {row}")
        acked = [int(line) for line in (run_dir / ACKS).read_text().split()] if (run_dir / ACKS).exists() else []
        try:
            selection = layout.select(run_dir)
        except Exception as error:
            return [*found, f"selection failed: {error}"]
        for info in layout.checkpoints(run_dir):
            if info.manifest is None or verify_files(info.path, info.manifest):
                found.append(f"{info.path.name} is not whole: {info.status} {info.reason}")
        step = selection.chosen.step if selection.chosen else 0
        if step < max(acked, default=0):
            found.append(f"step {max(acked)} was announced as saved, {step} would be continued")
        is_preempted = trial.how == "preempt" and moment != NOT_STRUCK and len(trace) > before
        if is_preempted and trace[-1]["step"] - step > 1:
            found.append(f"preempted after step {trace[-1]['step']}, {step} would be continued")
        if moment == "hung":
            found.append(f"not gone {GONE_WITHIN_S:.0f} s after the signal")
        return found


def _are_gone(processes: list[Any], patience_s: float) -> bool:
    """As the launcher does: when a rank is lost the others are killed, a moment later; no rank lost, it waits."""
    gone_by = time.monotonic() + GONE_WITHIN_S
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            time.sleep(patience_s)
            return True
        if time.monotonic() > gone_by:
            return False
        time.sleep(0.002)
    return True


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--preemptions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-", dir=os.environ.get("KILLS_DIR")) as directory:
        campaign = Campaign(Path(directory), seed=arguments.seed)
        plan = ["kill"] * arguments.kills + ["preempt"] * arguments.preemptions
        random.Random(arguments.seed).shuffle(plan)
        number = 0
        for done, how in enumerate(plan, start=1):
            while not campaign.run_trial(number := number + 1, how):
                pass
            if done % 20 == 0 or campaign.faults:
                print(f"{done}/{len(plan)} {dict(campaign.counts)} faults: {campaign.faults}", flush=True)
            if campaign.faults:
                break
    result = {
        "command": "python tests/faults/kills.py " + " ".join(argv),
        "seed": arguments.seed,
        "kills": arguments.kills,
        "preemptions": arguments.preemptions,
        "counts": dict(sorted(campaign.counts.items())),
        "faults": campaign.faults,
        "minutes": round((time.monotonic() - started) / 60, 1),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 1 if campaign.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
