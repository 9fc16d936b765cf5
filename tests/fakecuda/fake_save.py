"""A save behind training, the steps around it and a validation, on fake CUDA tensors.

Host memory is real: what a save would write is there, of zeros.
"""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import fake_cuda
from fake_step import Case, FakeRun, fake_run
from fake_watch import Watch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from trainer.checkpoint import manager as manager_module
from trainer.checkpoint import shards
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.snapshot import HostBuffers, Snapshot
from trainer.data.loader import ValidationBatches
from trainer.train.fit import validate
from trainer.train.step import training_step


class Writer:
    """Stands for `Saver`, which writes files: notes what the thread that writes is given."""

    def __init__(self, run_dir: Path, fake: FakeRun) -> None:
        self.run_dir, self.world, self.keep = run_dir, fake.run.world, None
        self.config, self.fingerprints = SimpleNamespace(async_save=True), dict[str, str]()
        self.device = next(fake.run.model.parameters()).device
        self.written: list[dict[str, int]] = []

    def prepare(self) -> None:
        """A stand-in agrees with nobody."""

    def save(self, snapshot: Snapshot) -> int:
        fake_cuda.called("write")
        tensors = list(
            shards.local_tensors([snapshot.model, snapshot.optim["state"], snapshot.extra])
        )
        held = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.numel()}
        self.written.append(
            {
                "bytes": sum(held.values()),
                "fake": sum(
                    isinstance(tensor, FakeTensor) or tensor.device.type != "cpu"
                    for tensor in tensors
                ),
                "unlocked": sum(not fake_cuda.is_locked(*memory) for memory in held.items()),
            }
        )
        return 0


def run_case(case: Case, directory: Path) -> dict[str, Any]:
    """Two saves, each with a step behind it, and a validation."""
    with ExitStack() as stack:
        fake = stack.enter_context(fake_run(case, directory))
        run, plain = fake.run, HostBuffers._allocate

        def allocate(buffers: HostBuffers, shapes: Any) -> None:
            with unset_fake_temporarily():
                plain(buffers, shapes)

        stack.enter_context(patch.object(HostBuffers, "_allocate", allocate))
        # fake tensors have no values that ranks could compare
        stack.enter_context(patch.object(manager_module, "require_resumable", lambda *args: None))
        run.validation_batches = ValidationBatches(fake.samples, fake.plan, batch_size=8)
        writer = Writer(directory, fake)
        manager = CheckpointManager(writer, state=run.stateful_parts(), tell=lambda *event: None)
        run.checkpoints = manager
        batches = [fake.batch(case, step=step) for step in (1, 2, 3)]
        stack.enter_context(fake.mode)
        training_step(run, batches[0])
        fake_cuda.CALLS.clear()
        fake_cuda.LOCKED.clear()
        with Watch(answer=lambda where: 0.0) as watch:
            for batch in batches[1:]:
                position = run.batches.schedule.position(batch.step - 1)
                manager.save(
                    position, loss=1.0, grad_norm=1.0, history=run.guard.history, is_required=False
                )
                training_step(run, batch)
            fake_cuda.called("validation")
            validate(run, 3)
            manager.finish()
        calls = [call._asdict() for call in fake_cuda.CALLS]
    shapes = [parameter.numel() for parameter in run.model.parameters() if parameter.requires_grad]
    return {
        "calls": calls,
        "num_trained": sum(shapes),
        "num_tensors": len(shapes),
        "written": writer.written,
        "reads": dict(watch.reads),
        "copies": watch.copies,
    }
