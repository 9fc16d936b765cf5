"""Cases 3, 11 and 12 without trusting our own failpoints: strace kills or fails a save at its
system calls.

Here at a sample of them that has every kind; at each with `pytest --full`.
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
from checkpoint_fakes import is_whole, save
from crash_oracle import start_from
from fake_run import FakeRun
from sweeps import some

from trainer.checkpoint import layout

PROGRAM = Path(__file__).with_name("fake_save.py")
CALLS = ("mkdir", "openat", "write", "fsync", "rename", "unlink", "rmdir", "close")
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


@dataclass(frozen=True)
class Call:
    """The `number`-th system call called `name` (from 1) of the program.

    `role`: the path it is about, the same in every run of the program. `is_saving`: before
    `layout.commit` returns.
    """

    name: str
    number: int
    role: str
    is_saving: bool

    def __str__(self) -> str:
        return f"{self.name} {self.number} ({self.role})"


@dataclass(frozen=True)
class Ended:
    code: int
    said: list[str]
    warned: str
    trace: list[str]


class Program:
    """Runs `fake_save.py` under strace; its start is always the same, so that system calls can
    be counted.
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

    def new_run_dir(self) -> Path:
        """With acknowledged checkpoints of steps 10 and `OLD`."""
        self._num_runs += 1
        run_dir = self._place / f"run{self._num_runs}"
        run_dir.mkdir()
        save(run_dir, 10, OLD)
        return run_dir

    def warm_up(self) -> None:
        """Write the byte code once, without strace: later runs only read it."""
        self._run([sys.executable, "-S"], self.new_run_dir(), keep=1)

    def run(self, run_dir: Path, *, keep: int, calls: str, injection: str = "") -> Ended:
        trace = run_dir.with_suffix(".trace")
        strace = [
            "strace",
            "-qq",
            "-y",
            "-o",
            str(trace),
            "-e",
            "signal=none",
            "-e",
            f"trace={calls}",
        ]
        # with a filter in the kernel, which loses signals, other calls cost nothing
        if "signal=" not in injection:
            strace += ["-f", "--seccomp-bpf"]
        inject = ["-e", f"inject={injection}"] if injection else []
        ended = self._run([*strace, *inject, sys.executable, "-S", "-B"], run_dir, keep=keep)
        lines = [
            re.sub(r"^\d+ +", "", line) for line in trace.read_text(errors="replace").splitlines()
        ]
        return Ended(ended.code, ended.said, ended.warned, lines)

    def _run(self, command: list[str], run_dir: Path, *, keep: int) -> Ended:
        found = subprocess.run(
            [*command, str(PROGRAM), str(run_dir), str(NEW), str(keep)],
            capture_output=True,
            text=True,
            env=self._environment,
            timeout=TIMEOUT_S,
            check=False,
        )
        return Ended(found.returncode, found.stdout.splitlines(), found.stderr, [])


@pytest.fixture
def program(memory_dir: Path) -> Program:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    probe = subprocess.run(
        ["strace", "-qq", "-o", os.devnull, "true"], capture_output=True, text=True, check=False
    )
    if probe.returncode != 0:
        pytest.skip(f"strace may not trace here: {probe.stderr.strip()}")
    program = Program(memory_dir)
    program.warm_up()
    return program


def calls_of_a_save(program: Program, *, keep: int) -> list[Call]:
    """All that change the disk, in order."""
    run_dir = program.new_run_dir()
    ended = program.run(run_dir, keep=keep, calls=",".join(CALLS))
    assert (ended.code, ended.said) == (0, [f"committed {NEW}", f"settled {NEW}"]), ended
    counts: Counter[str] = Counter()
    calls, created, is_saving = [], set[str](), True
    for line in ended.trace:
        is_saving = is_saving and f'"committed {NEW}' not in line
        name = line.partition("(")[0]
        counts[name] += 1
        role = role_of(line, run_dir)
        changes = role and name not in ("close", "openat")
        if name == "openat" and "O_CREAT" in line:
            created.add(role)
            changes = True
        if changes or (name == "close" and role in created):
            calls.append(Call(name, counts[name], role, is_saving))
    return calls


