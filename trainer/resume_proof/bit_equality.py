"""Are two finished runs of the same length and number of ranks equal in all they left? Reads files only (floor 5)."""

import csv
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.lock import is_given_back
from trainer.checkpoint.shards import CorruptShardError, read_torch
from trainer.run.preflight import OUTSIDE
from trainer.tracking import events_file, histories
from trainer.tracking.metrics_file import FILE_NAME, read_metrics

KEYS = ("train/loss", "train/grad_norm", "train/lr(1e-3)", "train/total_token_count")
LOADER = "loader"
"""In `data.pt`: torchdata's own counters, which begin anew with every start."""
TIMED = "seconds"
"""The column of the histories that no two runs share."""
UNREADABLE = ""
DIGEST_LENGTH = 16
NO_DIGEST = "none"


class Damage(str):
    """Stands for what is missing or damaged in a run: equal to nothing, another damage included."""


MISSING = Damage("missing")


@dataclass(frozen=True)
class Pair:
    """The same thing in two runs: a tensor, a number or another plain value."""

    place: str
    left: Any
    right: Any


@dataclass(frozen=True)
class Comparison:
    """Of the runs called `left` and `right`.

    `num_validations`: those in both. `max_difference` is over all numbers compared, infinite where there is no number
    on one side. `differences` has a line for each value or tensor that is not the same in every bit: by step, in the
    final checkpoint, in what else there is.
    """

    left: str
    right: str
    num_steps: int
    num_tensors: int
    num_validations: int
    max_difference: float
    differences: tuple[str, ...]


def compare_runs(left: Path, right: Path, *, steps: int) -> Comparison:
    """Of each step and validation the newest attempt; the parameters, optimizer and position after the last step; and
    what a user finds in the directory: histories, report, checkpoints, pointer, how the run ended, what is left over.

    `left` and `right` are run directories; they are named by their last part.
    """
    found = {*range(1, steps + 1), *_rows(left, "train"), *_rows(right, "train")}
    validated = {*_rows(left, "val"), *_rows(right, "val")}
    pairs = (
        _pairs_of_steps(left, right, sorted(found)),
        _pairs_of_checkpoints(left, right, steps),
        _pairs_of_validations(left, right, sorted(validated)),
        _pairs_of_ends(left, right),
    )
    return _compared(left, right, itertools.chain(*pairs))


def compare_steps(left: Path, right: Path, steps: range) -> Comparison:
    """Of these steps alone; of the validation and the checkpoint of the last one where both have it."""
    last = steps[-1]
    pairs = [_pairs_of_steps(left, right, steps)]
    if last in _rows(left, "val") and last in _rows(right, "val"):
        pairs.append(_pairs_of_validations(left, right, [last]))
    if all((run_dir / layout.step_dir_name(last)).exists() for run_dir in (left, right)):
        pairs.append(_pairs_of_checkpoints(left, right, last))
    return _compared(left, right, itertools.chain(*pairs))


def _compared(left: Path, right: Path, pairs: Iterable[Pair]) -> Comparison:
    num_steps = len(_rows(left, "train").keys() & _rows(right, "train").keys())
    num_validations = len(_rows(left, "val").keys() & _rows(right, "val").keys())
    num_tensors, max_difference, differences = 0, 0.0, []
    for pair in pairs:
        is_equal, gap, text = _judge(pair, left.name, right.name)
        num_tensors += isinstance(pair.left, Tensor) and isinstance(pair.right, Tensor)
        max_difference = max(max_difference, gap)
        if not is_equal:
            differences.append(f"{pair.place}: {text}")
    counts = {"num_steps": num_steps, "num_tensors": num_tensors, "num_validations": num_validations}
    return Comparison(left.name, right.name, **counts, max_difference=max_difference, differences=tuple(differences))


def distance(left: Path, right: Path) -> float:
    """Between the parameters of two checkpoints of as many ranks: the root of the sum of squared differences."""
    squares, manifest = 0.0, layout.inspect(left).manifest
    assert manifest is not None, "it is committed"
    for rank in range(manifest.num_shards):
        parts = [read_torch(path / layout.model_file(manifest.world_size, rank)) for path in (left, right)]
        once = {_local(tensor).data_ptr(): name for name, tensor in parts[0].items()}  # a tied head has two names
        for name in once.values():
            ours, theirs = (_local(part[name]).double() for part in parts)
            squares += float((ours - theirs).square().sum())
    return math.sqrt(squares)


def _rows(run_dir: Path, kind: str) -> dict[int, dict[str, Any]]:
    """{step: its row}, the newest attempt of each step; empty before the first."""
    path = run_dir / FILE_NAME
    return {row["step"]: row for row in read_metrics(path) if row["kind"] == kind} if path.exists() else {}


