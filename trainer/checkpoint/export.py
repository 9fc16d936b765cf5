"""`huggingface/`: the model as transformers and vLLM load it, made from the shards of a checkpoint.

Tensors are read from the shard files one by one, written as safetensors and read back. Nothing here
needs the model, a GPU or another rank, so it runs behind training, and on any machine afterwards.
"""

import copy
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, __version__
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import str_to_torch_dtype

from trainer.adapter_names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapted_name, peft_name
from trainer.checkpoint import fsio, layout
from trainer.checkpoint.base_weights import Adapter, BaseWeights, MergedReader, stored_name
from trainer.checkpoint.fsio import FileRecord
from trainer.checkpoint.model_files import CONFIG, GENERATION_CONFIG, TEMPLATES, ModelFiles, copied
from trainer.checkpoint.shards import ShardReader, weight_buffers, write_tensors
from trainer.config import ConfigError
from trainer.weight_files import INDEX
from trainer.weights import TensorGroup, WholeCheckpoint, match

MAX_FILE_BYTES = 5 * 10**9
OTHER_PARTS = "model-other-parts.safetensors"
"""What passes through: in every checkpoint, since its shards do not hold it."""


class TensorReader(Protocol):
    """Whole tensors by name, one at a time."""

    def whole(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class ExportSource:
    """What the exported directory takes over: the files of the model trained from, and the
    template trained with.
    """

    files: ModelFiles
    chat_template: str | None
    """Only when it is not the tokenizer's own; the tokenizer's files are copied byte for byte
    otherwise.
    """
    end_token_ids: tuple[int, ...]
    whole: WholeCheckpoint | None = None
    """Where the files of the model hold more than is trained: the export holds that too."""
    adapter: Adapter | None = None
    """Of a run that trains adapters."""


@dataclass(frozen=True)
class ExportPlan:
    """`layout`: exported name -> tensor without memory, in the order written; `split`: into which
    files; `groups`: exported name -> what it is made of; `architecture`: the class that an export
    loads as, without weights.
    """

    layout: dict[str, Tensor]
    split: StateDictSplit
    groups: dict[str, TensorGroup]
    architecture: PreTrainedModel | None
    whole: WholeCheckpoint | None
    dtype: torch.dtype
    base: BaseWeights | None = None
    """What adapters are merged with."""

    @property
    def is_adapter(self) -> bool:
        return ADAPTER_WEIGHTS in self.split.filename_to_tensors

    @property
    def weights_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.layout.values())

    @property
    def others(self) -> dict[str, Tensor]:
        """Name -> tensor without memory of what passes through."""
        found = {} if self.whole is None else self.whole.others
        return {
            name: torch.empty(t.shape, dtype=str_to_torch_dtype[t.dtype], device="meta")
            for name, t in found.items()
        }

    @property
    def others_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.others.values())


Plans = Mapping[str, ExportPlan]
"""By the directory below `huggingface/`; '' is that itself."""


def num_bytes(plans: Plans, *, has_weights: bool = True) -> int:
    return sum(plan.others_bytes + plan.weights_bytes * has_weights for plan in plans.values())


def plan_exports(
    model: PreTrainedModel,
    parameters: Mapping[str, Tensor],
    source: ExportSource,
    *,
    dtype: str,
    lora: str,
) -> Plans:
    """What a save of `parameters` exports. `lora`: adapter, merged or both, where these are
    adapters.
    """
    architecture = meta_copy(model)
    if source.adapter is not None:
        return plan_lora(parameters, source.adapter, architecture, dtype=dtype, lora=lora)
    return {
        "": plan_export(
            parameters, weight_buffers(model), architecture, dtype=dtype, whole=source.whole
        )
    }


def plan_lora(
    shapes: Mapping[str, Tensor],
    adapter: Adapter,
    architecture: PreTrainedModel | None,
    *,
    dtype: str,
    lora: str,
) -> Plans:
    """Adapters under peft's names in one file, and the base with what they add, under the names of
    its files.

    `architecture` is the base's class on the meta device; what its files hold besides the tensors
    of that class is merged unchanged. Without a class all weights of the files are exported in
    `dtype`.

    Raises `ConfigError` for a base that they cannot be merged with.
    """
    plans, target_dtype = dict[str, ExportPlan](), getattr(torch, dtype)
    if lora != "adapter":
        base = BaseWeights.of(adapter.base)
        for name in shapes:
            stored_name(base, adapted_name(name))
        unknown = match(architecture, None, base.shapes)[1] if architecture is not None else []
        numbers = {
            name: tensor
            for name, tensor in base.shapes.items()
            if tensor.is_floating_point() and name not in unknown
        }
        others = {name: tensor for name, tensor in base.shapes.items() if name not in numbers}
        merged = plan_export(numbers, others, None, dtype=dtype)
        plans[""] = dataclasses.replace(merged, base=base)
    if lora != "merged":
        stored = {
            peft_name(key): torch.empty(t.shape, dtype=target_dtype, device="meta")
            for key, t in shapes.items()
        }
        split = split_state_dict_into_shards_factory(
            stored,
            get_storage_size=lambda t: t.nbytes,
            filename_pattern=ADAPTER_WEIGHTS,
            max_shard_size=sys.maxsize,
        )
        groups = {peft_name(name): TensorGroup((peft_name(name),), (name,)) for name in shapes}
        plan = ExportPlan(stored, split, groups, None, None, target_dtype)
        plans[layout.LORA_ADAPTER if lora == "both" else ""] = plan
    return plans


