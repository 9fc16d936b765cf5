"""Programs that a model wrote: correct ones pass, hostile ones score 0 and leave nothing running."""

import glob
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from processes import wait_until

from trainer.config import ConfigError
from trainer.tools.evaluate import program_runner, programs
from trainer.tools.evaluate.programs import (
    FIRST_UID,
    has_bubblewrap,
    require_isolation,
    run_tests,
)

TEST = "solve(20) == 41"
RIGHT = "def solve(x):\n    return 2 * x + 1\n"
LIMIT_S = 1.5
HOSTILE = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "daemon": (
        "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        time.sleep(60)\n        os._exit(0)\nos._exit(0)"
    ),
    "memory": "kept = bytearray(2**33)",
    "disk": "with open('f', 'wb') as f:\n    while True: f.write(bytes(2**20))",
    "endless loop": "while True: pass",
    "ignores signals": (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: "
        "time.sleep(1)"
    ),
    "output flood": "while True: print('x' * 10**6)",
    "ends with success": "import os\nos._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "does not parse": "def solve(x) return 1",
    "wrong answer": "def solve(x): return 0",
}
"""Limits stop these programs with and without bubblewrap."""
in_bubblewrap = pytest.mark.skipif(
    not has_bubblewrap(), reason="bubblewrap is not installed or may not run"
)
SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture(autouse=True)
def short_limit(monkeypatch):
    monkeypatch.setattr(programs, "TIME_LIMIT_S", LIMIT_S)


@pytest.fixture(params=["in bubblewrap", "as an ordinary user"])
def judge(request):
    """Run a program with tests, isolated in one of the two ways."""
    if request.param == "in bubblewrap":
        if not has_bubblewrap():
            pytest.skip("bubblewrap is not installed or may not run")
        return run_tests
    if os.geteuid() == 0 and not os.access(SYSTEM_PYTHON, os.X_OK):
        pytest.skip("no interpreter that an ordinary user may run")
    return as_ordinary_user


def as_ordinary_user(code, tests):
    """Judge without bubblewrap, as a user with kernel limits: root becomes nobody."""
    is_root = os.geteuid() == 0
    job = {"code": code, "tests": tests, "seconds": LIMIT_S, "uid": None}
    job |= {"memory_bytes": 2**28, "max_tasks": 16 if is_root else 4096}
    with tempfile.TemporaryDirectory(prefix="sft-program-") as work:
        os.chmod(work, 0o777)
        runner = str(shutil.copy(program_runner.__file__, work))
        python = [sys.executable]
        if is_root:
            python = ["setpriv", f"--reuid={FIRST_UID + os.getpid()}", SYSTEM_PYTHON]
        return programs.judge(python, runner, job, work)


def test_right_programs_pass(judge):
    tests = {
        RIGHT: [TEST, "assert solve(0) == 1"],
        "def turn(a):\n    a.reverse()": ["a = [1, 2]\nturn(a)\nassert a == [2, 1]"],
        "def f(x):\n    raise KeyError(x)": [
            "try:\n    f(1)\n    assert False\nexcept KeyError:\n    pass",
        ],
    }
    for code, wanted in tests.items():
        assert judge(code, wanted) == ""


def test_limits_stop_hostile_programs_and_nothing_is_left(judge):
    before = set(psutil.pids())
    directories = set(glob.glob(f"{tempfile.gettempdir()}/sft-program-*"))
    found = {name: judge(code, [TEST]) for name, code in HOSTILE.items()}
    assert [name for name, reason in found.items() if not reason] == []
    assert "time limit" in found["endless loop"]
    assert wait_until(lambda: not _left(before), timeout_s=5.0), _left(before)
    assert set(glob.glob(f"{tempfile.gettempdir()}/sft-program-*")) <= directories


def _left(before):
    name = Path(program_runner.__file__).name
    found = psutil.process_iter(["pid", "cmdline"])
    return [
        str(process.info)
        for process in found
        if process.pid not in before and any(name in word for word in process.info["cmdline"] or ())
    ]


@in_bubblewrap
@pytest.mark.parametrize(
    "code",
    [
        "text = open('/etc/passwd').read()",
        "import os\nos.symlink('/etc', 'e')\ntext = open('e/passwd').read()",
        "open('OUTSIDE', 'w').write('here')",
        "import socket\nsocket.create_connection(('127.0.0.1', PORT), timeout=1).send(b'x')",
        "import os\nopen(os.__file__, 'a').write('x = 1')",
    ],
)
def test_bubblewrap_keeps_files_and_network_away(code, tmp_path):
    outside = tmp_path / "outside"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = code.replace("PORT", str(port)).replace("OUTSIDE", str(outside))
        assert run_tests(code + "\n" + RIGHT, [TEST])
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert not outside.exists()


@in_bubblewrap
def test_in_bubblewrap_a_program_kills_nothing_outside():
    run_tests("import os\nos.kill(-1, 9)\n" + RIGHT, [TEST])
    assert run_tests(RIGHT, [TEST]) == ""


def test_the_command_says_how_programs_are_isolated(monkeypatch):
    monkeypatch.setattr(programs, "has_bubblewrap", lambda: True)
    assert "inside bubblewrap" in require_isolation()
    monkeypatch.setattr(programs, "has_bubblewrap", lambda: False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "WITHOUT a sandbox" in require_isolation()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(ConfigError, match="bubblewrap"):
        require_isolation()


def test_the_environment_of_the_command_does_not_reach_a_program(judge, monkeypatch):
    monkeypatch.setenv("SECRET", "token")
    code = "import os\nfound = [name for name in os.environ if name not in ('LANG', 'LC_CTYPE', 'PWD')]"
    assert judge(code, ["found == []"]) == ""
