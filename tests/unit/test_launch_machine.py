"""What the launcher finds out about its machine: cards, cores, and the way to the other
machines.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from trainer.config import ConfigError
from trainer.launch import __main__ as launch
from trainer.launch import checks, ranks
from trainer.launch.checks import Launch
from trainer.launch.ranks import NodeLayout, count_gpus, gloo_interface, rank_environment
from trainer.run.compose import load_config
from trainer.runtime.status import Status


def with_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_nvidia: bool, torch: str
) -> None:
    """A machine with one driver of two, and a torch that is this source."""
    drivers = [tmp_path / "nvidiactl", tmp_path / "kfd"]
    drivers[not is_nvidia].touch()
    monkeypatch.setattr(ranks, "GPU_DRIVERS", tuple(map(str, drivers)))
    (tmp_path / "torch.py").write_text(torch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


FAKE_TORCH = """
__version__ = "2.13.0+cu130"
class _Backend:
    def is_built(): return {is_built}
class _Cuda:
    def init():
        if not {is_usable}:
            raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\\nhttp")
    def device_count(): return {num_gpus}
class backends:
    cuda = _Backend
class version:
    cuda = "13.0"
cuda = _Cuda
"""


@pytest.mark.parametrize(
    ("is_built", "num_counted", "reason"),
    [
        (False, 0, "torch 2.13.0+cu130 is built without CUDA"),
        (True, 0, "the NVIDIA driver is too old"),
        (True, 8, "the NVIDIA driver is too old"),
    ],
)
def test_a_driver_without_a_card_that_torch_can_use_is_refused_with_the_reason(
    is_built: bool, num_counted: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch counts cards without a context, so that it counts also those that it cannot use."""
    torch = FAKE_TORCH.format(is_built=is_built, is_usable=False, num_gpus=num_counted)
    with_driver(tmp_path, monkeypatch, is_nvidia=True, torch=torch)
    monkeypatch.setattr(ranks, "DRIVER_RELEASE", tmp_path / "none")
    with pytest.raises(ConfigError, match="torch sees no card") as caught:
        count_gpus()
    assert reason in str(caught.value) and "trainer.device=cpu" in str(caught.value)


RELEASES = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build  "
    "(dvs-builder@U16)",
)


