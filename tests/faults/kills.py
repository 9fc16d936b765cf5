"""Kill and preempt real training runs at random moments, as often as asked, and prove each time
that nothing is lost.

`python tests/faults/kills.py --kills 200 --preemptions 100 --seed 1` writes
benchmarks/results/kills.json. A trial is fixed by its seed up to the moment within the run, which
is the machine's. Each start is the real command with all its parts (loader workers in half of them,
validation, trackers, report) on a small model; `tests/whole_runs.py` stands for the launcher. A run
is struck until a start of it is left in peace and ends. It must then have left all that an
undisturbed run leaves: all numbers of each row but times, final state, histories, report,
checkpoints, pointer, end and lock. A strike that meets no living rank is repeated.

`--power-cuts N`, on a disk that keeps only what was synced (lying_disk.py): all processes die at
once, and each unsynced name and block of the run directory survives or not. Rows that such a cut
took may be missing in the end. It writes benchmarks/results/power_cuts.json.

`--all-features`: runs on 2 ranks leave updates out and keep a mirror; what kills all ranks kills
the mirror's process too in half of the trials. It writes
benchmarks/results/kills_all_features.json.
"""

import argparse
import collections
import contextlib
import json
import os
import platform
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import torch
import whole_runs
from faults.lying_disk import cut_power, run_on_lying_disk
from result_file import write_result
from whole_equality import compare_runs, logged_exit_code
from whole_runs import Attempt, tiny_model

from trainer.checkpoint import choice, layout
from trainer.checkpoint.lock import is_given_back
from trainer.checkpoint.manifest import verify_files
from trainer.checkpoint.storage import Storage
from trainer.errors import EXIT_DONE, EXIT_RESUMABLE
from trainer.launch.mirroring import mirrored
from trainer.launch.ranks import NodeLayout
from trainer.tools.mirror.contents import look
from trainer.tracking import histories
from trainer.tracking.metrics_file import read_rows
from trainer.train.start.compose import load_config

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
WORLD_SIZES = (1, 2, 2, 2, 3)
RECIPES = ((1, 1), (2, 2), (3, 2))
"""Steps between saves, checkpoints kept."""
FEATURES = ("trainer.guard.rules=[{metric: train/grad_norm, above: 5, do: skip}]",)
TOTAL_STEPS = 10
BASE = (
    f"trainer.total_training_steps={TOTAL_STEPS}",
    "trainer.test_freq=3",
    "trainer.hang_timeout_s=120",
)
GONE_WITHIN_S = 30.0
"""torchrun lets a rank that waits in C code, as for the others at the start, live 30 s after
another has left.
"""
ENDED_WITHIN_S = 120.0
NOT_STRUCK = "over before the strike"
TIMED = re.compile(
    "ts|attempt|train/time|(time|throughput|memory|system|ckpt|obs)/|progress/(attempt|elapsed|eta|goodput|lost)"
)
"""Numbers that no two runs share."""
COMPARED = ("train", "val")


@dataclass(frozen=True)
class Trial:
    """What is done to one start of a run: strike a while after a step, or within the next save,
    or at the run's end.
    """

    seed: int
    how: str
    where: str
    victims: tuple[int, ...]
    steps: float
    after_s: float
    words: tuple[str, ...]

    @classmethod
    def draw(cls, seed: int, world_size: int, how: str) -> "Trial":
        rng = random.Random(seed)
        where = rng.choice(("after a step", "after a step", "in a save", "at the end"))
        after_s = rng.uniform(
            0.0, {"after a step": 0.3, "in a save": 0.06, "at the end": 1.0}[where]
        )
        everyone = tuple(range(world_size))
        victims = everyone if how != "kill" or rng.random() < 0.3 else (rng.randrange(world_size),)
        is_async = str(rng.random() < 0.6).lower()
        words = (
            f"data.num_workers={rng.randrange(2)}",
            f"trainer.checkpoint.async_save={is_async}",
        )
        return cls(seed, how, where, victims, rng.random(), after_s, words)