def digest_of_parameters(run_dir: Path, *, steps: int) -> str:
    """The start of a SHA-256 over names, shapes and bytes of the parameters after the last step; `none` without."""
    checkpoint = layout.inspect(run_dir / layout.step_dir_name(steps))
    if checkpoint.manifest is None:
        return NO_DIGEST
    digest, world_size = hashlib.sha256(), checkpoint.manifest.world_size
    for rank in range(world_size):
        for name, value in _leaves(checkpoint.path / layout.model_file(world_size, rank)).items():
            if isinstance(value, Damage):
                return NO_DIGEST
            tensor = _local(value)
            digest.update(f"{rank} {name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(_bytes(tensor).numpy().data)
    return digest.hexdigest()[:DIGEST_LENGTH]


def _pairs_of_steps(left: Path, right: Path, steps: Iterable[int]) -> Iterator[Pair]:
    both = [_rows(run_dir, "train") for run_dir in (left, right)]
    for step in steps:
        rows = [found.get(step, {}) for found in both]
        if not all(rows):
            yield Pair(f"step {step}", *("logged" if row else MISSING for row in rows))
        else:
            yield from (Pair(f"step {step}, {key}", *(row.get(key, MISSING) for row in rows)) for key in KEYS)


def _pairs_of_validations(left: Path, right: Path, steps: Iterable[int]) -> Iterator[Pair]:
    both = [_rows(run_dir, "val") for run_dir in (left, right)]
    for step in steps:
        losses = (rows.get(step, {}).get("val/loss", MISSING) for rows in both)
        yield Pair(f"validation of step {step}, val/loss", *losses)


def _pairs_of_ends(left: Path, right: Path) -> Iterator[Pair]:
    for name in histories.FILE_NAMES.values():
        yield Pair(name, *(_history(run_dir / name) for run_dir in (left, right)))
    for place, look in _ENDS.items():
        yield Pair(place, look(left), look(right))


def _history(path: Path) -> Any:
    """Its lines, but for times; None without the file."""
    if not path.exists():
        return None
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: cell for name, cell in line.items() if name != TIMED} for line in csv.DictReader(file)]


_ENDS: dict[str, Callable[[Path], Any]] = {
    "step to continue from": lambda run_dir: layout.read_pointer(run_dir).step,
    "checkpoints kept": lambda run_dir: len(layout.committed(run_dir)),
    "what else the directory holds": lambda run_dir: ", ".join(
        sorted(
            name for name in fsio.list_dir(run_dir) if layout.parse_step(name) is None and not name.startswith(OUTSIDE)
        )
    ),
    "exit code in its log": lambda run_dir: events_file.last_exit_code(run_dir / events_file.FILE_NAME),
    "lock given back": is_given_back,
}


def _pairs_of_checkpoints(left: Path, right: Path, steps: int) -> Iterator[Pair]:
    found = [layout.inspect(run_dir / layout.step_dir_name(steps)) for run_dir in (left, right)]
    where = f"final {found[0].path.name}"
    sizes = [info.manifest.world_size if info.manifest else Damage(info.reason or info.status) for info in found]
    yield Pair(f"{where}, ranks", *sizes)
    if not isinstance(sizes[0], int) or sizes[0] != sizes[1]:
        return
    kinds = (layout.model_file, *([] if any(info.thinned for info in found) else [layout.optim_file]))
    shards = [name(sizes[0], rank) for name in kinds for rank in range(sizes[0])]
    for file in (*shards, layout.DATA):
        both = [_leaves(info.path / file) for info in found]
        names = {**both[0], **both[1]}
        if UNREADABLE in names:
            yield Pair(f"{where}, {file}", *(leaves.get(UNREADABLE, "good") for leaves in both))
            continue
        for name in names:
            yield Pair(f"{where}, {file}, {name}", *(leaves.get(name, MISSING) for leaves in both))


def _leaves(path: Path) -> dict[str, Any]:
    """{dotted name: tensor or plain value} of one file; tensors stay on disk until they are used.

    A file that cannot be read has the reason as its only content, under `UNREADABLE`.
    """
    try:
        tree = read_torch(path)
    except CorruptShardError as error:
        return {UNREADABLE: Damage(error)}
    if path.name == layout.DATA:
        tree = {name: value for name, value in tree.items() if name != LOADER}
    return dict(_flat(tree, ""))


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict | list | tuple):
        yield name, value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield from _flat(item, f"{name}.{key}" if name else str(key))


def _judge(pair: Pair, left_name: str, right_name: str) -> tuple[bool, float, str]:
    """(whether every bit is the same, the largest difference, both sides in words)."""
    left, right = pair.left, pair.right
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return _judge_tensors(left, right, left_name, right_name)
    is_damaged = isinstance(left, Damage) or isinstance(right, Damage)
    # the shortest text that reads back as the same float: exact, and NaN equals NaN
    is_equal = not is_damaged and repr(left) == repr(right)
    numbers = [value for value in (left, right) if isinstance(value, int | float)]
    gap = 0.0 if is_equal else math.inf
    if len(numbers) == 2 and not is_equal:
        gap = _finite_or_inf(abs(numbers[0] - numbers[1]))
    return is_equal, gap, f"{left_name} {_shown(left)}, {right_name} {_shown(right)}"


def _judge_tensors(left: Tensor, right: Tensor, left_name: str, right_name: str) -> tuple[bool, float, str]:
    if _shown(left) != _shown(right):
        return False, math.inf, f"{left_name} {_shown(left)}, {right_name} {_shown(right)}"
    left, right = _local(left), _local(right)
    if torch.equal(_bytes(left), _bytes(right)):
        return True, 0.0, ""
    gap = _finite_or_inf((left.double() - right.double()).abs().max().item())
    num_different = int((_bytes(left) != _bytes(right)).reshape(left.numel(), -1).any(1).sum())
    return False, gap, f"{num_different} of {left.numel()} numbers differ, by at most {gap:.3g}"


def _local(tensor: Tensor) -> Tensor:
    """The piece in the file; the mesh revived from it belongs to the run that saved it."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    assert isinstance(local, Tensor)
    return local


def _bytes(tensor: Tensor) -> Tensor:
    """uint8 [bytes]: tells -0.0 from 0.0, and NaN equals the same NaN."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _finite_or_inf(gap: float) -> float:
    return gap if math.isfinite(gap) else math.inf


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {tuple(value.shape)}, of which {tuple(_local(value).shape)} here"
    return value if isinstance(value, str) else f"{value!r:.60}"