@pytest.mark.parametrize("release", RELEASES)
def test_an_old_driver_is_refused_with_its_version_and_a_torch_that_runs_on_it(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = FAKE_TORCH.format(is_built=True, is_usable=False, num_gpus=8)
    with_driver(tmp_path, monkeypatch, is_nvidia=True, torch=torch)
    (tmp_path / "version").write_text(f"{release}\nGCC version:  gcc version 12.3.0\n")
    monkeypatch.setattr(ranks, "DRIVER_RELEASE", tmp_path / "version")
    with pytest.raises(ConfigError) as caught:
        count_gpus()
    message = str(caught.value)
    assert "the NVIDIA driver 535.104.05 is too old: it supports CUDA 12.2 at most" in message
    assert (
        "torch 2.13.0+cu130 is built for CUDA 13.0. Fix: update the driver to 580 or newer"
        in message
    )
    assert (
        "install the CUDA 12.6 build of torch 2.13.0 " in message
        and "trainer.device=cpu" in message
    )


@pytest.mark.parametrize("num_ranks", [[], ["8"]])
def test_cuda_without_a_card_is_refused_before_a_rank_starts(
    num_ranks: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ranks, "GPU_DRIVERS", ("/nonexistent",))
    monkeypatch.setattr(launch, "supervise", lambda *args, **kwargs: pytest.fail("started"))
    monkeypatch.setattr(launch.signal, "pthread_sigmask", lambda how, numbers: set())
    (tmp_path / "torch.py").write_text(
        FAKE_TORCH.format(is_built=False, is_usable=False, num_gpus=0)
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = ["trainer.device=cuda", f"trainer.default_local_dir={tmp_path}/run"]
    assert launch.main([*num_ranks, *words]) == 2
    error = capsys.readouterr().err
    assert (
        "trainer.device=cuda, but torch found 0 cards on this machine: torch 2.13.0+cu130 is built "
        "without" in error
    )
    assert "Fix: " in error and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("is_nvidia", "num_gpus"), [(True, 3), (False, 0), (False, 2)])
def test_cards_are_counted_by_torch(
    is_nvidia: bool, num_gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drivers of other makers are found on machines without a card for training too: then it is
    a CPU machine.
    """
    torch = FAKE_TORCH.format(is_built=True, is_usable=num_gpus > 0, num_gpus=num_gpus)
    with_driver(tmp_path, monkeypatch, is_nvidia=is_nvidia, torch=torch)
    assert count_gpus() == num_gpus


def test_the_question_is_one_that_torch_understands() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", ranks.ASK_TORCH], capture_output=True, text=True, check=True
    ).stdout
    found = json.loads(answer)
    assert isinstance(found["number"], int) and found["reason"] and found["torch"]


@pytest.mark.parametrize(
    ("num_gpus", "num_cores", "is_warned"), [(8, 8, True), (8, 32, False), (0, 1, False)]
)
def test_few_cores_beside_cards_are_warned_of(
    num_gpus: int,
    num_cores: int,
    is_warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(checks.os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    checks.run_checks({"cores": checks.cores}, Launch(load_config([]), 8, num_gpus))
    stderr = capsys.readouterr().err
    assert ("--cpus-per-task=32" in stderr) is is_warned and bool(stderr) is is_warned


def test_what_is_wrong_with_the_machine_is_said_before_a_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    monkeypatch.setattr(launch, "supervise", lambda *args, **kwargs: pytest.fail("started"))
    monkeypatch.setattr(launch.signal, "pthread_sigmask", lambda how, numbers: set())
    assert (
        launch.main(["2", "trainer.device=cpu", f"trainer.default_local_dir={tmp_path}/run"]) == 2
    )
    assert "GLOO_SOCKET_IFNAME=none0 names no network interface here" in capsys.readouterr().err


class Routes:
    """Stands for the kernel: from which address of this machine each host is reached."""

    def __init__(self, routes: dict[str, str]) -> None:
        self.routes = routes

    def getaddrinfo(self, host: str, port: int, **kwargs: object) -> list[tuple]:
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (host, port))]

    def socket(self, *args: object) -> "Routes":
        return self

    def __enter__(self) -> "Routes":
        return self

    def __exit__(self, *args: object) -> None: ...

    def connect(self, address: tuple[str, int]) -> None:
        if address[0] not in self.routes:
            raise OSError(101, "Network is unreachable")
        self.source = self.routes[address[0]]

    def getsockname(self) -> tuple[str, int]:
        return self.source, 4


def family_of(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


INTERFACES = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.7", "fe80::1%eth0"], "ib0": ["192.168.5.7"]}


LONE = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.7"], "idle0": []}


@pytest.mark.parametrize(
    ("interfaces", "routes", "expected"),
    [
        (
            INTERFACES,
            {"head": "192.168.5.7", "192.0.2.1": "10.0.0.7"},
            {"GLOO_SOCKET_IFNAME": "ib0"},
        ),
        # /etc/hosts of the first machine has 127.0.1.1 head
        (
            INTERFACES,
            {"head": "127.0.0.1", "192.0.2.1": "10.0.0.7"},
            {"GLOO_SOCKET_IFNAME": "eth0"},
        ),
        (INTERFACES, {"head": "127.0.0.1"}, {}),
        (LONE, {"head": "127.0.0.1"}, {"GLOO_SOCKET_IFNAME": "eth0"}),
        (INTERFACES, {}, {}),
    ],
)
def test_gloo_takes_the_interface_of_the_route_to_the_first_machine(
    interfaces: dict,
    routes: dict[str, str],
    expected: dict,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = Routes(routes)
    monkeypatch.setattr(ranks.socket, "getaddrinfo", kernel.getaddrinfo)
    monkeypatch.setattr(ranks.socket, "socket", kernel.socket)
    entries = {
        name: [SimpleNamespace(address=a, family=family_of(a)) for a in interfaces[name]]
        for name in interfaces
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    assert gloo_interface("head") == expected
    said = checks.network(Launch(load_config([]), 1, layout=NodeLayout(2, 0, "head", 29500)))
    assert ["set GLOO_SOCKET_IFNAME" in found.fix for found in said] == [True] * (expected == {})


def test_only_runs_on_several_machines_are_told_an_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "gloo_interface", lambda host: {"GLOO_SOCKET_IFNAME": f"to {host}"})
    nodes = NodeLayout(2, 1, "head", 1234)
    alone, several = [
        rank_environment({}, layout, num_ranks=1, status=Status("none"))
        for layout in (NodeLayout(), nodes)
    ]
    assert "GLOO_SOCKET_IFNAME" not in alone and several["GLOO_SOCKET_IFNAME"] == "to head"
    mine = rank_environment(
        {"GLOO_SOCKET_IFNAME": "mine"}, nodes, num_ranks=1, status=Status("none")
    )
    assert mine["GLOO_SOCKET_IFNAME"] == "mine"
    assert len(os.sched_getaffinity(0)) >= int(mine["OMP_NUM_THREADS"]) >= 1
