"""Let allocations of a run fail, at the start, while it resumes, trains, saves and exports, and prove
that nothing is lost.

`python tests/faults/allocations.py --cases 100 --seed 1` writes benchmarks/results/allocations.json.
A case is the run of failpoints.py on 2 ranks, continued from its checkpoint. One rank lacks memory
for one drawn allocation of at least 16 KiB (shim.c), or for each from there on.
"""

import argparse
import collections
import ctypes
import os
import pickle
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from faults.announced import train
from faults.failpoints import RECIPE, Matrix, Scene
from faults.lying_disk import run_on_lying_disk
from faults.save_points import Survey
from ranks import started_ranks
from result_file import write_result

from trainer.runtime.distributed import World

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "allocations.json"
ENDED_WITHIN_S = 100.0
NAMED = ("memory", "allocate", "bad_alloc", "bad alloc", "bad allocation")
"""Words of an error that names its cause."""


def train_with_failure(
    world: World, run_dir: Path, source: Any, rank: int, number: int, *, is_lasting: bool
) -> tuple[int, int]:
    """Return the exit code and the number of allocations."""
    shim = ctypes.CDLL(None)
    if world.rank == rank:
        shim.fail_allocation(number, int(is_lasting))
    try:
        code = train(world, run_dir, source, RECIPE)
    finally:
        num_seen = shim.fail_allocation(0, 0)
    return code, num_seen


def run_case(matrix: Matrix, run_dir: Path, chance: random.Random, limit: int) -> tuple[str, str]:
    """Return how one drawn case ended, and what is wrong."""
    rank, number, is_lasting = chance.randrange(2), chance.randint(1, limit), chance.random() < 0.3
    with started_ranks(
        train_with_failure, 2, run_dir, matrix.source, rank, number, is_lasting=is_lasting
    ) as ranks:
        deadline = time.monotonic() + ENDED_WITHIN_S
        for process, _ in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        victim, receiver = ranks[rank]
        code = victim.exitcode
        said = pickle.loads(receiver.recv_bytes())[1] if code in (0, 1) else ""
        is_over = all(process.exitcode is not None for process, _ in ranks)
    found = [] if is_over else ["not gone in time"]
    how = f"ended with exit code {said[0]}" if code == 0 else "named the cause"
    if code is not None and code < 0:
        how = f"killed by {signal.Signals(-code).name} in a library"
    elif code != 0 and not any(word in _message(said) for word in NAMED):
        found.append(f"the error does not name the cause: {said[-1500:]}")
    survey = Survey.of(run_dir)
    if survey.broken or survey.chosen not in survey.steps:
        found.append(f"harmed: {survey}")
    found += matrix._strayed(run_dir) or matrix._resume(run_dir)
    place = f"rank {rank}, allocation {number}{' and all later' if is_lasting else ''}"
    return how, f"{place}: {'; '.join(found)}" if found else ""


def _message(stack: str) -> str:
    """Return what stands after the last call of a Python stack."""
    lines = stack.lower().splitlines()
    calls = [number for number, line in enumerate(lines) if line.startswith("    ")]
    last_call = max(calls, default=-1)
    return "\n".join(lines[last_call + 1 :])


def run_cases(root: Path, num_cases: int, seed: int) -> dict[str, Any]:
    counts: collections.Counter[str] = collections.Counter()
    scene, chance, faults = Scene(root / "scene"), random.Random(seed), []
    matrix = Matrix(scene, root / "observed", async_save=False)
    with started_ranks(
        train_with_failure,
        2,
        scene.copy_to(root / "counted"),
        matrix.source,
        0,
        0,
        is_lasting=False,
    ) as ranks:
        _, (_, num_allocations) = pickle.loads(ranks[0][1].recv_bytes())
    for number in range(num_cases):
        how, fault = run_case(matrix, scene.copy_to(root / "case"), chance, num_allocations)
        shutil.rmtree(root / "case")
        counts[how] += 1
        faults += [fault] if fault else []
        if number % 10 == 9 or fault:
            print(f"{number + 1}/{num_cases} {dict(counts)} {faults}", flush=True)
    return {"allocations of a run": num_allocations, "counts": dict(counts), "faults": faults}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    if "DISK_ROOT" not in os.environ:
        return run_on_lying_disk()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="allocations-") as directory:
        found = run_cases(Path(directory), arguments.cases, arguments.seed)
    result = {
        "command": " ".join(["python tests/faults/allocations.py", *argv]),
        "seed": arguments.seed,
        "cases": arguments.cases,
        **found,
        "minutes": round((time.monotonic() - started) / 60, 1),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    write_result(arguments.output, result)
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    from faults.allocations import main  # the ranks know these functions by this name

    sys.exit(main(sys.argv[1:]))
