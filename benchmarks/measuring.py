"""Shared by all benchmarks: timed commands, the ceiling of the machine, versions, results as JSON
and as a table.
"""

import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from result_file import write_result as write_json

RESULTS = Path(__file__).resolve().parent / "results"
REPOSITORY = RESULTS.parent.parent
PEERS_VENV = REPOSITORY / ".venv-peers"


def run_command(
    words: list[str],
    *,
    cwd: Path,
    log: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    expected_code: int = 0,
) -> tuple[float, resource.struct_rusage]:
    """Return wall seconds and resources used. Raises an error with the end of the output if the
    command ends with a different code.

    `environment` is added to the environment of this process.
    """
    started = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(
            words,
            cwd=cwd,
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != expected_code:
        raise RuntimeError(
            f"{' '.join(words)} ended with {process.returncode}:\n{log.read_text()[-4000:]}"
        )
    return wall_s, usage


def gemm_gflops(
    dtype: torch.dtype, size: int = 2048, repeats: int = 10, device: str = "cpu"
) -> float:
    """Return the best rate of one square matrix product, the ceiling for shares. On a CPU it uses
    all threads.
    """
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    best_s = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        a @ b
        if a.is_cuda:
            torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - started)
    return 2 * size**3 / best_s / 1e9


def peer_versions(*packages: str) -> dict[str, str]:
    code = f"from importlib.metadata import version; print(*map(version, {packages!r}))"
    found = subprocess.run(
        [PEERS_VENV / "bin" / "python", "-c", code], check=True, capture_output=True, text=True
    )
    return dict(zip(packages, found.stdout.split(), strict=True))


def described_commit() -> str:
    words = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    return done.stdout.strip()


COMMIT = os.environ.get("COMMIT") or described_commit()
"""Return the commit at the start of the benchmark, because it may change during the benchmark.

A copy without a git directory reads it from the environment variable COMMIT.
"""


def header() -> dict[str, Any]:
    """Return the command (with file names only), commit, versions and machine for a result file."""
    if not COMMIT:
        raise SystemExit("the commit is not known.\nFix: set the environment variable COMMIT to it")
    arguments = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return {
        "command": " ".join(
            ["python", str(Path(sys.argv[0]).resolve().relative_to(REPOSITORY)), *arguments]
        ),
        "commit": COMMIT,
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "transformers")},
        "machine": {
            "cpus": os.cpu_count(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        },
    }


def middle(values: Iterable[float]) -> dict[str, float]:
    """Median and both extremes."""
    found = list(values)
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def table(columns: list[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def write_result(name: str, result: dict[str, Any], path: Path | None = None) -> None:
    path = path or RESULTS / f"{name}.json"
    write_json(path, result)
    print(f"wrote {path}")


def peak_bytes() -> int:
    """Return the peak of this process's resident memory. Unlike `ru_maxrss`, it does not start at
    its parent's peak.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
