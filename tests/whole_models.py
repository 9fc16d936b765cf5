"""Tiny checkpoints with several parts, as transformers writes them: random weights, without neutral
values.
"""

import torch
from families import family_settings
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMultimodalLM

from trainer.model.pretrained import ModelSource

_SIGHT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_IMAGE = {**_SIGHT, "image_size": 28, "patch_size": 14}
_PROJECTED = dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 32)
_QWEN_SIGHT = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": 32,
}


def _text(family, **changes):
    """The text part as the family that is such a part alone has it; the whole says what is tied."""
    of_whole = ("tie_word_embeddings", "bos_token_id", "eos_token_id")
    settings = family_settings(family, **changes)
    return {key: value for key, value in settings.items() if key not in of_whole}


WRAPPERS = {
    "gemma3": {
        "text_config": _text("gemma3_text"),
        "vision_config": _IMAGE,
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "text_config": _text("mistral", model_type="mistral"),
        "vision_config": _IMAGE,
        "tie_word_embeddings": False,
    },
    "qwen3_5": {"text_config": _text("qwen3_5_text"), "vision_config": _QWEN_SIGHT},
    "qwen3_5_moe": {"text_config": _text("qwen3_5_moe_text"), "vision_config": _QWEN_SIGHT},
    "kimi_k25": {
        "text_config": _text("deepseek_v3", model_type="deepseek_v3"),
        "vision_config": _SIGHT,
        "tie_word_embeddings": False,
    },
    "llama4": {"text_config": _text("llama4_text"), "vision_config": {**_IMAGE, **_PROJECTED}},
}
EXTRA = "mtp.fc.weight"
"""These tensors belong to no class of transformers: checkpoints hold them for other programs."""


def write_whole_model(path, model_type, *, has_extra=True, **changes):
    """The text part is in float32, and half of the untrained tensors are in bfloat16, as in mixed
    checkpoints.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(WRAPPERS.get(model_type, {}) | changes))
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in {
            id(t): t for t in model.state_dict().values() if t.is_floating_point()
        }.values():
            tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name in sorted(name for name in tensors if "vis" in name)[::2]:
        tensors[name] = tensors[name].bfloat16()
    if has_extra:
        tensors[EXTRA] = torch.randn(3, 5)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "preprocessor_config.json").write_text('{"image_size": 28}')
    return ModelSource(str(path))
