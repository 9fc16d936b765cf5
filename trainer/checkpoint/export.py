"""`huggingface/`: the model as transformers and vLLM load it, made from the shards of a checkpoint.

Tensors are read from the shard files one by one, written as safetensors and read back. Nothing here needs the model,
a GPU or another rank, so it runs behind training, and on any machine afterwards.
"""

import copy
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel, __version__
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import str_to_torch_dtype

from trainer import weights
from trainer.checkpoint import fsio, layout
from trainer.checkpoint.fsio import FileRecord
from trainer.checkpoint.manifest import Manifest, verify_files
from trainer.checkpoint.shards import ShardReader, read_torch, weight_buffers
from trainer.checkpoint.space import readable
from trainer.checkpoint.tensor_file import write_tensors
from trainer.config import ConfigError
from trainer.errors import CannotWriteError
from trainer.weights import TensorGroup, WholeCheckpoint, match, stored_in

MAX_FILE_BYTES = 5 * 10**9
_INDEX = "model.safetensors.index.json"
_WEIGHTS = (".safetensors", _INDEX)
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "spiece.model",
    "*.tiktoken",
    "*processor_config.json",
    "*.py",
)
_VOCABULARIES = ("vocab.json", "vocab.txt", "merges.txt")
OTHER_PARTS = "model-other-parts.safetensors"
"""What passes through: in every checkpoint, since its shards do not hold it."""


@dataclass(frozen=True)
class ExportSource:
    """What the exported directory takes over: the files of the model trained from, and the template trained with."""

    model_dir: Path
    chat_template: str | None
    """Only when it is not the tokenizer's own; the tokenizer's files are copied byte for byte otherwise."""
    end_token_ids: tuple[int, ...]
    whole: WholeCheckpoint | None = None
    """Where the model trained is the text part of one of several parts: the export is that again."""


@dataclass(frozen=True)
class ExportPlan:
    """`layout`: exported name -> tensor without memory, in the order written; `split`: into which files; `groups`:
    exported name -> what it is made of; `architecture`: the class that an export loads as, without weights.
    """

    layout: dict[str, Tensor]
    split: StateDictSplit
    groups: dict[str, TensorGroup]
    architecture: PreTrainedModel | None
    whole: WholeCheckpoint | None
    dtype: torch.dtype

    @property
    def weights_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.layout.values())

    @property
    def others(self) -> dict[str, Tensor]:
        """Name -> tensor without memory of what passes through."""
        found = {} if self.whole is None else self.whole.others
        return {
            name: torch.empty(t.shape, dtype=str_to_torch_dtype[t.dtype], device="meta") for name, t in found.items()
        }

    @property
    def others_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.others.values())


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
    `architecture` is the model on the meta device, by which transformers finds how it stores these tensors; None
    stores them as they are. With `whole` they are stored as its files have them.
    """
    target_dtype: torch.dtype = getattr(torch, dtype)
    own = {name: torch.empty(t.shape, dtype=target_dtype, device="meta") for name, t in shapes.items()}
    own |= {name: tensor.to("meta") for name, tensor in buffers.items()}
    if architecture is None:
        groups = [TensorGroup((name,), (name,)) for name in own]
    else:
        names = revert_weight_conversion(architecture, own).keys() if whole is None else whole.text_names
        groups, unknown = match(architecture, whole.model if whole else None, names)
        if unknown or {name for group in groups for name in group.own} != own.keys():
            raise ConfigError(
                f"{type(architecture).__name__} cannot be exported: transformers {__version__} does not "
                f"load what it would save ({', '.join(unknown[:5])})"
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
        filename_pattern="model{suffix}.safetensors" if whole is None else "model-text{suffix}.safetensors",
        max_shard_size=MAX_FILE_BYTES,
    )
    return ExportPlan(stored, split, by_name, whole.model if whole else architecture, whole, target_dtype)


def meta_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The architecture of a sharded model without weights, under its own class name."""
    original: Any = next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))
    with torch.device("meta"):
        meta_model: PreTrainedModel = original(copy.deepcopy(model.config))
    return meta_model