def sampled(calls: list[Call]) -> list[Call]:
    """Of each kind of call a few; all of those that give a checkpoint its name or take the word
    of its end.
    """
    few = [
        call for kind in CALLS for call in some([c for c in calls if c.name == kind], NUM_OF_KIND)
    ]
    return [call for call in calls if call in few or call.name == "rename"]


def role_of(line: str, run_dir: Path) -> str:
    """The path below the run directory that a traced call names first, without the random part
    of its name.
    """
    match = re.search(rf"{re.escape(str(run_dir))}([^\">]*)", line)
    return re.sub(r"\.[0-9a-f]{8}\b", "", f"run{match[1]}") if match else ""


def require_good_start(run_dir: Path, said: list[str], what: str) -> None:
    """What was acknowledged is found; a restart leaves nothing behind, and the next save
    succeeds.
    """
    acknowledged = max(
        [OLD, *(int(line.split()[1]) for line in said if line.startswith("committed"))]
    )
    outcome = start_from(run_dir, is_whole=is_whole)
    assert not outcome.error and not outcome.torn, f"{what}: {outcome}"
    assert outcome.step is not None and outcome.step >= acknowledged, (
        f"{what}: {outcome}, was told {said}"
    )
    run = FakeRun(run_dir, keep=1)
    assert run.restart() == outcome.step, what
    run.save()
    expected = {layout.step_dir_name(run.step), layout.POINTER}
    assert set(os.listdir(run_dir)) == expected, f"{what}: {os.listdir(run_dir)}"


@pytest.mark.parametrize("keep", [1, 2])
def test_a_kill_at_a_system_call_of_a_save(program, keep):
    calls = calls_of_a_save(program, keep=keep)
    assert len(calls) > (60 if keep == 1 else 50) and {call.name for call in calls} == set(CALLS)
    for call in sampled(calls):
        run_dir = program.new_run_dir()
        injection = f"{call.name}:signal=SIGKILL:when={call.number}"
        ended = program.run(run_dir, keep=keep, calls=call.name, injection=injection)
        assert ended.code == -signal.SIGKILL, f"{call}: not killed, {ended}"
        assert role_of(ended.trace[-1], run_dir) == call.role, (
            f"{call}: killed at {ended.trace[-1]}"
        )
        require_good_start(run_dir, ended.said, f"killed at {call}, keep={keep}")


def test_an_error_of_a_system_call_of_a_save(program):
    """Before the commit it fails the save; after it, it is a warning. Both name the path, and
    the next save is good.
    """
    calls = calls_of_a_save(program, keep=1)
    assert sum(call.is_saving for call in calls) > 30
    for call in sampled(calls):
        run_dir = program.new_run_dir()
        injection = f"{call.name}:error={ERRORS[call.name]}:when={call.number}"
        ended = program.run(run_dir, keep=1, calls=call.name, injection=injection)
        what = f"{ERRORS[call.name]} at {call}: {ended.said} {ended.warned}"
        assert any(
            "(INJECTED)" in line and role_of(line, run_dir) == call.role for line in ended.trace
        ), what
        assert ended.code == 0 and "Traceback" not in ended.warned, what
        first, *_, last = ended.said
        assert first.startswith("failed" if call.is_saving else f"committed {NEW}"), what
        assert last == f"settled {NEW + 1 if call.is_saving else NEW}", what
        complaint = re.sub(r"\.[0-9a-f]{8}\b", "", first if call.is_saving else ended.warned)
        assert f"{run_dir}{call.role.removeprefix('run')}" in complaint, (
            f"the path is not named: {what}"
        )
        require_good_start(run_dir, ended.said, what)
