"""The trainer's own step on fake CUDA tensors, operation by operation; run as a program of its own.

python fake_step.py LIBRARY   reads a case a line (JSON), answers each with a line of JSON
"""

import dataclasses
import json
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))
import fake_cuda

if __name__ == "__main__":
    fake_cuda.install(Path(sys.argv[1]))

import fake_kernels
import numpy as np
import torch
import torch.distributed as dist
from fake_watch import Watch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import fake_collectives  # noqa: F401  collectives of fake tensors
from torch.testing._internal.distributed.fake_pg import FakeStore
from toy import ToySamples, model_config, toy_run, write_model_config

from trainer.data.batch_plan import Limits, RankPlan
from trainer.data.loader import build_step
from trainer.model import assemble, load, packed_lm, parallelize
from trainer.runtime.distributed import make_world
from trainer.train.packet import BY_RANK, Packet, Totals
from trainer.train.step import training_step

LOCAL_RANK = 3
"""The index of rank 0's device here, so that code that uses device 0 by mistake is detected."""


@dataclasses.dataclass(frozen=True)
class Case:
    model_type: str = "qwen3"
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_ranks: int = 8
    fsdp_size: int = -1
    sequence_size: int = 1
    recompute: bool | str = False
    compile: bool = False
    offload: bool = False
    lora_rank: int = 0
    load_in_4bit: bool = False
    num_micro_batches: int = 2
    optimizer: str = "adamw"
    loss: str = "cross_entropy"
    kept: str = "float32"
    """The dtype of moments and parameters."""
    trouble_at: int = 0
    """A step of a whole run whose gradient norm causes a rollback."""

    @property
    def model_config(self):
        return model_config(
            param_dtype="bfloat16",
            reshard_after_forward=True,
            enable_gradient_checkpointing=self.recompute,
            cpu_offload=self.offload,
            fsdp_size=self.fsdp_size,
            master_dtype=self.kept,
            lora_rank=self.lora_rank,
            load_in_4bit=self.load_in_4bit,
            loss=self.loss,
            compile=self.compile,
            ulysses_sequence_parallel_size=self.sequence_size,
        )


def read_ones(packet, **derived):
    """Return the totals of a packet of ones, without waiting for the device. No rank requests
    anything, and nothing is abnormal.
    """
    summed = dict(packet.sums)
    by_rank = dict.fromkeys(packet.fields, (1.0,) * summed.pop(BY_RANK).shape[1])
    sums = {
        name: float(not name.endswith(("_requests", "is_skipped", "nonfinite")))
        for name in (*derived, *summed)
    }
    vectors = {name: np.ones(tuple(tensor.shape)) for name, tensor in summed.items()}
    return Totals(sums, by_rank, vectors)


@contextmanager
def fake_world(case):
    """Rank 0 in a world whose other ranks are simulated."""
    device = torch.device("cuda", LOCAL_RANK)
    torch.cuda.set_device(device)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.num_ranks)
    try:
        yield make_world(device, fsdp_size=case.fsdp_size, sequence_size=case.sequence_size)
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_run(case, directory):
    """Build everything from config.json to the optimizer as a run does, for the GPU's memory; yield
    the run and two batches.

    Batches contain the micro-batches of this rank that `case` requests, with three documents each
    if they are packed.
    """
    source = write_model_config(
        directory, case.model_type, **{"head_dim": 64, "hidden_size": 256, **case.changes}
    )
    config = case.model_config
    design = assemble.design_model(config, source, max_length=64)
    model = design.model
    is_packed = design.reason is None
    with fake_world(case) as world, _compiled_without_code():
        with on_meta_device():
            parallelize.parallelize(model, config, world)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            _fake_buffers(model)
            load.materialize(
                model,
                torch.device("cpu") if case.offload else world.device,
                buffer_device=world.device,
            )
            samples = ToySamples()
            optim = {"name": case.optimizer, "state_dtype": case.kept}
            run = toy_run(world, model, samples, total_steps=60, optim=optim)
        limits = Limits(None, 3 if is_packed else 1)
        plan = RankPlan(
            0, 1, limits, 0.0, pin_memory=True, share=(world.sequence_rank, world.sequence_size)
        )
        with patch.object(Packet, "read", read_ones), fake_kernels.of_a_card():
            ids = np.arange(limits.max_samples * case.num_micro_batches)
            steps = [build_step(samples, ids, plan, step=step, epoch=0) for step in (1, 2)]
            yield run, mode, [step.pin_memory() for step in steps]


def run_case(case, directory):
    """Record the second step of a run: its work on the device and its reads on the host."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    HOST_INPUTS.clear()
    with fake_run(case, directory) as (run, mode, steps), mode:
        training_step(run, steps[0])
        fake_cuda.CALLS.clear()
        with Watch() as watch:
            training_step(run, steps[1])
    model = run.model
    parameters = list(model.parameters())
    return {
        "is_packed": model.is_packed,
        "num_micro_batches": len(steps[1].micro_batches),
        "num_tokens": [len(micro_batch.input_ids_T) for micro_batch in steps[1].micro_batches],
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "num_trained": sum(
            parameter.numel() for parameter in parameters if parameter.requires_grad
        ),
        "layer_numels": [
            sum(p.numel() for p in layer.parameters()) for layer in packed_lm.decoder_layers(model)
        ],
        "num_kernels": watch.num_kernels,
        "operations": dict(watch.operations),
        "reads": dict(watch.reads),
        "copies": watch.copies,
        "collectives": watch.collectives,
        "host_inputs": list(HOST_INPUTS),
        "num_graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "waits": dict(
            Counter(call.name for call in fake_cuda.CALLS if call.name.endswith("synchronize"))
        ),
    }


@contextmanager
def on_meta_device():
    """FSDP2 would otherwise move meta parameters to the GPU and create its all-gather buffers
    there.
    """
    plain = torch.empty

    def empty(*args, device=None, **kwargs):
        return plain(*args, device=None if str(device).startswith("cuda") else device, **kwargs)

    moved = "torch.distributed.fsdp._fully_shard._fsdp_init._move_states_to_device"
    with patch(moved, lambda *args, **kwargs: None), patch("torch.empty", empty):
        yield


@contextmanager
def _compiled_without_code():
    """Capture graphs and run them unchanged, because there is no compiler for the GPU."""
    with patch("torch.compile", partial(torch.compile, backend=_graph_as_it_is)):
        yield


HOST_INPUTS = []
"""Return the dtypes of host tensors among the inputs of compiled graphs."""


def _graph_as_it_is(graph, inputs):
    found = [each for each in inputs if isinstance(each, Tensor) and each.device.type == "cpu"]
    HOST_INPUTS.extend(str(tensor.dtype) for tensor in found)
    return graph.forward


def _fake_buffers(model):
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = torch.empty(buffer.shape, dtype=buffer.dtype)


def main():
    torch.set_num_threads(1)
    import fake_plan
    import fake_whole_run

    kinds = {
        "step": run_case,
        "plan": fake_plan.run_case,
        "run": fake_whole_run.run_case,
    }
    for line in sys.stdin:
        settings = json.loads(line)
        kind = settings.pop("kind", "step")
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(kinds[kind](Case(**settings), Path(directory))), flush=True)


if __name__ == "__main__":
    main()
