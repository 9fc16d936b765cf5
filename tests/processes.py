"""What tests ask of processes that they started or that were started for them."""

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that is dead and only not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
