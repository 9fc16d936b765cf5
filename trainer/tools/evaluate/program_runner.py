"""Run one program and its tests under limits; read a job from stdin, print the verdict as JSON.

Started by `programs.py` with the standard library alone. Inside bubblewrap the kernel kills
whatever is left as soon as the runner ends. Without bubblewrap the runner is the parent of all that
the program starts, also of orphans (PR_SET_CHILD_SUBREAPER), so that it can kill every one;
RLIMIT_NPROC keeps their number small.
"""

import ctypes
import json
import os
import resource
import secrets
import select
import signal
import sys
import time
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
MAX_FILE_BYTES = 64 * 2**20
MAX_OPEN_FILES = 64
MAX_REASON_CHARS = 200
MAX_VERDICT_BYTES = 4096
POLL_S = 0.02


def main() -> None:
    job = json.load(sys.stdin)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    read_end, write_end = os.pipe()
    secret = secrets.token_hex(16)
    child = os.fork()
    if child == 0:
        os.close(read_end)
        _limit(job)
        _discard_output()
        verdict = json.dumps(
            {"reason": _why_it_fails(job["code"], job["tests"])[:MAX_REASON_CHARS]}
        )
        os.write(write_end, f"{secret}{verdict}".encode())
        os._exit(0)
    os.close(write_end)
    said, problem = _watch(read_end, deadline=time.monotonic() + job["seconds"])
    if not job["is_isolated"]:
        _kill_descendants()
    if said.startswith(secret):
        print(said.removeprefix(secret), flush=True)
    else:
        reason = problem or "the program ended before its tests"
        print(json.dumps({"reason": reason}), flush=True)


def _limit(job: dict[str, Any]) -> None:
    cpu_s = int(job["seconds"]) + 1
    for kind, value in (
        (resource.RLIMIT_NPROC, job["max_tasks"]),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))
    os.nice(10)
    if job["uid"] is not None:
        os.setgroups([])
        os.setgid(job["uid"])
        os.setuid(job["uid"])


def _discard_output() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)


def _why_it_fails(code: str, tests: list[str]) -> str:
    """Return the first reason why the program does not pass its tests, or an empty string."""
    namespace: dict[str, Any] = {"__name__": "program"}
    try:
        exec(compile(code, "program.py", "exec"), namespace)
    except BaseException as error:
        return f"the program raised {type(error).__name__}: {error}"
    for test in tests:
        try:
            if not _holds(test, namespace):
                return f"not true: {test}"
        except BaseException as error:
            return f"{type(error).__name__}: {error} in {test}"
    return ""


def _holds(test: str, namespace: dict[str, Any]) -> bool:
    """Evaluate an expression, or run statements, which hold unless they raise."""
    try:
        expression = compile(test, "test.py", "eval")
    except SyntaxError:
        exec(compile(test, "test.py", "exec"), namespace)
        return True
    return bool(eval(expression, namespace))


def _watch(read_end: int, *, deadline: float) -> tuple[str, str]:
    """Return what the child wrote, and why it was stopped, if it was. A verdict arrives in one
    piece (PIPE_BUF).
    """
    while time.monotonic() < deadline:
        if select.select([read_end], [], [], POLL_S)[0]:
            return os.read(read_end, MAX_VERDICT_BYTES).decode(errors="replace"), ""
        if _has_ended():
            return "", ""
    return "", "it did not end within its time limit"


def _has_ended() -> bool:
    """Reap what has ended; return whether no child is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _kill_descendants() -> None:
    """Stop every descendant first, so that none forks while others are killed."""
    while not _has_ended():
        stopped: set[int] = set()
        while found := set(_descendants()) - stopped:
            _signal(found, signal.SIGSTOP)
            stopped |= found
        _signal(stopped, signal.SIGKILL)
        time.sleep(POLL_S / 4)


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def _descendants() -> list[int]:
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(name)] = int(parent)
    found, newest = [], [os.getpid()]
    while newest:
        newest = [pid for pid, parent in parents.items() if parent in newest]
        found += newest
    return found


if __name__ == "__main__":
    main()
