"""The safeguards of checkpoint and resume, and what the CUDA paths need, removed one at a time: the
tests named beside each must then fail.

`python tests/faults/mutations.py` runs all of them in a copy of the repository and writes
benchmarks/results/mutations.json at the end; `--only TEXT` runs those with that in their name and
writes nothing. test_mutations.py keeps the lists in step with the code.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from gpu_safeguards import GPU_SAFEGUARDS
from safeguards import SAFEGUARDS

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results" / "mutations.json"
MUTATIONS = (*SAFEGUARDS, *GPU_SAFEGUARDS)


def mutated_copy(mutation, target):
    """A copy of the repository with one safeguard removed."""
    for name in ("trainer", "tests", "conf", "docs"):
        shutil.copytree(
            REPOSITORY / name, target / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "run_sft.sh", "README.md"):
        shutil.copy(REPOSITORY / name, target / name)
    path = target / "trainer" / mutation.file
    path.write_text(apply(mutation, path.read_text()))


def apply(mutation, text):
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"'{mutation.name}': what it removes stands {text.count(mutation.old)} times in "
            f"{mutation.file}"
        )
    return text.replace(mutation.old, mutation.new)


def caught_by(mutation):
    """Return the first test file that fails without the safeguard; None if all pass."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        root = Path(directory)
        mutated_copy(mutation, root)
        for test in mutation.tests:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "--timeout=300", f"tests/{test}"]
            environment = {**os.environ, "PYTHONPATH": str(root)}
            done = subprocess.run(
                command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            if done.returncode == 1:
                return test
            if done.returncode != 0:
                raise RuntimeError(
                    f"'{mutation.name}': {test} could not run:\n{done.stdout.decode()[-3000:]}"
                )
    return None


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args(argv)
    started = time.monotonic()
    found = {}
    for mutation in MUTATIONS:
        if arguments.only in mutation.name:
            test = caught_by(mutation)
            found[mutation.name] = test
            print("MISSED" if test is None else "caught", mutation.name, flush=True)
    missed = [name for name, test in found.items() if test is None]
    if not arguments.only:
        result = {
            "command": "python tests/faults/mutations.py",
            "failed test by safeguard removed": found,
            "missed": missed,
            "minutes": round((time.monotonic() - started) / 60, 1),
        }
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(found) - len(missed)} of {len(found)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
