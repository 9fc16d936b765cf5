"""Reads what verl 0.9.1 saves with FSDP2, so that a run begun there continues here.

Such a `global_step_N` has no manifest. That it is whole is judged from its names (`layout.inspect`), that its files
are undamaged from the checksum of every record in them (`damaged_files`), that they hold data only, and no code, from
the names in their pickles (`require_safe`). Do these in this order; then parameters load with `shards.load_model`.

Exact are parameters, moments, step and the number of samples consumed. Not kept are which samples these were (verl
deals `DistributedSampler`'s order to ranks, we follow our own, so the epoch under way repeats some and leaves out as
many) and the random generators, which we key by the step.
"""

import pickle
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainer.checkpoint import layout, shards
from trainer.checkpoint.layout import VerlCheckpoint
from trainer.checkpoint.shards import CorruptShardError
from trainer.config import ConfigError
from trainer.progress import Position

_CHUNK_BYTES = 4 << 20
_IS_DIRECTORY = 0x10
"""Torch reads zeros from a record with this attribute; no checksum covers it."""
_MOMENTS = {"step", "exp_avg", "exp_avg_sq"}
_RECONSTRUCT = np._core.multiarray._reconstruct  # type: ignore[attr-defined]
_NUMPY_RNG_STATE = (
    np.ndarray,
    np.dtype,
    np.dtypes.UInt32DType,
    _RECONSTRUCT,
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),  # as numpy 1 calls it
)
"""What the state of numpy's generator is made of, in the extra state alone: an array of 624 numbers."""


