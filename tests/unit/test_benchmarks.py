"""Benchmarks use functions that exist: CI imports them but does not run them."""

import os

from processes import run_python
from repository import REPOSITORY


def test_every_benchmark_can_be_imported():
    folder = REPOSITORY / "benchmarks"
    names = sorted(path.stem for path in folder.glob("*.py"))
    env = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{folder}"}
    done = run_python("-c", "\n".join(f"import {name}" for name in names), env=env)
    assert len(names) > 10 and done.returncode == 0, done.stderr