def known_architecture(directory: Path) -> tuple[PreTrainedModel | None, PreTrainedModel | None]:
    """The same from a `config.json`, and the class of the whole where that has more parts than the text; None if the
    architecture comes with code of its own, which is never run here.

    Raises `ConfigError` if this version of transformers does not know it.
    """
    tree = json.loads((directory / "config.json").read_text())
    if "auto_map" in tree and (any(directory.glob("*.py")) or tree.get("model_type") not in CONFIG_MAPPING):
        return None, None
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        whole = weights.whole_model(config)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config if whole is None else weights.text_config(whole), trust_remote_code=False
            )
    except (ValueError, KeyError) as error:
        raise ConfigError(f"'{directory}' cannot be exported with transformers {__version__}: {error}") from error
    return model, whole


def write_weights(
    plan: ExportPlan, target: Path, reader: ShardReader, *, share: tuple[int, int] = (0, 1)
) -> list[FileRecord]:
    """Write this writer's share `(index, count)` of the files into the existing directory `target`; read them back."""
    index, count = share
    mine = {name: names for i, (name, names) in enumerate(plan.split.filename_to_tensors.items()) if i % count == index}
    tensors = _exported(plan, reader, [name for names in mine.values() for name in names])
    return [
        write_tensors(target / file_name, {name: plan.layout[name] for name in names}, tensors)
        for file_name, names in mine.items()
    ]


def _exported(plan: ExportPlan, reader: ShardReader, names: list[str]) -> Iterator[Tensor]:
    """The named tensors in the dtype they are exported in; no more in memory than one group of them."""
    made: dict[str, Tensor] = {}
    for name in names:
        if name not in made:
            made.clear()
            group, dtype = plan.groups[name], plan.layout[name].dtype
            made |= group.to_stored([reader.whole(own).to(dtype) for own in group.own])
        yield made.pop(name)


def write_companions(plan: ExportPlan, target: Path, source: ExportSource) -> list[FileRecord]:
    """Everything beside the weights: config.json, generation_config.json, tokenizer, template, the model's own code."""
    records = [_write_json(target / "config.json", _config(source, plan))]
    records.append(_write_json(target / "generation_config.json", _generation_config(source)))
    copied = (*_TOKENIZER_FILES, *_VOCABULARIES, *(_TEMPLATES if source.chat_template is None else ()))
    for path in sorted({path for pattern in copied for path in source.model_dir.glob(pattern) if path.is_file()}):
        if source.chat_template is not None and path.name == "tokenizer_config.json":
            config = json.loads(path.read_text()) | {"chat_template": source.chat_template}
            records.append(_write_json(target / path.name, config))
        else:
            records.append(fsio.copy_file(path, target / path.name, root=target.parent))
    if source.chat_template is not None:
        text = source.chat_template.encode()
        records.append(fsio.write_file(target / "chat_template.jinja", text, root=target.parent))
    if plan.whole is not None:
        others = (tensor.whole() for tensor in plan.whole.others.values())
        records.append(write_tensors(target / OTHER_PARTS, plan.others, others))
    return records


def export_from_shards(checkpoint: Path, target: Path, *, dtype: str) -> None:
    """Make the new directory `target` from the shards of a committed checkpoint, proving what is read.

    Needs no GPU and no process group, and takes nothing from a run that goes on meanwhile. `target` appears when it
    is whole. Raises `ConfigError` if the checkpoint is not committed, damaged, or `target` cannot be taken as a name,
    `CannotWriteError` if it cannot be written.
    """
    manifest = _require_exportable(checkpoint, target)
    plan, reader = _open_shards(checkpoint, manifest, dtype=dtype)
    source, staging = ExportSource(checkpoint / layout.HUGGINGFACE, None, ()), fsio.temporary_path(target)
    size_bytes = plan.weights_bytes + plan.others_bytes
    try:
        if (free_bytes := fsio.free_bytes(target.parent)) < size_bytes:
            raise OSError(f"it needs {readable(size_bytes)}, and {readable(free_bytes)} are free")
        fsio.make_dir(staging)
        write_companions(plan, staging, source)
        write_weights(plan, staging, reader)
        write_index(plan, staging)
        fsio.fsync_tree(staging)
        fsio.rename(staging, target)
    except BaseException as error:
        with suppress(OSError):
            fsio.remove_tree(staging)
        if isinstance(error, OSError):
            raise CannotWriteError(f"'{target}' cannot be made: {error}") from error
        raise