def plan_export(
    shapes: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    architecture: PreTrainedModel | None,
    *,
    dtype: str,
    whole: WholeCheckpoint | None = None,
) -> ExportPlan:
    """Which tensors go into which file. `shapes`: every parameter once (a tied head is absent).

    Parameters are exported in `dtype`, buffers in their own.
    `architecture` is the model on the meta device, by which transformers finds how it stores these
    tensors; None stores them as they are. They are stored as the files of `whole` have them where
    that has several parts.
    """
    target_dtype: torch.dtype = getattr(torch, dtype)
    several, text_names = (None, ()) if whole is None else (whole.model, whole.text_names)
    own = {
        name: torch.empty(t.shape, dtype=target_dtype, device="meta") for name, t in shapes.items()
    }
    own |= {name: tensor.to("meta") for name, tensor in buffers.items()}
    if architecture is None:
        groups = [TensorGroup((name,), (name,)) for name in own]
    else:
        names = (
            revert_weight_conversion(architecture, own).keys() if several is None else text_names
        )
        groups, unknown = match(architecture, several, names)
        if unknown or {name for group in groups for name in group.own} != own.keys():
            raise ConfigError(
                f"{type(architecture).__name__} cannot be exported: transformers {__version__} "
                f"does not load what it would save ({', '.join(unknown[:5])})"
            )
    order = {name: place for place, name in enumerate(own)}
    groups.sort(key=lambda group: min(order[name] for name in group.own))
    by_name: dict[str, TensorGroup] = {}
    stored: dict[str, Tensor] = {}
    for group in groups:
        made = group.to_stored([own[name] for name in group.own])
        stored |= made
        by_name |= dict.fromkeys(made, group)
    split = split_state_dict_into_shards_factory(
        stored,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors"
        if whole is None
        else "model-text{suffix}.safetensors",
        max_shard_size=MAX_FILE_BYTES,
    )
    return ExportPlan(stored, split, by_name, several or architecture, whole, target_dtype)


