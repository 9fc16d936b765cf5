"""The launcher: its arguments, the place of this machine, exit codes, errors."""

import os
import socket

import pytest

from trainer.config import ConfigError
from trainer.launch import __main__ as launch
from trainer.launch import agent
from trainer.launch.ranks import (
    NodeLayout,
    first_host,
    node_layout,
    rank_environment,
)
from trainer.launch.supervise import run_exit_code
from trainer.runtime.status import ABORTED, VARIABLE, Status, new_status

SLURM = {
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "n[07-08]",
    "SLURM_JOB_ID": "40123",
}
NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, NodeLayout()),
        ({"NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "x"}, NodeLayout()),
        (NODES, NodeLayout(2, 1, "10.0.0.1", 29500)),
        ({**NODES, "MASTER_PORT": "1234"}, NodeLayout(2, 1, "10.0.0.1", 1234)),
        (SLURM, NodeLayout(2, 1, "n07", 20123)),
        ({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "9"}, NodeLayout(2, 1, "head", 9)),
        ({**SLURM, **NODES}, NodeLayout(2, 1, "10.0.0.1", 29500)),
        ({**NODES, "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({**NODES, "NODE_RANK": "2"}, "NODE_RANK=2 must be less than NNODES=2"),
        ({**NODES, "NODE_RANK": "first"}, "NODE_RANK must be a whole number"),
        ({**SLURM, "SLURM_LOCALID": "1"}, "ntasks-per-node=1"),
    ],
)
def test_node_layout(env, expected):
    if isinstance(expected, NodeLayout):
        assert node_layout(env) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            node_layout(env)


def test_first_host_of_a_slurm_list():
    hosts = {
        "a1,b2": "a1",
        "n[01-04]": "n01",
        "gpu-[3,5-7]-ib,x": "gpu-3-ib",
        "r[1-2]n[3,5]": "r1n3",
    }
    assert {nodelist: first_host(nodelist) for nodelist in hosts} == hosts


def test_threads_and_environment(monkeypatch):
    def environment(env, num_ranks):
        status = Status("here")
        return rank_environment(env, NodeLayout(), num_ranks=num_ranks, status=status)

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    threads = {1: "8", 3: "2", 9: "1"}
    assert {n: environment({}, n)["OMP_NUM_THREADS"] for n in threads} == threads
    assert environment({"OMP_NUM_THREADS": "3", VARIABLE: "old"}, 2)["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("reported", "agent_code", "was_signalled", "code"),
    [
        (None, 1, False, 1),
        (0, 0, False, 0),
        (65, 1, False, 65),
        (76, 1, True, 76),
        (75, 0, False, 75),
        (75, 1, False, 1),
        (0, 1, True, 75),
        (None, ABORTED, True, ABORTED),
        (75, ABORTED, False, ABORTED),
        (75, ABORTED, True, 75),
    ],
)
def test_exit_code(reported, agent_code, was_signalled, code):
    assert run_exit_code(reported, agent_code=agent_code, was_signalled=was_signalled) == code


@pytest.fixture
def run_agent(monkeypatch):
    """Run the agent of one of two machines. Return the exit code of its launcher."""
    monkeypatch.setenv("SFT_AGENT_PID", "")
    monkeypatch.setattr(agent.signal, "signal", lambda *arguments: None)
    monkeypatch.setattr(agent.logging, "disable", lambda level: None)

    def run(host, port):
        command = launch.agent_command(1, NodeLayout(2, 0, host, port), [], timeout_s=60)
        with new_status(1) as status:
            monkeypatch.setenv(VARIABLE, status.address)
            code = agent.run_agent(command[3:])
            return run_exit_code(status.exit_code(), agent_code=code, was_signalled=False)

    return run


def test_machines_that_do_not_meet_in_time_can_continue(run_agent, monkeypatch, capsys):
    import torch.distributed.run

    def wait_for_machines(arguments):
        raise torch.distributed.DistStoreError("Timed out after 61 seconds: 1/2 joined.\nframe")

    monkeypatch.setattr(torch.distributed.run, "run", wait_for_machines)
    assert run_agent("head", 1234) == 75
    error = capsys.readouterr().err
    assert "the machines did not meet: Timed out after 61 seconds" in error and "frame" not in error


def test_a_port_that_is_in_use_on_this_machine_is_named(run_agent, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run_agent("127.0.0.1", port) == 2
    assert f"MASTER_PORT={port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nodes", "num_gpus", "num_ranks", "code"),
    [({}, 0, 2, 1), ({}, 2, 2, 75), (NODES, 0, 2, 75)],
)
def test_an_aborted_rank_with_peers_may_have_lost_one(
    nodes, num_gpus, num_ranks, code, tmp_path, monkeypatch
):
    """One machine without GPUs has no NCCL that could lose a peer."""
    for name, value in nodes.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "supervise", lambda *_, **__: ABORTED)
    monkeypatch.setattr("trainer.launch.checks.run_checks", lambda checks, launch: None)
    monkeypatch.setattr("trainer.launch.ranks.gpus_for_run", lambda device: num_gpus)
    monkeypatch.setattr(launch.signal, "pthread_sigmask", lambda how, numbers: set())
    (tmp_path / "run").mkdir()
    assert launch.main([str(num_ranks), f"trainer.default_local_dir={tmp_path}/run"]) == code


def test_a_failed_restore_does_not_say_that_nothing_was_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("trainer.launch.mirroring._prepare", lambda config, layout: 75)
    monkeypatch.setattr(launch.signal, "pthread_sigmask", lambda how, numbers: set())
    words = [
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.checkpoint.mirror=memory://runs/a",
    ]
    assert launch.main(["1", *words]) == 75
    assert capsys.readouterr().out == "resume with the same command\n"
