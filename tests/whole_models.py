"""Tiny checkpoints of several parts, as transformers writes them: random weights, none of which
has a neutral value.
"""

from pathlib import Path
from typing import Any

import torch
from families import COMMON
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMultimodalLM

from trainer.model.pretrained import ModelSource

_TEXT = {
    key: value
    for key, value in COMMON.items()
    if key not in ("tie_word_embeddings", "bos_token_id", "eos_token_id")
}
_SIGHT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_IMAGE = {**_SIGHT, "image_size": 28, "patch_size": 14}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_HYBRID = {**_TEXT, **_LINEAR, "layer_types": ["linear_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LLAMA4 = {
    **_TEXT,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 48,
    "layer_types": ["chunked_attention", "full_attention"],
    "attention_chunk_size": 8,
}
_QWEN_SIGHT = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": 32,
}
WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {
            **_TEXT,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision_config": _IMAGE,
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": _IMAGE,
        "tie_word_embeddings": False,
    },
    "qwen3_5": {"text_config": _HYBRID, "vision_config": _QWEN_SIGHT},
    "qwen3_5_moe": {
        "text_config": {**_HYBRID, **_EXPERTS, "shared_expert_intermediate_size": 16},
        "vision_config": _QWEN_SIGHT,
    },
    "kimi_k25": {
        "text_config": {
            **{key: value for key, value in _TEXT.items() if key != "head_dim"},
            "model_type": "deepseek_v3",
            "num_key_value_heads": 4,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 16,
        },
        "vision_config": _SIGHT,
        "tie_word_embeddings": False,
    },
    "llama4": {
        "text_config": _LLAMA4,
        "vision_config": {
            **_IMAGE,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "vision_output_dim": 32,
        },
    },
}
EXTRA = "mtp.fc.weight"
"""Of no class of transformers: checkpoints hold such tensors for other programs."""


def write_whole_model(
    path: Path, model_type: str, *, has_extra: bool = True, **changes: Any
) -> ModelSource:
    """The text part in float32; half of what passes through in bfloat16, as in mixed
    checkpoints.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(WRAPPERS[model_type] | changes))
    model: Any = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
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
