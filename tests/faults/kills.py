"""Kill and preempt real training runs at random moments, and prove each time that nothing is lost.

`python tests/faults/kills.py --kills 300 --preemptions 100 --seed 11` writes
benchmarks/results/kills.json. A trial is fixed by its seed up to the moment within the run, which
depends on the machine. Each start is the real command with all its parts (loader workers in half of
them, validation, trackers, report) on a small model; `tests/whole_runs.py` is its launcher. A run is
struck until a start of it ends undisturbed. It must then have left all that an undisturbed run
leaves: all numbers of each row except times, final state, histories, report, checkpoints, pointer,
end and lock. A strike that meets no living rank is repeated.

`--power-cuts N` uses a disk that keeps only what was synced (lying_disk.py): all processes die at
once, and each unsynced name and block of the run directory survives or not. Rows that such a cut
took may be missing at the end. It writes benchmarks/results/power_cuts.json.
"""

import collections
import contextlib
import json
import os
import random
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil
import whole_runs
from faults.campaign import parser_of, run_campaign
from faults.lying_disk import cut_power, run_on_lying_disk
from whole_equality import compare_runs, logged_exit_code
from whole_runs import tiny_model

from trainer.checkpoint import choice, layout
from trainer.checkpoint.lock import is_given_back
from trainer.checkpoint.manifest import verify_files
from trainer.errors import EXIT_DONE, EXIT_RESUMABLE
from trainer.tracking import histories

WORLD_SIZES = (1, 2, 2, 2, 3)
RECIPES = ((1, 1), (2, 2), (3, 2))
"""Steps between saves, checkpoints kept."""
TOTAL_STEPS = 10
BASE = (
    f"trainer.total_training_steps={TOTAL_STEPS}",
    "trainer.test_freq=3",
    "trainer.hang_timeout_s=120",
)
LATEST_S = {"after a step": 0.3, "in a save": 0.06, "at the end": 1.0}
"""Where a trial strikes, and the longest wait from that point."""
GONE_WITHIN_S = 30.0
"""torchrun lets a rank that waits in C code live for 30 s after another rank has exited."""
ENDED_WITHIN_S = 120.0
NOT_STRUCK = "over before the strike"
TIMED = re.compile(
    "ts|attempt|train/time|(time|throughput|memory|system|ckpt|obs)/|progress/(attempt|elapsed|eta|goodput|lost)"
)
"""Values that differ between equal runs."""


@dataclass(frozen=True)
class Trial:
    """The disturbance of one start of a run: strike `after_s` after a step, in the next save, or at
    the end.

    `steps`: share of the remaining steps.
    """

    seed: int
    how: str
    where: str
    victims: tuple[int, ...]
    steps: float
    after_s: float
    words: tuple[str, ...]

    @classmethod
    def draw(cls, seed, world_size, how):
        rng = random.Random(seed)
        where = rng.choice(("after a step", *LATEST_S))
        after_s = rng.uniform(0.0, LATEST_S[where])
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
    """A run in progress. `straight`: the directory of an undisturbed run."""

    run_dir: Path
    world_size: int
    words: tuple[str, ...]
    straight: Path

    @property
    def log(self):
        return self.run_dir.with_suffix(".log")

    @property
    def all_words(self):
        return (*self.words, f"trainer.default_local_dir={self.run_dir}")


def announced(run_dir):
    """Return the steps that the last attempt reported as saved."""
    output = run_dir.with_suffix(".log").read_text()
    return set(map(int, re.findall(r"saved \S+/global_step_(\d+)\b", output)))


def rows_of(run_dir):
    """Return the rows of every attempt by kind, step and attempt. A kill may tear the last line, a
    power cut any line.
    """
    path = run_dir / "metrics.jsonl"
    rows = {}
    for line in path.read_text().split("\n")[:-1] if path.exists() else []:
        with contextlib.suppress(ValueError if "DISK_ROOT" in os.environ else ()):
            row = json.loads(line)
            rows[row["kind"], row["step"], row.get("attempt", 0)] = row
    return rows


def places_of(run_dir):
    return {(kind, step) for kind, step, _ in rows_of(run_dir)}