@dataclass(frozen=True)
class Run:
    """A run under way; `straight` is what an undisturbed one left."""

    run_dir: Path
    world_size: int
    words: tuple[str, ...]
    straight: Path

    @property
    def log(self) -> Path:
        return self.run_dir.with_suffix(".log")

    @property
    def mirror(self) -> str | None:
        """Its URL; none of a run without the features."""
        return f"file://{self.run_dir}.mirror" if set(FEATURES) <= set(self.words) else None

    def announced(self) -> set[int]:
        """Steps that its last attempt said it had saved."""
        return {
            int(step) for step in re.findall(r"saved \S+/global_step_(\d+)\b", self.log.read_text())
        }

    def rows(self) -> list[dict[str, Any]]:
        """Of every attempt, also those that no longer count; the last line may be torn by a
        kill.
        """
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        if "DISK_ROOT" in os.environ:
            lines = [line for line in lines if _is_json(line)]
        return [json.loads(line) for line in lines]

    def last_step(self) -> int:
        return max((row["step"] for row in self.rows() if row["kind"] == "train"), default=0)


class Campaign:
    """A sequence of trials on run directories that are used until their run is complete."""

    def __init__(self, root: Path, *, seed: int, has_all_features: bool = False) -> None:
        self._root, self._seed, self._has_all_features = root, seed, has_all_features
        self._base = (*tiny_model(root), *BASE)
        self._straight: dict[tuple[int, int, int], Path] = {}
        self._num_runs = 0
        self._current: Run | None = None
        self._lost_rows: set[tuple[str, int]] = set()
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []

    def run_trial(self, number: int, how: str) -> bool:
        """Start the current run, disturb it, and check what it left. Findings go to `faults`;
        whether it was struck.
        """
        current = self._current = self._current or self._new_run(number)
        trial = Trial.draw(self._seed * 1_000_000 + number, current.world_size, how)
        moment, code = self._disturb(trial, current)
        self.counts[f"{how}: {moment}"] += 1
        found = self._check(current, code, trial.how if moment != NOT_STRUCK else "")
        if code == EXIT_DONE:
            expected = self._without_lost_rows(current)
            differences = compare_runs(expected, current.run_dir, steps=TOTAL_STEPS).differences
            found += [text for text in differences if not text.endswith("missing and missing")]
            found += _different_ends(current)
            self._current = None
            self.counts["runs completed"] += 1
        self.faults += [
            f"trial {number} ({trial}, {moment}, {current.run_dir.name}): {fault}"
            for fault in found
        ]
        return moment != NOT_STRUCK

    def _new_run(self, number: int) -> Run:
        rng = random.Random(self._seed * 7919 + number)
        world_size, (save_freq, keep) = rng.choice(WORLD_SIZES), rng.choice(RECIPES)
        words = (*self._base, f"trainer.save_freq={save_freq}", f"trainer.max_ckpt_to_keep={keep}")
        if self._has_all_features:
            world_size, words = 2, (*words, *FEATURES)
        key = (world_size, save_freq, keep)
        if key not in self._straight:
            self._straight[key] = self._root / f"straight_{world_size}_{save_freq}_{keep}"
            straight = Run(self._straight[key], world_size, words, self._straight[key])
            with _with_mirror(straight):
                code, output = whole_runs.run(
                    world_size, *_words(straight), log=straight.log, timeout_s=ENDED_WITHIN_S
                )
            assert code == EXIT_DONE, output
        self._num_runs += 1
        self._lost_rows.clear()
        return Run(self._root / f"run{self._num_runs}", world_size, words, self._straight[key])

    def _disturb(self, trial: Trial, current: Run) -> tuple[str, int | None]:
        """Start all ranks, strike, and wait until they are gone: where the strike fell, and the
        exit code.
        """
        number = signal.SIGTERM if trial.how == "preempt" else signal.SIGKILL
        begun_at = layout.read_pointer(current.run_dir).step or 0
        due_step = (
            TOTAL_STEPS
            if trial.where == "at the end"
            else begun_at + 1 + int(trial.steps * (TOTAL_STEPS - begun_at))
        )
        words = (*_words(current), *trial.words)
        with (
            _with_mirror(current),
            whole_runs.started(current.world_size, *words, log=current.log) as attempt,
        ):
            is_due = False
            while not is_due and not attempt.is_over():
                time.sleep(0.005)
                is_due = f"step {due_step}/" in attempt.output or begun_at >= TOTAL_STEPS
                is_due &= attempt.can_be_signalled
            while (
                trial.where == "in a save"
                and _moment(current.run_dir) == "elsewhere"
                and not attempt.is_over()
            ):
                time.sleep(0.001)
            time.sleep(trial.after_s)
            moment = _moment(current.run_dir) if trial.where != "at the end" else trial.where
            if not all(attempt.ranks[victim].is_alive() for victim in trial.victims):
                return NOT_STRUCK, attempt.wait(ENDED_WITHIN_S)
            if trial.how == "power cut":
                self._cut_power(trial, current, attempt)
                return moment, attempt.wait(GONE_WITHIN_S)
            attempt.send(number, *trial.victims)
            if trial.how == "kill" and len(trial.victims) == current.world_size and trial.seed % 2:
                _kill_mirrors()
            patience_s = (
                random.Random(trial.seed + 1).uniform(0.0, 0.3) if trial.how == "kill" else None
            )
            code = _gone(attempt, patience_s)
            if code is None:
                self.faults.append(f"{attempt.output}\n{attempt.stacks()}")
            return moment, code

    def _cut_power(self, trial: Trial, current: Run, attempt: Attempt) -> None:
        """Let all processes die, those that ranks have started too, and the disk forget."""
        ranks = [psutil.Process(rank.pid) for rank in attempt.ranks]
        started = [child for rank in ranks for child in rank.children(recursive=True)]
        attempt.send(signal.SIGKILL)
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        attempt.wait(GONE_WITHIN_S)
        psutil.wait_procs(started, GONE_WITHIN_S)
        before = {(row["kind"], row["step"]) for row in current.rows()}
        cut_power(current.run_dir, trial.seed)
        lost = before - {(row["kind"], row["step"]) for row in current.rows()}
        self._lost_rows |= lost
        self.counts["cuts that took rows of metrics"] += bool(lost)

    def _without_lost_rows(self, current: Run) -> Path:
        """The undisturbed run, without rows that power cuts took and that no attempt wrote again."""
        lost = self._lost_rows - {(row["kind"], row["step"]) for row in current.rows()}
        if not lost:
            return current.straight
        expected = current.run_dir.with_name(f"{current.run_dir.name}.expected")
        shutil.copytree(current.straight, expected)
        rows = [
            json.dumps(row, separators=(",", ":")) + "\n"
            for row in Run(expected, current.world_size, (), expected).rows()
            if (row["kind"], row["step"]) not in lost
        ]
        (expected / "metrics.jsonl").write_text("".join(rows))
        epochs = histories.epoch_histories(read_rows(expected / "metrics.jsonl"))
        for kind, name in histories.FILE_NAMES.items():
            (expected / name).write_text(histories._table(epochs[kind]))
        return expected

    def _check(self, current: Run, code: int | None, how: str) -> list[str]:
        """What is wrong with what a start left, which was struck by `how`, or not."""
        run_dir = current.run_dir
        if code is None:
            return [f"not gone {GONE_WITHIN_S:.0f} s after the strike"]
        found = list(_different_rows(current))
        saved = current.announced()
        try:
            chosen = choice.select(run_dir).chosen
        except Exception as error:
            return [*found, f"selection failed: {error}"]
        for info in layout.checkpoints(run_dir):
            if info.manifest is None or verify_files(info.path, info.manifest):
                found.append(f"{info.path.name} is not whole: {info.status} {info.reason}")
        step = chosen.step if chosen else 0
        if step < max(saved, default=0):
            found.append(f"step {max(saved)} was announced as saved, {step} would be continued")
        if how in ("kill", "power cut"):
            return found
        if code not in ((EXIT_DONE, EXIT_RESUMABLE) if how else (EXIT_DONE,)):
            found.append(f"exit code {code}: {current.log.read_text()[-2000:]}")
        # before the first step there is nothing to save
        if "stopped by SIGTERM;" in current.log.read_text():
            return found
        if current.last_step() - step > 1:
            found.append(f"preempted after step {current.last_step()}, {step} would be continued")
        if not is_given_back(run_dir) or logged_exit_code(run_dir) != code:
            found.append(
                f"exit code {code}, but its log says otherwise or its lock is not given back"
            )
        return found


