"""Run Python in a separate process, wait for processes, and end what takes too long."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

from repository import REPOSITORY


class TookTooLongError(BaseException):
    """Code exceeded its time limit. No `except Exception` or `except OSError` in the code hides
    this.
    """


def run_python(*words, timeout_s=120.0, **options):
    """Run `python *words` on this checkout, and keep the output."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    settings = {"env": environment, "timeout": timeout_s, **options}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, **settings)


@contextmanager
def time_limit(what, limit_s):
    """Raise `TookTooLongError` in code that takes longer than `limit_s`."""

    def give_up(number, frame):
        raise TookTooLongError(f"{what} takes longer than {limit_s} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def wait_until(condition, *, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def free_port():
    """A port of this machine on which nobody listens, below those of outgoing connections."""
    while True:
        port = secrets.choice(range(10000, 32768))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