def meta_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The architecture of a sharded model without weights, under its own class name."""
    original: Any = next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))
    with torch.device("meta"):
        meta_model: PreTrainedModel = original(copy.deepcopy(model.config))
    return meta_model


def require_export(info: layout.CheckpointInfo) -> None:
    """Raises `ConfigError` for a checkpoint that was saved without weights of its export, and
    got none since.
    """
    export = info.path / layout.HUGGINGFACE
    saved = (
        [record.path for record in info.manifest.files if layout.is_export(record.path)]
        if info.manifest
        else []
    )
    names = [*saved, *(str(path) for path in export.glob("*.safetensors"))]
    if not any(name.endswith(".safetensors") and not name.endswith(OTHER_PARTS) for name in names):
        raise ConfigError(
            f"'{export}' holds no weights, because trainer.checkpoint.save_contents had no "
            f"hf_model: take a checkpoint that was saved with it"
        )


def write_export(
    plans: Plans,
    target: Path,
    reader: ShardReader,
    source: ExportSource,
    *,
    share: tuple[int, int] = (0, 1),
    has_weights: bool = True,
) -> list[FileRecord]:
    """This writer's share `(index, count)` of the weights' files, in the existing directories below
    `target`, by their paths from `target`'s own directory; the first writer adds what is beside
    them.
    """
    root, is_first = target.parent, share[0] == 0
    # first: the checkpoint that they are copied from may go while the weights are written
    records = write_companions(plans[""], target, source) if is_first else []
    for directory, plan in plans.items():
        place = target / directory
        if has_weights:
            tensors = (
                MergedReader(plan.base, reader, source.adapter)
                if plan.base and source.adapter
                else reader
            )
            records += write_weights(plan, place, tensors, root=root, share=share)
        if has_weights and is_first:
            records += write_index(plan, place, root=root)
        if is_first and plan.is_adapter and source.adapter:
            records.append(_write_json(place / ADAPTER_CONFIG, source.adapter.settings, root=root))
    return records


def copied_bytes(plans: Plans, *, has_weights: bool = True) -> int:
    """What `with_copies` takes on the disk, over all writers."""
    bases = [plan for plan in plans.values() if plan.base is not None and has_weights]
    base_bytes = sum(
        tensor.nbytes for plan in bases if plan.base for tensor in plan.base.shapes.values()
    )
    return base_bytes + sum(plan.others_bytes for plan in plans.values())


def with_copies(
    plans: Plans, directory: Path, *, share: tuple[int, int], has_weights: bool = True
) -> Plans:
    """Plans that read the model directory no more: this writer's share of what they take from there
    is copied.

    Raises `ConfigError` if it changed since its digest was taken, `OSError` if the copies cannot be
    made.
    """
    return {
        place: _with_copies(plan, directory, share, has_weights) for place, plan in plans.items()
    }


def _with_copies(
    plan: ExportPlan, directory: Path, share: tuple[int, int], has_weights: bool
) -> ExportPlan:
    if plan.whole is not None and share[0] == 0:
        whole = dataclasses.replace(plan.whole, others=copied(plan.whole.others, directory))
        if whole.others_digest != plan.whole.others_digest:
            raise ConfigError("the weights of the model changed while the run started; start again")
        plan = dataclasses.replace(plan, whole=whole)
    if plan.base is not None and has_weights:
        names = [name for names in _files_of(plan, share).values() for name in names]
        plan = dataclasses.replace(plan, base=plan.base.with_copies(names, directory))
    return plan


def _files_of(plan: ExportPlan, share: tuple[int, int]) -> dict[str, list[str]]:
    """File name -> names of its tensors, of share `(index, count)` of the files."""
    index, count = share
    files = plan.split.filename_to_tensors.items()
    return {name: names for number, (name, names) in enumerate(files) if number % count == index}


def write_weights(
    plan: ExportPlan,
    target: Path,
    reader: TensorReader,
    *,
    root: Path,
    share: tuple[int, int] = (0, 1),
) -> list[FileRecord]:
    """Write this writer's share `(index, count)` of the files into the existing directory
    `target`; read them back.
    """
    mine = _files_of(plan, share)
    tensors = _exported(plan, reader, [name for names in mine.values() for name in names])
    return [
        write_tensors(
            target / file_name, {name: plan.layout[name] for name in names}, tensors, root=root
        )
        for file_name, names in mine.items()
    ]


def _exported(plan: ExportPlan, reader: TensorReader, names: list[str]) -> Iterator[Tensor]:
    """The named tensors in the dtype they are exported in; no more in memory than one group of
    them.
    """
    made: dict[str, Tensor] = {}
    for name in names:
        if name not in made:
            made.clear()
            group, dtype = plan.groups[name], plan.layout[name].dtype
            made |= group.to_stored([reader.whole(own).to(dtype) for own in group.own])
        yield made.pop(name)


def write_companions(plan: ExportPlan, target: Path, source: ExportSource) -> list[FileRecord]:
    """Everything beside the weights: config.json, generation_config.json, tokenizer, template, the
    model's own code.

    An adapter alone has no config.json: with one, transformers takes the directory for a whole
    model.
    """
    root = target.parent
    records = (
        [] if plan.is_adapter else [_write_json(target / CONFIG, _config(source, plan), root=root)]
    )
    records.append(_write_json(target / GENERATION_CONFIG, _generation_config(source), root=root))
    for name, data in source.files.companions.items():
        if source.chat_template is not None and name in TEMPLATES:
            continue  # the one trained with is written below
        if source.chat_template is not None and name == "tokenizer_config.json":
            config = json.loads(data) | {"chat_template": source.chat_template}
            records.append(_write_json(target / name, config, root=root))
        else:
            records.append(fsio.write_file(target / name, data, root=root))
    if source.chat_template is not None:
        text = source.chat_template.encode()
        records.append(fsio.write_file(target / "chat_template.jinja", text, root=root))
    if plan.whole is not None:
        others = (tensor.whole() for tensor in plan.whole.others.values())
        records.append(write_tensors(target / OTHER_PARTS, plan.others, others, root=root))
    return records


def write_index(plan: ExportPlan, target: Path, *, root: Path) -> list[FileRecord]:
    """Which file holds which tensor, where there are several."""
    if not plan.split.is_sharded and plan.whole is None:
        return []
    index: dict[str, object] = {
        "metadata": {"total_size": plan.weights_bytes + plan.others_bytes},
        "weight_map": plan.split.tensor_to_filename | dict.fromkeys(plan.others, OTHER_PARTS),
    }
    return [_write_json(target / INDEX, index, root=root)]


def _config(source: ExportSource, plan: ExportPlan) -> dict[str, object]:
    """The source's own config with the dtype that was written; `torch_dtype` is the key every
    reader knows.
    """
    config: dict[str, object] = json.loads(source.files.contents[CONFIG])
    name = str(plan.dtype).removeprefix("torch.")
    config["torch_dtype"] = name
    for part in (config, config.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part, dict) and key in part:
                part[key] = name
    config.setdefault("architectures", [type(plan.architecture).__name__])
    return config


def _generation_config(source: ExportSource) -> dict[str, object]:
    """The source's, its end tokens completed by those that the model was trained to end a turn
    with.
    """
    config: dict[str, object] = json.loads(source.files.contents.get(GENERATION_CONFIG, b"{}"))
    known = config.get("eos_token_id", [])
    ids = [i for i in (known if isinstance(known, list) else [known]) if isinstance(i, int)]
    merged = ids + [i for i in source.end_token_ids if i not in ids]
    if merged:
        config["eos_token_id"] = merged if len(merged) > 1 else merged[0]
    return config


def _write_json(path: Path, value: Mapping[str, object], *, root: Path) -> FileRecord:
    return fsio.write_file(
        path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(), root=root
    )
