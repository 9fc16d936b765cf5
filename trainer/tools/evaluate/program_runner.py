"""Runs one program and its tests under limits: reads a job from stdin, and prints why the program
fails.

`programs.py` starts this file, which may use only the standard library. The program runs in a child
process. The parent only adopts the program's orphans (PR_SET_CHILD_SUBREAPER), so that
`programs.py` finds all of the program's processes among its descendants.
"""

import contextlib
import ctypes
import json
import os
import resource
import sys
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
MAX_FILE_BYTES = 64 * 2**20
MAX_OPEN_FILES = 64
MAX_REASON_CHARS = 200
VERDICT = "verdict:"
"""The marker before the reason. If it is missing, the program ended before its tests."""


def main() -> None:
    job = json.load(sys.stdin)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.fork() == 0:
        _limit(job)
        output = os.dup(1)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        reason = why_it_fails(job["code"], job["tests"])[:MAX_REASON_CHARS]
        os.write(output, f"{VERDICT}{reason}".encode(errors="replace"))
        os._exit(0)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _limit(job: dict[str, Any]) -> None:
    """Limit the resources of this process and its children, and switch to the job's user id if it
    has one.
    """
    limits = {
        resource.RLIMIT_NPROC: job["max_tasks"],
        resource.RLIMIT_CPU: int(job["seconds"]) + 1,
        resource.RLIMIT_AS: job["memory_bytes"],
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        resource.setrlimit(kind, (value, value))
    os.nice(10)
    if job["uid"] is not None:
        os.setgroups([])
        os.setgid(job["uid"])
        os.setuid(job["uid"])


def why_it_fails(code: str, tests: list[str]) -> str:
    """Return the first reason why the program does not pass its tests; empty if it passes."""
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
    """Return True if a test passes: an expression that is true, or statements that do not raise."""
    try:
        expression = compile(test, "test.py", "eval")
    except SyntaxError:
        exec(compile(test, "test.py", "exec"), namespace)
        return True
    return bool(eval(expression, namespace))


if __name__ == "__main__":
    main()
