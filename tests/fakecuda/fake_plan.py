"""Run a plan's step once on CPU tensors in place of GPU tensors, as every plan does, and once on
fake CUDA tensors.
"""

from contextlib import contextmanager
from unittest.mock import patch

import torch
from fake_kernels import of_a_card
from fake_step import fake_world, on_meta_device
from toy import write_model_config

from trainer.model import load, parallelize
from trainer.tools.plan import fake_step as planner
from trainer.tools.plan import memory
from trainer.train.start.compose import load_config

LIMITS = ("data.max_length=512", "data.max_token_len_per_gpu=512", "data.train_batch_size=64")


def run_case(case, directory):
    write_model_config(
        directory, case.model_type, head_dim=64, hidden_size=256, num_hidden_layers=4
    )
    model = {
        "partial_pretrain": directory,
        "enable_gradient_checkpointing": str(case.recompute).lower(),
        "fsdp_config.cpu_offload": str(case.offload).lower(),
        "fsdp_config.fsdp_size": case.fsdp_size,
        "ulysses_sequence_parallel_size": case.sequence_size,
    }
    config = load_config(
        [*LIMITS, "trainer.device=cuda", *(f"model.{key}={value}" for key, value in model.items())]
    )
    job = memory._job(config, case.num_ranks)
    pretended = planner.measure(job, 4)
    with _on_fake_cuda(case):
        return {"pretended": _told(pretended), "found": _told(planner.measure(job, 4))}


@contextmanager
def _on_fake_cuda(case):
    plain_parallelize = parallelize.parallelize
    plain_materialize = load.materialize

    @contextmanager
    def world(job):
        with fake_world(case) as made:
            yield made

    def sharded(*args):
        with on_meta_device():
            plain_parallelize(*args)

    def with_memory(model, device, *, buffer_device):
        plain_materialize(
            model, torch.device("cpu") if case.offload else device, buffer_device=buffer_device
        )

    with (
        of_a_card(),
        patch.object(planner, "_fake_world", world),
        patch.object(parallelize, "parallelize", sharded),
        patch.object(load, "materialize", with_memory),
    ):
        yield


def _told(measured):
    """Return the bytes at the memory peak of each phase, by category."""
    return {str(phase): dict(held) for phase, held in measured[planner.DEVICE].items()}
