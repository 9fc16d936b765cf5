"""`huggingface/`: the model as transformers and vLLM load it, made from a checkpoint's shards.

Tensors are read from the shard files one by one, written as safetensors, and read back. An export
needs no model, GPU or other rank, so it can run in the background during training, or later on any
machine.
"""

import copy
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, __version__
from transformers.core_model_loading import revert_weight_conversion

from trainer.checkpoint import fsio, layout
from trainer.checkpoint.base_weights import (
    Adapter,
    Change,
    base_tensors,
    changes_of,
)
from trainer.checkpoint.fsio import FileRecord, Share
from trainer.checkpoint.model_card import FILE_NAME as CARD
from trainer.checkpoint.model_files import (
    CONFIG,
    GENERATION_CONFIG,
    MORE_TEMPLATES,
    TEMPLATES,
    ModelFiles,
)
from trainer.checkpoint.shards import Shards, copied, shapes_of, write_stored, write_tensors
from trainer.config import ConfigError
from trainer.model.adapter_names import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    is_adapter,
    peft_name,
)
from trainer.model.quantized import QUANTIZATION_CONFIG
from trainer.model.weight_files import INDEX
from trainer.model.weights import StoredTensor, TensorGroup, WholeCheckpoint, match, places_of

MAX_FILE_BYTES = 5 * 10**9
OTHER_PARTS = "model-other-parts.safetensors"
"""The file of tensors that are exported unchanged. The shards do not contain these tensors, so
every checkpoint of a model that has them contains this file.
"""


@dataclass(frozen=True)
class ExportSource:
    """The run's data that an export needs in addition to the shards.

    chat_template: None for the tokenizer's template, whose files are copied byte for byte; whole:
    set if the model's files contain untrained tensors, which are then exported too; adapter: set if
    the run trains adapters.
    """

    files: ModelFiles
    chat_template: str | None
    end_token_ids: tuple[int, ...]
    whole: WholeCheckpoint | None = None
    adapter: Adapter | None = None


@dataclass(frozen=True)
class ExportPlan:
    """The tensors of an export, and their files.

    layout: exported name -> meta tensor, in the order of the files; files: file name -> names of
    its tensors; groups: exported name -> the tensors from which it is made; class_name: the class
    that loads the export; base: in a merged export, the tensors of the base model; changes: name of
    a weight in the base model -> its change. An export without weights has no `files`.
    """

    source: ExportSource
    layout: dict[str, Tensor]
    files: dict[str, list[str]]
    groups: dict[str, TensorGroup]
    class_name: str | None
    dtype: str
    base: Mapping[str, StoredTensor]
    changes: Mapping[str, Change]

    @property
    def others(self) -> Mapping[str, StoredTensor]:
        """The tensors that are exported unchanged."""
        return self.source.whole.others if self.source.whole else {}

    @property
    def num_bytes(self) -> int:
        tensors = (*self.layout.values(), *shapes_of(self.others).values())
        return sum(tensor.nbytes for tensor in tensors)

    def with_copies(self, directory: Path, *, share: Share) -> Self:
        """Copy this writer's share of the tensors in the model directory, and return the new plan.

        After that, the model directory is never read again. If its files have changed by then, the
        run does not start (`require_model_unchanged`). Raises `OSError` if the copy fails.
        """
        whole = self.source.whole
        if whole is not None and share[0] == 0:
            whole = dataclasses.replace(whole, others=copied(whole.others, directory))
        base = self.base
        if base:
            made_from = {
                name: base[name]
                for exported in chain.from_iterable(self.files_of(share).values())
                for name in self.groups[exported].stored
            }
            base = {**base, **copied(made_from, directory)}
        source = dataclasses.replace(self.source, whole=whole)
        return dataclasses.replace(self, source=source, base=base)

    def files_of(self, share: Share) -> dict[str, list[str]]:
        """Return file name -> names of its tensors for share `(index, count)` of the files."""
        index, count = share
        return dict(list(self.files.items())[index::count])


