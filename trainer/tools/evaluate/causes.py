"""Explains why the loss of an export differs from the loss of its step, by comparing the export's
files with the files of training.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoTokenizer

from trainer.checkpoint import layout
from trainer.checkpoint.base_weights import digest
from trainer.checkpoint.layout import CheckpointInfo
from trainer.checkpoint.lineage import BASE_WEIGHTS
from trainer.checkpoint.manifest import Manifest, verify_files
from trainer.checkpoint.state import ModelShards, read_shards
from trainer.config import Config, ConfigError
from trainer.data.loader import pack
from trainer.data.samples import Samples
from trainer.model.adapter_names import ADAPTER_CONFIG
from trainer.model.assemble import build_model, design_model
from trainer.model.weights import stored_in
from trainer.runtime import distributed
from trainer.runtime.heartbeat import Heartbeat
from trainer.runtime.json_lines import flat, read_object
from trainer.tools.evaluate.engines import PEFT_CONFIG, model_of
from trainer.train.start.inputs import resolve_source

RELATIVE = 1e-5
"""A different order of additions may change a sample's log-probability by this share."""
NUM_NAMED = 5
HARMLESS_KEYS = (
    "dtype",
    "torch_dtype",
    "transformers_version",
    "architectures",
    "use_cache",
    "_name_or_path",
    "base_model_name_or_path",
    "auto_map",
)
"""Settings that do not change the logits."""


@dataclass(frozen=True)
class Trained:
    """A checkpoint, with the samples, the loss and the number of supervised tokens of the
    validation at its step.
    """

    info: CheckpointInfo
    manifest: Manifest
    config: Config
    tokenizer: Any
    samples: Samples
    loss: float
    num_loss_tokens: int

    @property
    def export(self) -> Path:
        return self.info.path / layout.HUGGINGFACE


def causes_of(trained: Trained) -> list[str]:
    """Return the faults in the files of an export, most obvious first."""
    return [
        *(f"files: {problem}" for problem in verify_files(trained.info.path, trained.manifest)),
        *_tokenizer(trained),
        *_adapter(trained),
        *_tensors(trained),
        *_settings(trained),
    ]


def _tokenizer(trained: Trained) -> Iterator[str]:
    """Compare the exported chat template and vocabulary with those used in training."""
    try:
        exported = AutoTokenizer.from_pretrained(trained.export)
    except (OSError, ValueError) as error:
        yield f"tokenizer: cannot be loaded: {error}"
        return
    if exported.chat_template != trained.tokenizer.chat_template:
        yield "chat template: it differs from the template used in training"
    if exported.get_vocab() != trained.tokenizer.get_vocab():
        yield "tokenizer: its vocabulary differs from the one used in training"


def _adapter(trained: Trained) -> Iterator[str]:
    """Compare the base weights of an adapter with those that training used."""
    if not (trained.export / PEFT_CONFIG).exists():
        return
    if trained.config.model.load_in_4bit:
        yield "base: training used its weights in NF4 (model.load_in_4bit), but the engine does not use NF4"
    base, _ = model_of(trained.export)
    expected = trained.manifest.fingerprints.get(BASE_WEIGHTS)
    if expected and digest(base) != expected:
        yield f"base: the weights in '{base}' differ from the weights that the adapter was trained on"


def _tensors(trained: Trained) -> Iterator[str]:
    """Name exported tensors that differ from the tensors with the same names in the shards."""
    shards = read_shards(trained.info, layout.model_file)
    different = []
    for file in sorted(trained.export.glob("*.safetensors")):
        try:
            stored = stored_in(file)
            for name in sorted(stored.keys() & trained.manifest.tensors.keys()):
                exported = stored[name].read(())
                saved = shards.whole(name)
                if not torch.equal(saved.to(exported.dtype), exported):
                    different.append(name)
        except ConfigError as error:
            yield f"weights: {error}"
    if different:
        examples = ", ".join(different[:NUM_NAMED])
        yield f"weights: {len(different)} tensors differ from the trained tensors: {examples}"


def _settings(trained: Trained) -> Iterator[str]:
    """Name model and adapter settings that differ from those used in training."""
    sources = {
        "config.json": Path(resolve_source(trained.config).path) / "config.json",
        PEFT_CONFIG: trained.info.path / ADAPTER_CONFIG,
    }
    for name, source in sources.items():
        expected = flat(read_object(source))
        exported = flat(read_object(trained.export / name))
        for key in sorted(expected.keys() & exported.keys()):
            is_harmless = key.rpartition(".")[2] in HARMLESS_KEYS
            if not is_harmless and expected[key] != exported[key]:
                yield f"{name}: {key} is {exported[key]}, but training used {expected[key]}"


def first_difference(trained: Trained, sums: np.ndarray, *, rounding: float) -> str | None:
    """Describe the first sample whose served log-probability differs from the trained model's.

    `rounding` is the largest difference that two correct log-probabilities of a sample may have.
    Returns None if no sample differs.
    """
    with trained_model(trained) as model:
        expected_sums = sums_of(model, trained)
    for index, (expected, served) in enumerate(zip(expected_sums, sums, strict=True)):
        is_near = abs(served - expected) <= rounding + RELATIVE * abs(expected)
        if not is_near:  # NaN is never near
            _, (count,) = trained.samples.counts(np.array([index]))
            return (
                f"{trained.samples.location(index)}: loss per token {-served / count:.4f} when served, "
                f"{-expected / count:.4f} trained"
            )
    return None


@contextmanager
def trained_model(trained: Trained) -> Iterator[Any]:
    """Build the trained model as a resumed run does, in a process group of one rank."""
    config = trained.config
    world = distributed.start(
        torch.device("cpu"),
        timeout_s=60,
        fsdp_size=-1,
        heartbeat=Heartbeat(),
    )
    try:
        max_length = config.data.max_length
        design = design_model(config.model, resolve_source(config), max_length=max_length)
        model: Any = build_model(design, world=world, seed=config.trainer.seed)
        ModelShards(model).load_state_dict(read_shards(trained.info, layout.model_file))
        model.eval()
        yield model
    finally:
        distributed.stop()


@torch.no_grad()
def sums_of(model: Any, trained: Trained) -> np.ndarray:
    """Return each sample's summed log-probability, computed with the trainer's own model."""
    indices = range(len(trained.samples))
    return np.array([-float(model(pack(trained.samples, [i])).loss_sum) for i in indices])


@torch.no_grad()
def round_weights(model: Any, dtype: torch.dtype) -> None:
    """Round all weights of a sharded model to `dtype`, in place."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # otherwise the next forward uses the unrounded gathered copies
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))
