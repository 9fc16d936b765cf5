"""Benchmarks use functions that exist: CI imports them but does not run them."""

import os
import subprocess
import sys

from repository import REPOSITORY


def test_every_benchmark_can_be_imported():
    folder = REPOSITORY / "benchmarks"
    names = sorted(path.stem for path in folder.glob("*.py"))
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(f"import {name}" for name in names)],
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{folder}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert len(names) > 10 and done.returncode == 0, done.stderr