def _require_exportable(checkpoint: Path, target: Path) -> Manifest:
    """The manifest, once the files an export reads are proven; weights exported before are not among them."""
    info = layout.inspect(checkpoint)
    if info.manifest is None:
        reason = info.reason or "it was written by verl, without a manifest; use verl's model_merger"
        raise ConfigError(f"'{checkpoint}' cannot be exported: {reason}")
    if os.path.lexists(target):
        raise ConfigError(f"'{target}' exists already: name a new directory")
    if not target.parent.is_dir():
        raise ConfigError(f"'{target}' cannot be made: there is no directory '{target.parent}'")
    if target.parent.resolve().is_relative_to(checkpoint.resolve()):
        raise ConfigError(f"'{target}' would go when its checkpoint does: name a directory outside of '{checkpoint}'")
    manifest = info.manifest
    size = manifest.world_size
    shards = {layout.extra_file(size, 0), *(layout.model_file(size, rank) for rank in range(manifest.num_shards))}
    companions = {
        record.path
        for record in manifest.files
        if layout.is_export(record.path)
        and (record.path.endswith(f"/{OTHER_PARTS}") or not record.path.endswith(_WEIGHTS))
    }
    files = tuple(record for record in manifest.files if record.path in shards | companions)
    if problems := verify_files(checkpoint, dataclasses.replace(manifest, files=files)):
        raise ConfigError(f"'{checkpoint}' is damaged: {'; '.join(problems)}")
    return manifest


def _open_shards(checkpoint: Path, manifest: Manifest, *, dtype: str) -> tuple[ExportPlan, ShardReader]:
    """What to write, and the mapped files to make it from: they stay readable when a running job deletes them."""
    size = manifest.world_size
    exported = checkpoint / layout.HUGGINGFACE
    architecture, model = known_architecture(exported)
    whole = None
    if model is not None:
        whole = WholeCheckpoint(model, manifest.text_names, stored_in(exported / OTHER_PARTS))
    buffers = read_torch(checkpoint / layout.extra_file(size, 0)).get("buffers", {})
    if absent := sorted(set(weight_buffers(architecture) if architecture else ()) - set(buffers)):
        raise ConfigError(f"'{checkpoint}' cannot be exported: it was saved by a version that left out {absent[0]}")
    shapes = {name: torch.empty(info.shape, device="meta") for name, info in manifest.tensors.items()}
    plan = plan_export(shapes, buffers, architecture, dtype=dtype, whole=whole)
    reader = ShardReader(
        checkpoint, world_size=size, num_shards=manifest.num_shards, parameters=shapes, buffers=buffers
    )
    if plan.dtype is torch.float16:
        for name in shapes:
            if not torch.isfinite(reader.whole(name).to(plan.dtype)).all():
                raise ConfigError(f"'{name}' has values beyond the range of float16: export in bfloat16 or float32")
    return plan, reader


def write_index(plan: ExportPlan, target: Path) -> list[FileRecord]:
    """Which file holds which tensor, where there are several."""
    if not plan.split.is_sharded and plan.whole is None:
        return []
    index: dict[str, object] = {
        "metadata": {"total_size": plan.weights_bytes + plan.others_bytes},
        "weight_map": plan.split.tensor_to_filename | dict.fromkeys(plan.others, OTHER_PARTS),
    }
    return [_write_json(target / _INDEX, index)]


def _config(source: ExportSource, plan: ExportPlan) -> dict[str, object]:
    """The source's own config with the dtype that was written; `torch_dtype` is the key every reader knows."""
    config: dict[str, object] = json.loads((source.model_dir / "config.json").read_text())
    name = str(plan.dtype).removeprefix("torch.")
    config["torch_dtype"] = name
    for part in (config, config.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part, dict) and key in part:
                part[key] = name
    config.setdefault("architectures", [type(plan.architecture).__name__])
    return config


def _generation_config(source: ExportSource) -> dict[str, object]:
    """The source's, its end tokens completed by those that the model was trained to end a turn with."""
    path = source.model_dir / "generation_config.json"
    config: dict[str, object] = json.loads(path.read_text()) if path.is_file() else {}
    known = config.get("eos_token_id", [])
    ids = [i for i in (known if isinstance(known, list) else [known]) if isinstance(i, int)]
    merged = ids + [i for i in source.end_token_ids if i not in ids]
    if merged:
        config["eos_token_id"] = merged if len(merged) > 1 else merged[0]
    return config


def _write_json(path: Path, value: dict[str, object]) -> FileRecord:
    return fsio.write_file(
        path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(), root=path.parent.parent
    )
