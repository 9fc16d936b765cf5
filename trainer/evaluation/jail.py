"""Run as `python -I -S -B jail.py LINK` by `sandbox.py`: one half of a check, shut in (floor 5).

Imports nothing of this package; the job on stdin is JSON. Two processes, each in namespaces of its own, are joined by
the socket LINK alone: one runs the program, the other its tests, which call it as a stranger: only plain values come
back, so no answer can compare equal to everything, and the program never sees what is expected. The verdict is written
by the tests' half to a pipe that the program's half was not given.
"""

import ast
import builtins
import ctypes
import errno
import importlib
import json
import os
import resource
import signal
import socket
import struct
import sys
from itertools import islice, pairwise
from typing import Any, NamedTuple, NoReturn

SHOWN_CHARS = 200
MAX_MESSAGE_BYTES = 2**20
MAX_ITEMS = 10**5
DISK_MIB, MAX_FILES, MAX_OPEN, MAX_PROCESSES = 32, 1000, 32, 4
OWN_MOUNTS, OWN_USER, REST = 0x00020000, 0x10000000, 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
"""Of unshare; the rest: processes, network, IPC, host name."""
READ_ONLY, NO_SUID, NO_DEVICE, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
RELATIVE_TIMES, SHOWN_RELATIVE, KEPT_FLAGS = 1 << 21, 4096, 8 | 1024 | 2048
DEATH_SIGNAL, DUMPABLE, SECCOMP, NO_NEW_PRIVILEGES = 1, 4, 22, 38
NOBODY = 65534
PLAIN: tuple[Any, ...] = (bool, int, float, complex, str, bytes)
STRANGER_UIDS = 1 << 30  # above every account: as root the program gets a user of its own, whose processes are counted


class Machine(NamedTuple):
    """Numbers of its system calls; denied are shmget, msgget, semget, memfd_create, add_key and io_uring_setup, whose
    memory no limit counts, and unshare, setns, bpf, userfaultfd and perf_event_open."""

    audit: int
    pivot_root: int
    clone: int
    denied: tuple[int, ...]


MACHINES = {
    "x86_64": Machine(0xC000003E, 155, 56, (29, 68, 64, 319, 248, 425, 272, 308, 321, 323, 298)),
    "aarch64": Machine(0xC00000B7, 41, 220, (194, 186, 190, 279, 217, 425, 97, 268, 280, 282, 241)),
}

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is a child to end
    job = json.load(sys.stdin)
    link_number = int(sys.argv[1])
    _keep_only(1, link_number)
    libc.prctl(DEATH_SIGNAL, signal.SIGKILL)
    try:
        _shut_in(job["root"], job["number"])
        child = os.fork()  # the first process of its namespace: when it ends, the kernel ends all that it started
    except OSError as error:
        os.write(1, json.dumps({"error": str(error)}).encode())
        os._exit(1)
    if child == 0:
        _run(job, link_number)
    os.close(link_number)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.waitpid(child, 0)


def _run(job: dict[str, Any], link_number: int) -> NoReturn:
    """The child: gives up what it may, then works on its half."""
    try:
        _give_up(job)
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
    """Of all descriptors; what Python takes for stdin and stderr is /dev/null."""
    for after, number in pairwise((-1, *numbers, os.sysconf("SC_OPEN_MAX"))):
        os.closerange(after + 1, number)
    os.open("/dev/null", os.O_RDONLY)
    os.open("/dev/null", os.O_WRONLY)


