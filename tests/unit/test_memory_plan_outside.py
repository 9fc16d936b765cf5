"""What a plan says of memory beside the step (CUDA, NCCL, the host), and of models that it
cannot plan.
"""

import mmap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from ranks import run_ranks
from test_memory_plan import RECOMPUTE, a_plan, planned, run, tokens
from toy import START, build_toy_model, optim_config, write_model_config

from trainer.checkpoint import shards, snapshot
from trainer.checkpoint.snapshot import HostBuffers, Snapshot
from trainer.model.experts import Routers
from trainer.optim import OPTIMIZERS
from trainer.progress import History
from trainer.run.compose import load_config
from trainer.tools.plan import checks, fake_step, memory
from trainer.tools.plan.disk import DiskPlan
from trainer.tools.plan.memory import SAVE_COPY

CPU = "trainer.device=cpu"


def test_what_cuda_and_nccl_take_grows_with_the_ranks_of_a_machine() -> None:
    """Estimated at 2 to 4 GiB beside seven others, where 1.5 GiB were put."""
    needed = [a_plan(ranks, 2**30).needed_gib - 1.05 for ranks in (1, 2, 4, 8, 16, 512)]
    assert needed == pytest.approx([1.5, 2.0, 2.5, 3.0, 3.0, 3.0])
    assert len({replace(a_plan(ranks, 2**30), is_cuda=False).needed_gib for ranks in (1, 8)}) == 1


@pytest.mark.parametrize(
    ("free_bytes", "levels"),
    [
        (10**10, ["ok", "warn"]),
        (2 * 10**9, ["warn", "warn"]),
        (10**9, ["fail", "warn"]),
        (10**13, ["ok", "ok"]),
    ],
)
def test_checkpoints_and_prepared_tokens_need_room_where_they_are_written(
    free_bytes: int, levels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens need not be prepared again, so that too little room for them is no failure."""
    disk = DiskPlan(shard_bytes=10**9, export_bytes=10**8, num_checkpoints=2, token_bytes=10**12)
    monkeypatch.setattr(checks, "plan_disk", lambda config, plan: disk)
    monkeypatch.setattr(checks.fsio, "free_bytes", lambda path: free_bytes)
    found = list(checks.check_disk(load_config([CPU]), a_plan(2)))
    assert [one.level for one in found] == levels
    assert "checkpoints/.cache" in found[1].what and "checkpoints/.cache" not in found[0].what


def test_host_memory_is_told_for_all_ranks_of_a_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*tokens(64, 32, batch=64), "model.fsdp_config.param_dtype=bfloat16"]
    settings = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 32000}
    host_bytes = planned(tmp_path, 16, *words, **settings).host_bytes[SAVE_COPY]
    _, lines, _ = run(capsys, "16", f"model.partial_pretrain={tmp_path}", *words)
    assert (
        f"host memory on a machine with 8 of these ranks: {8 * host_bytes / 2**30:.2f} GiB" in lines
    )
    assert "host memory on a machine" not in "".join(
        run(capsys, "2", f"model.partial_pretrain={tmp_path}", *words, CPU)[1]
    )


def size_of_the_copy(world: Any, source: Any) -> int:
    """Bytes of the block into which a save behind training copies a state that has been trained
    a step.
    """
    model = build_toy_model(world, source)
    optimizer = OPTIMIZERS["adamw"](model, optim_config())
    fake_step.run_step(
        model,
        Routers(model, world.device),
        optimizer,
        [fake_step.full_batch((32, 32))],
    )
    sizes: list[int] = []
    allocate = mmap.mmap

    def recorded(fileno: int, length: int, **settings: Any) -> mmap.mmap:
        sizes.append(length)
        return allocate(fileno, length, **settings)

    snapshot.mmap.mmap = recorded  # type: ignore[assignment,misc]  # of this process, which ends with this function
    state = {
        "model": shards.model_state(model),
        "optim": shards.optimizer_state(model, optimizer),
        "extra": {},
    }
    HostBuffers(torch.device("cpu")).copy(
        Snapshot(START, data={}, loss=None, grad_norm=None, history=History(), **state)
    )
    return sum(sizes)


def test_a_save_behind_training_takes_the_host_memory_that_was_planned(tmp_path: Path) -> None:
    """Its own memory per tensor, in powers of two, was 1.9 times that."""
    found = planned(
        tmp_path, 2, *tokens(64, 32), CPU, "model.fsdp_config.param_dtype=float32", vocab_size=2000
    )
    source = write_model_config(tmp_path, vocab_size=2000)
    assert run_ranks(size_of_the_copy, 2, source)[0] == pytest.approx(
        found.host_bytes[SAVE_COPY], rel=0.01
    )


def test_a_model_whose_step_cannot_be_planned_is_named_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "a and b must have same reduction dim, but got [128, 96] X [64, 64].\nand more"
        )

    monkeypatch.setattr(fake_step, "run_step", fails)
    write_model_config(tmp_path)
    code, lines, errors = run(
        capsys, "2", f"model.partial_pretrain={tmp_path}", *tokens(64, 32), RECOMPUTE
    )
    assert (code, lines) == (2, [])
    named = (
        f"ERROR: model.partial_pretrain={tmp_path}: its step cannot be planned (RuntimeError: a and"
    )
    assert errors.splitlines()[-1].startswith(named)
    assert "memory/max_reserved_gib" in errors and "test_memory_plan_outside.py:" in errors
    assert "Traceback" not in errors and "and more" not in errors


def test_memory_is_that_of_a_card_or_a_share_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_cpu, on_gpu = (load_config([f"trainer.device={device}"]) for device in ("cpu", "auto"))
    whole_gib = memory.default_memory_gib(on_cpu, 1)
    assert memory.default_memory_gib(on_cpu, 4) == whole_gib / 4
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert memory.default_memory_gib(on_gpu, 4) == 80
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    sizes = (80, 24, 16)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda n: SimpleNamespace(total_memory=sizes[n] * 2**30),
    )
    found = {num_ranks: memory.default_memory_gib(on_gpu, num_ranks) for num_ranks in (1, 2, 3, 8)}
    assert found == {1: 80, 2: 24, 3: 16, 8: 16}, "of the smallest card that a rank takes"


@pytest.mark.parametrize(
    ("cgroup", "limit"),
    [
        ("0::/job/step\n", "job/memory.max"),
        ("5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n", "memory/memory.limit_in_bytes"),
    ],
)
def test_the_limit_of_a_container_is_the_memory_that_may_be_used(
    tmp_path: Path, cgroup: str, limit: str
) -> None:
    """Both versions of control groups: the limit of a job around this process, and a
    container's own mount.
    """
    machine_bytes = psutil.virtual_memory().total
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    (tmp_path / "cgroup/job/step").mkdir(parents=True)
    (tmp_path / "cgroup/job/step/memory.max").write_text("max\n")
    file = tmp_path / "cgroup" / limit
    file.parent.mkdir(exist_ok=True)
    found = []
    for size in ("max", machine_bytes + 1, 3 * 2**30):
        file.write_text(f"{size}\n")
        found.append(memory.host_memory_bytes(tmp_path / "proc", tmp_path / "cgroup"))
    assert found == [machine_bytes, machine_bytes, 3 * 2**30]
    assert memory.host_memory_bytes(tmp_path / "none", tmp_path / "cgroup") == machine_bytes
