"""Manages processes on this machine, and runs work that may never finish in a thread."""

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")
GONE_WITHIN_S = 30.0


def status_of(process: psutil.Process) -> str:
    """Return psutil's status of the process; '' if it has ended (reaped or not) or its PID now
    belongs to another process.
    """
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


def born_at(pid: int) -> int | None:
    """Return the clock ticks from the boot of the machine to the start of a process; None if
    unknown.

    Pids are reused, especially after a container restarts. The pid and this number together
    identify a process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace", encoding="utf-8")
        return int(stat.rpartition(")")[2].split()[19])
    except (OSError, LookupError, ValueError):
        return None


def die_with_parent(parent_pid: int, *, code: int) -> None:
    """Ask the kernel to kill this process when its parent ends. Exit with `code` if the parent has
    already ended.
    """
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(code)


def name_signal(number: int) -> str:
    """Return the name of the signal that killed a process, with the likely reason."""
    reason = " (likely out of host memory)" if number == signal.SIGKILL else ""
    return signal.Signals(number).name + reason


def run_in(python: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a different Python interpreter to its end, without PYTHONPATH and similar variables,
    which are meant for this interpreter.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(
        [python, *words],
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def begun(work: Callable[[], T], *, name: str | None = None) -> Future[T]:
    """Begin the work in a daemon thread, which cannot delay the end of the process even if a
    storage never answers.
    """
    answer = Future[T]()

    def in_thread() -> None:
        try:
            answer.set_result(work())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(
        target=in_thread,
        name=name,
        daemon=True,
    ).start()
    return answer


def kill_tree(pid: int) -> None:
    """Kill a process and every process below it. All are stopped first, so that none starts
    another.

    Waits until they are gone, at most `GONE_WITHIN_S`.
    """
    deadline = time.monotonic() + GONE_WITHIN_S
    seen: set[psutil.Process] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        root.suspend()
        while time.monotonic() < deadline:
            found = {process for process in root.children(recursive=True) if status_of(process)}
            if not found:
                break
            number = signal.SIGKILL if found <= seen else signal.SIGSTOP
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            seen |= found
        root.kill()
