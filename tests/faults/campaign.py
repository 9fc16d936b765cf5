"""Shared by the campaigns: a working directory, and the result file with its command and versions."""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from repository import REPOSITORY
from result_file import write_result

RESULTS = REPOSITORY / "benchmarks" / "results"
Work = Callable[[Path, argparse.Namespace], dict[str, Any]]


def parser_of(description, **numbers):
    """Return a parser with `--output` and an option for each number, with its default."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--output", type=Path)
    return parser


def run_campaign(name, parser, argv, work, *, result=""):
    """Run `work` in a temporary directory and write its result. Return 1 if it has faults."""
    arguments = parser.parse_args(argv)
    started = time.monotonic()
    place = os.environ.get("DISK_ROOT") or os.environ.get("KILLS_DIR")
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=place) as directory:
        found = work(Path(directory), arguments)
    found = {
        "command": " ".join([f"python tests/faults/{name}.py", *argv]),
        **found,
        "minutes": round((time.monotonic() - started) / 60, 1),
        "versions": {"python": platform.python_version(), "torch": version("torch")},
    }
    write_result(arguments.output or RESULTS / f"{result or name}.json", found)
    print(json.dumps(found, indent=1))
    return 1 if found["faults"] else 0
