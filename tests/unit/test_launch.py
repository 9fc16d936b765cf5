"""The launcher: its arguments, the place of this machine, the command of the agent, mistakes."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.config import ConfigError
from trainer.launch import __main__ as launch
from trainer.launch import agent, ranks
from trainer.launch.__main__ import agent_command
from trainer.launch.aborts import exit_code_after_abort
from trainer.launch.ranks import (
    Arguments,
    NodeLayout,
    first_host,
    node_layout,
    parse_arguments,
    rank_environment,
)
from trainer.launch.supervise import run_exit_code
from trainer.runtime.status import ABORTED, VARIABLE, Status, new_status

ROOT = Path(__file__).parents[2]
SLURM = {
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "n[07-08]",
    "SLURM_JOB_ID": "40123",
}
NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}


@pytest.mark.parametrize("num_ranks", [None, 8])
@pytest.mark.parametrize("overrides", ["", "optim.lr=1e-5 --cfg job", "--help", "~data.val_files"])
def test_arguments(num_ranks, overrides):
    words = overrides.split()
    argv = words if num_ranks is None else [str(num_ranks), *words]
    assert parse_arguments(argv) == Arguments(num_ranks, words)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, NodeLayout()),
        ({"NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "x"}, NodeLayout()),
        ({"SLURM_NNODES": "1", "SLURM_NODEID": "0"}, NodeLayout()),
        (NODES, NodeLayout(2, 1, "10.0.0.1", 29500)),
        ({**NODES, "MASTER_PORT": "1234"}, NodeLayout(2, 1, "10.0.0.1", 1234)),
        (SLURM, NodeLayout(2, 1, "n07", 20123)),
        ({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "9"}, NodeLayout(2, 1, "head", 9)),
        ({**SLURM, **NODES}, NodeLayout(2, 1, "10.0.0.1", 29500)),
    ],
)
def test_node_layout(env, expected, monkeypatch):
    monkeypatch.setattr(ranks.shutil, "which", lambda name: None)
    assert node_layout(env) == expected


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({**NODES, "NODE_RANK": ""}, "NODE_RANK is not set"),
        ({**NODES, "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({**NODES, "NODE_RANK": "2"}, "NODE_RANK=2, but NNODES=2"),
        ({**NODES, "NODE_RANK": "first"}, "NODE_RANK must be a whole number"),
        ({**NODES, "NNODES": "0"}, "NNODES must be a whole number of at least 1"),
        ({**NODES, "MASTER_PORT": "http"}, "MASTER_PORT must be a whole number"),
        ({**SLURM, "SLURM_LOCALID": "1"}, "ntasks-per-node=1"),
    ],
)
def test_wrong_layout(env, message):
    with pytest.raises(ConfigError, match=message):
        node_layout(env)


HOSTS = {
    "a1": "a1",
    "a1,b2": "a1",
    "n[01-04]": "n01",
    "gpu-[3,5-7]-ib,x": "gpu-3-ib",
    "n[007],m1": "n007",
}


def test_first_host_without_scontrol(monkeypatch):
    monkeypatch.setattr(ranks.shutil, "which", lambda name: None)
    assert {nodelist: first_host(nodelist) for nodelist in HOSTS} == HOSTS


def test_threads_and_environment(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for num_ranks, num_threads in ((1, "8"), (3, "2"), (8, "1"), (9, "1"), (2, "4")):
        env = rank_environment(
            {"HOME": "/h"}, NodeLayout(), num_ranks=num_ranks, status=Status("here")
        )
        assert env["OMP_NUM_THREADS"] == num_threads
    assert (env["HOME"], env[VARIABLE], env["PYTHONSAFEPATH"]) == ("/h", "here", "1")
    mine = {
        "OMP_NUM_THREADS": "3",
        VARIABLE: "old",
        "PYTHONSAFEPATH": "",
        "TORCH_CPP_LOG_LEVEL": "INFO",
    }
    assert rank_environment(mine, NodeLayout(), num_ranks=2, status=Status("here")) == {
        **mine,
        VARIABLE: "here",
    }


@pytest.mark.parametrize(
    ("reported", "agent_code", "was_signalled", "code"),
    [
        (None, 0, False, 0),
        (None, 1, False, 1),
        (None, -9, True, 1),
        (0, 0, False, 0),
        (65, 1, False, 65),
        (76, 1, True, 76),
        (75, 0, False, 75),
        (75, 1, True, 75),
        (0, 1, True, 75),
        (75, 1, False, 1),
        (0, 1, False, 1),
        (None, ABORTED, False, ABORTED),
        (None, ABORTED, True, ABORTED),
        (75, ABORTED, False, ABORTED),
        (75, ABORTED, True, 75),
        (1, ABORTED, False, 1),
        (65, ABORTED, False, 65),
    ],
)
def test_exit_code(reported, agent_code, was_signalled, code):
    assert run_exit_code(reported, agent_code=agent_code, was_signalled=was_signalled) == code


@pytest.fixture
def run_agent(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], int]:
    """Runs the agent of one of two machines. Returns the exit code of its launcher."""
    monkeypatch.setenv("SFT_AGENT_PID", "")
    monkeypatch.setattr(agent.signal, "signal", lambda *arguments: None)
    monkeypatch.setattr(agent.logging, "disable", lambda level: None)

    def run(host: str, port: int) -> int:
        command = agent_command(1, NodeLayout(2, 0, host, port), [], timeout_s=60)
        with new_status(1) as status:
            monkeypatch.setenv(VARIABLE, status.address)
            code = agent.run_agent(command[3:])
            return run_exit_code(status.exit_code(), agent_code=code, was_signalled=False)

    return run


def test_machines_that_do_not_meet_in_time_are_told_and_can_continue(
    run_agent,
    monkeypatch,
    capsys,
):
    import torch.distributed.run

    def wait_for_machines(arguments: object) -> None:
        raise torch.distributed.DistStoreError(
            "Timed out after 61 seconds waiting for clients. 1/2 clients joined.\nframe"
        )

    monkeypatch.setattr(torch.distributed.run, "run", wait_for_machines)
    assert run_agent("head", 1234) == 75
    error = capsys.readouterr().err
    assert "the machines did not meet: Timed out after 61 seconds" in error and "frame" not in error


def test_a_port_that_is_in_use_on_this_machine_is_named(run_agent, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run_agent("127.0.0.1", port) == 2
    error = capsys.readouterr().err
    assert f"MASTER_PORT={port} is already in use" in error
    assert "Fix: set MASTER_PORT to a free port" in error


def run_main(*argv: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    code = "import sys; from trainer.launch.__main__ import main; code = main(sys.argv[1:]); "
    code += "assert 'torch' not in sys.modules; sys.exit(code)"
    full_env = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    return subprocess.run(
        [sys.executable, "-c", code, *argv],
        env=full_env,
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.mark.parametrize(
    ("argv", "env", "message"),
    [
        (["2", "data.train_batchsize=8"], {}, "train_batch_size"),
        (["0"], {}, "at least 1"),
        (["2", "--fast"], {}, "--fast"),
        (["2"], {"NNODES": "2"}, "NODE_RANK is not set"),
    ],
)
def test_mistakes_end_with_2_before_torch_is_loaded(argv, env, message):
    result = run_main(*argv, env=env)
    assert result.returncode == 2
    assert result.stderr.startswith("ERROR: ") and message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("key", ["trainer.default_local_dir", "data.cache_dir", "data.train_files"])
@pytest.mark.parametrize("quote", ["", "'"])
def test_a_path_that_is_not_utf8_is_refused_before_a_rank_starts(key, quote):
    result = run_main("2", f"{key}={quote}/tmp/bad\udcff/x{quote}")
    assert result.returncode == 2
    assert (
        f"{key}={quote}/tmp/bad\\udcff/x{quote}' is not valid UTF-8" in result.stderr
        and "Fix: " in result.stderr
    )


def test_a_directory_that_was_removed_under_the_shell_is_said(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert launch.main(["2"]) == 2


@pytest.mark.parametrize(
    ("nodes", "num_gpus", "num_ranks", "code"),
    [({}, 0, 2, 1), ({}, 1, 1, 1), ({}, 2, 2, 75), (NODES, 0, 2, 75)],
)
def test_a_rank_that_was_aborted_may_have_lost_a_peer(
    nodes,
    num_gpus,
    num_ranks,
    code,
    tmp_path,
    monkeypatch,
    capsys,
):
    """On one machine without GPUs there is no NCCL that could have lost one."""
    for name, value in nodes.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "supervise", lambda *_, **__: ABORTED)
    monkeypatch.setattr("trainer.launch.checks.run_checks", lambda checks, launch: None)
    monkeypatch.setattr(launch, "gpus_for_run", lambda device: num_gpus)
    monkeypatch.setattr(launch.signal, "pthread_sigmask", lambda how, numbers: set())
    (tmp_path / "run").mkdir()
    assert launch.main([str(num_ranks), f"trainer.default_local_dir={tmp_path}/run"]) == code
    assert ("as when NCCL loses another machine" in capsys.readouterr().err) is (code == 75)


def test_aborts_without_a_new_step_are_not_resumable_for_ever(tmp_path, capsys):
    def ends_after(step: int) -> int:
        with (tmp_path / "metrics.jsonl").open("a") as log:
            log.write(json.dumps({"step": step, "kind": "train", "attempt": 1, "ts": 0.0}) + "\n")
        return exit_code_after_abort(tmp_path, 0)

    assert [ends_after(step) for step in (5, 4, 6, 6)] == [75] * 4, (
        "a step that is new begins the count again"
    )
    assert exit_code_after_abort(tmp_path, 1) == 75, "another machine counts for itself"
    assert ends_after(5) == 1
    assert (
        "ERROR: 3 starts in a row were aborted, and none got past step 6" in capsys.readouterr().err
    )
    assert ends_after(5) == 75, "started by hand it has as many tries again"
