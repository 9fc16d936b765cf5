"""Trains part of a model: LoRA adapters, which peft makes and names, or the parameters that
`model.freeze` does not freeze.

Frozen parameters are stored in the compute dtype.
"""

import logging
import math
import warnings
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trainer.config import ConfigError, ModelConfig, names_matching
from trainer.model import expert_adapters, load, lora_layers, nf4
from trainer.model.adapter_names import (
    ADAPTER_WEIGHTS,
    NAME,
    Places,
    is_adapter,
    layer_of,
    peft_name,
    placed,
)
from trainer.model.pretrained import ModelSource
from trainer.model.weights import TensorGroup, has_tied_head, local_slices, stored_in
from trainer.runtime import seeding
from trainer.runtime.log import labelled

if TYPE_CHECKING:
    from peft import LoraConfig

logger = logging.getLogger(__name__)
_FREE = {
    "base_model_name_or_path",
    "revision",
    "task_type",
    "auto_mapping",
    "peft_version",
    "inference_mode",
    "lora_dropout",
    "ensure_weight_tying",
    # the tensors' names determine these exactly
    "target_modules",
    "target_parameters",
    "exclude_modules",
}
_HELD = {"r", "lora_alpha", "use_rslora", "fan_in_fan_out", "modules_to_save"}
"""Settings of an initial adapter: those in `_FREE` are ignored, those in `_HELD` are kept."""


def choose_trained(model: PreTrainedModel, config: ModelConfig, source: ModelSource) -> None:
    """Add adapters to the model on meta, or freeze the configured parameters.

    Raises `ConfigError` for layers or parameters that do not exist or cannot be adapted.
    """
    if config.has_adapters:
        _inject(model, config, source)
    elif config.freeze:
        _freeze(model, config.freeze)


def settings(model: PreTrainedModel) -> dict[str, Any]:
    """Return the contents of `adapter_config.json` for a model's adapters."""
    own: Any = model
    tree: dict[str, Any] = own.peft_config[NAME].to_dict() | {"inference_mode": True}
    return {key: sorted(value) if isinstance(value, set) else value for key, value in tree.items()}


def fill(
    model: PreTrainedModel,
    config: ModelConfig,
    source: ModelSource,
    *,
    seed: int,
) -> None:
    """Give adapters their initial values, from `model.lora_adapter_path` or from peft. Without that
    path, modules that are trained in full keep the base model's values.

    peft's initial values are zero for B and uniform for A. A is drawn from the seed and the
    parameter's name, so its values do not depend on the number of ranks.
    """
    trained = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
    if config.lora_adapter_path is not None:
        file = Path(config.lora_adapter_path) / ADAPTER_WEIGHTS
        _load(trained, file, source.places)
        return
    for name, parameter in trained.items():
        if not is_adapter(name):
            continue
        local, where = local_slices(parameter)
        whole = torch.zeros(parameter.shape)
        if ".lora_A." in name:
            generator = torch.Generator().manual_seed(seeding.key("lora", seed, name))
            nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
        local.copy_(whole[where])


def log_trained(model: PreTrainedModel, config: ModelConfig) -> None:
    """Log which layers of a built model have adapters."""
    if config.has_adapters:
        written = settings(model)
        text = lora_layers.summary(model, rank=written["r"])
        layers = [module for module in model.modules() if isinstance(module, nf4.Nf4Linear)]
        if layers:
            text += f"; {len(layers)} linear layers in NF4"
        if written["modules_to_save"]:
            text += f"; trained in full: {', '.join(written['modules_to_save'])}"
        logger.info(labelled("adapters", text))


def _wanted(config: ModelConfig, source: ModelSource) -> tuple["LoraConfig", str | list[str], str]:
    """Return the configured settings, the layers to adapt, and the `key=value` of the option that
    names the layers.
    """
    from peft import LoraConfig

    path = config.lora_adapter_path
    if path is not None:
        layers = _adapted_in(Path(path) / ADAPTER_WEIGHTS, source.places)
        return _given(path), layers, f"model.lora_adapter_path={path}"
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        use_rslora=config.use_rslora,
        modules_to_save=config.modules_to_save,
        target_modules=[],
        task_type="CAUSAL_LM",
    )
    return settings, config.target_modules, f"model.target_modules={config.target_modules}"


