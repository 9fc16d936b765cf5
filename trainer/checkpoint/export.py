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
from typing import Any, Protocol, Self

import torch
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, __version__
from transformers.core_model_loading import revert_weight_conversion

from trainer.adapter_names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapted_name, peft_name
from trainer.checkpoint import fsio, layout
from trainer.checkpoint.base_weights import Adapter, BaseWeights, MergedReader, stored_name
from trainer.checkpoint.fsio import FileRecord
from trainer.checkpoint.model_files import CONFIG, GENERATION_CONFIG, TEMPLATES, ModelFiles
from trainer.checkpoint.shards import ShardReader, copied, shapes_of, write_tensors
from trainer.config import ConfigError
from trainer.weight_files import INDEX
from trainer.weights import TensorGroup, WholeCheckpoint, match

MAX_FILE_BYTES = 5 * 10**9
OTHER_PARTS = "model-other-parts.safetensors"
"""Tensors that pass through: in every checkpoint, since its shards do not hold them."""


class TensorReader(Protocol):
    """Whole tensors by name, one at a time."""

    def whole(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class ExportSource:
    """Everything that an export takes over from the training.

    `chat_template`: only if it is not the tokenizer's own, whose files are copied byte for byte.
    `whole`: set if the model's files hold more than is trained, which the export holds too.
    `adapter`: set if adapters are trained.
    """

    files: ModelFiles
    chat_template: str | None
    end_token_ids: tuple[int, ...]
    whole: WholeCheckpoint | None = None
    adapter: Adapter | None = None


@dataclass(frozen=True)
class ExportPlan:
    """The tensors of an export, and their files.

    layout: exported name -> tensor without memory, in the order written; `groups`: exported name ->
    tensors it is made from; `architecture`: the class that an export loads as, without weights;
    `base`: the weights that adapters are merged with.
    """

    layout: dict[str, Tensor]
    split: StateDictSplit
    groups: dict[str, TensorGroup]
    architecture: PreTrainedModel | None
    whole: WholeCheckpoint | None
    dtype: torch.dtype
    base: BaseWeights | None = None

    @property
    def is_adapter(self) -> bool:
        return ADAPTER_WEIGHTS in self.split.filename_to_tensors

    @property
    def weights_bytes(self) -> int:
        return _bytes(self.layout)

    @property
    def others(self) -> dict[str, Tensor]:
        """Tensors that pass through, by name, without memory."""
        return {} if self.whole is None else shapes_of(self.whole.others)

    def num_bytes(self, *, has_weights: bool = True) -> int:
        return _bytes(self.others) + self.weights_bytes * has_weights

    def copied_bytes(self, *, has_weights: bool = True) -> int:
        """Return what `with_copies` takes on the disk, over all writers."""
        from_base = self.base.shapes if self.base is not None and has_weights else {}
        return _bytes(self.others) + _bytes(from_base)

    def with_copies(
        self, directory: Path, *, share: tuple[int, int], has_weights: bool = True
    ) -> Self:
        """Copy this writer's share of the tensors from the model directory, which is not read
        again.

        Raises `ConfigError` if they changed since their digest was taken, `OSError` if they cannot
        be copied.
        """
        plan = self
        if plan.whole is not None and share[0] == 0:
            whole = dataclasses.replace(plan.whole, others=copied(plan.whole.others, directory))
            if whole.others_digest != plan.whole.others_digest:
                raise ConfigError(
                    "the weights of the model changed while the run started; start again"
                )
            plan = dataclasses.replace(plan, whole=whole)
        if plan.base is not None and has_weights:
            names = [name for names in plan.files_of(share).values() for name in names]
            plan = dataclasses.replace(plan, base=plan.base.with_copies(names, directory))
        return plan

    def files_of(self, share: tuple[int, int]) -> dict[str, list[str]]:
        """Return file name -> names of its tensors, of share `(index, count)` of the files."""
        index, count = share
        files = enumerate(self.split.filename_to_tensors.items())
        return {name: names for number, (name, names) in files if number % count == index}


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def plan_of(
    shapes: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    architecture: PreTrainedModel | None,
    source: ExportSource,
    *,
    dtype: str,
    lora: str,
) -> ExportPlan:
    """Plan the export of `shapes`; `lora` is `adapter` or `merged`, if these are adapters.

    A merged export has the base's tensors with the adapters added, under the names of its files.
    `architecture` is then the base's class; tensors of its files that the class lacks are exported
    unchanged. Without a class all weights are exported in `dtype`.

    Raises `ConfigError` for a base that adapters cannot be merged with.
    """
    if source.adapter is None:
        return plan_export(shapes, buffers, architecture, dtype=dtype, whole=source.whole)
    if lora == "adapter":
        return _plan_adapter(shapes, getattr(torch, dtype))
    base = BaseWeights.of(source.adapter.base)
    for name in shapes:
        stored_name(base, adapted_name(name))
    unknown = match(architecture, None, base.shapes)[1] if architecture is not None else []
    weights = {
        name: tensor
        for name, tensor in base.shapes.items()
        if tensor.is_floating_point() and name not in unknown
    }
    others = {name: tensor for name, tensor in base.shapes.items() if name not in weights}
    return dataclasses.replace(plan_export(weights, others, None, dtype=dtype), base=base)


def _plan_adapter(shapes: Mapping[str, Tensor], dtype: torch.dtype) -> ExportPlan:
    """Plan one file of adapters under peft's names."""
    stored = {
        peft_name(name): torch.empty(tensor.shape, dtype=dtype, device="meta")
        for name, tensor in shapes.items()
    }
    groups = {peft_name(name): TensorGroup((peft_name(name),), (name,)) for name in shapes}
    return ExportPlan(
        stored, _split(stored, ADAPTER_WEIGHTS, sys.maxsize), groups, None, None, dtype
    )


def _split(stored: dict[str, Tensor], pattern: str, max_bytes: int) -> StateDictSplit:
    return split_state_dict_into_shards_factory(
        stored,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern=pattern,
        max_shard_size=max_bytes,
    )


def plan_export(
    shapes: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    architecture: PreTrainedModel | None,
    *,
    dtype: str,
    whole: WholeCheckpoint | None = None,
) -> ExportPlan:
    """Plan which tensors go into which file. `shapes`: every parameter once (a tied head is absent).

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
    name = "model" if whole is None else "model-text"
    split = _split(stored, f"{name}{{suffix}}.safetensors", MAX_FILE_BYTES)
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
    plan: ExportPlan,
    target: Path,
    reader: ShardReader,
    source: ExportSource,
    *,
    share: tuple[int, int] = (0, 1),
    has_weights: bool = True,
) -> list[FileRecord]:
    """Write share `(index, count)` of the weights' files into the existing directory `target`.

    The first writer adds the other files. Paths are relative to the directory above `target`.
    """
    root, is_first = target.parent, share[0] == 0
    # first: the checkpoint that they are copied from may go while the weights are written
    records = write_companions(plan, target, source) if is_first else []
    if not has_weights:
        return records
    tensors: TensorReader = reader
    if plan.base is not None and source.adapter is not None:
        tensors = MergedReader(plan.base, reader, source.adapter)
    records += write_weights(plan, target, tensors, root=root, share=share)
    return records + (write_index(plan, target, root=root) if is_first else [])


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
    mine = plan.files_of(share)
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
            made |= group.to_stored([_cast(reader.whole(own), dtype, own) for own in group.own])
        yield made.pop(name)


def _cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    cast = tensor.to(dtype)
    if dtype == torch.float16 and not torch.isfinite(cast).all():
        raise ConfigError(
            f"'{name}' has values beyond the range of float16.\nFix: export in bfloat16 or float32"
        )
    return cast


def write_companions(plan: ExportPlan, target: Path, source: ExportSource) -> list[FileRecord]:
    """Everything beside the weights: config.json, generation_config.json, tokenizer, template, the
    model's own code.

    An adapter alone has no config.json: with one, transformers takes the directory for a whole
    model.
    """
    root = target.parent
    records = []
    if source.adapter is not None and plan.is_adapter:
        records.append(_write_json(target / ADAPTER_CONFIG, source.adapter.settings, root=root))
    else:
        records.append(_write_json(target / CONFIG, _config(source, plan), root=root))
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
    """Write which file holds which tensor, if there are several."""
    if not plan.split.is_sharded and plan.whole is None:
        return []
    index: dict[str, object] = {
        "metadata": {"total_size": plan.num_bytes()},
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
