"""Processes that tests have started and that are still running."""

import contextlib
import os
from multiprocessing import forkserver, resource_tracker

import psutil

from trainer.runtime.processes import status_of

MARK = "STARTED_BY_TESTS_OF"
"""A variable in the environment of all processes that tests start, so that even orphans are found.
"""


def left_running():
    """Return all of them except the two that multiprocessing keeps until the interpreter ends."""
    kept = {
        os.getpid(),
        forkserver._forkserver._forkserver_pid,
        resource_tracker._resource_tracker._pid,
    }
    found = set(psutil.Process().children(recursive=True))
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(os.getpid()):
                found.add(process)
    return sorted(
        (p for p in found if p.pid not in kept and status_of(p)), key=lambda process: process.pid
    )


def describe(process):
    with contextlib.suppress(psutil.Error):
        return f"{process.pid}: {' '.join(process.cmdline())[:200]}"
    return f"{process.pid}: gone meanwhile"
