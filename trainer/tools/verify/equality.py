"""Compares the logs and checkpoints of two finished runs of the same length, bit for bit."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import layout
from trainer.checkpoint.shards import CorruptShardError, local_tensors, read_torch
from trainer.tools.verify.runs import logged

STEP_KEYS = ("train/loss", "train/grad_norm", "train/lr(1e-3)", "train/total_token_count")
LOADER = "loader"
"""Entry of `data.pt` with torchdata's counters, which restart in every process."""


class Missing(str):
    """The reason why a run lacks a value. It differs from every value, including itself."""


MISSING = Missing("missing")


@dataclass
class Comparison:
    """The number of equal values and tensors, and a line for each difference in run order."""

    num_equal: int = 0
    differences: list[str] = field(default_factory=list)

    def add(
        self,
        place: str,
        left: Any,
        right: Any,
    ) -> None:
        """Compare a value or tensor of one run with its counterpart in the other."""
        difference = _difference(left, right)
        if difference:
            self.differences.append(f"{place}: {difference}")
        else:
            self.num_equal += 1


def compare_runs(left: Path, right: Path, *, steps: int) -> Comparison:
    """Compare the newest attempt of each step and validation, and the last step's checkpoint."""
    found = Comparison()
    left_values = dict(_values(left, steps))
    right_values = dict(_values(right, steps))
    for place in {**left_values, **right_values}:
        found.add(place, left_values.get(place, MISSING), right_values.get(place, MISSING))
    return found


def _values(run_dir: Path, steps: int) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of everything to compare."""
    rows = {row["step"]: row for row in logged(run_dir, "train")}
    for step in sorted({*range(1, steps + 1), *rows}):
        row = rows.get(step, {})
        for key in STEP_KEYS:
            yield f"step {step}, {key}", row.get(key, MISSING)
    yield from _saved(run_dir / layout.step_dir_name(steps))
    for row in logged(run_dir, "val"):
        yield f"validation of step {row['step']}, val/loss", row.get("val/loss", MISSING)


def _saved(checkpoint: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of everything in a checkpoint."""
    info = layout.inspect(checkpoint)
    if info.manifest is None:
        yield checkpoint.name, Missing(info.reason)
        return
    num_ranks = info.manifest.world_size
    yield f"{checkpoint.name}, ranks", num_ranks
    shards = [
        name(num_ranks, rank)
        for name in (layout.model_file, layout.optim_file)
        for rank in range(num_ranks)
    ]
    for file in (*shards, layout.DATA):
        place = f"{checkpoint.name}, {file}"
        try:
            tree = read_torch(checkpoint / file)  # tensors stay on disk until they are compared
        except CorruptShardError as error:
            yield place, Missing(error)
            continue
        yield place, "readable"
        if file == layout.DATA:
            tree.pop(LOADER, None)
        for name, value in _leaves(tree):
            yield f"{place}, {name}", value


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names with the tensors and plain values of nested containers."""
    if isinstance(tree, list | tuple):
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        yield name, tree
        return
    for key, item in tree.items():
        yield from _leaves(item, f"{name}.{key}" if name else str(key))


def _difference(left: Any, right: Any) -> str:
    """Describe how two values differ; "" if they are equal. NaN equals NaN."""
    shown = _shown(left), _shown(right)
    if shown[0] != shown[1] or isinstance(left, Missing):
        return " and ".join(shown)
    if not isinstance(left, Tensor):
        return ""
    left, right = local_tensors([left, right])
    if torch.equal(_bytes(left), _bytes(right)):
        return ""
    largest = (left.double() - right.double()).abs().max().item()
    return f"numbers differ by at most {largest:.3g}"


def _bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, uint8 [bytes]. As bytes, -0.0 differs from 0.0, and a NaN equals a NaN
    with the same bits.
    """
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _shown(value: Any) -> str:
    if isinstance(value, Missing):
        return str(value)
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        (local,) = local_tensors(value)
        return f"{dtype} {tuple(value.shape)}, of which {tuple(local.shape)} here"
    return repr(value)
