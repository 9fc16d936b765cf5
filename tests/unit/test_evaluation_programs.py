"""Programs that a model wrote, in bubblewrap: right ones pass, hostile ones score 0 and leave
nothing behind.
"""

import glob
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from trainer.config import ConfigError
from trainer.tools.evaluate import program_runner, programs
from trainer.tools.evaluate.programs import has_bubblewrap, require_bubblewrap, run_tests

TEST = "solve(20) == 41"
RIGHT = "def solve(x):\n    return 2 * x + 1\n"
LIMIT_S = 2.0
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
    "a pipe for a verdict": "import os\nos.mkfifo('verdict.json')\nos._exit(0)",
    "ends with success": "import os\nos._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "does not parse": "def solve(x) return 1",
    "wrong answer": "def solve(x): return 0",
}
in_bubblewrap = pytest.mark.skipif(
    not has_bubblewrap(), reason="bubblewrap is not installed or may not run"
)


@pytest.fixture
def server() -> Iterator[tuple[int, list[bytes]]]:
    """A port of this machine, and what was heard there."""
    listening, heard = socket.create_server(("127.0.0.1", 0)), list[bytes]()

    def listen() -> None:
        try:
            heard.append(listening.accept()[0].recv(1))
        except OSError:
            pass

    threading.Thread(target=listen, daemon=True).start()
    yield listening.getsockname()[1], heard
    listening.close()


@in_bubblewrap
@pytest.mark.parametrize(
    ("code", "tests"),
    [
        (RIGHT, [TEST, "assert solve(0) == 1"]),
        ("def turn(a):\n    a.reverse()", ["a = [1, 2]\nturn(a)\nassert a == [2, 1]"]),
        ("import os\nfound = set(os.environ) - {'LANG', 'LC_CTYPE', 'PWD'}", ["found == set()"]),
    ],
    ids=["expression", "statements", "empty environment"],
)
def test_right_programs_pass(code: str, tests: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "token")
    assert run_tests(code, tests) == ""


@in_bubblewrap
def test_limits_stop_hostile_programs_and_nothing_is_left() -> None:
    before = set(psutil.pids())
    directories = set(glob.glob(f"{tempfile.gettempdir()}/sft-program-*"))
    reasons = {name: run_tests(code, [TEST], limit_s=LIMIT_S) for name, code in HOSTILE.items()}
    assert [name for name, reason in reasons.items() if not reason] == []
    assert "time limit" in reasons["endless loop"]
    deadline = time.monotonic() + 5.0
    while _left(before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _left(before) == []
    assert set(glob.glob(f"{tempfile.gettempdir()}/sft-program-*")) <= directories


def _left(before: set[int]) -> list[str]:
    name = Path(program_runner.__file__).name
    found = [process for process in psutil.process_iter(["cmdline"]) if process.pid not in before]
    lines = [" ".join(process.info["cmdline"] or ()) for process in found]
    return [line for line in lines if name in line]


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
    ids=["reads", "reads by a link", "writes", "network", "changes the standard library"],
)
def test_files_and_network_are_out_of_reach(
    code: str, server: tuple[int, list[bytes]], tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    code = code.replace("PORT", str(server[0])).replace("OUTSIDE", str(outside))
    assert run_tests(code + "\n" + RIGHT, [TEST])
    assert not outside.exists() and not server[1]


@in_bubblewrap
def test_a_program_kills_nothing_outside() -> None:
    run_tests("import os\nos.kill(-1, 9)\n" + RIGHT, [TEST], limit_s=LIMIT_S)
    assert run_tests(RIGHT, [TEST]) == ""


def test_without_bubblewrap_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setattr(programs, "has_bubblewrap", has_bubblewrap.__wrapped__)
    with pytest.raises(ConfigError, match="Fix: install bubblewrap"):
        require_bubblewrap()
