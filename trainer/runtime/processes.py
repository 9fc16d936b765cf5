"""Processes of this machine: what one does, that it ends with its parent, another interpreter.

And work in a thread that may never end.
"""

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

STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def status_of(process: psutil.Process) -> str:
    """Return psutil's status of the process; '' when it has ended, reaped or not, or when its number
    belongs to another process by now.
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
    """Clock ticks from the boot of the machine to the start of a process: with its number, which
    others are given once it has ended, and after a restart of a container soon, that tells it from
    them. None where nothing says it.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace", encoding="utf-8")
        return int(stat.rpartition(")")[2].split()[19])
    except (OSError, LookupError, ValueError):
        return None


def die_with_parent(parent_pid: int, *, code: int) -> None:
    """Have this process killed when its parent ends, however that ends; leave with `code` if it
    has ended already.
    """
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):  # no Linux
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(code)


def name_signal(number: int) -> str:
    """The name of the signal that killed a process, with the likely reason."""
    reason = " (likely out of host memory)" if number == signal.SIGKILL else ""
    return signal.Signals(number).name + reason


def run_in(python: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Another interpreter, to its end; what PYTHONPATH and its like say is meant for this one."""
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
    """Begin the work in a thread that does not hold up the end of the process: a storage, or a
    stopped process, may never answer.
    """
    answer = Future[T]()

    def in_thread() -> None:
        try:
            answer.set_result(work())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=in_thread, name=name, daemon=True).start()
    return answer


def kill_tree(pid: int, *, limit_s: float = 30.0) -> None:
    """Kill a process and every process below it. All are stopped first, so that none starts another.

    Waits until they are gone, at most `limit_s`.
    """
    deadline = time.monotonic() + limit_s
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
