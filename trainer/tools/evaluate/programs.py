"""Run a program that a model wrote against tests, inside bubblewrap (floor 5).

The program has no network, its own process numbers, an empty environment, and limits on time,
memory, processes and files. The only files it sees are the interpreter, the system libraries and a
temporary directory.
"""

import functools
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from trainer.config import ConfigError
from trainer.runtime.json_lines import read_object
from trainer.tools.evaluate import program_runner

BUBBLEWRAP = "bwrap"
SYSTEM_DIRECTORIES = ("/usr", "/lib", "/lib64", "/bin")
TIME_LIMIT_S = 10.0
MEMORY_BYTES = 512 * 2**20
FIRST_UID = 2**30
"""Root's programs run under a random user number from here on, which nobody has: the kernel does
not limit the number of root's processes.
"""


@functools.cache
def has_bubblewrap() -> bool:
    """Return whether bubblewrap is installed and the kernel lets it make namespaces."""
    if shutil.which(BUBBLEWRAP) is None:
        return False
    with tempfile.TemporaryDirectory(prefix="sft-program-") as work:
        probe = [*_bubblewrap(Path(work)), sys.executable, "-I", "-S", "-c", ""]
        return subprocess.run(probe, stderr=subprocess.DEVNULL, cwd="/", env={}).returncode == 0


def require_bubblewrap() -> None:
    if not has_bubblewrap():
        raise ConfigError(
            "programs that a model wrote run only inside bubblewrap, which is missing here or may "
            "not make namespaces. Fix: install bubblewrap (apt-get install bubblewrap)"
        )


def run_tests(code: str, tests: list[str], *, limit_s: float = TIME_LIMIT_S) -> str:
    """Return why `code` does not pass `tests`, or an empty string if it does; a test is an
    expression that must be true, or statements.

    Tests and program share one interpreter: a program that attacks its judge can pass without
    solving the task.
    """
    uid = FIRST_UID + secrets.randbelow(FIRST_UID) if os.geteuid() == 0 else None
    job = {"code": code, "tests": tests, "memory_bytes": MEMORY_BYTES, "uid": uid}
    runner = str(program_runner.__file__)
    with tempfile.TemporaryDirectory(prefix="sft-program-") as name:
        work = Path(name)
        if uid is not None:
            os.chown(work, uid, uid)
        command = [*_bubblewrap(work), sys.executable, "-I", "-S", "-B", runner]
        try:
            subprocess.run(
                command,
                input=json.dumps(job).encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=work,
                env={"LANG": "C.UTF-8"},
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            return "it did not end within its time limit"
        verdict = read_object(work / program_runner.VERDICT)
    return str(verdict.get("reason", "the program ended before its tests"))


def _bubblewrap(work: Path) -> list[str]:
    """Return the command in front of the runner's, with `work` as its only writable directory."""
    runner = Path(program_runner.__file__).resolve()
    command = [BUBBLEWRAP, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    if os.geteuid() == 0:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user"]
    command += ["--die-with-parent", "--new-session"]
    for directory in SYSTEM_DIRECTORIES:
        command += ["--ro-bind-try", directory, directory]
    for directory in {sys.base_prefix, sys.prefix}:
        command += ["--ro-bind", directory, directory]
    command += ["--ro-bind", str(runner), str(runner), "--proc", "/proc", "--dev", "/dev"]
    return [*command, "--bind", str(work), str(work), "--chdir", str(work)]
