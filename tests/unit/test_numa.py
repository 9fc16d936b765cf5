"""On a machine with several NUMA nodes, ranks are bound to the CPUs next to their GPUs."""

import shutil

import pytest
from torch.distributed import run

from trainer.launch import __main__ as launch
from trainer.launch.ranks import NodeLayout


@pytest.mark.parametrize(
    ("num_nodes", "has_numactl", "expected"), [(2, True, True), (2, False, False), (1, True, False)]
)
def test_numa_binding_needs_several_nodes_and_numactl(
    tmp_path, monkeypatch, num_nodes, has_numactl, expected
):
    for number in range(num_nodes):
        (tmp_path / f"node{number}").mkdir()
    monkeypatch.setattr(launch, "NUMA_NODES", tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if has_numactl else None)
    assert launch.can_bind_numa() == expected
    layout = NodeLayout(1, 0, "127.0.0.1", 29500)
    command = launch.agent_command(8, layout, [], timeout_s=60, binds_numa=expected)
    arguments = run.parse_args(command[3:])
    assert arguments.numa_binding == ("node" if expected else None)