def _call(name: str, *args: Any) -> None:
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _shut_in(root: str, number: int) -> None:
    """Namespaces of its own, and a root that holds Python and an empty directory."""
    with open("/proc/self/uid_map") as file:  # root of a container without root has few users
        users = [(int(first), int(first) + int(count)) for first, _, count in map(str.split, file)]
    is_root = os.geteuid() == 0 and any(first <= STRANGER_UIDS <= end // 2 for first, end in users)
    if is_root and libc.unshare(OWN_MOUNTS | REST) != 0:
        is_root = False
        _become_stranger(number)  # the kernel limits no number of processes for root, in a user namespace too
        libc.prctl(DUMPABLE, 1)  # else /proc/self stays root's
    if not is_root:
        uid, gid = os.geteuid(), os.getegid()
        _call("unshare", OWN_USER | OWN_MOUNTS | REST)
        for name, line in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {uid} 1"), ("gid_map", f"{NOBODY} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    _call("mount", None, b"/", None, RECURSIVE | PRIVATE, None)
    limits = f"size={DISK_MIB}m,nr_inodes={MAX_FILES},mode=755".encode()
    _call("mount", b"tmpfs", root.encode(), b"tmpfs", NO_SUID | NO_DEVICE, limits)
    for path in (sys.base_prefix, "/lib", "/lib64", "/usr/lib", "/usr/lib64"):
        _show(path, root)
    os.mkdir(f"{root}/old")
    os.mkdir(f"{root}/work")
    os.chmod(f"{root}/work", 0o1777)
    open(f"{root}/null", "w").close()
    _call("mount", b"/dev/null", f"{root}/null".encode(), None, BIND, None)
    if os.uname().machine not in MACHINES:
        raise OSError(f"no numbers of system calls are known for {os.uname().machine}")
    _call("syscall", MACHINES[os.uname().machine].pivot_root, root.encode(), f"{root}/old".encode())
    os.chdir("/work")
    _call("umount2", b"/old", 2)


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


def _give_up(job: dict[str, Any]) -> None:
    """Rights and resources, for good. What else runs for this user does not count: it has a user to itself."""
    if os.geteuid() == 0:
        _become_stranger(job["number"])
    _call("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
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
    _deny(MACHINES[os.uname().machine])


def _deny(machine: Machine) -> None:
    """System calls that are answered with "not permitted", for good: a filter of seccomp, as the kernel reads it."""
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    refused, missing, allowed = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x7FFF0000
    lines = [(load, 0, 0, 4), (equal, 1, 0, machine.audit), (end, 0, 0, refused)]
    lines += [(load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (end, 0, 0, refused)]  # x86-64's second table
    for number in machine.denied:
        lines += [(equal, 0, 1, number), (end, 0, 0, refused)]
    # clone3 (435) has its flags in memory, where no filter looks: without it the C library takes clone
    lines += [(equal, 0, 1, 435), (end, 0, 0, missing), (equal, 0, 3, machine.clone), (load, 0, 0, 16)]
    lines += [(any_bit, 0, 1, OWN_USER | OWN_MOUNTS | REST), (end, 0, 0, refused), (end, 0, 0, allowed)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    _call("prctl", SECCOMP, 2, struct.pack("HP", len(lines), ctypes.addressof(code)))


def _become_stranger(number: int) -> None:
    os.setgroups([])
    os.setresgid(*[STRANGER_UIDS + number] * 3)
    os.setresuid(*[STRANGER_UIDS + number] * 3)


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
            kind: Any = getattr(builtins, answer["raised"], None)
            is_usual = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if is_usual else RuntimeError)(str(answer["text"])[:SHOWN_CHARS])
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
        made, is_asked = set(names), False
        for test in tests:
            try:
                compiled, is_statement = compile(test, "tests", "eval"), False
            except SyntaxError:
                compiled, is_statement = compile(test, "tests", "exec"), True
            if not eval(compiled, names) and not is_statement:  # statements are None
                return {"passed": False, "reason": f"not true: {test}"[:SHOWN_CHARS]}
            is_asked |= not made.isdisjoint(compiled.co_names)
    except BaseException as error:
        return {"passed": False, "reason": f"{type(error).__name__}: {error}"[:SHOWN_CHARS]}
    if not is_asked and link.num_calls == 0:  # a name may stand in a function of the tests
        return {"passed": False, "reason": "the tests ask nothing of the program"}
    return {"passed": True, "reason": ""}


if __name__ == "__main__":
    main()
