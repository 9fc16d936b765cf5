"""The whole of `run`, from its configuration to its exit code, on fake CUDA tensors as the first of
many ranks.

Tensors of the host are real, those of the card have no memory: files hold zeros. What is replaced,
and why:

- the process group is torch's fake one (there are no other ranks), and so is what they say: in an
  exchange of objects the same as this rank (on a card of their own), in a save that they wrote
  shards like its own
- a value of the card that the host reads is made up: a fake tensor has none
- a rollback goes back past one step, not 16: a run of five is enough
- FSDP2 moves no buffers to the card ahead of the trainer: memory of the host cannot become that of
  a fake tensor
- kernels that torch's build for CPUs lacks are those of `fake_kernels`
"""

import os
import shutil
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import fake_cuda
import fake_kernels
import torch
import torch.distributed as dist
from fake_step import LOCAL_RANK, read_ones
from fake_watch import Watch
from safetensors.torch import load_file
from small_files import change_json, read_lines
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer.checkpoint import layout, rollback
from trainer.checkpoint.save import Agreement
from trainer.quickstart import MODEL_DIR
from trainer.runtime.heartbeat import Heartbeat
from trainer.runtime.signals import StopRequest
from trainer.train.packet import Packet
from trainer.train.start.compose import load_config
from trainer.train.start.main import run


class OnCard(TorchDispatchMode):
    """Make tensors of a CUDA device fake and all others real. A copy to the host contains zeros."""

    def __init__(self):
        super().__init__()
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def __enter__(self):
        # `torch.tensor` of a device: of the host, then copied
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *args):
        super().__exit__(*args)
        torch._C._set_only_lift_cpu_tensors(False)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        on_card = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        devices = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
        if not on_card and not any(device.type == "cuda" for device in devices):
            return func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], FakeTensor):
            return args[0]
        with self._mode:
            result = func(*args, **kwargs)
        return tree_map_only(FakeTensor, _on_host, result)


def _on_host(tensor):
    return tensor if tensor.device.type == "cuda" else torch.zeros(tensor.shape, dtype=tensor.dtype)


class Phases(Heartbeat):
    """Record notes by phase: `train 3` is the third step of the run."""

    def __init__(self, watch):
        self._watch = watch
        self._counts = Counter[str]()
        super().__init__()

    def enter(self, phase, *, limit_s):
        self._counts[phase] += 1
        self._watch.phase = f"{phase} {self._counts[phase]}"
        fake_cuda.called(f"phase {phase}")
        super().enter(phase, limit_s=limit_s)


def answer(where, num_ranks):
    """Return the number that the host would read at `where`: a sum over ranks that each contributed
    1, no difference in the self-check, a finite state.
    """
    if "_require_all" in where:
        return num_ranks
    if "_reference" in where:  # of one of two documents, which ours has packed
        return 0.5
    return (
        0.0
        if any(name in where for name in ("_is_finite", "_gradient_errors", "_influence"))
        else 1.0
    )


def run_case(case, directory):
    """The quickstart with two layers: a save after every other step, and a validation and a
    required save at the end.
    """
    config = load_config(_words(case, directory))
    run_dir = directory / "run"
    environment = {"RANK": "0", "LOCAL_RANK": str(LOCAL_RANK), "WORLD_SIZE": str(case.num_ranks)}
    watch = Watch(answer=lambda where: answer(where, case.num_ranks))
    heartbeat = Phases(watch)
    with (
        patch.dict(os.environ, environment),
        _other_ranks(case.num_ranks, run_dir),
        patch.object(Packet, "read", _reader(case, heartbeat)),
        patch.object(rollback, "STEPS_BEFORE_ONSET", 1),
        patch.object(rollback, "SKIPPED_AROUND", 0),
        patch("torch.distributed.fsdp._fully_shard._fsdp_init._move_states_to_device"),
        fake_kernels.of_a_card(),
        OnCard(),
        watch,
    ):
        fake_cuda.CALLS.clear()
        code = run(config, StopRequest(), heartbeat)
    committed = layout.committed(run_dir)
    events = [line["kind"] for line in read_lines(run_dir / "events.jsonl")]
    exported = load_file(committed[-1].path / "huggingface/model.safetensors")
    return {
        "exit_code": code,
        "calls": [call._asdict() for call in fake_cuda.CALLS],
        "reads": dict(watch.reads),
        "copies": watch.copies,
        "collectives": watch.collectives,
        "checkpoints": [info.step for info in committed],
        "exported": sum(tensor.numel() for tensor in exported.values()),
        "events": events,
    }


def _words(case, directory):
    shutil.copytree(MODEL_DIR, directory / "model")
    change_json(directory / "model/config.json", num_hidden_layers=2)
    return [
        "trainer.device=cuda",
        f"model.partial_pretrain={directory}/model",
        "model.random_weights=true",
        f"trainer.default_local_dir={directory}/run",
        f"data.cache_dir={directory}/cache",
        f"data.train_max_samples={16 * case.num_ranks}",
        f"data.train_batch_size={4 * case.num_ranks // case.sequence_size}",
        "data.micro_batch_size_per_gpu=2",
        "data.num_workers=0",
        f"trainer.total_training_steps={5 if case.trouble_at else 3}",
        "trainer.save_freq=2",
        "trainer.test_freq=-1",
        "trainer.guard.rules=[{metric: train/grad_norm, above: 50, do: rollback}]",
        f"model.fsdp_config.fsdp_size={case.fsdp_size}",
        f"model.ulysses_sequence_parallel_size={case.sequence_size}",
    ]


def _reader(case, heartbeat):
    """Each sum over ranks is read once. In the step of the fault, its gradient norm is large the
    first time.
    """
    troubled = [case.trouble_at]

    def read(packet, **derived):
        fake_cuda.called("packet")
        found = read_ones(packet, **derived)
        if "grad_norm" in derived and heartbeat.step in troubled:
            troubled.clear()
            return replace(found, sums={**found.sums, "grad_norm": 100.0})
        return found

    return read


@contextmanager
def _other_ranks(num_ranks, run_dir):
    plain = dist.init_process_group
    others = range(1, num_ranks)

    def start(backend, **options):
        plain("fake", **options | {"store": dist.HashStore()})

    def gathered(found, own, group=None):
        found[:] = [own] * len(found)
        if isinstance(own, tuple) and own[1] == fake_cuda.CARD.uuid:
            found[1:] = [(own[0], f"card of rank {rank}", *own[2:]) for rank in others]

    def agree(agreement, *, value, error, deadline):
        assert error is None
        written = dict[int, list[Any]]()
        # the shards
        if isinstance(value, list) and any(record.path == layout.DATA for record in value):
            (staging,) = run_dir.glob(f"{layout.STAGING_PREFIX}*")
            for rank in others:
                copies = [
                    replace(record, path=record.path.replace("_rank_0", f"_rank_{rank}"))
                    for record in value
                ]
                written[rank] = [copy for copy in copies if copy not in value]
                for record, copy in zip(value, copies, strict=True):
                    if copy != record:
                        os.link(staging / record.path, staging / copy.path)
        return [value, *(written.get(rank, []) for rank in others)]

    with (
        patch.object(dist, "init_process_group", start),
        patch.object(dist, "all_gather_object", gathered),
        patch.object(Agreement, "renew", lambda agreement: None),
        patch.object(Agreement, "agree", agree),
    ):
        yield
