"""Let allocations of a run fail while it starts, resumes, trains, saves and exports, and prove that
nothing is lost.

`python tests/faults/allocations.py --cases 100 --seed 1` writes benchmarks/results/allocations.json.
A case is a run on 2 ranks, continued from its checkpoint. On one rank one drawn allocation of at
least 16 KiB fails (shim.c), or each from there on. An undisturbed start must then finish the run.
"""

import collections
import ctypes
import os
import pickle
import random
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from faults.campaign import parser_of, run_campaign
from faults.lying_disk import run_on_lying_disk
from faults.save_points import Survey
from ranks import run_ranks, started_ranks
from toy_runs import TRACE, Recipe, odd_model, read_trace, run

from trainer.checkpoint import layout

RECIPE = Recipe(total_steps=8, save_freq=2, keep=1, has_trace=True)
BEGUN = 4
"""Each case continues from this step."""
ENDED_WITHIN_S = 100.0
NAMED = ("memory", "allocate", "bad_alloc", "bad alloc", "bad allocation")
"""Words in an error that name its cause."""


class Scene:
    """A straight run, and the directory from which every case continues: a crash left it before the
    checkpoint of `BEGUN` was published, and with a half-written save.
    """

    def __init__(self, root):
        self.source = odd_model(root / "model")
        straight = root / "straight"
        self._prepared = root / "prepared"
        straight.mkdir()
        run_ranks(run, 2, straight, self.source, replace(RECIPE, keep=None))
        self._rows = {row["step"]: row for row in read_trace(straight)}
        for name in ("global_step_2", f"global_step_{BEGUN}"):
            shutil.copytree(straight / name, self._prepared / name)
        (self._prepared / f"global_step_{BEGUN}" / layout.PUBLISHED).unlink()
        shutil.copytree(straight / "global_step_2", self._prepared / ".staging_global_step_6.0123")
        (self._prepared / layout.POINTER).write_text("2")
        lines = (straight / TRACE).read_text().splitlines(keepends=True)
        (self._prepared / TRACE).write_text("".join(lines[:BEGUN]))

    def copy_to(self, run_dir):
        return Path(shutil.copytree(self._prepared, run_dir))

    def diverged(self, run_dir):
        rows = read_trace(run_dir)
        return [f"diverged: {row}" for row in rows if row != self._rows[row["step"]]]

    def resume(self, run_dir):
        """Train to the end, as without the failure, and leave nothing behind."""
        run_ranks(run, 2, run_dir, self.source, RECIPE)
        found = self.diverged(run_dir)
        survey = Survey.of(run_dir)
        if {row["step"] for row in read_trace(run_dir)} != self._rows.keys():
            found.append("steps are missing in the trace after the resume")
        if survey != Survey(RECIPE.total_steps, (RECIPE.total_steps,)):
            found.append(f"after the resume: {survey}")
        return found


def train_with_failure(world, run_dir, source, rank, number, *, is_lasting):
    """Return the exit code and the number of allocations."""
    errors = os.open(run_dir.with_suffix(f".{world.rank}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(errors, 2)
    shim = ctypes.CDLL(None)
    if world.rank == rank:
        shim.fail_allocation(number, int(is_lasting))
    try:
        code = run(world, run_dir, source, RECIPE).exit_code
    finally:
        num_seen = shim.fail_allocation(0, 0)
    return code, num_seen


def run_case(scene, run_dir, rank, number, *, is_lasting=False):
    """Return how a case ended, and its faults."""
    with started_ranks(
        train_with_failure, 2, run_dir, scene.source, rank, number, is_lasting=is_lasting
    ) as ranks:
        deadline = time.monotonic() + ENDED_WITHIN_S
        for process, _ in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        victim, receiver = ranks[rank]
        code = victim.exitcode
        result = pickle.loads(receiver.recv_bytes())[1] if code in (0, 1) else ""
        is_over = all(process.exitcode is not None for process, _ in ranks)
    found = [] if is_over else ["not gone in time"]
    how = f"ended with exit code {result[0]}" if code == 0 else "named the cause"
    if code is not None and code < 0:
        how = f"killed by {signal.Signals(-code).name} in a library"
    elif code != 0:
        errors = run_dir.with_suffix(f".{rank}").read_text()
        found += unnamed(message(result) if code == 1 else errors)
    survey = Survey.of(run_dir)
    if survey.broken or survey.chosen not in survey.steps:
        found.append(f"harmed: {survey}")
    return how, found + (scene.diverged(run_dir) or scene.resume(run_dir))


def unnamed(said):
    """Return a fault unless the text of an error names the cause.

    If a thread has no memory for its variables, the C library ends the process with code 127. It
    names the cause on the error stream, to which Python then writes nothing.
    """
    is_named = any(word in said.lower() for word in NAMED)
    return [] if is_named else [f"the error does not name the cause: {said[-1500:]}"]


def message(stack):
    """Return the text after the last call of a Python stack."""
    lines = stack.splitlines()
    calls = [number for number, line in enumerate(lines) if line.startswith("    ")]
    return "\n".join(lines[max(calls, default=-1) + 1 :])


def run_cases(root, arguments):
    counts = collections.Counter()
    scene = Scene(root)
    chance = random.Random(arguments.seed)
    faults = []
    counted = scene.copy_to(root / "counted")
    results = run_ranks(train_with_failure, 2, counted, scene.source, 0, 0, is_lasting=False)
    num_allocations = results[0][1]
    for done in range(1, arguments.cases + 1):
        rank = chance.randrange(2)
        number = chance.randint(1, num_allocations)
        is_lasting = chance.random() < 0.3
        case = scene.copy_to(root / "case")
        how, found = run_case(scene, case, rank, number, is_lasting=is_lasting)
        shutil.rmtree(case)
        counts[how] += 1
        place = f"rank {rank}, allocation {number}{' and all later' if is_lasting else ''}"
        faults += [f"{place}: {fault}" for fault in found]
        if done % 10 == 0 or found:
            print(f"{done}/{arguments.cases} {dict(counts)} {faults}", flush=True)
    return {"allocations of a run": num_allocations, "counts": dict(counts), "faults": faults}


def main(argv):
    if "DISK_ROOT" not in os.environ:
        return run_on_lying_disk()
    return run_campaign("allocations", parser_of(__doc__, cases=100, seed=1), argv, run_cases)


if __name__ == "__main__":
    from faults.allocations import main  # the ranks know these functions by this name

    sys.exit(main(sys.argv[1:]))
