"""Running a program against tests where it can do no harm (floor 5); `jail.py` is what each half runs in."""

import itertools
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from trainer.config import ConfigError
from trainer.evaluation import jail

MAX_VERDICT_BYTES = 4096
END_WITHIN_S = 5.0
_numbers = itertools.count(os.getpid() * 64)


@dataclass(frozen=True)
class SandboxLimits:
    """Of one program: time it has, and the address space of each of its processes."""

    seconds: float = 10.0
    memory_mib: int = 512


@dataclass(frozen=True)
class Verdict:
    is_passed: bool
    reason: str
    """Why not."""


def require_sandbox() -> None:
    """Raises `ConfigError` where programs cannot be shut in: code of a model never runs without."""
    found = run_tests("def one():\n    return 1", ["one() == 1"], SandboxLimits(seconds=30.0))
    if not found.is_passed:
        raise ConfigError(f"programs cannot be shut in here: {found.reason}")


def run_tests(code: str, tests: list[str], limits: SandboxLimits) -> Verdict:
    """Whether all of `tests` hold for the program. Nothing of either is left when this returns."""
    deadline = time.monotonic() + limits.seconds
    ends, halves = socket.socketpair(), []
    with tempfile.TemporaryDirectory(prefix="sft-jail-") as root, ends[0], ends[1]:
        try:
            jobs: tuple[dict[str, Any], ...] = ({"code": code, "tests": None}, {"tests": tests})
            for end, job in zip(ends, jobs, strict=True):
                halves.append(_start(end, root, limits, job))
            for end in ends:
                end.close()
            said = _read(halves[1], deadline)
        finally:
            for half in halves:
                _end(half)
    if not said:
        is_late = time.monotonic() >= deadline
        reason = f"no answer within {limits.seconds:g} s" if is_late else "the tests ended without a verdict"
        return Verdict(False, reason)
    found = json.loads(said)
    if "error" in found:
        raise ConfigError(
            f"programs cannot be shut in here ({found['error']}): exec needs a kernel that lets this user make "
            f"namespaces (sysctl user.max_user_namespaces above 0; in a container, one started with "
            f"--security-opt seccomp=unconfined or --privileged)"
        )
    return Verdict(found["passed"], found["reason"])


def _start(end: socket.socket, root: str, limits: SandboxLimits, job: dict[str, Any]) -> subprocess.Popen[bytes]:
    half = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(jail.__file__), str(end.fileno())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={"LANG": "C.UTF-8"},
        pass_fds=(end.fileno(),),
        start_new_session=True,
    )
    cpu_s = int(limits.seconds) + 1
    job |= {"root": root, "number": next(_numbers) % 10**9, "memory_mib": limits.memory_mib, "cpu_s": cpu_s}
    assert half.stdin is not None
    half.stdin.write(json.dumps(job).encode())
    half.stdin.close()
    return half


def _read(half: subprocess.Popen[bytes], deadline: float) -> bytes:
    assert half.stdout is not None
    said = b""
    while (left_s := deadline - time.monotonic()) > 0 and len(said) < MAX_VERDICT_BYTES:
        if not select.select([half.stdout], [], [], left_s)[0]:
            break
        if not (more := os.read(half.stdout.fileno(), MAX_VERDICT_BYTES)):
            return said
        said += more
    return b""


def _end(half: subprocess.Popen[bytes]) -> None:
    """Its outer process ends the inner one, and waits until the kernel has ended all that this one started."""
    half.terminate()
    try:
        half.wait(END_WITHIN_S)
    except subprocess.TimeoutExpired:
        half.kill()
        half.wait()
    assert half.stdout is not None
    half.stdout.close()
