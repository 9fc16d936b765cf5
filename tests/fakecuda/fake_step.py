"""The trainer's own step on fake CUDA tensors, operation by operation; run as a program of its own.

python fake_step.py LIBRARY CASE.json ...   prints one line of JSON a case
"""

import contextlib
import dataclasses
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
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
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed import ProcessGroup
from torch.distributed._tools import fake_collectives  # noqa: F401  collectives of fake tensors
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toy import ToySamples, model_config, toy_run, write_model_config

from trainer.batch import StepBatch
from trainer.data.batch_plan import Limits
from trainer.data.loader import RankPlan, build_step
from trainer.loop.step import training_step
from trainer.model import assemble, load, packed_lm, parallelize
from trainer.monitor.packet import Packet, Totals
from trainer.runtime.distributed import World, make_world, mesh_dimensions

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal.default", "masked_select", "unique")
"""Operations whose result the host needs, in part of their name."""
NO_KERNEL = ("empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "detach", "lift_fresh")
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Case:
    model_type: str = "qwen3"
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_ranks: int = 8
    fsdp_size: int = -1
    recompute: bool | str = False
    offload: bool = False
    num_micro_batches: int = 2
    optimizer: str = "adamw"
    kept: str = "float32"
    """What moments and parameters are kept in."""
    reads_the_loss: bool = False
    """A fault to be found: the host looks at each loss as soon as it is there."""


class Watch(TorchDispatchMode):
    """Counts operations; notes what reads a value on the host, copies between devices, and collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.num_kernels = 0
        self.reads: Counter[str] = Counter()
        self.copies: Counter[tuple[str, str, str]] = Counter()
        self.collectives: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(func), kwargs or {}
        is_mask = name == "aten.index.Tensor" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if is_mask or any(word in name for word in READS):
            self.reads[f"{name} at {_where()}"] += 1
        result = func(*args, **kwargs)
        if name == "prim.device.default":
            return result
        self.operations[name] += 1
        self.num_kernels += num_kernels(func)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if name in ("aten._to_copy.default", "aten.copy_.default"):
            self._note_copy(name, args, kwargs, inputs, outputs)
        elif name.startswith("c10d."):
            self._note_collective(name, args, kwargs)
        return result

    def _note_copy(self, name: str, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        if name == "aten.copy_.default":
            source, target = args[1], args[0]
            is_async = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        else:
            source, target, is_async = inputs[0], outputs[0], bool(kwargs.get("non_blocking"))
        if source.device.type != target.device.type:
            way = f"{source.device.type} to {target.device.type}"
            self.copies[(way, "async" if is_async else "blocking", _where())] += 1

    def _note_collective(self, name: str, args: Any, kwargs: Any) -> None:
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        groups = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject) and _is_group(leaf)]
        largest = max(tensors, key=lambda tensor: tensor.numel())
        kind = name.removeprefix("c10d.").removesuffix(".default").strip("_")
        self.collectives.append(
            {
                "kind": kind,
                "dtype": str(largest.dtype).removeprefix("torch."),
                "numel": largest.numel(),
                "ranks": ProcessGroup.unbox(groups[0]).size(),
                "device": largest.device.type,
            }
        )


def num_kernels(func: Any) -> int:
    """What the device has to do: views, memory alone and notes of the profiler give it nothing."""
    name = func.name().split(".")[0]
    if name.startswith(("c10d::", "profiler::")) or name.split("::")[1] in NO_KERNEL:
        return 0
    aliases = [result.alias_info for result in func._schema.returns]
    if aliases and all(alias is not None and not alias.is_write for alias in aliases):
        return 0
    return fake_kernels.NUM_KERNELS.get(name, 1)


def _is_group(leaf: torch.ScriptObject) -> bool:
    return "ProcessGroup" in leaf._type().qualified_name()


def _where() -> str:
    """The innermost lines of the trainer that led here."""
    frame, found = sys._getframe(2), list[str]()
    while frame is not None and len(found) < 2:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(REPOSITORY / "trainer"):
            found.append(f"{path.relative_to(REPOSITORY)}:{frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or "torch"


def read_ones(packet: Packet, **derived: Tensor) -> Totals:
    """What the host would wait for: a packet of ones."""
    num_ranks = (len(packet.values) - len(packet.names)) // len(packet.fields)
    by_rank = dict.fromkeys(packet.fields, (1.0,) * num_ranks)
    return Totals(dict.fromkeys((*derived, *packet.names), 1.0), by_rank)


@contextmanager
def fake_world(case: Case) -> Iterator[World]:
    """Rank 0 among ranks that do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.num_ranks)
    try:
        yield make_world(torch.device("cuda", 0), mesh_dimensions(case.num_ranks, fsdp_size=case.fsdp_size))
    finally:
        dist.destroy_process_group()