def plan_export(
    shapes: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    architecture: PreTrainedModel | None,
    source: ExportSource,
    *,
    dtype: str,
    lora: str = "adapter",
    has_weights: bool = True,
) -> ExportPlan:
    """Decide which tensors go into which file.

    shapes: every parameter once (without a tied head), exported in `dtype`; buffers: these keep
    their dtype; architecture: the model on the meta device, from which transformers derives how it
    stores the tensors, or None to store them as they are. If `source.whole` is a model with several
    components, the tensors are stored as in its files.

    lora: `adapter` or `merged`, if the run trains adapters. A merged export has the base model's
    tensors with the adapters added, under the names in the base model's files. `architecture` is
    then the base model on the meta device; tensors that it lacks are exported unchanged.

    Raises `ConfigError` if transformers could not load the export, or if the adapters cannot be
    merged with the base model.
    """
    adapter = source.adapter
    base: Mapping[str, StoredTensor] = {}
    changes: dict[str, Change] = {}
    target_dtype = getattr(torch, dtype)
    own = {
        name: torch.empty(tensor.shape, dtype=target_dtype, device="meta")
        for name, tensor in shapes.items()
    }
    pattern = "model{suffix}.safetensors"
    max_bytes = MAX_FILE_BYTES
    if adapter is None:
        own |= {name: tensor.to("meta") for name, tensor in buffers.items()}
        groups = _stored_groups(own, architecture, source.whole)
        if source.whole is not None:
            pattern = "model-text{suffix}.safetensors"
    else:
        places = places_of(architecture, adapter.whole) if architecture is not None else {}
        in_full = adapter.trained_in_full(shapes, places)
        if lora == "adapter":  # a single file with peft's names
            names = {name: name for name in own} | in_full
            groups = [
                TensorGroup((peft_name(name, places),), (own_name,))
                for name, own_name in names.items()
            ]
            pattern = ADAPTER_WEIGHTS
            max_bytes = sys.maxsize
        else:
            base = base_tensors(adapter.base)
            changes = changes_of(adapter, shapes, in_full, architecture, places)
            groups, others = _base_groups(base, changes, architecture, adapter.whole)
            own = _base_shapes(groups, base, set(others), target_dtype)
            architecture = None
    layout: dict[str, Tensor] = {}
    by_name: dict[str, TensorGroup] = {}
    for group in groups if has_weights else ():
        made = group.to_stored([own[name] for name in group.own])
        layout |= made
        by_name |= dict.fromkeys(made, group)
    split = split_state_dict_into_shards_factory(
        layout,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern=pattern,
        max_shard_size=max_bytes,
    )
    model = (source.whole.model if source.whole else None) or architecture
    return ExportPlan(
        source=source,
        layout=layout,
        files=split.filename_to_tensors,
        groups=by_name,
        class_name=type(model).__name__ if model is not None else None,
        dtype=dtype,
        base=base,
        changes=changes,
    )


def _base_groups(
    base: Mapping[str, StoredTensor],
    changes: Mapping[str, Change],
    architecture: PreTrainedModel | None,
    whole: PreTrainedModel | None,
) -> tuple[list[TensorGroup], list[str]]:
    """Return (the groups of a base model's tensors, in the order of its files; the names of tensors
    outside the language model). A tensor without a change forms a separate group.

    Raises `ConfigError` if the files lack a changed weight.
    """
    if architecture is not None:
        known, others = match(architecture, whole, base)
    else:
        # files may leave out the first component of a name: the module without the head
        own_names = {name.partition(".")[2]: name for name in changes}
        own_names |= {name: name for name in changes}
        known = [TensorGroup((n,), (own_names.get(n, n),)) for n in base]
        others = []
    of_stored = {
        name: group
        for group in known
        if not changes.keys().isdisjoint(group.own)
        for name in group.stored
    }
    found = {name: of_stored.get(name, TensorGroup((name,), (name,))) for name in base}
    groups = list({id(group): group for group in found.values()}.values())
    present = {name for group in groups for name in group.own}
    for name, change in changes.items():
        is_tied_head = not is_adapter(change.trained) and change.trained != name
        if name not in present and not is_tied_head:
            raise ConfigError(
                f"the files of the base model have no tensor for '{name}', so its adapter cannot be "
                f"merged.\nFix: use hf_model instead of merged_model in "
                f"trainer.checkpoint.save_contents. To export a checkpoint, use --lora adapter"
            )
    return groups, others