class Campaign:
    """A sequence of trials on runs. Each run is used until it is complete."""

    def __init__(self, root, *, seed):
        self._root = root
        self._seed = seed
        self._base = (*tiny_model(root), *BASE)
        self._num_runs = 0
        self._current = None
        self._lost_rows = set()
        self.counts = collections.Counter()
        self.faults = []

    def run_all(self, strikes):
        """Strike according to `strikes` (number by kind) until there is a fault."""
        plan = [how for how, count in strikes.items() for _ in range(count)]
        random.Random(self._seed).shuffle(plan)
        number = 0
        for done, how in enumerate(plan, start=1):
            while not self._run_trial(number := number + 1, how):
                pass
            if done % 20 == 0 or self.faults:
                print(f"{done}/{len(plan)} {dict(self.counts)} {self.faults}", flush=True)
            if self.faults:
                break

    def _run_trial(self, number, how):
        """Start the current run, strike it, and check the result. Return False if it was not
        struck.
        """
        current = self._current = self._current or self.new_run(number)
        trial = Trial.draw(self._seed * 1_000_000 + number, current.world_size, how)
        moment, code = self._strike(trial, current)
        self.counts[f"{how}: {moment}"] += 1
        found = check(current, code, trial.how if moment != NOT_STRUCK else "")
        if code == EXIT_DONE:
            found += self._differences(current) + different_checkpoints(current)
            self._current = None
            self.counts["runs completed"] += 1
        place = f"trial {number} ({trial}, {moment}, {current.run_dir.name})"
        self.faults += [f"{place}: {fault}" for fault in found]
        return moment != NOT_STRUCK

    def new_run(self, number):
        rng = random.Random(self._seed * 7919 + number)
        world_size, (save_freq, keep) = rng.choice(WORLD_SIZES), rng.choice(RECIPES)
        words = (*self._base, f"trainer.save_freq={save_freq}", f"trainer.max_ckpt_to_keep={keep}")
        straight = self._root / f"straight_{world_size}_{save_freq}_{keep}"
        if not straight.exists():
            whole_runs.train(straight, world_size, *words, timeout_s=ENDED_WITHIN_S)
        self._num_runs += 1
        self._lost_rows.clear()
        return Run(self._root / f"run{self._num_runs}", world_size, words, straight)

    def _strike(self, trial, current):
        """Start all ranks, strike, and wait until they are gone. Return the place of the strike,
        and the exit code.
        """
        begun_at = layout.read_pointer(current.run_dir).step or 0
        due_step = begun_at + 1 + int(trial.steps * (TOTAL_STEPS - begun_at))
        if trial.where == "at the end":
            due_step = TOTAL_STEPS
        words = (*current.all_words, *trial.words)
        with whole_runs.started(current.world_size, *words, log=current.log) as attempt:
            while not attempt.is_over():
                is_due = f"step {due_step}/" in attempt.output or begun_at >= TOTAL_STEPS
                if is_due and attempt.can_be_signalled:
                    break
                time.sleep(0.005)
            while trial.where == "in a save" and not attempt.is_over():
                if moment_of(current.run_dir) != "elsewhere":
                    break
                time.sleep(0.001)
            time.sleep(trial.after_s)
            moment = trial.where if trial.where == "at the end" else moment_of(current.run_dir)
            if not all(attempt.ranks[victim].is_alive() for victim in trial.victims):
                return NOT_STRUCK, attempt.wait(ENDED_WITHIN_S)
            if trial.how == "preempt":
                attempt.send(signal.SIGTERM, *trial.victims)
            elif trial.how == "kill":
                attempt.send(signal.SIGKILL, *trial.victims)
                # The launcher kills the others when a rank is lost.
                time.sleep(random.Random(trial.seed + 1).uniform(0.0, 0.3))
                attempt.send(signal.SIGKILL)
            else:
                self._cut_power(trial, current, attempt)
            code = attempt.wait(GONE_WITHIN_S)
            if code is None:
                self.faults.append(f"{attempt.output}\n{attempt.stacks()}")
            return moment, code

    def _cut_power(self, trial, current, attempt):
        """Kill all processes, including those started by ranks, and let the disk forget."""
        ranks = [psutil.Process(rank.pid) for rank in attempt.ranks]
        started = [child for rank in ranks for child in rank.children(recursive=True)]
        attempt.send(signal.SIGKILL)
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        attempt.wait(GONE_WITHIN_S)
        psutil.wait_procs(started, GONE_WITHIN_S)
        before = rows_of(current.run_dir).keys()
        cut_power(current.run_dir, trial.seed)
        lost = before - rows_of(current.run_dir).keys()
        self._lost_rows |= lost
        self.counts["cuts that took rows of metrics"] += bool(lost)

    def _differences(self, current):
        """Return the differences between the run and the undisturbed one, except for rows that
        power cuts lost and no attempt repeated.
        """
        differences = compare_runs(current.straight, current.run_dir, steps=TOTAL_STEPS).differences
        # an older attempt's row of the same step does not count: its steps were undone
        newest = {(kind, step): attempt for kind, step, attempt in sorted(rows_of(current.run_dir))}
        lost = {
            (kind, step)
            for kind, step, attempt in self._lost_rows
            if newest.get((kind, step), 0) < attempt
        }
        names = {"train": "step {},", "val": "validation of step {},"}
        taken = tuple(names[kind].format(step) for kind, step in lost if kind in names)
        if lost:  # the histories lack them too
            taken += tuple(histories.FILE_NAMES.values())
        return [text for text in differences if not text.startswith(taken)]


