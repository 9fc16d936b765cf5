"""Weights into a sharded model on meta: every rank reads only its own slices, or makes them
from a keyed seed.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Self

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import load_state_dict, str_to_torch_dtype
from transformers.utils.loading_report import LoadStateDictInfo

from trainer import weights
from trainer.adapter_names import base_name, is_adapter
from trainer.config import ConfigError
from trainer.model import new_tokens, packed_lm
from trainer.model.packed_lm import ModelSource
from trainer.runtime import seeding
from trainer.weight_files import INDEX, SINGLE_FILE, weight_files
from trainer.weights import StoredTensor, TensorGroup, WholeCheckpoint, local_slices

logger = logging.getLogger(__name__)
_ROWS = 4096
_STORED_DTYPES = {"F64", "F32", "F16", "BF16"}


def materialize(
    model: PreTrainedModel, device: torch.device, *, buffer_device: torch.device
) -> None:
    """Give every parameter memory on `device` (undefined values), keep buffers' values and tied
    parameters tied.
    """
    buffers = dict(model.named_buffers())
    is_tied = _is_tied(model)
    model.to_empty(device=device)
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffer.to(buffer_device)
    if is_tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def load_weights(model: PreTrainedModel, source: ModelSource, *, seed: int) -> None:
    """Fill the model: every rank reads its own slices of what the files hold as the model does, and
    one group at a time of what transformers must convert; or with the architecture's own
    initialisation keyed by the seed. Collective.
    """
    if source.random_weights:
        _from_main_rank(model, _initialized(model, source, seed) if dist.get_rank() == 0 else {})
        return
    found = SourceWeights.of(source)
    found.require_all_of(model)
    tensors, embeddings = _stored_tensors(model), model.get_input_embeddings().weight
    grown = [embeddings, *model.get_output_embeddings().parameters()] if source.new_tokens else []
    try:
        for group in found.groups:
            fill(
                group,
                tensors,
                found.files,
                may_grow=any(tensors[group.own[0]] is tensor for tensor in grown),
            )
    except ConfigError:
        raise
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"model.partial_pretrain={source.path}: weights cannot be loaded: {error}"
        ) from error
    if source.new_tokens:
        stored = next(
            group.stored[0] for group in found.groups if tensors[group.own[0]] is embeddings
        )
        new_tokens.fill_rows(model, source.new_tokens, found.files[stored].shape[0], seed=seed)


@dataclass(frozen=True)
class SourceWeights:
    """What the files of a source hold: tensors of the model, and others."""

    path: str
    files: dict[str, StoredTensor]
    groups: list[TensorGroup]
    others: list[str]
    text: PreTrainedModel
    whole: PreTrainedModel | None
    """Both on meta; the class that wrote the files where the model is one part of several."""

    @classmethod
    def of(cls, source: ModelSource) -> Self:
        config, whole = packed_lm.read_architecture(source)
        files = _stored_files(Path(source.path))
        with torch.device("meta"):
            text = AutoModelForCausalLM.from_config(
                config, trust_remote_code=source.trust_remote_code
            )
        try:
            return cls(source.path, files, *weights.match(text, whole, files), text, whole)
        except ConfigError as error:
            raise ConfigError(f"model.partial_pretrain={source.path}: {error}") from error

    def require_all_of(self, model: PreTrainedModel) -> None:
        """Raise `ConfigError` unless every tensor of the model is here, once."""
        missing = set(_stored_tensors(model)) - {
            name for group in self.groups for name in group.own
        }
        keys = LoadStateDictInfo(
            missing_keys=missing,
            unexpected_keys=set(),
            mismatched_keys=set(),
            error_msgs=[],
            conversion_errors={},
            skipped_pp_keys=set(),
        )
        model._adjust_missing_and_unexpected_keys(keys)
        if lacking := sorted(keys.missing_keys | (missing & dict(model.named_parameters()).keys())):
            way_out = (
                "; use model.random_weights=true to start from random ones"
                if self.whole is None
                else ""
            )
            raise ConfigError(
                f"model.partial_pretrain={self.path} lacks weights for {lacking[:5]}{way_out}"
            )
        self._require_same_tied()

    @property
    def aliases(self) -> dict[str, str]:
        """Name of a tensor of the files that is tied -> name of the tensor that it is another
        copy of.
        """
        by_own: dict[tuple[str, ...], str] = {}
        stored = [
            (group.stored[0], by_own.setdefault(group.own, group.stored[0]))
            for group in self.groups
        ]
        return {name: kept for name, kept in stored if name != kept}

    def _require_same_tied(self) -> None:
        """A head of its own under a config that ties it would be dropped without a word."""
        for name, kept in self.aliases.items():
            if not _are_equal(self.files[name], self.files[kept]):
                raise ConfigError(
                    f"{self.files[name].file}: {name} differs from {kept}, the embeddings, but "
                    f"config.json ties them; set tie_word_embeddings to false there"
                )


def whole_checkpoint(source: ModelSource) -> WholeCheckpoint | None:
    """What the files hold besides the tensors that are trained, for exports to carry; None if that
    is nothing.

    Raises `ConfigError` where a tensor of the text part of several parts is not found.
    """
    has_parts = packed_lm.read_architecture(source)[1] is not None
    if source.random_weights:
        if not has_parts:
            return None
        raise ConfigError(
            f"model.random_weights=true: the other parts of {source.path} have no weights then; "
            f"name a directory whose config.json is that of the text part alone (its 'text_config')"
        )
    found = SourceWeights.of(source)
    others = {name: found.files[name] for name in sorted(found.others)}
    if found.whole is None:
        _announce_text(found)
        return WholeCheckpoint(None, (), others) if others else None
    found.require_all_of(found.text)
    logger.info("the text part is trained; %d other tensors go into exports unchanged", len(others))
    text_names = tuple(name for group in found.groups for name in group.stored)
    return WholeCheckpoint(found.whole, text_names, others)


def _announce_text(found: SourceWeights) -> None:
    """Name what the files of a text model hold besides its tensors, and what they hold twice."""
    if found.others:
        logger.info(
            "%d tensors of the files are not part of %s and are not trained (%s, ...): exports of "
            "the whole model carry them unchanged",
            len(found.others),
            type(found.text).__name__,
            sorted(found.others)[0],
        )
    for name, kept in found.aliases.items():
        logger.info("%s and %s are the same weight (tied): exports hold it once", kept, name)


def _is_tied(model: PreTrainedModel) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def _stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters once each (a tied head is absent), then the buffers that belong to the
    weights; no adapters.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in aliases}
    return {
        base_name(name): tensor
        for name, tensor in (parameters | buffers).items()
        if not is_adapter(name)
    }


def _stored_files(path: Path) -> dict[str, StoredTensor]:
    """What the files of a directory hold."""
    stored: dict[str, StoredTensor] = {}
    for file in weight_files(path):
        stored |= (
            weights.stored_in(file) if file.suffix == ".safetensors" else _stored_in_pickle(file)
        )
    if not stored:
        raise ConfigError(
            f"model.partial_pretrain={path}: weights cannot be loaded: there is no {SINGLE_FILE} "
            f"or {INDEX}"
        )
    return stored


def _stored_in_pickle(file: Path) -> dict[str, StoredTensor]:
    """The same of a file of the older kind, of which nothing but tensors is accepted."""
    try:
        tensors: dict[str, Tensor] = load_state_dict(file)
    except (OSError, RuntimeError, ValueError, UnpicklingError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    names = {dtype: name for name, dtype in str_to_torch_dtype.items()}
    return {
        name: StoredTensor(file, tuple(tensor.shape), names[tensor.dtype], tensor.__getitem__)
        for name, tensor in tensors.items()
    }


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Compared some rows at a time: embeddings are large, and every rank does this."""
    parts = [(slice(row, row + _ROWS),) for row in range(0, one.shape[0], _ROWS)]
    return one.shape == other.shape and all(
        torch.equal(one.read(part), other.read(part)) for part in parts
    )


