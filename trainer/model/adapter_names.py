"""Names of a LoRA model's parameters: inside peft's model, in its base model and in files.

peft wraps a layer `q_proj`, renames it to `q_proj.base_layer`, and adds `q_proj.lora_A.default` and
`lora_B`. An adapter for stacked expert weights wraps their module: `experts.lora_A`, and also
`experts.base_layer.lora_A` if two weights are adapted.

In a checkpoint with several parts, the language model's layers have different names: `Places` maps
prefixes of names in the language model to prefixes in the whole model. It is empty for a checkpoint
with one part.
"""

from collections.abc import Mapping

Places = Mapping[str, str]

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
NAME = "default"
"""peft's default name for an adapter."""
_PEFT = "base_model.model."


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """Return a parameter's name in the model without adapters."""
    return name.replace("base_layer.", "")


def peft_name(name: str, places: Places) -> str:
    """Return the name of a trained parameter in `adapter_model.safetensors`."""
    return _PEFT + placed(name, places).replace(f".{NAME}.", ".")


def layer_of(name: str, places: Places) -> str | None:
    """Return the layer that a tensor of `adapter_model.safetensors` adapts; None if it is outside
    the language model.
    """
    layer = name.removeprefix(_PEFT).partition(".lora_")[0]
    if places and not layer.startswith(tuple(places.values())):
        return None
    return unplaced(layer, places)


def unplaced(name: str, places: Places) -> str:
    """Return the language model's name for a parameter or layer of the whole checkpoint."""
    return placed(name, {place: own for own, place in places.items()})


def placed(name: str, places: Places) -> str:
    """Return the name that the whole checkpoint gives a parameter or layer of the language model."""
    for own, place in places.items():
        if name.startswith(own):
            return place + name.removeprefix(own)
    return name
