"""Cases 3, 11 and 12 without trusting our own observer: strace kills or fails a save at its system
calls. A sample with every kind; all with `pytest --full`.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from checkpoint_fakes import Run, is_whole, save
from crash_oracle import start_from
from sweeps import some

from trainer.checkpoint import layout

PROGRAM = Path(__file__).with_name("fake_save.py")
OLD, NEW = 20, 30
NUM_OF_KIND = 3
TIMEOUT_S = 60.0
ERRORS = {
    "mkdir": "ENOSPC",
    "openat": "EROFS",
    "write": "ENOSPC",
    "fsync": "EIO",
    "close": "EDQUOT",  # where a network file system reports a full disk
    "rename": "EIO",
    "unlink": "EACCES",
    "rmdir": "EBUSY",
}
CALLS = tuple(ERRORS)


@dataclass(frozen=True)
class Call:
    """System call number `number` (from 1) of those called `name`. role: the path it is about, equal
    in every run of the program; is_saving: before the commit returns.
    """

    name: str
    number: int
    role: str
    is_saving: bool


@dataclass(frozen=True)
class Ended:
    code: int
    said: list[str]
    warned: str
    trace: list[str]


class Program:
    """Runs `fake_save.py` under strace, with a start that is always the same, so that system calls
    can be counted.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._environment = {
            "PATH": os.environ["PATH"],
            # `-S` leaves out where packages are installed
            "PYTHONPATH": str(Path(psutil.__file__).parents[1]),
            "PYTHONPYCACHEPREFIX": str(place / "bytecode"),
        }
        self._num_runs = 0
        # Write the byte code once: later runs only read it.
        self._run([sys.executable, "-S"], self.new_run_dir(), keep=1)

    def new_run_dir(self) -> Path:
        """Return a directory with acknowledged checkpoints of steps 10 and `OLD`."""
        self._num_runs += 1
        run_dir = self._place / f"run{self._num_runs}"
        run_dir.mkdir()
        save(run_dir, 10, OLD)
        return run_dir

    def run(self, run_dir: Path, *, keep: int, calls: str, injection: str = "") -> Ended:
        trace = run_dir.with_suffix(".trace")
        command = ["strace", "-qq", "-y", "-o", str(trace), "-e", "signal=none"]
        command += ["-e", f"trace={calls}"]
        # With a filter in the kernel, which loses signals, other calls cost nothing.
        if "signal=" not in injection:
            command += ["-f", "--seccomp-bpf"]
        if injection:
            command += ["-e", f"inject={injection}"]
        found = self._run([*command, sys.executable, "-S", "-B"], run_dir, keep=keep)
        lines = trace.read_text(errors="replace").splitlines()
        lines = [re.sub(r"^\d+ +", "", line) for line in lines]
        return Ended(found.returncode, found.stdout.splitlines(), found.stderr, lines)

    def _run(
        self, command: list[str], run_dir: Path, *, keep: int
    ) -> subprocess.CompletedProcess[str]:
        command = [*command, str(PROGRAM), str(run_dir), str(NEW), str(keep)]
        environment = self._environment
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S
        )


@pytest.fixture
def program(memory_dir: Path) -> Program:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    probe = subprocess.run(
        ["strace", "-qq", "-o", os.devnull, "true"], capture_output=True, text=True
    )
    if probe.returncode != 0:
        pytest.skip(f"strace may not trace here: {probe.stderr.strip()}")
    return Program(memory_dir)


def calls_of_a_save(program: Program, *, keep: int) -> list[Call]:
    """Return the calls that change the disk: of each kind a few, and all renames."""
    run_dir = program.new_run_dir()
    ended = program.run(run_dir, keep=keep, calls=",".join(CALLS))
    assert (ended.code, ended.said) == (0, [f"committed {NEW}", f"settled {NEW}"]), ended
    counts: Counter[str] = Counter()
    calls, created, is_saving = [], set[str](), True
    for line in ended.trace:
        is_saving = is_saving and f'"committed {NEW}' not in line
        name, role = line.partition("(")[0], role_of(line, run_dir)
        counts[name] += 1
        if name == "openat" and "O_CREAT" in line:
            created.add(role)
        elif name == "openat" or not role or (name == "close" and role not in created):
            continue
        calls.append(Call(name, counts[name], role, is_saving))
    assert len(calls) > 50 and {call.name for call in calls} == set(CALLS)
    few = [call for kind in CALLS for call in some_of_kind(calls, kind)]
    return [call for call in calls if call in few or call.name == "rename"]


def some_of_kind(calls: list[Call], kind: str) -> list[Call]:
    return some([call for call in calls if call.name == kind], NUM_OF_KIND)


def role_of(line: str, run_dir: Path) -> str:
    """Return the first path below the run directory in a traced call, without its random part."""
    match = re.search(rf"{re.escape(str(run_dir))}([^\">]*)", line)
    return without_nonce(f"run{match[1]}") if match else ""


def without_nonce(text: str) -> str:
    return re.sub(r"\.[0-9a-f]{8}\b", "", text)


def require_good_start(run_dir: Path, said: list[str], what: str) -> None:
    """What was acknowledged is found; a restart leaves nothing behind; the next save succeeds."""
    committed = [int(line.split()[1]) for line in said if line.startswith("committed")]
    outcome = start_from(run_dir, is_whole=is_whole)
    assert not outcome.error and not outcome.torn, f"{what}: {outcome}"
    assert outcome.step is not None and outcome.step >= max([OLD, *committed]), what
    run = Run(run_dir, keep=1)
    assert run.restart() == outcome.step, what
    run.save()
    left = set(os.listdir(run_dir))
    assert left == {layout.step_dir_name(run.step), layout.POINTER}, f"{what}: {left}"


@pytest.mark.parametrize("keep", [1, 2])
def test_a_kill_at_a_system_call_of_a_save(program, keep):
    for call in calls_of_a_save(program, keep=keep):
        run_dir = program.new_run_dir()
        injection = f"{call.name}:signal=SIGKILL:when={call.number}"
        ended = program.run(run_dir, keep=keep, calls=call.name, injection=injection)
        assert ended.code == -signal.SIGKILL, f"{call}: not killed, {ended}"
        assert role_of(ended.trace[-1], run_dir) == call.role, f"{call}: {ended.trace[-1]}"
        require_good_start(run_dir, ended.said, f"killed at {call}, keep={keep}")


def test_an_error_of_a_system_call_of_a_save(program):
    """Before the commit it fails the save, after it it is a warning. Both name the path, and the
    next save is good.
    """
    for call in calls_of_a_save(program, keep=1):
        run_dir = program.new_run_dir()
        injection = f"{call.name}:error={ERRORS[call.name]}:when={call.number}"
        ended = program.run(run_dir, keep=1, calls=call.name, injection=injection)
        what = f"{injection} {call.role}: {ended.said} {ended.warned}"
        injected = [line for line in ended.trace if "(INJECTED)" in line]
        assert call.role in [role_of(line, run_dir) for line in injected], what
        assert ended.code == 0 and "Traceback" not in ended.warned, what
        first, *_, last = ended.said
        assert first.startswith("failed" if call.is_saving else f"committed {NEW}"), what
        assert last == f"settled {NEW + 1 if call.is_saving else NEW}", what
        complaint = without_nonce(first if call.is_saving else ended.warned)
        assert f"{run_dir}{call.role.removeprefix('run')}" in complaint, what
        require_good_start(run_dir, ended.said, what)
