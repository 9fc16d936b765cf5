"""Why an export does not give the loss of its step: its files against what was written, trained
and said (floor 5).
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoTokenizer

from trainer.adapter_names import ADAPTER_CONFIG
from trainer.checkpoint import layout
from trainer.checkpoint.base_weights import digest
from trainer.checkpoint.layout import CheckpointInfo
from trainer.checkpoint.lineage import BASE_WEIGHTS
from trainer.checkpoint.manifest import verify_files
from trainer.checkpoint.shards import ShardReader
from trainer.checkpoint.state import ModelShards, load_state
from trainer.config import Config, ConfigError
from trainer.data.loader import pack
from trainer.data.samples import Samples
from trainer.model.assemble import build_model
from trainer.run.inputs import PreparedData, resolve_source
from trainer.runtime import distributed
from trainer.runtime.heartbeat import Heartbeat
from trainer.runtime.json_lines import flat
from trainer.serving.engines import PEFT_CONFIG, Sample, adapter_of
from trainer.weights import stored_in

RELATIVE = 1e-5
"""Of a sample's log-probability, beside the rounding of its dtype: what another order of
additions may change.
"""
NUM_NAMED = 5
NO_MATTER = frozenset(
    (
        "dtype",
        "torch_dtype",
        "transformers_version",
        "architectures",
        "use_cache",
        "_name_or_path",
        "auto_map",
    )
)
"""Keys of config.json that change no logit."""


def causes(
    info: CheckpointInfo, config: Config, data: PreparedData, samples: Sequence[Sample]
) -> list[str]:
    """What is wrong with the files of an export, in words, the plainest first."""
    assert info.manifest is not None
    export = info.path / layout.HUGGINGFACE
    found = [f"files: {problem}" for problem in verify_files(info.path, info.manifest)]
    found += [*_tokenizer(export, data, samples), *_base(info, export), *_tensors(info, export)]
    return [*found, *_settings(Path(resolve_source(config).path), export)]


def first_difference(
    info: CheckpointInfo,
    config: Config,
    validation: Samples,
    samples: Sequence[Sample],
    served: np.ndarray,
    *,
    rounding: float,
) -> str | None:
    """The first sample whose log-probability is another than the trained model's own.

    `rounding`: how far apart two right ones may be.
    """
    with trained_model(info, config) as model:
        for sample, expected, found in zip(
            samples, sums_of(model, validation), served, strict=True
        ):
            if not abs(found - expected) <= rounding + RELATIVE * abs(expected):
                count = int(sample.mask[1:].sum())
                return f"{sample.place}: {-found / count:.4f} a token served, {-expected / count:.4f} trained"
    return None


def _tokenizer(export: Path, data: PreparedData, samples: Sequence[Sample]) -> Iterator[str]:
    try:
        exported = AutoTokenizer.from_pretrained(export)
    except (OSError, ValueError) as error:
        yield f"tokenizer: cannot be loaded: {error}"
        return
    if exported.chat_template != data.tokenizer.chat_template:
        yield "chat template: it is not the one that was trained with"
        return
    if exported.get_vocab() != data.tokenizer.get_vocab():
        yield "tokenizer: its vocabulary is not the one that was trained with"
    for sample in samples:
        text = data.tokenizer.decode(sample.ids.tolist(), clean_up_tokenization_spaces=False)
        if exported(text).input_ids != data.tokenizer(text).input_ids:
            yield f"tokenizer: it makes other tokens than the one that was trained with, first of {sample.place}"
            return


def _base(info: CheckpointInfo, export: Path) -> Iterator[str]:
    """An adapter on another base, or another adapter than was trained."""
    assert info.manifest is not None
    if not (export / PEFT_CONFIG).exists():
        return
    base, _, _ = adapter_of(export)
    if (trained_for := info.manifest.fingerprints.get(BASE_WEIGHTS)) and digest(
        base
    ) != trained_for:
        yield f"base: '{base}' holds other weights than those the adapter was trained for"
    saved, exported = (
        json.loads(path.read_text(encoding="utf-8"))
        for path in (info.path / ADAPTER_CONFIG, export / PEFT_CONFIG)
    )
    for key in ("r", "lora_alpha", "use_rslora"):
        if saved.get(key) != exported.get(key):
            yield f"adapter: {PEFT_CONFIG} says {key}={exported.get(key)}, it was trained with {saved.get(key)}"


def _tensors(info: CheckpointInfo, export: Path) -> Iterator[str]:
    """Tensors that are not those of the shards, where both have the same names."""
    assert info.manifest is not None
    manifest = info.manifest
    shapes = {
        name: torch.empty(found.shape, device="meta") for name, found in manifest.tensors.items()
    }
    size, num_shards = manifest.world_size, manifest.num_shards
    reader = ShardReader(
        info.path, world_size=size, num_shards=num_shards, parameters=shapes, buffers={}
    )
    others = []
    for file in sorted(export.glob("*.safetensors")):
        try:
            stored = stored_in(file)
            for name in sorted(set(stored) & set(shapes)):
                exported, trained = stored[name].read(()), reader.whole(name)
                if exported.shape != trained.shape or not torch.equal(
                    trained.to(exported.dtype), exported
                ):
                    others.append(name)
        except ConfigError as error:
            yield f"weights: {error}"
    if others:
        more = f" and {len(others) - NUM_NAMED} more" if len(others) > NUM_NAMED else ""
        yield f"weights: not the trained ones: {', '.join(others[:NUM_NAMED])}{more}"


def _settings(source: Path, export: Path) -> Iterator[str]:
    """What config.json says otherwise than that of the model which was trained."""
    if not (export / "config.json").exists():
        return
    trained, exported = (
        flat(json.loads((path / "config.json").read_text(encoding="utf-8")))
        for path in (source, export)
    )
    for key in sorted(trained.keys() & exported.keys()):
        if key.rpartition(".")[2] not in NO_MATTER and trained[key] != exported[key]:
            yield f"config.json: {key} is {exported[key]}, the model was trained with {trained[key]}"


@contextmanager
def trained_model(info: CheckpointInfo, config: Config) -> Iterator[Any]:
    """As a resume builds it, in a process group of its own."""
    world = distributed.start(
        torch.device("cpu"), timeout_s=60, fsdp_size=-1, heartbeat=Heartbeat()
    )
    try:
        seed, max_length = config.trainer.seed, config.data.max_length
        model: Any = build_model(
            config.model, resolve_source(config), world=world, seed=seed, max_length=max_length
        )
        load_state(info, {"model": ModelShards(model)}, contents=("model",), world=world)
        model.eval()
        yield model
    finally:
        distributed.stop()


@torch.no_grad()
def sums_of(model: Any, validation: Samples) -> Iterator[float]:
    """Each sample's summed log-probability."""
    for index in range(len(validation)):
        yield -float(model(pack(validation, [index])).loss_sum)


@torch.no_grad()
def round_weights(model: Any, dtype: torch.dtype) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # what is gathered would be computed with once more
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))