def fill(
    group: TensorGroup,
    tensors: Mapping[str, Tensor],
    files: Mapping[str, StoredTensor],
    *,
    may_grow: bool = False,
) -> None:
    """This rank's slices of the model's tensors from those of the files, which `may_grow`: have
    fewer rows.
    """
    stored, own = [files[name] for name in group.stored], [tensors[name] for name in group.own]
    if all(tensor.is_floating_point() for tensor in own):
        for name, found in zip(group.stored, stored, strict=True):
            if found.dtype not in _STORED_DTYPES:
                raise ConfigError(
                    f"{found.file}: tensor {name} is {found.dtype}, no floating-point weights"
                )
    slices = [local_slices(tensor) for tensor in own]
    if group.converter is None:
        (local, where), *_ = slices
        shape = tuple(stored[0].shape)
        if may_grow and shape[0] < own[0].shape[0]:
            where = (
                slice(*(min(row, shape[0]) for row in (where[0].start, where[0].stop))),
                *where[1:],
            )
            local, shape = local[: where[0].stop - where[0].start], (own[0].shape[0], *shape[1:])
        _require_shape(shape, own[0], f"{stored[0].file}: tensor {group.stored[0]}")
        if local.numel():
            local.copy_(stored[0].read(where))
    elif any(local.numel() for local, _ in slices):
        made = group.to_own([found.whole() for found in stored])
        for name, tensor, (local, where) in zip(group.own, own, slices, strict=True):
            _require_shape(
                made[name].shape,
                tensor,
                f"{stored[0].file}: {name}, made from {group.stored[0]}, …",
            )
            local.copy_(made[name][where])


def _require_shape(found: Sequence[int], tensor: Tensor, what: str) -> None:
    if tuple(found) != tuple(tensor.shape):
        raise ConfigError(
            f"{what} has shape {tuple(found)}, the config asks for {tuple(tensor.shape)}"
        )


def _initialized(model: PreTrainedModel, source: ModelSource, seed: int) -> dict[str, Tensor]:
    """transformers' own initialisation on the CPU: equal for every world size."""
    config = copy.deepcopy(model.config)  # the attention chosen below is written into it
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeding.key("init", seed))
        whole = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            trust_remote_code=source.trust_remote_code,
            attn_implementation="eager",
        )
    tensors: dict[str, Tensor] = whole.state_dict()
    return tensors


def _from_main_rank(model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
    """Rank 0 has all tensors whole, the others receive one at a time and keep their slices: one
    copy per run.
    """
    for name, tensor in _stored_tensors(model).items():
        local, where = local_slices(tensor)
        if tensors:
            whole = tensors[name].to(local.device, tensor.dtype).contiguous()
        else:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=local.device)
        dist.broadcast(whole, src=0)
        local.copy_(whole[where])