def _words(current: Run) -> tuple[str, ...]:
    mirror = () if current.mirror is None else (f"trainer.checkpoint.mirror={current.mirror}",)
    return (*current.words, f"trainer.default_local_dir={current.run_dir}", *mirror)


@contextlib.contextmanager
def _with_mirror(current: Run) -> Iterator[None]:
    """The launcher's part, where the run has a mirror."""
    with mirrored(load_config(list(_words(current))), NodeLayout()) as refusal:
        assert refusal is None, f"the mirror refused the run with exit code {refusal}"
        yield


def _is_json(line: str) -> bool:
    """A power cut may leave holes in what was not synced."""
    with contextlib.suppress(ValueError):
        return isinstance(json.loads(line), dict)
    return False


def _kill_mirrors() -> None:
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "trainer.tools.mirror" in process.cmdline():
                process.kill()


def _different_rows(current: Run) -> list[str]:
    """Rows of any attempt that are not those of the undisturbed run, bit by bit."""
    straight = Run(current.straight, current.world_size, (), current.straight)
    expected = {(row["kind"], row["step"]): row for row in straight.rows()}
    found = []
    for row in current.rows():
        other = expected.get((row["kind"], row["step"]), {})
        if row["kind"] in COMPARED:
            # each attempt's first row has some more
            names = sorted(name for name in other if not TIMED.match(name))
            found += [
                f"step {row['step']} diverged: {name} {row.get(name)} instead of {other.get(name)}"
                for name in names
                if row.get(name) != other.get(name)
            ]
    return found


