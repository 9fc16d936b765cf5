"""Runs a model-written program against tests, in a child process with limits.

The child gets a temporary directory and an environment without the user's variables. When it ends,
all processes that it started are killed. If bubblewrap is installed, the child runs inside it: it
has no network and its own process ids, and it sees only the interpreter, the system libraries and
its own directory. Without bubblewrap, the program can read and write the user's files and use the
network, which is why the command requires `--allow-code`.

The kernel does not limit the number of root's processes. Root therefore needs bubblewrap, and
inside it the program runs under a different user id.
"""

import functools
import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from trainer.config import ConfigError
from trainer.runtime.processes import kill_tree
from trainer.tools.evaluate import program_runner

BUBBLEWRAP = "bwrap"
SYSTEM_DIRECTORIES = ("/usr", "/lib", "/lib64", "/bin")
TIME_LIMIT_S = 10.0
"""The wall time limit of a program, including its tests."""
MEMORY_BYTES = 512 * 2**20
"""The address space that each process of a program may use."""
MAX_VERDICT_BYTES = 4096
"""A verdict of up to this size is written atomically (PIPE_BUF)."""
MAX_PROCESSES = 16
FIRST_UID = 2**30
"""Programs started by root run under a random user id from this value up, which no user has."""


@functools.cache
def has_bubblewrap() -> bool:
    """Return True if bubblewrap is installed and the kernel lets it create namespaces."""
    if shutil.which(BUBBLEWRAP) is None:
        return False
    with tempfile.TemporaryDirectory(prefix="sft-program-") as work:
        probe = [*_bubblewrap(work), sys.executable, "-I", "-S", "-c", ""]
        return (
            subprocess.run(
                probe,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={},
            ).returncode
            == 0
        )


def require_isolation() -> str:
    """Return a sentence that describes how this machine isolates programs.

    Raises `ConfigError` for root without a working bubblewrap.
    """
    if has_bubblewrap():
        return "programs run inside bubblewrap: no network, no files but the Python installation"
    if os.geteuid() == 0:
        raise ConfigError(
            "the model's programs cannot be limited: you are root, and bubblewrap is missing or "
            "not permitted to run.\nFix: apt-get install bubblewrap, or run this command as a "
            "non-root user"
        )
    return (
        "programs run WITHOUT a sandbox: they can read and write your files and use the network. "
        "Fix: install bubblewrap"
    )


def run_tests(code: str, tests: list[str]) -> str:
    """Return the reason why `code` does not pass `tests`; empty if it passes.

    A test is an expression that must be true, or statements that must not raise. The tests and the
    program share one interpreter, so a program that attacks the tests can pass without solving the
    task.
    """
    uid = FIRST_UID + secrets.randbelow(FIRST_UID) if os.geteuid() == 0 else None
    job = {
        "code": code,
        "tests": tests,
        "seconds": TIME_LIMIT_S,
        "memory_bytes": MEMORY_BYTES,
        "max_tasks": MAX_PROCESSES + (_num_tasks_of_user() if uid is None else 0),
        "uid": uid,
    }
    with tempfile.TemporaryDirectory(prefix="sft-program-") as work:
        if uid is not None:
            os.chown(work, uid, uid)
        bubblewrap = _bubblewrap(work) if has_bubblewrap() else []
        return judge([*bubblewrap, sys.executable], program_runner.__file__, job, work)


def judge(
    python: list[str],
    runner: str,
    job: dict[str, Any],
    work: str,
) -> str:
    """Run a job in the directory `work`, and return the reason why it fails; empty if it passes."""
    process = subprocess.Popen(
        [*python, "-I", "-S", "-B", runner],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=work,
        env={"LANG": "C.UTF-8"},
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(job).encode())
                process.stdin.close()
            is_told = select.select([process.stdout], [], [], job["seconds"])[0]
            said = os.read(process.stdout.fileno(), MAX_VERDICT_BYTES) if is_told else b""
        finally:
            kill_tree(process.pid)
    verdict = said.decode(errors="replace")
    if verdict.startswith(program_runner.VERDICT):
        return verdict.removeprefix(program_runner.VERDICT)
    if is_told:
        return "the program ended before its tests"
    return "the program did not end within its time limit"


def _num_tasks_of_user() -> int:
    """Return the number of this user's threads, which RLIMIT_NPROC limits."""
    count = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == os.getuid():
                count += process.num_threads()
    return count


def _bubblewrap(work: str) -> list[str]:
    """Return a command prefix that runs a program in bubblewrap, where only `work` is writable."""
    command = [BUBBLEWRAP, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    if os.geteuid() == 0:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user"]
    command += ["--die-with-parent", "--new-session"]
    for directory in SYSTEM_DIRECTORIES:
        command += ["--ro-bind-try", directory, directory]
    runner = str(Path(program_runner.__file__).resolve())
    for path in (sys.base_prefix, sys.prefix, runner):
        command += ["--ro-bind", path, path]
    command += ["--proc", "/proc", "--dev", "/dev"]
    return [*command, "--bind", work, work, "--chdir", work]