def _refused(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{path} was written by verl and cannot be continued: {reason}; {layout.USE_VERL}")


def damaged_files(checkpoint: VerlCheckpoint, *, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Read share `(index, count)` of the files whole and name each whose checksums do not hold; [] = all are whole."""
    index, count = share
    return [problem for name in checkpoint.torch_files[index::count] if (problem := _damage(checkpoint.path / name))]


def _damage(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.external_attr & _IS_DIRECTORY:
                    return f"{path.name} is damaged: its record {info.filename} is marked as a directory"
                # by entry: `testzip` opens by name, and a changed name may be that of another record
                with archive.open(info) as record:
                    while record.read(_CHUNK_BYTES):
                        pass
        torch.serialization.get_unsafe_globals_in_checkpoint(path)  # torch reads headers that Python passes over
    except Exception as error:  # a damaged header fails in as many ways as it has fields
        return f"{path.name} is damaged: {error}"
    return None


def require_safe(checkpoint: VerlCheckpoint) -> None:
    """Raise `ConfigError` listing the names of all code that a file would run when loaded. Reads only the pickles."""
    for name in checkpoint.torch_files:
        with _only_data(checkpoint.path / name):
            pass


@contextmanager
def _only_data(path: Path) -> Iterator[None]:
    """Within, the file may be loaded: it holds nothing but data."""
    allowed = _NUMPY_RNG_STATE if path.name.startswith("extra_state_") else ()
    with torch.serialization.safe_globals(list(allowed)):
        try:
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError) as error:
            raise CorruptShardError(f"{path}: {error}") from error
        if unsafe:
            names = ", ".join(sorted(unsafe))
            reason = f"loading {path.name} would run {names}, which is not data of verl's FSDP2 trainer"
            raise _refused(path.parent, reason)
        yield


def _read(path: Path) -> Any:
    with _only_data(path):
        return shards.read_torch(path)


def count_shards(checkpoint: VerlCheckpoint) -> int:
    """How many ranks share one copy of the model: all, or fewer with replicas (then the first of them hold one whole).

    The mesh itself is not asked: of an older torch it comes back without its sizes.
    """
    model = _read_model(checkpoint)
    sharded = {name: value for name, value in model.items() if isinstance(value, DTensor)}
    placements = {value.placements for value in sharded.values()}
    if placements == {(Shard(0),)}:
        return checkpoint.world_size
    if placements != {(Replicate(), Shard(0))}:
        raise _refused(checkpoint.path, f"its tensors are placed as {placements or 'on one rank'}, not cut along dim 0")
    rows = {(len(value), len(value._local_tensor)) for value in sharded.values()}
    sizes = [size for size in range(1, checkpoint.world_size) if checkpoint.world_size % size == 0]
    fitting = [size for size in sizes if all(local == -(-whole // size) for whole, local in rows)]
    if len(fitting) != 1:
        raise _refused(checkpoint.path, f"its shards fit groups of {fitting} ranks")
    return fitting[0]


def _read_model(checkpoint: VerlCheckpoint) -> dict[str, Any]:
    name = layout.model_file(checkpoint.world_size, 0)
    model = _read(checkpoint.path / name)
    if not isinstance(model, dict):
        raise _refused(checkpoint.path, f"{name} holds no tensors by name")
    return model


def optimizer_parts(checkpoint: VerlCheckpoint, *, num_shards: int, param_names: Sequence[str]) -> list[dict[str, Any]]:
    """What the first `num_shards` ranks saved of the optimizer, in the form of `shards.optimizer_state`.

    verl numbers parameters in the order of its model, which is the order of names in the model files; of `param_names`,
    each parameter of our model once, the order does not matter. Raises `ConfigError` if the two are not of one model,
    or if the optimizer is not AdamW.
    """
    files = [layout.optim_file(checkpoint.world_size, rank) for rank in range(num_shards)]
    model = _read_model(checkpoint)
    known = set(param_names)
    order = [name for name in model if name in known]
    if absent := sorted(known - set(order)):
        raise _refused(
            checkpoint.path, f"its model has no parameter {absent[0]} ({len(absent)} of {len(known)} missing)"
        )
    parts = []
    for file in files:
        saved = _read(checkpoint.path / file)
        try:
            parts.append(_by_name(saved, {name: tuple(model[name].shape) for name in order}))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _refused(checkpoint.path, f"{file}: {error or type(error).__name__}") from error
    return parts


def _by_name(saved: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """`optimizer.state_dict()` under names; `shapes` of the parameters are in the order of their numbers."""
    if len(saved["param_groups"]) != 1:
        raise ValueError(f"it has {len(saved['param_groups'])} parameter groups, verl makes one")
    (group,) = saved["param_groups"]
    if group["params"] != list(range(len(shapes))):
        raise ValueError(f"it steps {len(group['params'])} parameters, the model has {len(shapes)}")
    state = {}
    for number, (name, shape) in enumerate(shapes.items()):
        moments = saved["state"].get(number, {})
        if set(moments) != _MOMENTS:
            raise ValueError(f"the state of '{name}' is {sorted(moments)}, not that of AdamW: {sorted(_MOMENTS)}")
        if not tuple(moments["exp_avg"].shape) == tuple(moments["exp_avg_sq"].shape) == shape:
            raise ValueError(
                f"parameter {number} has the shape {tuple(moments['exp_avg'].shape)}, '{name}' has {shape}"
            )
        state[name] = moments
    settings = {key: value for key, value in group.items() if key != "params"}
    return {"state": state, "param_groups": [{**settings, "param_names": list(shapes)}]}


def schedule_note(checkpoint: VerlCheckpoint) -> str:
    """How verl's learning rate stood at another step than the run; empty if it did not. Ours follows the step alone."""
    name = layout.extra_file(checkpoint.world_size, 0)
    extra = _read(checkpoint.path / name)
    try:
        last_epoch = extra["lr_scheduler"]["last_epoch"]
    except (KeyError, TypeError) as error:
        raise _refused(checkpoint.path, f"{name} has no position of a learning rate schedule") from error
    if last_epoch == checkpoint.step:
        return ""
    return (
        f"verl's learning rate schedule stood at step {last_epoch}, the run at step {checkpoint.step}: "
        f"the rate follows step {checkpoint.step} from here on"
    )


def read_position(checkpoint: VerlCheckpoint, *, num_samples: int, train_batch_size: int) -> Position:
    """Where the run stands in the data; a finished epoch is the start of the next (verl resumes into an empty one).

    `num_samples` are those of the data set now; verl leaves out what does not fill a batch of every rank at the end of
    an epoch. `train_batch_size` tells the number of data-parallel ranks where the files do not; otherwise it may be
    another than verl's. Raises `ConfigError` if the data cannot be those that verl trained on.
    """
    found = {_read_progress(checkpoint, name) for name in checkpoint.data_files}
    if len(found) > 1:
        raise _refused(checkpoint.path, f"its data ranks stand at different places: {sorted(found, key=repr)}")
    ((num_batches, batch_size),) = found
    samples_per_step, per_epoch = 0, num_batches
    if batch_size is not None:
        num_ranks = _num_data_ranks(checkpoint, batch_size, train_batch_size)
        samples_per_step, per_epoch = num_ranks * batch_size, num_samples // num_ranks // batch_size
    epoch, index = divmod(checkpoint.step, max(per_epoch, 1))
    if num_batches != (index or per_epoch):
        raise _refused(
            checkpoint.path,
            f"after step {checkpoint.step} it had taken {num_batches} batches of its epoch, but {num_samples} "
            f"samples make {per_epoch} steps an epoch: it was trained on other data, or other rows are left out here",
        )
    return Position(checkpoint.step, epoch, index * samples_per_step)


def _read_progress(checkpoint: VerlCheckpoint, name: str) -> tuple[int, int | None]:
    """How many batches one data-parallel rank took of the epoch under way, and their size; None if it took all.

    From the state of torchdata's StatefulDataLoader, which has another layout with worker processes than without.
    """
    state = _read(checkpoint.path / name)
    try:
        if "_snapshot" in state:
            sampler, since = state["_snapshot"]["_main_snapshot"], state["_steps_since_snapshot"]
        else:
            sampler, since = state, 0
        num_batches, num_samples = sampler["_sampler_iter_yielded"], sampler["_sampler_iter_state"]["samples_yielded"]
        if state["_iterator_finished"]:  # the sampler has looked at the samples that make no whole batch, too
            return num_batches + since, None
        batch_size, rest = divmod(num_samples, num_batches)
        if batch_size < 1 or rest or since < 0:
            raise ValueError(f"{num_samples} samples in {num_batches} batches")
        return num_batches + since, batch_size
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        reason = f"{name} is not the position of a torchdata StatefulDataLoader over a DistributedSampler: {error!r}"
        raise _refused(checkpoint.path, reason) from error


def _num_data_ranks(checkpoint: VerlCheckpoint, batch_size: int, train_batch_size: int) -> int:
    """Each rank had a file of its own, unless ranks shared one (sequence parallelism) or only rank 0 wrote (legacy)."""
    num_files, world_size = len(checkpoint.data_files), checkpoint.world_size
    is_legacy = checkpoint.data_files == (layout.DATA,)
    if num_files == world_size:
        return num_files
    num_ranks, rest = divmod(train_batch_size, batch_size)
    if rest or world_size % num_ranks or not (is_legacy or num_ranks == num_files):
        raise ConfigError(
            f"{checkpoint.path} has {', '.join(checkpoint.data_files)} of {world_size} ranks, {batch_size} samples a "
            f"batch, which does not fit data.train_batch_size={train_batch_size}: set it to what verl trained with; if "
            f"it is that, data files of other ranks are missing, and verl has to continue this run"
        )
    return num_ranks
