"""Processes of this machine: what one does, and that it ends with its parent (floor 1, no torch)."""

import contextlib
import ctypes
import os
import signal

import psutil

STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def status_of(process: psutil.Process) -> str:
    """What the process does in psutil's words; empty when it has ended, reaped or not, or is another by now."""
    try:
        status = str(process.status()) if process.is_running() else ""
    except psutil.Error:
        return ""
    return "" if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else status


def is_alive(pid: int) -> bool:
    try:
        return status_of(psutil.Process(pid)) != ""
    except psutil.NoSuchProcess:
        return False


def die_with_parent(parent_pid: int, *, code: int) -> None:
    """Have this process killed when its parent ends, however that ends; leave with `code` if it has ended already."""
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):  # no Linux
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(code)
