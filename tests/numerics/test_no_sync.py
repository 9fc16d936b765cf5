"""On CUDA, torch itself raises an error at the first wait between the batch and the single read of
the step's sums.

tests/fakecuda looks for operations that would wait, without a GPU.
"""

from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from toy import ToySamples, build_toy_model, toy_run, write_model_config

from trainer.train.packet import Packet
from trainer.train.step import training_step


@pytest.mark.gpu
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_cuda_waits_for_nothing_in_a_step(tmp_path, param_dtype):
    """The documents' bounds are already on the host. A kernel launch that read them from the device
    would raise here.
    """
    source = write_model_config(tmp_path, head_dim=64)
    assert run_ranks(
        steps_under_sync_debug, 1, source, param_dtype, on_device="cuda:0", timeout_s=300
    ) == [3]


def steps_under_sync_debug(world, source, param_dtype):
    model = build_toy_model(world, source, param_dtype=param_dtype)
    parts = toy_run(world, model, ToySamples(), total_steps=4)
    read = Packet.read

    def allowed(packet, **derived):
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
