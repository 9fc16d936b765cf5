"""Matches the tensors in files with those of a model, and converts them.

Nothing depends on model names. transformers' own classes on the meta device and its own conversions
decide, one group of tensors at a time.
"""

import copy
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from trainer.config import ConfigError
from trainer.model.adapter_names import Places, placed


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. `dtype` is its name in safetensors; `read` returns slices."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[tuple[slice, ...]], Tensor]

    def whole(self) -> Tensor:
        return self.read(tuple(slice(0, size) for size in self.shape))


@dataclass(frozen=True)
class WholeCheckpoint:
    """A checkpoint with tensors that are not trained; exports write all of its tensors.

    `others` are the untrained tensors. If the checkpoint has several parts and only its language
    model is trained, `model` is the whole model on the meta device, and `text_names` are the names
    of the language model's tensors in the files. For a language model with extra tensors (for
    multi-token prediction), `model` is None and `text_names` is empty.
    """

    model: PreTrainedModel | None
    text_names: tuple[str, ...]
    others: Mapping[str, StoredTensor]

    @cached_property
    def others_digest(self) -> str:
        """Return the SHA-256 of the untrained tensors' names, layouts and bytes."""
        sha256 = hashlib.sha256()
        for name, tensor in self.others.items():
            sha256.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
            sha256.update(bytes_of(tensor.whole()))
        return sha256.hexdigest()