def _different_ends(current: Run) -> list[str]:
    """What a finished run holds otherwise than the undisturbed one: checkpoints, the mirror.

    The newest are kept, and a stop saves between the steps that are due: there an attempt went on.
    """
    undisturbed = layout.committed(current.straight)
    straight = Run(current.straight, current.world_size, (), current.straight)
    firsts: dict[int, int] = {}
    for row in current.rows():
        if row["kind"] == "train":
            firsts.setdefault(row["attempt"], row["step"])
    saved = sorted(straight.announced() | {step - 1 for step in firsts.values()})
    due = saved[-len(undisturbed) :]
    kept = [info.step for info in layout.committed(current.run_dir)]
    found = [] if kept == due else [f"checkpoints {kept} instead of {due}"]
    if current.mirror is not None:
        held = look(Storage(current.mirror))
        if (
            held.pointer != TOTAL_STEPS
            or TOTAL_STEPS not in held.whole
            or held.steps != held.whole.keys()
        ):
            found.append(
                f"mirror: pointer {held.pointer}, whole {sorted(held.whole)} of "
                f"{sorted(held.steps)}"
            )
    return found


def _moment(run_dir: Path) -> str:
    names = os.listdir(run_dir) if run_dir.exists() else []
    if any(name.startswith(layout.STAGING_PREFIX) and "probe" not in name for name in names):
        return "while saving"
    if any(name.startswith(layout.TRASH_PREFIX) for name in names):
        return "while rotating"
    return "elsewhere"


def _gone(attempt: Attempt, patience_s: float | None) -> int | None:
    """The exit code. When a rank was killed the others are killed `patience_s` later, as the
    launcher does.
    """
    deadline = time.monotonic() + GONE_WITHIN_S
    if patience_s is not None:
        time.sleep(patience_s)
        for process in attempt.ranks:
            process.kill()
    return attempt.wait(max(0.0, deadline - time.monotonic()))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--preemptions", type=int, default=100)
    parser.add_argument("--power-cuts", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--all-features", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(argv)
    name = "kills_all_features.json" if arguments.all_features else "kills.json"
    strikes = {"kill": arguments.kills, "preempt": arguments.preemptions}
    if arguments.power_cuts:
        name, strikes = "power_cuts.json", {"power cut": arguments.power_cuts}
        if "DISK_ROOT" not in os.environ:
            return run_on_lying_disk()
    started = time.monotonic()
    place = os.environ.get("DISK_ROOT") or os.environ.get("KILLS_DIR")
    with tempfile.TemporaryDirectory(prefix="kills-", dir=place) as directory:
        campaign = Campaign(
            Path(directory), seed=arguments.seed, has_all_features=arguments.all_features
        )
        plan = [how for how, count in strikes.items() for _ in range(count)]
        random.Random(arguments.seed).shuffle(plan)
        number = 0
        for done, how in enumerate(plan, start=1):
            while not campaign.run_trial(number := number + 1, how):
                pass
            if done % 20 == 0 or campaign.faults:
                print(
                    f"{done}/{len(plan)} {dict(campaign.counts)} faults: {campaign.faults}",
                    flush=True,
                )
            if campaign.faults:
                break
    result = {
        "command": "python tests/faults/kills.py " + " ".join(argv),
        "seed": arguments.seed,
        "strikes": strikes,
        "counts": dict(sorted(campaign.counts.items())),
        "faults": campaign.faults,
        "minutes": round((time.monotonic() - started) / 60, 1),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    write_result(arguments.output or RESULTS / name, result)
    print(json.dumps(result, indent=1))
    return 1 if campaign.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
