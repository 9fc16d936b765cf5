"""A pretrained model's directory: the architecture in config.json and the tensors in files."""

import logging
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from trainer.config import ConfigError
from trainer.model import quantized, weights
from trainer.model.adapter_names import Places, base_name, is_adapter
from trainer.model.weights import StoredTensor, TensorGroup, WholeCheckpoint

logger = logging.getLogger(__name__)
_ROWS = 4096


@dataclass(frozen=True)
class ModelSource:
    """The source of a model's architecture and weights. Each file is read once.

    `path` is a local directory; Hub ids have already been resolved.
    """

    path: str
    random_weights: bool = False
    trust_remote_code: bool = False
    new_tokens: dict[str, int] = field(default_factory=dict)
    """{token: id} of tokens without trained rows."""

    @cached_property
    def config(self) -> PretrainedConfig:
        """Return the config of the language model, which may be one part of the checkpoint.

        Raise `ConfigError` unless it is a decoder that can be loaded.
        """
        return self._stored_config if self.whole is None else weights.text_config(self.whole)

    @cached_property
    def whole(self) -> PreTrainedModel | None:
        """Return the whole model on meta, in the class that wrote the files, if the language model
        is one of several parts; otherwise None.
        """
        return weights.whole_model(self._stored_config, f"model.partial_pretrain={self.path}")

    @cached_property
    def text(self) -> PreTrainedModel:
        """Return the language model on meta."""
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                self.config, trust_remote_code=self.trust_remote_code
            )
        return model

    @cached_property
    def places(self) -> Places:
        """Return the prefixes of the language model's names in the whole model, by prefix."""
        return weights.places_of(self.text, self.whole)

    @cached_property
    def weights(self) -> "SourceWeights":
        """Return the tensors of the files. Raise `ConfigError` if the model cannot be made from
        them.
        """
        files = quantized.weights_in(Path(self.path))
        try:
            groups, others = weights.match(self.text, self.whole, files)
        except ConfigError as error:
            raise ConfigError(f"model.partial_pretrain={self.path}: {error}") from error
        return SourceWeights(self, files, groups, others)

    @cached_property
    def _stored_config(self) -> PretrainedConfig:
        name = f"model.partial_pretrain={self.path}"
        try:
            config = AutoConfig.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)
        except (OSError, ValueError, KeyError, StrictDataclassError) as error:
            raise ConfigError(f"{name} has no usable config.json: {error}") from error
        for part in (config, config.get_text_config()):
            settings = vars(part).pop(quantized.QUANTIZATION_CONFIG, None)
            if settings is not None:
                quantized.require_supported(settings, name)
        if getattr(config, "is_encoder_decoder", False):
            raise ConfigError(
                f"{name} is a '{config.model_type}', an encoder-decoder model.\n"
                f"Fix: choose a decoder-only language model"
            )
        return config


@dataclass(frozen=True)
class SourceWeights:
    """The tensors in the files of a source: the model's tensors, and others."""

    source: ModelSource
    files: dict[str, StoredTensor]
    groups: list[TensorGroup]
    others: list[str]

    def require_all_of(self, model: PreTrainedModel) -> None:
        """Raise `ConfigError` unless the files hold every tensor of the model, and tied tensors are
        equal.
        """
        own = {name for group in self.groups for name in group.own}
        parameters = dict(model.named_parameters())
        # buffers that transformers ignores may be missing
        ignored = model._keys_to_ignore_on_load_missing or ()
        lacking = sorted(
            name
            for name in stored_tensors(model).keys() - own
            if name in parameters or not any(re.search(pattern, name) for pattern in ignored)
        )
        path = self.source.path
        if lacking:
            way_out = ".\nFix: start from random weights with model.random_weights=true"
            raise ConfigError(
                f"model.partial_pretrain={path} lacks weights for {lacking[:5]}"
                f"{way_out if self.source.whole is None else ''}"
            )
        for name, kept in self.aliases.items():
            if not _are_equal(self.files[name], self.files[kept]):
                raise ConfigError(
                    f"{self.files[name].file}: {name} differs from {kept}, the embeddings, but "
                    f"config.json ties them.\nFix: set tie_word_embeddings to false there"
                )

    @property
    def aliases(self) -> dict[str, str]:
        """Return {name of a tied tensor in the files: name of the tensor that it copies}."""
        by_own: dict[tuple[str, ...], str] = {}
        aliases = {}
        for group in self.groups:
            name = group.stored[0]
            kept = by_own.setdefault(group.own, name)
            if name != kept:
                aliases[name] = kept
        return aliases


def whole_checkpoint(source: ModelSource) -> WholeCheckpoint | None:
    """Return the untrained tensors of the files, which exports include; None if there are none.

    For a checkpoint with several parts, raise `ConfigError` if the files lack a tensor of the
    language model, or if random weights are configured.
    """
    if source.random_weights:
        if source.whole is None:
            return None
        raise ConfigError(
            f"model.random_weights=true: the other parts of {source.path} would have no weights.\n"
            f"Fix: use a directory whose config.json is the 'text_config' of that model"
        )
    found = source.weights
    others = {name: found.files[name] for name in sorted(found.others)}
    text_names: tuple[str, ...] = ()
    if source.whole is not None:
        found.require_all_of(source.text)
        text_names = tuple(name for group in found.groups for name in group.stored)
    for name, kept in found.aliases.items():
        logger.info("%s and %s are the same weight (tied), so exports contain it once", kept, name)
    if not others:
        return None
    logger.info(
        "%d tensors of the files are not part of %s and are not trained (%s, ...): exports of the "
        "whole model contain them unchanged",
        len(others),
        type(source.text).__name__,
        next(iter(others)),
    )
    return WholeCheckpoint(source.whole, text_names, others)


def stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return each parameter once (no tied head), then the saved buffers, without adapters."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in aliases}
    return {
        base_name(name): tensor
        for name, tensor in (parameters | buffers).items()
        if not is_adapter(name)
    }


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Compare a few rows at a time, because embeddings are large and every rank compares them."""
    parts = [(slice(row, row + _ROWS),) for row in range(0, one.shape[0], _ROWS)]
    return one.shape == other.shape and all(
        torch.equal(one.read(part), other.read(part)) for part in parts
    )