def _base_shapes(
    groups: list[TensorGroup],
    base: Mapping[str, StoredTensor],
    others: Set[str],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return the model's tensors in the groups as meta tensors. Floating-point tensors have the
    exported dtype; `others` and integers keep the dtype of the files.
    """
    stored = {
        name: tensor.to(dtype) if tensor.is_floating_point() and name not in others else tensor
        for name, tensor in shapes_of(base).items()
    }
    made: dict[str, Tensor] = {}
    for group in groups:
        made |= group.to_own([stored[name] for name in group.stored])
    return made


def _stored_groups(
    own: dict[str, Tensor], architecture: PreTrainedModel | None, whole: WholeCheckpoint | None
) -> list[TensorGroup]:
    """Return the groups in which transformers stores the tensors `own`, in the order of `own`.

    Raises `ConfigError` if transformers would not load every tensor again.
    """
    if architecture is None:
        return [TensorGroup((name,), (name,)) for name in own]
    several, names = (whole.model, whole.text_names) if whole else (None, ())
    names = names or tuple(revert_weight_conversion(architecture, own))
    groups, unknown = match(architecture, several, names)
    if unknown or {name for group in groups for name in group.own} != own.keys():
        raise ConfigError(
            f"{type(architecture).__name__} cannot be exported: transformers {__version__} would "
            f"save tensors that it cannot load ({', '.join(unknown[:5])}).\n"
            f"Fix: install a transformers version that can load them, or train a different model"
        )
    order = {name: place for place, name in enumerate(own)}
    return sorted(groups, key=lambda group: min(order[name] for name in group.own))


def meta_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a sharded model's architecture without weights, under its own class name."""
    original: Any = next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))
    with torch.device("meta"):
        return original(copy.deepcopy(model.config))


def require_export(info: layout.CheckpointInfo) -> None:
    """Raise `ConfigError` for a checkpoint whose export has no weights."""
    export = info.path / layout.HUGGINGFACE
    if not {path.name for path in export.glob("*.safetensors")} - {OTHER_PARTS}:
        raise ConfigError(
            f"'{export}' holds no weights: they were deleted, or hf_model was not in "
            f"trainer.checkpoint.save_contents.\n"
            f"Fix: choose another checkpoint, or write an export with `checkpoint export`"
        )


def write_export(
    plan: ExportPlan,
    target: Path,
    shards: Shards,
    buffers: Mapping[str, Tensor],
    *,
    share: Share = (0, 1),
    card: bytes | None = None,
) -> list[FileRecord]:
    """Write share `(index, count)` of the weight files into the directory `target`.

    Each weight file is read back. Returns the records of the written files, with paths relative to
    the parent of `target`. The first writer adds the other files, and the model card if the export
    has weights.
    """
    root = target.parent
    records: list[FileRecord] = []
    if share[0] == 0:
        small_files = _companions(plan)
        if plan.files and card is not None:
            small_files[CARD] = card
        if len(plan.files) > 1 or (plan.files and plan.source.whole is not None):
            small_files[INDEX] = _index(plan)
        # Write these first: their source checkpoint may be deleted while the weights are written.
        for name, data in small_files.items():
            fsio.make_dirs((target / name).parent)
            records.append(fsio.write_file(target / name, data, root=root))
        if plan.source.whole is not None:
            records.append(write_stored(target / OTHER_PARTS, plan.others, root=root))

    mine = plan.files_of(share)
    tensors = _exported(plan, chain.from_iterable(mine.values()), shards, buffers)
    for file_name, names in mine.items():
        shapes = {name: plan.layout[name] for name in names}
        records.append(write_tensors(target / file_name, shapes, tensors, root=root))
    return records


