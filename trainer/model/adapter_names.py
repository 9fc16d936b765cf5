"""Names of the parameters of a model with LoRA adapters: inside peft's model, in its base and in
files.

peft puts a layer `q_proj` inside another as `q_proj.base_layer`, beside `q_proj.lora_A.default` and
`lora_B`.
"""

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAME = "default"
"""peft's own name of an adapter."""


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """Return a parameter's name in the model without adapters."""
    return name.replace(".base_layer.", ".")


def adapted_name(name: str) -> str:
    """Return the name of the base's parameter that an adapter's parameter adds to."""
    return name.partition(".lora_")[0] + ".weight"


def peft_name(name: str) -> str:
    """Return the name of an adapter's parameter in `adapter_model.safetensors`."""
    return "base_model.model." + name.replace(f".{NAME}.", ".")
