"""The network interface over which this machine reaches the others of a run (floor 5, no torch)."""

import socket
from socket import AF_INET, AF_INET6

import psutil

ANYWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses kept for documentation: the route to them is the default route."""
LOOPBACK = {"127.0.0.1", "::1"}


def gloo_interface(master_addr: str) -> dict[str, str]:
    """`GLOO_SOCKET_IFNAME` for the ranks, or nothing when no route tells.

    gloo would listen where the name of this machine leads, and on Debian and in containers that is 127.0.1.1, which
    no other machine reaches. On the first machine its own address may lead there too; then the default route tells,
    or that there is only one interface to take.
    """
    for host in (master_addr, *ANYWHERE):
        if name := _interface_to(host):
            return {"GLOO_SOCKET_IFNAME": name}
    names = list(_outward_interfaces())
    return {"GLOO_SOCKET_IFNAME": names[0]} if len(names) == 1 else {}


def _interface_to(host: str) -> str | None:
    """The interface of the route to a host, unless that is this machine's loopback. Sends nothing."""
    try:
        resolved = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in resolved:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            if name := _interface_with(probe.getsockname()[0]):
                return name
    return None


def _interface_with(address: str) -> str | None:
    return next((name for name, addresses in _outward_interfaces().items() if address in addresses), None)


def _outward_interfaces() -> dict[str, set[str]]:
    """Addresses by interface, without the loopback and without those that nothing can reach."""
    found = {
        name: {entry.address.partition("%")[0] for entry in entries if entry.family in (AF_INET, AF_INET6)}
        for name, entries in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if addresses and not addresses & LOOPBACK}
