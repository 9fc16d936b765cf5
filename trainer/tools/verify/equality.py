"""Whether two finished runs of the same length logged and saved the same, bit for bit (floor 5)."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.checkpoint import layout
from trainer.checkpoint.shards import CorruptShardError, read_torch
from trainer.tracking.metrics_file import FILE_NAME, read_metrics

STEP_KEYS = ("train/loss", "train/grad_norm", "train/lr(1e-3)", "train/total_token_count")
LOADER = "loader"
"""Entry of `data.pt`: torchdata's counters, which start again with every process."""
MISSING = object()
"""Differs from every value, also from itself."""


@dataclass
class Comparison:
    """`differences`: a line for each value or tensor that differs, in the order of the run."""

    num_steps: int = 0
    num_tensors: int = 0
    num_validations: int = 0
    differences: list[str] = field(default_factory=list)

    def add(self, place: str, left: Any, right: Any) -> None:
        """Compare a value or tensor of two runs."""
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            self.num_tensors += 1
            difference = _tensor_difference(left, right)
        # repr is exact, and NaN equals NaN
        elif left is MISSING or right is MISSING or repr(left) != repr(right):
            difference = f"{_shown(left)} and {_shown(right)}"
        else:
            difference = ""
        if difference:
            self.differences.append(f"{place}: {difference}")


def compare_runs(left: Path, right: Path, *, steps: int) -> Comparison:
    """Compare the newest attempt of each step and validation, and the checkpoint of the last
    step.
    """
    found = Comparison()
    both = [_rows(run_dir, "train") for run_dir in (left, right)]
    found.num_steps = len(both[0].keys() & both[1].keys())
    for step in sorted({*range(1, steps + 1), *both[0], *both[1]}):
        rows = [rows.get(step) for rows in both]
        if None in rows:
            logged = ["logged" if row else "not logged" for row in rows]
            found.differences.append(f"step {step}: {' and '.join(logged)}")
            continue
        for key in STEP_KEYS:
            found.add(f"step {step}, {key}", *(row.get(key, MISSING) for row in rows if row))
    _compare_checkpoints(
        found, *(run_dir / layout.step_dir_name(steps) for run_dir in (left, right))
    )
    both = [_rows(run_dir, "val") for run_dir in (left, right)]
    found.num_validations = len(both[0].keys() & both[1].keys())
    for step in sorted({*both[0], *both[1]}):
        losses = [rows.get(step, {}).get("val/loss", MISSING) for rows in both]
        found.add(f"validation of step {step}, val/loss", *losses)
    return found


def _rows(run_dir: Path, kind: str) -> dict[int, dict[str, Any]]:
    """{step: its row}, of the newest attempt; empty before the first row."""
    path = run_dir / FILE_NAME
    rows = read_metrics(path) if path.exists() else []
    return {row["step"]: row for row in rows if row["kind"] == kind}


def _compare_checkpoints(found: Comparison, left: Path, right: Path) -> None:
    infos = [layout.inspect(path) for path in (left, right)]
    name = left.name
    for info in infos:
        if info.manifest is None:
            found.differences.append(
                f"{name}: {info.path.parent.name} has none: {info.reason or info.status}"
            )
    sizes = [info.manifest.world_size for info in infos if info.manifest]
    if len(sizes) < 2:
        return
    if sizes[0] != sizes[1]:
        found.differences.append(f"{name}: {sizes[0]} and {sizes[1]} ranks")
        return
    ranks = range(sizes[0])
    files = [layout.model_file(sizes[0], rank) for rank in ranks]
    files += [layout.optim_file(sizes[0], rank) for rank in ranks]
    for file in (*files, layout.DATA):
        try:
            leaves = [dict(_leaves(path / file)) for path in (left, right)]
        except CorruptShardError as error:
            found.differences.append(f"{name}, {file}: {error}")
            continue
        for key in {**leaves[0], **leaves[1]}:
            found.add(f"{name}, {file}, {key}", *(side.get(key, MISSING) for side in leaves))


def _leaves(path: Path) -> Iterator[tuple[str, Any]]:
    """(dotted name, tensor or plain value) of a file; tensors stay on disk until they are used."""
    tree = read_torch(path)
    if path.name == layout.DATA:
        tree = {name: value for name, value in tree.items() if name != LOADER}
    return _flat(tree, "")


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    else:
        yield name, value
        return
    for key, item in items:
        yield from _flat(item, f"{name}.{key}" if name else str(key))


def _tensor_difference(left: Tensor, right: Tensor) -> str:
    if _shown(left) != _shown(right):
        return f"{_shown(left)} and {_shown(right)}"
    left, right = _local(left), _local(right)
    left_bytes, right_bytes = _bytes(left), _bytes(right)
    if torch.equal(left_bytes, right_bytes):
        return ""
    per_number = (left_bytes != right_bytes).reshape(left.numel(), -1)
    num_different = int(per_number.any(1).sum())
    largest = (left.double() - right.double()).abs().max().item()
    return f"{num_different} of {left.numel()} numbers differ, by at most {largest:.3g}"


def _local(tensor: Tensor) -> Tensor:
    """The part in this file. The mesh that comes with it belongs to the run that saved it."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    assert isinstance(local, Tensor)
    return local


def _bytes(tensor: Tensor) -> Tensor:
    """uint8 [bytes]: -0.0 differs from 0.0, and NaN equals the same NaN."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _shown(value: Any) -> str:
    if value is MISSING:
        return "missing"
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {tuple(value.shape)}, of which {tuple(_local(value).shape)} here"
    return f"{value!r:.60}"
