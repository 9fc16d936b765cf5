"""Programs that mean harm, or want to pass without solving the task: stopped, scored 0, and nothing of them is left."""

import glob
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from trainer.evaluation.sandbox import SandboxLimits, run_tests

TEST = "solve(20) == 41"
RIGHT = "def solve(x):\n    return 2 * x + 1\n"
LIMITS = SandboxLimits(seconds=2.0, memory_mib=256)
MARK = "/tmp/left_by_a_program"
IN_CALL = "def solve(x):\n    import os, socket, sys, time, subprocess, ctypes\n"
HOSTILE = {
    "fork bomb": "import os\nwhile True:\n    os.fork()",
    "fork bomb that ignores errors": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "memory": "kept = bytearray(2**33)",
    "memory bit by bit": "kept = []\nwhile True: kept.append(bytearray(2**20))",
    "huge number": IN_CALL + "    return 7 ** (10 ** 9)",
    "zip bomb": "import zlib\nkept = zlib.decompress(zlib.compress(bytes(2**27)) * 1) * 99",
    "disk": "with open('f', 'wb') as f:\n    while True: f.write(bytes(2**20))",
    "many files": "n = 0\nwhile True:\n    open(str(n), 'w').close(); n += 1",
    "writes outside": f"open('{MARK}', 'w').write('here')",
    "reads secrets": "open('/etc/passwd').read()",
    "symlink to /etc": "import os\nos.symlink('/etc', 'e')\nopen('e/passwd').read()",
    "/proc": "import os\nos.listdir('/proc/1')",
    "old root": "import os\nos.chdir('/old')\nopen('root/.bashrc')\nopen('etc/passwd')",
    "replaces the standard library": "import os\nopen(os.__file__, 'a').write('x = 1')",
    "network": "import socket\nsocket.create_connection(('127.0.0.1', PORT), timeout=1).send(b'x')",
    "endless loop": "while True: pass",
    "sleeps": "import time\ntime.sleep(1000)",
    "ignores signals": "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: time.sleep(1)",
    "kill -9 -1": IN_CALL + "    os.kill(-1, 9)\n    return 0",
    "kills its parent": IN_CALL + "    os.kill(os.getppid(), 9)\n    return 0",
    "ptrace": IN_CALL + "    return ctypes.CDLL(None).ptrace(16, 1, 0, 0)",
    "output flood": "while True: print('x' * 10**6)",
    "daemon": IN_CALL + "    if os.fork() == 0:\n        os.setsid()\n        time.sleep(1000)\n    return 0",
    "huge recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef solve(x): return solve(x)",
    "ends with success": "import os\nos._exit(0)",
    "ends in the call": IN_CALL + "    os._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "equals everything": "class All:\n    def __eq__(self, other): return True\ndef solve(x): return All()",
    "equal int": "class Int(int):\n    def __eq__(self, other): return True\ndef solve(x): return Int(3)",
    "changes builtins": "import builtins\nbuiltins.compile = builtins.eval = lambda *a: True\ndef solve(x): return 0",
    "looks into frames": "import sys, gc\ndef solve(x):\n    f = sys._getframe()\n    while f:\n"
    "        for v in [*f.f_locals.values(), *map(str, gc.get_objects())]:\n"
    "            if 'solve(20) ==' in str(v): return int(str(v).split('solve(20) ==')[1].split()[0])\n"
    "        f = f.f_back",
    "writes a verdict": IN_CALL + "    for n in range(64):\n"
    '        try: os.write(n, b\'{"passed": true, "reason": ""}\')\n'
    "        except OSError: pass\n    os._exit(0)",
    "floods the answer": "def solve(x): return 'x' * 10**7",
    "deep answer": IN_CALL + "    for n in range(64):\n"
    "        try: os.write(n, b'{\"value\": \"' + b'(' * 90000 + b'\"}\\n')\n"
    "        except OSError: pass",
    "mounts": IN_CALL + "    return ctypes.CDLL(None).mount(b'proc', b'/work', b'proc', 0, None)",
    "does not parse": "def solve(x) return 1",
    # these answer rightly where they can do what they must not
    "memory of no process": IN_CALL + "    return 40 + (ctypes.CDLL(None).shmget(0, 2**20, 0o1600) >= 0)",
    "memory in a file of no disk": IN_CALL + "    return 40 + (os.memfd_create('f') > 0)",
    "rights in a namespace": IN_CALL + "    return 40 + (ctypes.CDLL(None).unshare(0x10000000) == 0)",
    "clone with rights": IN_CALL + "    libc = ctypes.CDLL(None)\n"
    "    number, flags = (56 if os.uname().machine == 'x86_64' else 220), 0x10000000 | 17\n"
    "    made = libc.syscall(number, flags, 0, 0, 0, 0)\n"
    "    if made == 0: os._exit(0)\n"
    "    return 40 + (made > 0)",
}
OF_ANY_USER = ("memory bit by bit", "many files", "writes outside", "reads secrets", "network")
OF_ANY_USER += ("kill -9 -1", "memory of no process", "rights in a namespace", "replaces the standard library")
AS_ANOTHER = """
import json, sys
from trainer.evaluation.sandbox import SandboxLimits, run_tests
programs, test = json.load(sys.stdin)
found = [run_tests(code, [test], SandboxLimits(seconds=1.0, memory_mib=256)) for code in programs]
print(json.dumps([[verdict.is_passed, verdict.reason] for verdict in found]))
"""


