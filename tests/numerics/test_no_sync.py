"""Between the batch and the one read of the step's sums nothing may wait for the device.

On a CPU nothing can wait, but what would wait on CUDA is an operation of its own that can be seen.
On CUDA torch itself raises at the first wait.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from toy import ToySamples, build_toy_model, toy_run, write_model_config

from trainer.batch import LossOutput
from trainer.loop.step import training_step
from trainer.monitor.packet import Packet, Totals

aten = torch.ops.aten
READS_A_VALUE = (
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.is_nonzero.default,
    aten.equal.default,
)
"""Operations whose result the host needs: a Python number, or a tensor whose shape depends on
values.
"""


class Reads(TorchDispatchMode):
    """Which operations read a value back, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_mask = func is aten.index.Tensor and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if func in READS_A_VALUE or is_mask:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def read_nothing(packet: Packet, **derived: torch.Tensor) -> Totals:
    """A packet of ones."""
    num_summed = sum(tensor.numel() for tensor in packet.sums.values())
    num_ranks = (len(packet.values) - num_summed) // len(packet.fields)
    by_rank = dict.fromkeys(packet.fields, (1.0,) * num_ranks)
    return Totals(dict.fromkeys((*derived, *packet.sums), 1.0), by_rank, {})


def reads_of_a_step(
    world: Any, source: Any, is_broken: bool, loss: str = "cross_entropy"
) -> list[str]:
    model = build_toy_model(world, source, loss=loss)
    parts = toy_run(world, model, ToySamples(), total_steps=3)
    if is_broken:
        plain = model.forward

        def reading(batch: Any) -> LossOutput:
            output = plain(batch)
            return output._replace(loss_sum=output.loss_sum * float(output.loss_sum > -1))

        model.forward = reading
    batches = iter(parts.batches)
    training_step(parts, next(batches))
    with Reads() as reads, patch.object(Packet, "read", read_nothing):
        training_step(parts, next(batches))
    return reads.found


def test_a_step_reads_nothing_back_before_its_sums(tmp_path: Path) -> None:
    source = write_model_config(tmp_path)
    for world_size in (1, 2):
        assert run_ranks(reads_of_a_step, world_size, source, False) == [[]] * world_size
    assert run_ranks(reads_of_a_step, 2, source, False, "dft") == [[], []]
    assert run_ranks(reads_of_a_step, 1, source, True)[0], "a read of the loss goes unseen"


@pytest.mark.gpu
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_cuda_waits_for_nothing_in_a_step(tmp_path: Path, param_dtype: str) -> None:
    """The documents' bounds are on the host already; a kernel launch that asked for them would
    raise here.
    """
    source = write_model_config(tmp_path, head_dim=64)
    assert run_ranks(
        steps_under_sync_debug, 1, source, param_dtype, on_device="cuda:0", timeout_s=300
    ) == [3]


def steps_under_sync_debug(world: Any, source: Any, param_dtype: str) -> int:
    model = build_toy_model(world, source, param_dtype=param_dtype)
    parts = toy_run(world, model, ToySamples(), total_steps=4)
    read = Packet.read

    def allowed(packet: Packet, **derived: torch.Tensor) -> Totals:
        torch.cuda.set_sync_debug_mode("default")
        return read(packet, **derived)

    num_watched = 0
    with patch.object(Packet, "read", allowed):
        for batch in parts.batches:
            pinned = batch.pin_memory()
            if batch.step > 1:  # the first step loads kernels
                torch.cuda.set_sync_debug_mode("error")
                num_watched += 1
            training_step(parts, pinned)
    return num_watched
