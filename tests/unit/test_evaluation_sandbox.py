"""Programs that mean harm, or want to pass without solving the task: stopped, scored 0, and nothing of them is left."""

import glob
import os
import socket
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

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
}


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
    assert "called nothing" in run_tests(RIGHT, ["sum([1, 2]) == 3"], SandboxLimits()).reason
    assert (
        "redefines all"
        in run_tests("def all(x): return True\n" + RIGHT, ["all([solve(1) == 0])"], SandboxLimits()).reason
    )
