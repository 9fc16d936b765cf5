"""The model card in `huggingface/`: a README.md with the metadata that the Hub reads."""

import json
from collections.abc import Mapping

from huggingface_hub import ModelCardData

FILE_NAME = "README.md"


def model_card(
    measured: Mapping[str, object],
    *,
    base_model: str | None,
    is_adapter: bool,
    settings: Mapping[str, object],
    origins: Mapping[str, object],
) -> bytes:
    """Return the card of a checkpoint.

    measured: measurements by name, such as step and loss; base_model: a Hub id, if the base model
    has one; settings: configuration keys that differ from their defaults; origins: facts by name
    about the sources that the model was made from.
    """
    data = ModelCardData(
        base_model=base_model,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["fsdp-sft", *(["lora"] if is_adapter else [])],
    )
    kind = "LoRA adapter" if is_adapter else "model"
    sections = (
        (f"A {kind} from supervised fine-tuning with fsdp-sft.", measured),
        ("Made from:", origins),
        ("Settings that differ from their defaults:", settings),
    )
    parts = [f"---\n{data.to_yaml()}\n---", "# Model card"]
    for title, values in sections:
        # Values in an indented block cannot be read as markup.
        lines = [f"    {name}: {json.dumps(value)}" for name, value in values.items()]
        parts += [title, "\n".join(lines)]
    return ("\n\n".join(part for part in parts if part) + "\n").encode()