def check(current, code, how):
    """Return the faults in the result of a start that was struck by `how`, or not at all."""
    run_dir = current.run_dir
    if code is None:
        return [f"not gone {GONE_WITHIN_S:.0f} s after the strike"]
    found = different_rows(current)
    saved = announced(run_dir)
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
    output = current.log.read_text()
    if code not in ((EXIT_DONE, EXIT_RESUMABLE) if how else (EXIT_DONE,)):
        found.append(f"exit code {code}: {output[-2000:]}")
    if "stopped by SIGTERM;" in output:  # before the first step there is nothing to save
        return found
    last_step = max((step for kind, step in places_of(run_dir) if kind == "train"), default=0)
    if last_step - step > 1:
        found.append(f"preempted after step {last_step}, {step} would be continued")
    if not is_given_back(run_dir) or logged_exit_code(run_dir) != code:
        found.append(f"exit code {code}, but its log differs or its lock is not given back")
    return found


def different_rows(current):
    """Return numbers of any attempt that differ in a bit from the undisturbed run."""
    expected = {(kind, step): row for (kind, step, _), row in rows_of(current.straight).items()}
    found = []
    for (kind, step, _), row in rows_of(current.run_dir).items():
        # Each attempt's first row has some more.
        for name, value in expected.get((kind, step), {}).items():
            is_compared = kind in ("train", "val") and not TIMED.match(name)
            if is_compared and row.get(name) != value:
                found.append(f"step {step} diverged: {name} {row.get(name)} instead of {value}")
    return found


def different_checkpoints(current):
    """Return the differences between the checkpoints of a finished run and those due.

    The newest are kept. A stop saves between the due steps, at steps where an attempt continued.
    """
    undisturbed = layout.committed(current.straight)
    firsts = {}
    for kind, step, attempt in rows_of(current.run_dir):
        if kind == "train":
            firsts.setdefault(attempt, step)
    saved = sorted(announced(current.straight) | {step - 1 for step in firsts.values()})
    due = saved[-len(undisturbed) :]
    kept = [info.step for info in layout.committed(current.run_dir)]
    return [] if kept == due else [f"checkpoints {kept} instead of {due}"]


def moment_of(run_dir):
    names = os.listdir(run_dir) if run_dir.exists() else []
    if any(name.startswith(layout.STAGING_PREFIX) and "probe" not in name for name in names):
        return "while saving"
    if any(name.startswith(layout.TRASH_PREFIX) for name in names):
        return "while rotating"
    return "elsewhere"


def work(root, arguments):
    strikes = {"kill": arguments.kills, "preempt": arguments.preemptions}
    if arguments.power_cuts:
        strikes = {"power cut": arguments.power_cuts}
    campaign = Campaign(root, seed=arguments.seed)
    campaign.run_all(strikes)
    counts = dict(sorted(campaign.counts.items()))
    return {"strikes": strikes, "counts": counts, "faults": campaign.faults}


def main(argv):
    parser = parser_of(__doc__, kills=200, preemptions=100, power_cuts=0, seed=1)
    has_cuts = bool(parser.parse_args(argv).power_cuts)
    if has_cuts and "DISK_ROOT" not in os.environ:
        return run_on_lying_disk()
    return run_campaign("kills", parser, argv, work, result="power_cuts" if has_cuts else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