@dataclass(frozen=True)
class TensorGroup:
    """Tensors in the files and in the model that hold the same values: usually one each, but more
    for fused tensors such as experts.

    `own`: names in the model; tied tensors appear once. `whole`: their names in the class that
    wrote the files.
    """

    stored: tuple[str, ...]
    own: tuple[str, ...]
    whole: tuple[str, ...] = ()
    patterns: tuple[str | None, ...] = ()
    converter: WeightConverter | None = None
    model: PreTrainedModel | None = field(default=None, repr=False)

    def to_own(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Convert the files' tensors, in the order of `stored`, to the model's tensors."""
        if self.converter is None:
            return {self.own[0]: tensors[0]}
        assert self.model is not None
        converter = copy.deepcopy(self.converter)
        for name, pattern, tensor in zip(self.stored, self.patterns, tensors, strict=True):
            converter.add_tensor(self.whole[0], name, pattern, tensor)  # type: ignore[arg-type]
        made = converter.convert(self.whole[0], model=self.model, config=self.model.config)
        values = {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }
        return {own: values[name] for own, name in zip(self.own, self.whole, strict=True)}

    def to_stored(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """Convert the model's tensors, in the order of `own`, to the files' tensors."""
        if self.converter is None:
            return dict.fromkeys(self.stored, tensors[0])
        model: Any = self.model
        model._weight_conversions = [self.converter]  # transformers reads them from this attribute
        try:
            made = revert_weight_conversion(model, dict(zip(self.whole, tensors, strict=True)))
        finally:
            del model._weight_conversions
        # names may have lost a prefix, but within a pattern the order is the same as in loading
        by_pattern: dict[str | None, list[Tensor]] = defaultdict(list)
        for name in sorted(made, key=dot_natural_key):
            by_pattern[self.converter.rename_source_key(name)[1]].append(made[name])
        num_made = {pattern: len(found) for pattern, found in by_pattern.items()}
        if num_made != Counter(self.patterns):
            raise ConfigError(
                f"{self.own[0]} cannot be stored as {self.stored[0]}, …, because transformers "
                f"converts it to different tensors"
            )
        return {
            name: by_pattern[pattern].pop(0)
            for name, pattern in zip(self.stored, self.patterns, strict=True)
        }


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor as a file stores them."""
    return tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data


def stored_in(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file. Raises `ConfigError` if it cannot be read."""
    try:
        reader: Any = safe_open(file, framework="pt")
        slices = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118  no mapping
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error

    def reading(name: str) -> Callable[[tuple[slice, ...]], Tensor]:
        return lambda where: slices[name][where] if where else reader.get_tensor(name)

    return {
        name: StoredTensor(file, tuple(found.get_shape()), found.get_dtype(), reading(name))
        for name, found in slices.items()
    }


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_slices(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return (this rank's shard of a parameter, the shard's slices in the whole tensor)."""
    shard = local(parameter).detach()
    starts = (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        _, starts = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    sizes = zip(starts, shard.shape, strict=True)
    return shard, tuple(slice(start, start + size) for start, size in sizes)


def whole_model(config: PretrainedConfig, name: str) -> PreTrainedModel | None:
    """Return the whole model of this configuration on meta, of the class that writes such
    checkpoints; None for a plain language model.

    Raise `ConfigError`, whose message begins with the checkpoint's `name`, if no part can be
    trained.
    """
    text = config.get_text_config()
    if text is config:
        return None
    kind = f"{name} is a '{config.model_type}' of several parts, and"
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if type(text) not in mapping:
        with suppress(KeyError, ValueError):  # the whole config's class may take the text config
            AutoModelForCausalLM.register(type(text), mapping[type(config)])
    if type(text) not in mapping:
        raise ConfigError(
            f"{kind} transformers has no separate language model for its text part "
            f"('{text.model_type}')"
        )
    known, *_ = config.architectures or ("",)
    nameless: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING
    found: Any = getattr(transformers, known, None) if known else nameless.get(type(config), None)
    if found is None:
        raise ConfigError(f"{kind} its class ({known or 'none is named'}) is not in transformers")
    try:
        with torch.device("meta"):
            model: PreTrainedModel = found(copy.deepcopy(config))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{kind} its {found.__name__} cannot be built: {str(error).strip()}"
        ) from error
    return model


def text_config(whole: PreTrainedModel) -> PretrainedConfig:
    """Return the language model's config. `tie_word_embeddings` follows from the whole model's weights,
    not from its config.
    """
    config = copy.deepcopy(whole.config.get_text_config())
    config.tie_word_embeddings = has_tied_head(whole)
    return config


def has_tied_head(model: PreTrainedModel) -> bool:
    """Return True if the output head shares the weight of the input embeddings."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def match(
    text: PreTrainedModel, whole: PreTrainedModel | None, stored: Iterable[str]
) -> tuple[list[TensorGroup], list[str]]:
    """Return the groups of tensors that make the language model, and the names of all other tensors
    in the files.

    `text` (the language model) and `whole` are on the meta device. `whole` is None unless the files
    hold several parts.

    1. Rename each stored name as transformers' loader does. Stored names with an equal target are
       the sources of one conversion, such as the experts of a stacked weight.
    2. If a converter made a target, its other target patterns name the other results.
    3. Translate the targets, which are names in the whole model, to names in the language model.
    """
    model = whole or text
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    places = places_of(text, whole)
    tensors = text.state_dict(keep_vars=True)
    own = {placed(name, places): name for name in tensors}
    # a tied head is kept under the name of the embeddings
    kept: dict[Tensor, str] = {parameter: name for name, parameter in text.named_parameters()}
    state = model.state_dict()

    def rename(name: str, known: list[WeightConverter]) -> tuple[str, str | None]:
        return rename_source_key(name, renamings, known, model.base_model_prefix, state)

    members: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
    others = []
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename(name, converters)
        if target not in state and name in state:
            target = name
            pattern = None
        if target in own:
            members[target].append((name, pattern))
        else:
            others.append(name)
    groups = []
    for target, found in members.items():
        names, patterns = zip(*found, strict=True)
        # parts of a model may have converters with equal patterns
        converter = next(
            (
                one
                for one in converters
                if patterns[0] in one.source_patterns and rename(names[0], [one])[1] is not None
            ),
            None,
        )
        targets = [target]
        if converter is not None:
            targets = [
                target.replace(converter.target_patterns[0], other, 1)
                for other in converter.target_patterns
            ]
        owned = tuple(kept.get(tensors[own[name]], own[name]) for name in targets)
        groups.append(TensorGroup(names, owned, tuple(targets), patterns, converter, model))
    return groups, others


def base_name_of(model: PreTrainedModel) -> str:
    """Return the name of the submodel that holds the embeddings; "" if there is none."""
    embeddings = model.get_input_embeddings()
    return next(
        (
            name
            for name, child in model.named_children()
            if isinstance(child, PreTrainedModel) and embeddings in child.modules()
        ),
        "",
    )


def places_of(text: PreTrainedModel, whole: PreTrainedModel | None) -> Places:
    """Return where the language model is in the whole model: {prefix of a name: its prefix there},
    for prefixes such as `model.` and `lm_head.`.

    Return an empty dict if `whole` is None. Raise `ConfigError` unless each prefix has exactly one
    place, and each tensor has the same shape there.
    """
    if whole is None:
        return {}
    base_name = base_name_of(text)
    base = type(text.get_submodule(base_name))
    head = text.get_output_embeddings()
    head_name = next(name for name, module in text.named_modules() if module is head)
    own = [(f"{name}.", module) for name, module in whole.named_modules()]
    found = {
        f"{base_name}.": [place for place, module in own if type(module) is base],
        f"{head_name}.": [
            place for place, module in own if module is whole.get_output_embeddings()
        ],
    }
    beginnings = {name: place for name, places in found.items() for place in places}
    faults = [name[:-1] for name, places in found.items() if len(places) != 1]
    shapes = {name: tensor.shape for name, tensor in whole.state_dict().items()}
    for name, tensor in text.state_dict().items():
        if shapes.get(placed(name, beginnings)) != tensor.shape:
            faults.append(name)
    if faults:
        raise ConfigError(
            f"{type(whole).__name__} does not contain {faults[0]} of its {type(text).__name__} "
            f"exactly once"
        )
    return beginnings