def _inject(model: PreTrainedModel, config: ModelConfig, source: ModelSource) -> None:
    """Add adapters to the chosen layers and experts, in place, and train `modules_to_save` in full.

    Raises `ConfigError` for settings that contradict each other or that experts do not support.
    """
    from peft import inject_adapter_in_model

    settings, targets, said = _wanted(config, source)
    if config.lora_rank not in (0, settings.r):
        raise ConfigError(
            f"model.lora_rank={config.lora_rank}, but the adapter in model.lora_adapter_path has "
            f"rank {settings.r}.\nFix: leave model.lora_rank out"
        )
    settings.lora_dropout = config.lora_dropout
    base = Path(config.partial_pretrain)
    settings.base_model_name_or_path = str(base.resolve() if base.is_dir() else base)
    stacked = lora_layers.expert_weights(model)
    if isinstance(targets, list) and settings.target_parameters:
        targets = _with_weights(targets, stacked, settings.target_parameters)
        settings.target_parameters = None
    chosen = lora_layers.chosen(model, targets, said=said)
    layers = [name for name in chosen if name not in stacked]
    of_experts = defaultdict(list)
    for name in chosen:
        if name in stacked:
            module, _, weight = name.rpartition(".")
            of_experts[module].append(weight)
    if of_experts and not layers:
        raise ConfigError(f"{said} selects only experts.\nFix: add a linear layer, such as o_proj")
    if of_experts and config.lora_dropout:
        raise ConfigError(
            f"model.lora_dropout={config.lora_dropout}: adapters of experts do not support dropout.\n"
            f"Fix: model.lora_dropout=0"
        )
    in_4_bits = lora_layers.chosen(model, lora_layers.ALL_LINEAR, said="")
    in_full = lora_layers.ends_named(model, settings.modules_to_save or [])
    settings.modules_to_save = None  # peft would add a copy of each module
    # full names, passed as an adapter's tensors: peft reads some target_modules differently
    tensors = {f"{name}.lora_A.weight": torch.empty(0) for name in layers}
    with warnings.catch_warnings():
        # warnings about target_modules, which are set below, and about layer settings
        warnings.simplefilter("ignore")
        try:
            inject_adapter_in_model(settings, model, NAME, state_dict=tensors)
        except ValueError as error:
            raise ConfigError(
                f"peft cannot adapt {layers[0]} and {len(layers) - 1} other layers of this model: "
                f"{error}.\nFix: select fewer layers with model.target_modules"
            ) from error
    for name, weights in of_experts.items():
        expert_adapters.adapt(model, name, weights, settings)
    if config.load_in_4bit:
        _hold_in_4_bits(model, in_4_bits)
    for end in in_full.values():
        end.requires_grad_(True)
    if in_full:
        settings.modules_to_save = [placed(name, source.places) for name in in_full]
        settings.ensure_weight_tying = has_tied_head(model)
    settings.target_modules, settings.target_parameters = lora_layers.written(
        source.whole or model, [placed(name, source.places) for name in layers]
    )
    settings.target_parameters += [placed(n, source.places) for n in chosen if n in stacked]
    if settings.target_parameters:
        # peft refuses dropout with target_parameters; only training needs it
        settings.lora_dropout = 0.0


def _hold_in_4_bits(model: PreTrainedModel, names: list[str]) -> None:
    """Replace linear layers, inside their adapters, by layers with NF4 weights."""
    for name in names:
        layer: Any = model.get_submodule(name)
        if hasattr(layer, "base_layer"):
            name = f"{name}.base_layer"
            layer = layer.base_layer
        if nf4.can_hold(layer):
            model.set_submodule(name, nf4.Nf4Linear(layer))


def _adapted_in(file: Path, places: Places) -> list[str]:
    """Return the names of the layers that the adapter in a file adapts. Raises `ConfigError` for a
    layer outside the language model.
    """
    layers: dict[str, None] = {}
    for name in filter(is_adapter, stored_in(file)):
        layer = layer_of(name, places)
        if layer is None:
            raise ConfigError(
                f"{file} adapts {name}, but only the language model is trained.\n"
                f"Fix: start from an adapter that covers only the language model"
            )
        layers[layer] = None
    return list(layers)


def _given(path: str) -> "LoraConfig":
    """Return the settings of the initial adapter. Raises `ConfigError` unless it is plain LoRA."""
    from peft import LoraConfig, PeftConfig

    try:
        found = PeftConfig.from_pretrained(path)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ConfigError(
            f"model.lora_adapter_path={path} has no usable adapter_config.json: {error}"
        ) from error
    plain = LoraConfig().to_dict()
    own = found.to_dict()
    known = _FREE | _HELD
    # how A was initialized does not matter, unless the method changes the base model
    if own.get("init_lora_weights") in (True, False, "gaussian"):
        known |= {"init_lora_weights"}
    odd = [
        f"{key}={value}"
        for key, value in own.items()
        if key not in known and (value or None) != (plain.get(key) or None)
    ]
    if odd:
        raise ConfigError(
            f"model.lora_adapter_path={path} uses more than plain LoRA ({', '.join(odd)}).\n"
            f"Fix: start from an adapter without these settings"
        )
    held = {key: own[key] for key in (*_HELD, "target_parameters")}
    return LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=[],
        **held,
    )


def _with_weights(layers: list[str], stacked: list[str], named: list[str]) -> list[str]:
    """Return an adapter's layers, with each expert module replaced by the names of its adapted
    weights.
    """
    adapted = {name.replace(".base_layer", "") for name in layers}
    leaves = {lora_layers.leaf(name) for name in named}
    modules = set()
    weights = []
    for name in stacked:
        module, _, weight = name.rpartition(".")
        modules.add(module)
        if module in adapted and weight in leaves:
            weights.append(name)
    return sorted(adapted - modules) + weights


def _load(adapters: dict[str, nn.Parameter], file: Path, places: Places) -> None:
    stored = stored_in(file)
    own = {peft_name(name, places): parameter for name, parameter in adapters.items()}
    if odd := sorted(stored.keys() ^ own.keys()):
        raise ConfigError(
            f"{file} does not fit this model: {len(odd)} tensor names differ, such as {odd[0]}.\n"
            f"Fix: choose an adapter for this model"
        )
    for name in own:
        load.fill(TensorGroup((name,), (name,)), own, stored)


def _freeze(model: PreTrainedModel, patterns: list[str]) -> None:
    """Freeze the parameters that match. A pattern may match either name of a tied weight."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        for name in names_matching(pattern, named, key="model.freeze", kind="parameter"):
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ConfigError(
            f"model.freeze={patterns} freezes every parameter, so there is nothing to train.\n"
            f"Fix: freeze fewer parameters"
        )
