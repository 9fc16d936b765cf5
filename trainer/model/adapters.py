"""What of a model is trained, if not all: LoRA adapters, which peft makes and names, or what `model.freeze` leaves.

What is frozen is held in the dtype it is computed in.
"""

import logging
import math
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trainer.adapter_names import ADAPTER_WEIGHTS, NAME, is_adapter, peft_name
from trainer.config import ConfigError, ModelConfig, did_you_mean
from trainer.model import load
from trainer.runtime import seeding
from trainer.weights import TensorGroup, local_slices, stored_in

if TYPE_CHECKING:
    from peft import LoraConfig

logger = logging.getLogger(__name__)
_ALL_LINEAR = "all-linear"
_FREE = {"base_model_name_or_path", "revision", "task_type", "auto_mapping", "peft_version", "inference_mode"}
_HELD = {"r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "fan_in_fan_out", "lora_dropout"}
"""Settings of an adapter to start from that say nothing about it, and those that are followed."""


def choose_trained(model: PreTrainedModel, config: ModelConfig) -> None:
    """Give the model on meta its adapters, or freeze what is to be.

    Raises `ConfigError` for layers or parameters that are not there, or cannot be adapted.
    """
    if config.has_adapters:
        _inject(model, config)
    elif config.freeze:
        _freeze(model, config.freeze)


def settings(model: PreTrainedModel) -> dict[str, Any]:
    """Of the adapters of a model, as they stand in `adapter_config.json`."""
    own: Any = model
    tree: dict[str, Any] = own.peft_config[NAME].to_dict() | {"inference_mode": True}
    return {key: sorted(value) if isinstance(value, set) else value for key, value in tree.items()}


def fill(model: PreTrainedModel, config: ModelConfig, *, seed: int) -> None:
    """Give adapters their first values, those of `model.lora_adapter_path` or peft's own: B zero, A uniform, drawn
    from the seed and its name, so that the number of ranks does not matter.
    """
    adapters = {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}
    if config.lora_adapter_path is not None:
        _load(adapters, Path(config.lora_adapter_path) / ADAPTER_WEIGHTS)
        return
    for name, parameter in adapters.items():
        local, where = local_slices(parameter)
        whole = torch.zeros(parameter.shape)
        if ".lora_A." in name:
            generator = torch.Generator().manual_seed(seeding.key("lora", seed, name))
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        local.copy_(whole[where])


def _inject(model: PreTrainedModel, config: ModelConfig) -> None:
    from peft import inject_adapter_in_model

    settings = _given(config.lora_adapter_path) if config.lora_adapter_path else _configured(model, config)
    if config.lora_rank not in (0, settings.r):
        raise ConfigError(
            f"model.lora_rank={config.lora_rank}, but the adapter in model.lora_adapter_path has rank {settings.r}: "
            f"leave model.lora_rank out"
        )
    settings.base_model_name_or_path = _where(config.partial_pretrain)
    head: Any = model.get_output_embeddings()
    if any(parameter.ndim > 2 for parameter in model.parameters()):
        logger.info("LoRA: experts stay as they are, and have no adapters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a tied head, which is refused below, and of settings of the layer
            inject_adapter_in_model(settings, model, NAME)
    except ValueError as error:
        raise ConfigError(f"model.target_modules={settings.target_modules}: {error}") from error
    if settings.target_parameters:
        raise ConfigError(
            f"model.target_modules={config.target_modules} takes in experts, which lie in one tensor of three "
            f"dimensions and cannot have adapters here: name other layers, as "
            f"model.target_modules=[q_proj,k_proj,v_proj,o_proj]"
        )
    has_lookup = any("lora_embedding" in name for name, _ in model.named_parameters())
    if has_lookup or model.get_output_embeddings() is not head:
        raise ConfigError(
            f"model.target_modules={config.target_modules} takes in the embeddings or the output head, which cannot "
            f"have adapters here: the head holds the loss, and may share the embeddings' weight; name layers only"
        )


def _configured(model: PreTrainedModel, config: ModelConfig) -> "LoraConfig":
    from peft import LoraConfig

    targets = config.target_modules
    if targets == _ALL_LINEAR:  # peft's own would take in experts, whose layers have these names in older files
        head = model.get_output_embeddings()
        linear = (nn.Linear, Conv1D)
        targets = [name for name, layer in model.named_modules() if isinstance(layer, linear) and layer is not head]
    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        use_rslora=config.use_rslora,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )


def _given(path: str) -> "LoraConfig":
    """The settings of an adapter to start from. Raises `ConfigError` for what is more than plain LoRA."""
    from peft import LoraConfig, PeftConfig

    try:
        found = PeftConfig.from_pretrained(path)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ConfigError(f"model.lora_adapter_path={path} has no usable adapter_config.json: {error}") from error
    plain, own = LoraConfig().to_dict(), found.to_dict()
    # how its first values were drawn says nothing, but for ways that change the base
    free = _FREE | {"init_lora_weights"} if own["init_lora_weights"] in (True, False, "gaussian") else _FREE
    # peft writes an empty list for experts of which none has an adapter
    odd = [key for key in own if key not in free | _HELD and (own[key] or None) != (plain.get(key) or None)]
    if odd:
        values = ", ".join(f"{key}={own[key]}" for key in odd)
        raise ConfigError(f"model.lora_adapter_path={path} is more than plain LoRA, which alone is trained: {values}")
    if own["lora_dropout"]:
        logger.info("model.lora_adapter_path: its lora_dropout=%s is not used", own["lora_dropout"])
    return LoraConfig(task_type="CAUSAL_LM", **{key: own[key] for key in _HELD - {"lora_dropout"}})


def _where(name: str) -> str:
    """As an adapter names its base: a Hub id, or a directory that is found from everywhere."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.is_dir() else name


def _load(adapters: dict[str, nn.Parameter], file: Path) -> None:
    stored, own = stored_in(file), {peft_name(name): parameter for name, parameter in adapters.items()}
    if odd := sorted(stored.keys() ^ own.keys()):
        raise ConfigError(f"{file} is an adapter of other layers: {odd[0]} ({len(odd)} names differ)")
    for name in own:
        load.fill(TensorGroup((name,), (name,)), own, stored)


def _freeze(model: PreTrainedModel, patterns: list[str]) -> None:
    """A weight of two names, as a tied head, is frozen by either."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        try:
            found = [name for name in named if re.search(pattern, name)]
        except re.error as error:
            raise ConfigError(f"model.freeze: '{pattern}' is no regular expression: {error}") from error
        if not found:
            hint = did_you_mean(pattern, named) or f"they are called as {', '.join(list(named)[:3])}"
            raise ConfigError(f"model.freeze: '{pattern}' is in the name of no parameter; {hint}")
        for name in found:
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ConfigError(f"model.freeze={patterns} freezes every parameter: nothing is left to train")
