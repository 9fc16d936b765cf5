"""Run one program and its tests under limits, and write the verdict (floor 5).

`programs.py` starts it inside bubblewrap with the standard library alone. It reads a job from stdin
and writes `verdict.json` into its working directory. A program that ends the process leaves no
verdict, and the kernel then kills whatever the program started.
"""

import json
import os
import resource
import sys
from typing import Any

VERDICT = "verdict.json"
MAX_FILE_BYTES = 64 * 2**20
MAX_OPEN_FILES = 64
MAX_PROCESSES = 16
MAX_REASON_CHARS = 200


def main() -> None:
    job = json.load(sys.stdin)
    limit(job)
    discard_output()
    verdict = {"reason": why_it_fails(job["code"], job["tests"])[:MAX_REASON_CHARS]}
    with open(VERDICT, "w", encoding="utf-8") as file:
        json.dump(verdict, file)
    os._exit(0)


def limit(job: dict[str, Any]) -> None:
    """Limit this process and all that it starts; root becomes an ordinary user."""
    for kind, value in (
        (resource.RLIMIT_NPROC, MAX_PROCESSES),
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


def discard_output() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)


def why_it_fails(code: str, tests: list[str]) -> str:
    """Return the first reason why the program does not pass its tests, or an empty string."""
    namespace: dict[str, Any] = {"__name__": "program"}
    try:
        exec(compile(code, "program.py", "exec"), namespace)
    except BaseException as error:
        return f"the program raised {type(error).__name__}: {error}"
    for test in tests:
        try:
            if not holds(test, namespace):
                return f"not true: {test}"
        except BaseException as error:
            return f"{type(error).__name__}: {error} in {test}"
    return ""


def holds(test: str, namespace: dict[str, Any]) -> bool:
    """Evaluate an expression, or run statements, which hold unless they raise."""
    try:
        expression = compile(test, "test.py", "eval")
    except SyntaxError:
        exec(compile(test, "test.py", "exec"), namespace)
        return True
    return bool(eval(expression, namespace))


if __name__ == "__main__":
    main()
