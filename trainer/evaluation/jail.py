"""Run as `python -I -S -B jail.py LINK` by `sandbox.py`: one half of a check, shut in (floor 5).

Imports nothing of this package; the job on stdin is JSON. Two processes, each in namespaces of its own, are joined by
the socket LINK alone: one runs the program, the other its tests. The tests call the program over LINK as a stranger:
only plain values come back, so no answer can compare equal to everything, and the program never sees what is expected.
The verdict is written by the tests' half to a pipe that the program's half was not given.
"""

import ast
import builtins
import ctypes
import importlib
import json
import os
import resource
import signal
import socket
import sys
from itertools import islice
from typing import Any, NoReturn

SHOWN_CHARS = 200
MAX_MESSAGE_BYTES = 2**20
MAX_ITEMS = 10**5
DISK_MIB, MAX_FILES, MAX_OPEN, MAX_PROCESSES = 32, 1000, 32, 4
OWN_MOUNTS, OWN_USER, REST = 0x00020000, 0x10000000, 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
"""Of unshare; the rest: processes, network, IPC, host name."""
READ_ONLY, NO_SUID, NO_DEVICE, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
RELATIVE_TIMES, SHOWN_RELATIVE = 1 << 21, 4096
KEPT_FLAGS = 8 | 1024 | 2048
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
DEATH_SIGNAL, NO_NEW_PRIVILEGES = 1, 38
NOBODY = 65534
PLAIN: tuple[Any, ...] = (bool, int, float, complex, str, bytes)
STRANGER_UIDS = 1 << 30
"""Above every account: as root the program gets a user of its own, so that processes can be counted."""

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is a child to end
    job = json.load(sys.stdin)
    link_number = int(sys.argv[1])
    _keep_only(1, link_number)
    libc.prctl(DEATH_SIGNAL, signal.SIGKILL)
    try:
        is_root = _shut_in(job["root"])
        child = os.fork()  # the first process of its namespace: when it ends, the kernel ends all that it started
    except OSError as error:
        os.write(1, json.dumps({"error": str(error)}).encode())
        os._exit(1)
    if child == 0:
        _run(job, link_number, is_root)
    os.close(link_number)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.waitpid(child, 0)


def _run(job: dict[str, Any], link_number: int, is_root: bool) -> NoReturn:
    """The child: gives up what it may, then works on its half."""
    try:
        _give_up(job, is_root)
        if job["tests"] is None:
            os.dup2(os.open("/null", os.O_RDWR), 1)
            _serve(job["code"], socket.socket(fileno=link_number))
        else:
            verdict = os.dup(1)
            os.dup2(os.open("/null", os.O_RDWR), 1)
            found = _judge(job["tests"], Link(socket.socket(fileno=link_number)))
            os.write(verdict, json.dumps(found).encode())
    finally:
        os._exit(0)


def _keep_only(*numbers: int) -> None:
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in numbers:
            try:
                os.close(number)
            except OSError:
                pass  # the descriptor that listed them
    os.open("/dev/null", os.O_RDONLY)
    os.open("/dev/null", os.O_WRONLY)


def _call(name: str, *args: Any) -> None:
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _shut_in(root: str) -> bool:
    """Namespaces of its own, and a root that holds Python and an empty directory; whether it is root outside."""
    uid, gid = os.geteuid(), os.getegid()
    is_root = uid == 0 and libc.unshare(OWN_MOUNTS | REST) == 0
    if not is_root:
        _call("unshare", OWN_USER | OWN_MOUNTS | REST)
        for name, line in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {uid} 1"), ("gid_map", f"{NOBODY} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    _call("mount", None, b"/", None, RECURSIVE | PRIVATE, None)
    size = f"size={DISK_MIB}m,nr_inodes={MAX_FILES},mode=755".encode()
    _call("mount", b"tmpfs", root.encode(), b"tmpfs", NO_SUID | NO_DEVICE, size)
    for path in (sys.base_prefix, "/lib", "/lib64", "/usr/lib", "/usr/lib64"):
        _show(path, root)
    for name in ("work", "old"):
        os.mkdir(f"{root}/{name}")
    os.chmod(f"{root}/work", 0o1777)
    open(f"{root}/null", "w").close()
    _call("mount", b"/dev/null", f"{root}/null".encode(), None, BIND, None)
    machine = os.uname().machine
    if machine not in PIVOT_ROOT:
        raise OSError(f"no number of pivot_root is known for {machine}")
    _call("syscall", PIVOT_ROOT[machine], root.encode(), f"{root}/old".encode())
    os.chdir("/work")
    _call("umount2", b"/old", 2)
    return is_root


