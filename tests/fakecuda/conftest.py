"""A process in which torch sees eight GPUs, shared by the tests of this directory."""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fake_cuda
import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def fake_runs(tmp_path_factory):
    """Runs a case (fields of `fake_step.Case`, and its `kind`) there, once; what it did."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to build the fake device with")
    directory = tmp_path_factory.mktemp("fake_cuda")
    library = fake_cuda.build(directory)
    errors = directory / "stderr"
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)])
    with (
        open(errors, "w") as stderr,
        subprocess.Popen(
            [sys.executable, str(HERE / "fake_step.py"), str(library)],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):

        @functools.cache
        def answer(line):
            print(line, file=process.stdin, flush=True)
            while text := process.stdout.readline():
                if text.startswith("{"):
                    return json.loads(text)
            raise AssertionError(f"{line}:\n{errors.read_text()[-4000:]}")

        yield lambda **case: answer(json.dumps(case))
        process.stdin.close()