def run_case(case: Case, directory: Path) -> dict[str, Any]:
    """The second step of a run: what it does on the device and what it asks of the host."""
    source = write_model_config(directory, case.model_type, **{"head_dim": 64, "hidden_size": 256, **case.changes})
    config = model_config(
        param_dtype="bfloat16",
        reshard_after_forward=True,
        enable_gradient_checkpointing=case.recompute,
        cpu_offload=case.offload,
        fsdp_size=case.fsdp_size,
        master_dtype=case.kept,
    )
    reason = assemble.per_document_reason(config, source, max_length=64)
    with fake_world(case) as world:
        model = packed_lm.build_on_meta(source, packed_lm.read_config(source), is_packed=reason is None)
        with _on_meta_device():
            parallelize.parallelize(model, config, world)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        steps = [_fake_batch(case, mode, step=step, is_packed=reason is None) for step in (1, 2)]
        with mode:
            _fake_buffers(model)
            load.materialize(model, torch.device("cpu") if case.offload else world.device, buffer_device=world.device)
            optim = {"state_dtype": case.kept}
            run = toy_run(world, model, ToySamples(), total_steps=60, optimizer_name=case.optimizer, optim=optim)
            if case.reads_the_loss:
                _read_every_loss(model)
            with patch.object(Packet, "read", read_ones), fake_kernels.fused_rms_norm():
                training_step(run, steps[0])
                fake_cuda.CALLS.clear()
                with Watch() as watch:
                    training_step(run, steps[1])
    return {
        "is_packed": reason is None,
        "num_micro_batches": len(steps[1].micro_batches),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layer_numels": [sum(p.numel() for p in layer.parameters()) for layer in packed_lm.decoder_layers(model)],
        "num_kernels": watch.num_kernels,
        "operations": dict(watch.operations),
        "reads": dict(watch.reads),
        "copies": [[*key, count] for key, count in watch.copies.items()],
        "collectives": watch.collectives,
        "waits": dict(Counter(call.name for call in fake_cuda.CALLS if call.name.endswith("synchronize"))),
    }


@contextmanager
def _on_meta_device() -> Iterator[None]:
    """FSDP2 would move parameters on meta to the card, and make its all-gather buffers there."""
    plain = torch.empty

    def empty(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        return plain(*args, device=None if str(device).startswith("cuda") else device, **kwargs)

    moved = "torch.distributed.fsdp._fully_shard._fsdp_init._move_states_to_device"
    with patch(moved, lambda *args, **kwargs: None), patch("torch.empty", empty):
        yield


def _read_every_loss(model: Any) -> None:
    plain = model.forward

    def reading(batch: Any) -> Any:
        output = plain(batch)
        with contextlib.suppress(DataDependentOutputException):  # a fake tensor has no value to tell
            output.loss_sum.item()
        return output

    model.forward = reading


def _fake_buffers(model: torch.nn.Module) -> None:
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _fake_batch(case: Case, mode: FakeTensorMode, *, step: int, is_packed: bool) -> StepBatch:
    """A step in which this rank has so many micro-batches, of three documents if they are packed."""
    samples, num_documents = ToySamples(), 3 if is_packed else 1
    plan = RankPlan(0, 1, Limits(None, num_documents), 0.0)
    ids = np.arange(num_documents * case.num_micro_batches)
    batch = build_step(samples, ids, plan, step=step, epoch=0)
    return dataclasses.replace(batch, micro_batches=tuple(m._map(mode.from_tensor) for m in batch.micro_batches))


def main() -> None:
    torch.set_num_threads(1)
    for words in sys.argv[2:]:
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(run_case(Case(**json.loads(words)), Path(directory))), flush=True)


if __name__ == "__main__":
    main()
