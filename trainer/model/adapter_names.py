"""Names of the parameters of a model with LoRA adapters: inside peft's model, in its base and in
files.

peft puts a layer `q_proj` inside another as `q_proj.base_layer`, beside `q_proj.lora_A.default` and
`lora_B`. An adapter of a stacked weight of experts is around their module: `experts.lora_A`, and
`experts.base_layer.lora_A` where two weights are adapted.

In a checkpoint of several parts, the text part's layers have other names: `Places` maps the
beginning of a name in the text part to its beginning in the whole. It is empty for a checkpoint of
one part.
"""

from collections.abc import Mapping

Places = Mapping[str, str]

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAME = "default"
"""peft's own name of an adapter."""
_PEFT = "base_model.model."


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """Return a parameter's name in the model without adapters."""
    return name.replace("base_layer.", "")


def adapted_name(name: str) -> str:
    """Return the name of the base's parameter that an adapter's parameter adds to."""
    return name.partition(".lora_")[0] + ".weight"


def peft_name(name: str, places: Places) -> str:
    """Return the name of an adapter's parameter in `adapter_model.safetensors`."""
    return _PEFT + placed(name, places).replace(f".{NAME}.", ".")


def layer_of(name: str, places: Places) -> str | None:
    """Return the layer that a tensor of `adapter_model.safetensors` adapts; None if it is not in
    the text part.
    """
    layer = name.removeprefix(_PEFT).partition(".lora_")[0]
    if places and not layer.startswith(tuple(places.values())):
        return None
    return placed(layer, {place: own for own, place in places.items()})


def placed(name: str, places: Places) -> str:
    """Return the name in the whole checkpoint of a parameter or layer of the text part."""
    for own, place in places.items():
        if name.startswith(own):
            return place + name.removeprefix(own)
    return name