def _index(plan: ExportPlan) -> bytes:
    places = {name: file for file, names in plan.files.items() for name in names}
    index = {
        "metadata": {"total_size": plan.num_bytes},
        "weight_map": places | dict.fromkeys(plan.others, OTHER_PARTS),
    }
    return _as_json(index)


def _exported(
    plan: ExportPlan,
    names: Iterable[str],
    shards: Shards,
    buffers: Mapping[str, Tensor],
) -> Iterator[Tensor]:
    """Yield the named tensors in their exported dtype. Only one group is in memory at a time."""
    made: dict[str, Tensor] = {}
    for name in names:
        if name not in made:
            made.clear()
            group = plan.groups[name]
            known = buffers
            if plan.base:
                known = group.to_own([plan.base[stored].whole() for stored in group.stored])
            dtype = plan.layout[name].dtype
            values = [_cast(_value(plan, own, known, shards), dtype, own) for own in group.own]
            made |= group.to_stored(values)
            del known, values
        yield made.pop(name)


def _value(
    plan: ExportPlan,
    name: str,
    known: Mapping[str, Tensor],
    shards: Shards,
) -> Tensor:
    """Return a tensor of the model from `known` or the shards, with any change from training."""
    value = known[name] if name in known else shards.whole(name)
    change = plan.changes.get(name)
    return value if change is None else change.applied(value, shards)


def _cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    cast = tensor.to(dtype)
    if dtype == torch.float16 and not torch.isfinite(cast).all():
        raise ConfigError(
            f"'{name}' has values beyond the range of float16.\nFix: export in bfloat16 or float32"
        )
    return cast


def _companions(plan: ExportPlan) -> dict[str, bytes]:
    """Return the contents of every file except weights, by path.

    These are config.json, generation_config.json, the tokenizer, the chat template, and the model's
    own code. An adapter export has no config.json: with that file, transformers would load the
    directory as a whole model.
    """
    source = plan.source
    files = dict(source.files.contents)
    if source.chat_template is not None:  # replaces the tokenizer's own templates
        own = {name for name in files if name in TEMPLATES or name.startswith(MORE_TEMPLATES)}
        files = {name: data for name, data in files.items() if name not in own}
        files["chat_template.jinja"] = source.chat_template.encode()
        if (tokenizer := files.get("tokenizer_config.json")) is not None:
            config = json.loads(tokenizer) | {"chat_template": source.chat_template}
            files["tokenizer_config.json"] = _as_json(config)
    if source.adapter is not None and not plan.changes:
        del files[CONFIG]
        files[ADAPTER_CONFIG] = _as_json(source.adapter.settings)
    else:
        files[CONFIG] = _as_json(_config(plan))
    return files | {GENERATION_CONFIG: _as_json(_generation_config(source))}


def _config(plan: ExportPlan) -> dict[str, object]:
    """Return the source's config with the exported dtype. All readers understand `torch_dtype`."""
    config = json.loads(plan.source.files.contents[CONFIG])
    config["torch_dtype"] = plan.dtype
    for part in (config, config.get("text_config")):
        if not isinstance(part, dict):
            continue
        part.pop(QUANTIZATION_CONFIG, None)
        for key in ("dtype", "torch_dtype"):
            if key in part:
                part[key] = plan.dtype
    if plan.class_name is not None:
        config.setdefault("architectures", [plan.class_name])
    return config


def _generation_config(source: ExportSource) -> dict[str, object]:
    """Return the source's generation config, with the end tokens of trained turns added."""
    config = json.loads(source.files.contents.get(GENERATION_CONFIG, b"{}"))
    known = config.get("eos_token_id")
    candidates = [*(known if isinstance(known, list) else [known]), *source.end_token_ids]
    ids = list(dict.fromkeys(i for i in candidates if isinstance(i, int)))
    if ids:
        config["eos_token_id"] = ids if len(ids) > 1 else ids[0]
    return config


def _as_json(value: Mapping[str, object]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
