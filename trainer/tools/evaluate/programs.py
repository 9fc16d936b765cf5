"""Run a program that a model wrote against tests, in a child process with limits.

The child gets an empty environment and a temporary directory, and all that it started is killed
when it ends. Where bubblewrap is installed the child also runs inside it: without network, with its
own process numbers, and with the interpreter, the system libraries and its own directory as the
only files. Without bubblewrap the program can read and write the user's files and use the network,
which is why the command asks for `--allow-code`. The kernel does not limit the number of root's
processes: root needs bubblewrap, inside which programs run under another user number.
"""

import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from trainer.config import ConfigError
from trainer.tools.evaluate import program_runner

BUBBLEWRAP = "bwrap"
SYSTEM_DIRECTORIES = ("/usr", "/lib", "/lib64", "/bin")
TIME_LIMIT_S = 10.0
"""Wall time of a program with its tests."""
MEMORY_BYTES = 512 * 2**20
"""Address space of each of its processes."""
GRACE_S = 10.0
"""Time for the runner to start, and to kill what the program started."""
MAX_PROCESSES = 16
FIRST_UID = 2**30
"""Root's programs run under a random user number from here on, which no one has: limits do not
hold for root.
"""


@functools.cache
def has_bubblewrap() -> bool:
    """Return whether bubblewrap is installed and the kernel lets it make namespaces."""
    if shutil.which(BUBBLEWRAP) is None:
        return False
    with tempfile.TemporaryDirectory(prefix="sft-program-") as work:
        probe = [*_bubblewrap(Path(work)), sys.executable, "-I", "-S", "-c", ""]
        return subprocess.run(probe, stderr=subprocess.DEVNULL, cwd="/", env={}).returncode == 0


def require_isolation() -> str:
    """Return one line that says how programs are isolated here. Raises `ConfigError` for root
    without bubblewrap.
    """
    if has_bubblewrap():
        return "programs run inside bubblewrap: no network, no files but the Python installation"
    if os.geteuid() == 0:
        raise ConfigError(
            "programs of a model cannot be limited when you are root and bubblewrap cannot be "
            "used. Fix: install bubblewrap (apt-get install bubblewrap), or run this command as an "
            "ordinary user"
        )
    return (
        "programs run WITHOUT a sandbox: they can read and write your files and use the network. "
        "Fix: install bubblewrap"
    )


def run_tests(code: str, tests: list[str], *, limit_s: float = TIME_LIMIT_S) -> str:
    """Return why `code` does not pass `tests`, or an empty string if it does; a test is an
    expression that must be true, or statements.

    Tests and program share one interpreter: a program that attacks its judge can pass without
    solving the task.
    """
    uid = FIRST_UID + secrets.randbelow(FIRST_UID) if os.geteuid() == 0 else None
    job = {
        "code": code,
        "tests": tests,
        "seconds": limit_s,
        "memory_bytes": MEMORY_BYTES,
        "max_tasks": MAX_PROCESSES + (_num_tasks_of_user() if uid is None else 0),
        "uid": uid,
        "is_isolated": has_bubblewrap(),
    }
    with tempfile.TemporaryDirectory(prefix="sft-program-") as work:
        if uid is not None:
            os.chown(work, uid, uid)
        inside = _bubblewrap(Path(work)) if has_bubblewrap() else []
        runner = subprocess.Popen(
            [*inside, sys.executable, "-I", "-S", "-B", str(program_runner.__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=work,
            env={"LANG": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            said, _ = runner.communicate(json.dumps(job).encode(), timeout=limit_s + GRACE_S)
        except subprocess.TimeoutExpired:
            said = b""
        finally:
            if runner.poll() is None:
                os.killpg(runner.pid, signal.SIGKILL)
                runner.wait()
    return str(json.loads(said)["reason"]) if said else "the program ended its runner"


def _num_tasks_of_user() -> int:
    """Count processes and threads of this user: RLIMIT_NPROC limits their sum."""
    count = 0
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and process.stat().st_uid == os.getuid():
                count += sum(1 for _ in (process / "task").iterdir())
        except OSError:
            continue
    return count


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
