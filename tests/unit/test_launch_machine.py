"""Tests of the launcher's view of its machine: GPUs, cores, and the route to other machines."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from trainer.config import ConfigError
from trainer.launch import checks, ranks
from trainer.launch.checks import Launch
from trainer.launch.ranks import NodeLayout, gloo_interface, gpus_for_run, rank_environment
from trainer.runtime.status import Status
from trainer.train.start.compose import load_config

FAKE_TORCH = """
__version__ = "2.13.0"
class _Backend:
    def is_built(): return True
class _Cuda:
    def init():
        if not {is_usable}:
            raise RuntimeError("The NVIDIA driver on your system is too old.\\nhttp")
    def device_count(): return 3
class backends:
    cuda = _Backend
cuda = _Cuda
"""


@pytest.mark.parametrize(
    ("driver", "is_usable", "device", "expected"),
    [
        ("nvidiactl", True, "cpu", 0),
        ("nvidiactl", False, "auto", "The NVIDIA driver on your system is too old"),
        ("kfd", False, "auto", 0),
        ("kfd", True, "auto", 3),
        (None, True, "auto", 0),
        (None, False, "cuda", "torch sees no GPU on this machine: The NVIDIA driver"),
    ],
)
def test_torch_counts_the_gpus_of_a_machine_with_a_driver(
    driver, is_usable, device, expected, tmp_path, monkeypatch
):
    """The driver also counts GPUs that torch cannot use, and other drivers exist without a GPU."""
    drivers = [tmp_path / "nvidiactl", tmp_path / "kfd"]
    monkeypatch.setattr(ranks, "GPU_DRIVERS", tuple(map(str, drivers)))
    if driver is not None:
        (tmp_path / driver).touch()
    (tmp_path / "torch.py").write_text(FAKE_TORCH.format(is_usable=is_usable))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if isinstance(expected, int):
        assert gpus_for_run(device) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            gpus_for_run(device)


@pytest.mark.parametrize(
    ("num_gpus", "num_cores", "is_warned"), [(8, 8, True), (8, 32, False), (0, 1, False)]
)
def test_few_cores_beside_cards_are_warned_of(num_gpus, num_cores, is_warned, monkeypatch, capsys):
    monkeypatch.setattr(checks.os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    checks.run_checks({"cores": checks.cores}, Launch(load_config([]), 8, num_gpus))
    stderr = capsys.readouterr().err
    assert ("--cpus-per-task=32" in stderr) is is_warned and bool(stderr) is is_warned


SEVERAL = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.7", "fe80::1%eth0"], "ib0": ["192.168.5.7"]}
LONE = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.7"], "idle0": []}
DEFAULT_ROUTE = {"192.0.2.1": "10.0.0.7"}


@pytest.mark.parametrize(
    ("interfaces", "routes", "expected"),
    [
        (SEVERAL, {"head": "192.168.5.7", **DEFAULT_ROUTE}, "ib0"),
        # /etc/hosts of the first machine has 127.0.1.1 head
        (SEVERAL, {"head": "127.0.0.1", **DEFAULT_ROUTE}, "eth0"),
        (SEVERAL, {"head": "127.0.0.1"}, None),
        (LONE, {"head": "127.0.0.1"}, "eth0"),
        (SEVERAL, {}, None),
    ],
)
def test_gloo_takes_the_interface_of_the_route_to_the_first_machine(
    interfaces, routes, expected, monkeypatch
):
    monkeypatch.setattr(
        ranks, "_own_addresses_to", lambda host: [*filter(None, [routes.get(host)])]
    )
    entries = {
        name: [
            SimpleNamespace(address=a, family=socket.AF_INET6 if ":" in a else socket.AF_INET)
            for a in addresses
        ]
        for name, addresses in interfaces.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    assert gloo_interface("head") == ({"GLOO_SOCKET_IFNAME": expected} if expected else {})


def test_only_runs_on_several_machines_are_told_an_interface(monkeypatch):
    def interface(env, layout):
        found = rank_environment(env, layout, num_ranks=1, status=Status("none"))
        return found.get("GLOO_SOCKET_IFNAME")

    monkeypatch.setattr(ranks, "gloo_interface", lambda host: {"GLOO_SOCKET_IFNAME": f"to {host}"})
    nodes = NodeLayout(2, 1, "head", 1234)
    assert interface({}, NodeLayout()) is None
    assert interface({}, nodes) == "to head"
    assert interface({"GLOO_SOCKET_IFNAME": "mine"}, nodes) == "mine"