def _show(path: str, root: str) -> None:
    """The same path below the new root, for reading."""
    inside = root + path
    if not os.path.lexists(path) or os.path.lexists(inside):
        return
    os.makedirs(os.path.dirname(inside), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), inside)
        return
    os.mkdir(inside)
    _call("mount", path.encode(), inside.encode(), None, BIND | RECURSIVE, None)
    shown = os.statvfs(path).f_flag
    kept = (shown & KEPT_FLAGS) | (RELATIVE_TIMES if shown & SHOWN_RELATIVE else 0)
    _call("mount", None, inside.encode(), None, BIND | REMOUNT | READ_ONLY | NO_SUID | NO_DEVICE | kept, None)


def _give_up(job: dict[str, Any], is_root: bool) -> None:
    """Rights and resources, for good. What else runs for this user does not count: it has a user to itself."""
    if is_root:
        stranger = STRANGER_UIDS + job["number"]
        os.setgroups([])
        os.setresgid(stranger, stranger, stranger)
        os.setresuid(stranger, stranger, stranger)
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _call("capset", header, none)
    _call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    libc.prctl(DEATH_SIGNAL, signal.SIGKILL)
    memory_bytes = job["memory_mib"] << 20
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, job["cpu_s"]),
        (resource.RLIMIT_FSIZE, DISK_MIB << 20),
        (resource.RLIMIT_NOFILE, MAX_OPEN),
        (resource.RLIMIT_NPROC, MAX_PROCESSES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def _serve(code: str, link: socket.socket) -> None:
    """The program's half: runs it, then answers what is asked of the objects it made."""
    kept: list[Any] = []
    namespace: dict[str, Any] = {"__name__": "program"}
    lines = link.makefile("rb")

    def packed(value: Any) -> dict[str, Any]:
        try:
            return {"value": repr(_plain(value))}
        except TypeError:
            kept.append(value)
            return {"object": len(kept) - 1}

    def unpacked(item: dict[str, Any]) -> Any:
        return kept[item["object"]] if "object" in item else _literal(item["value"])

    def answered(question: dict[str, Any] | None) -> dict[str, Any]:
        if question is None:
            exec(compile(code, "program", "exec"), namespace)
            return {"names": {name: packed(value) for name, value in list(namespace.items()) if name[:1] != "_"}}
        target, args = kept[question["object"]], [unpacked(item) for item in question["args"]]
        if question["do"] == "list":
            return packed(list(islice(target, MAX_ITEMS)))
        if question["do"] == "get":
            return packed(getattr(target, *args))
        kwargs = {name: unpacked(item) for name, item in question["kwargs"].items()}
        return {**packed(target(*args, **kwargs)), "args": [packed(arg) for arg in args]}

    question: dict[str, Any] | None = None
    while True:
        try:
            answer = answered(question)
        except BaseException as error:
            kind = next(kind.__name__ for kind in type(error).__mro__ if hasattr(builtins, kind.__name__))
            answer = {"raised": kind, "text": str(error)[:SHOWN_CHARS]}
        link.sendall(json.dumps(answer).encode() + b"\n")
        if not (line := lines.readline()):
            return
        question = json.loads(line)


def _plain(value: Any) -> Any:
    """A value of built-in types, those of subclasses too. Raises `TypeError` for anything else."""
    if value is None:
        return None
    for kind in PLAIN:
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        made: Any = list if isinstance(value, list) else tuple if isinstance(value, tuple) else set
        return made(_plain(item) for item in value)
    raise TypeError(f"a {type(value).__name__} is no plain value")


class Numbers(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(float(node.id)) if node.id in ("inf", "nan") else node


def _literal(text: str) -> Any:
    return ast.literal_eval(Numbers().visit(ast.parse(text, mode="eval").body))


class Link:
    """The tests' half of the conversation. Raises `EOFError` where the program has ended or talks nonsense."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._lines, self.num_calls = link, link.makefile("rb"), 0

    def names(self) -> dict[str, Any]:
        names: dict[str, Any] = self._answer()["names"]
        return {name: self._unpacked(item) for name, item in names.items()}

    def ask(self, do: str, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_calls += do == "call"
        packed = {name: _packed(item) for name, item in kwargs.items()}
        question = {"do": do, "object": number, "args": [_packed(arg) for arg in args], "kwargs": packed}
        self._link.sendall(json.dumps(question).encode() + b"\n")
        answer = self._answer()
        for arg, item in zip(args, answer.get("args", ()), strict=False):
            _change(arg, item)
        return self._unpacked(answer)

    def _answer(self) -> dict[str, Any]:
        line = self._lines.readline(MAX_MESSAGE_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError("the program ended, or answered with more than is read")
        answer: dict[str, Any] = json.loads(line)
        if "raised" in answer:
            kind = getattr(builtins, answer["raised"], None)
            is_usual = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if is_usual else RuntimeError)(str(answer["text"])[:SHOWN_CHARS])  # type: ignore[misc]
        return answer

    def _unpacked(self, item: dict[str, Any]) -> Any:
        return Stranger(self, int(item["object"])) if "object" in item else _literal(item["value"])


class Stranger:
    """An object of the program: it can be called, listed, asked for attributes, and equals nothing but itself."""

    def __init__(self, link: Link, number: int) -> None:
        self._link, self._number = link, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._link.ask("call", self._number, args, kwargs)

    def __iter__(self) -> Any:
        return iter(self._link.ask("list", self._number, (), {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._link.ask("get", self._number, (name,), {})


def _packed(value: Any) -> dict[str, Any]:
    return {"object": value._number} if isinstance(value, Stranger) else {"value": repr(_plain(value))}


def _change(arg: Any, item: dict[str, Any]) -> None:
    """What the program did to an argument in place."""
    if type(arg) in (list, dict, set) and "value" in item and type(new := _literal(item["value"])) is type(arg):
        arg.clear()
        (arg.extend if isinstance(arg, list) else arg.update)(new)


def _judge(tests: list[str], link: Link) -> dict[str, Any]:
    """Whether all tests hold, and if not why. A text that is an expression must be true, another must not raise."""
    try:
        names = link.names()
        if taken := names.keys() & vars(builtins).keys():
            return {"passed": False, "reason": f"redefines {min(taken)}, which tests may use"}
        for name in names.keys() & sys.stdlib_module_names:
            names[name] = importlib.import_module(name)
        for test in tests:
            try:
                compiled = compile(test, "tests", "eval")
            except SyntaxError:
                exec(compile(test, "tests", "exec"), names)
            else:
                if not eval(compiled, names):
                    return {"passed": False, "reason": f"not true: {test}"[:SHOWN_CHARS]}
    except BaseException as error:
        return {"passed": False, "reason": f"{type(error).__name__}: {error}"[:SHOWN_CHARS]}
    if link.num_calls == 0:
        return {"passed": False, "reason": "the tests called nothing of the program"}
    return {"passed": True, "reason": ""}


if __name__ == "__main__":
    main()
