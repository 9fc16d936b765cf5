"""Simulated machines on one machine: namespaces with separate network, host name, processes and
/etc/hosts, on one switch.

Each host resolves its own name to 127.0.1.1, as on Debian, and the names of the others to their
addresses. A host lives as long as the first process of its namespace; killing that process kills
everything that the host runs. Needs root and iproute2.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.77.0"


def why_not():
    """The reason why namespaces are impossible here; empty if they are possible."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    for name in ("ip", "unshare", "nsenter", "mount", "hostname"):
        if shutil.which(name) is None:
            return f"not installed: {name}"
    try:
        with tempfile.TemporaryDirectory() as directory, network(1, hosts_dir=Path(directory)):
            return ""
    except (subprocess.CalledProcessError, OSError) as error:
        return f"no namespaces here: {error}"


@dataclass
class Host:
    """A machine: `namespace` is the pid of its first process, `switch` the pid of the network's
    first process.
    """

    name: str
    address: str
    keeper: "subprocess.Popen[bytes]"
    namespace: int
    switch: int

    def start(self, command, *, cwd, env, log):
        """Run a command on this machine. Return its exit code, or -9 if the machine was killed."""
        inside = self.entering("env", f"--chdir={cwd}", *command)
        return subprocess.Popen(inside, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def entering(self, *command):
        """Return the words that run a command on this machine."""
        return _entering(self.namespace, *command)

    def cut_off(self):
        """Pull the cable: connections stay open, but nothing passes through them."""
        _run(self.switch, f"ip link set {self.name} down")

    def plug_in(self):
        _run(self.switch, f"ip link set {self.name} up")

    def kill(self):
        """Power off."""
        os.kill(self.namespace, signal.SIGKILL)
        self.keeper.wait()


@contextmanager
def network(num_hosts, *, hosts_dir):
    """Start this number of hosts, and end them with all their processes at the end of the block.
    `hosts_dir` holds their /etc/hosts.
    """
    addresses = {f"host{number}": f"{NETWORK}.{number + 1}" for number in range(num_hosts)}
    with _namespaces("--net") as (_, switch), ExitStack() as held:
        _run(switch, "ip link add switch0 type bridge")
        _run(switch, "ip link set switch0 up")
        hosts = []
        for name in addresses:
            keeper, namespace = held.enter_context(
                _namespaces("--net", "--uts", "--pid", "--mount-proc")
            )
            hosts.append(Host(name, addresses[name], keeper, namespace, switch))
            _set_up(
                hosts[-1],
                {**addresses, "localhost": "127.0.0.1", name: "127.0.1.1"},
                hosts_dir / f"{name}.hosts",
            )
        yield hosts


def _set_up(host, known, table):
    table.write_text("".join(f"{address} {name}\n" for name, address in known.items()))
    name = host.name
    namespace = host.namespace
    there = f"eth0 netns /proc/{namespace}/ns/net"
    _run(host.switch, f"ip link add {name} type veth peer name {there}")
    _run(host.switch, f"ip link set {name} master switch0 up")
    _run(namespace, "ip link set lo up")
    _run(namespace, f"ip address add {host.address}/24 dev eth0")
    _run(namespace, "ip link set eth0 up")
    _run(namespace, f"hostname {name}")
    _run(namespace, f"mount --bind {table} /etc/hosts")


@contextmanager
def _namespaces(*kinds):
    """(process that keeps them, pid of their first process); both die when the first does."""
    command = ["unshare", *kinds, "--fork", "sh", "-c", "echo; read ends_with_us"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as keeper:
        try:
            if not keeper.stdout.read(1):  # all is made when the first process speaks
                raise subprocess.CalledProcessError(keeper.wait(), command)
            yield keeper, int(Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text())
        finally:
            keeper.stdin.close()


def _entering(namespace, *command):
    return ["nsenter", "--target", str(namespace), "--all", "--", *command]


def _run(namespace, command):
    subprocess.run(_entering(namespace, *command.split()), check=True, capture_output=True)
