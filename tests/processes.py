"""Waiting for what processes do."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()