def listening() -> tuple[socket.socket, list[bytes]]:
    server, heard = socket.create_server(("127.0.0.1", 0)), []

    def listen() -> None:
        try:
            heard.append(server.accept()[0].recv(1))
        except OSError:
            pass

    threading.Thread(target=listen, daemon=True).start()
    return server, heard


def test_hostile_programs_score_0_and_leave_nothing() -> None:
    assert len(HOSTILE) >= 30
    before, (server, heard) = set(psutil.pids()), listening()
    files = set(glob.glob(f"{tempfile.gettempdir()}/sft-jail-*"))
    port = str(server.getsockname()[1])
    library = Path(os.__file__).read_bytes()
    with ThreadPoolExecutor(3) as pool:
        found = dict(
            zip(
                HOSTILE,
                pool.map(lambda code: run_tests(code.replace("PORT", port), [TEST], LIMITS), HOSTILE.values()),
                strict=True,
            )
        )
        left = [p for p in psutil.process_iter(["pid", "cmdline"]) if p.pid not in before]
        assert not [p for p in left if any("jail.py" in word for word in p.info["cmdline"] or ())]
    server.close()
    assert [name for name, verdict in found.items() if verdict.is_passed] == []
    assert all(verdict.reason for verdict in found.values())
    assert not heard and not os.path.exists(MARK) and Path(os.__file__).read_bytes() == library
    assert set(glob.glob(f"{tempfile.gettempdir()}/sft-jail-*")) <= files


@pytest.mark.parametrize("user", ["--map-root-user", "--map-user=1000 --map-group=1000"])
def test_the_sandbox_of_another_user_holds_too(user: str) -> None:
    """An ordinary one, and root of a container that has no other user."""
    programs = [RIGHT, *(HOSTILE[name].replace("PORT", "9") for name in OF_ANY_USER)]
    ended = subprocess.run(
        ["unshare", "--user", *user.split(), sys.executable, "-c", AS_ANOTHER],
        input=json.dumps([programs, TEST]),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found[0] == [True, ""]
    assert all(not is_passed and reason for is_passed, reason in found[1:])
    assert not os.path.exists(MARK)


def test_right_programs_pass() -> None:
    tests = {
        RIGHT: [TEST],
        "def turn(a):\n    a.reverse()": ["a = [1, 2]\nturn(a)\nassert a == [2, 1]"],
        "class S:\n    def up(self, n): return (i for i in range(n))": ["assert list(S().up(2)) == [0, 1]"],
        "def least(): return float('inf'), {1: (2, None)}, set()": ["least() == (float('inf'), {1: (2, None)}, set())"],
        "def f(x):\n    raise KeyError(x)": ["try:\n    f(1)\n    assert False\nexcept KeyError:\n    pass"],
    }
    for code, wanted in tests.items():
        assert run_tests(code, wanted, SandboxLimits()).reason == ""


def test_what_tests_do_not_ask_does_not_pass() -> None:
    assert "ask nothing" in run_tests(RIGHT, ["sum([1, 2]) == 3"], SandboxLimits()).reason
    for answer, reason in ((42, ""), (41, "not true: answer == 42")):
        assert run_tests(f"answer = {answer}", ["answer == 42"], SandboxLimits()).reason == reason
    assert (
        "redefines all"
        in run_tests("def all(x): return True\n" + RIGHT, ["all([solve(1) == 0])"], SandboxLimits()).reason
    )
