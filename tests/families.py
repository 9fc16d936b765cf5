"""A tiny model of every family of text-only causal language models that transformers has, and what
is not one.

`FAMILIES` has, by model type, what its configuration needs beyond `COMMON` to be tiny and to hold
every kind of layer of the family, with windows and chunks shorter than the documents; None leaves a
common setting out. `VARIANTS` are further forms of some, named family first. `LEFT_OUT` has the
other names of transformers' mapping, with the reason.
"""

from typing import Any

from toy import VOCAB

COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _of(value: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, value)


_WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
_TIED = {"tie_word_embeddings": True}
_NO_HEAD_DIM = {"head_dim": None}
_GEMMA = {**_TIED, "query_pre_attn_scalar": 8}
_GROUPED = {**_ROUTED, "n_group": 2, "topk_group": 1}
_RANKS = _of(8, "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
_MLA = {**_RANKS, "qk_rope_head_dim": 4, "head_dim": None, "num_key_value_heads": 4}
_INDEX = {"index_topk": 8, "index_head_dim": 8, "index_n_heads": 2}
_DSA = {**_MLA, **_INDEX, "head_dim": 4, "mlp_layer_types": ["dense", "sparse"]}
_LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_LINEAR = {**_DELTA, **_LINEAR_FIRST}
_CONVOLUTION = {"mamba_d_state": 8, "mamba_d_conv": 3}
_MAMBA = {"chunk_size": 8, "conv_kernel": 3, "expand": 2}
_HEADS = {"mamba_n_heads": 4, "mamba_d_head": 16}
_STATES = {**_CONVOLUTION, **_HEADS, "mamba_n_groups": 1, "mamba_chunk_size": 8, "mamba_expand": 2}
_GRANITE = {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5}
_GRANITE_EXPERTS = {**_GRANITE, **_LOCAL, "head_dim": None}
_FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 2.0, 4.0, 8.0]}
_ORIGINAL = "original_max_position_embeddings"
_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, _ORIGINAL: 8, **_FACTORS}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
_COMPASS_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_COMPRESSED = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
_SHARED = {"shared_expert_intermediate_size": 16}
_GEMMA_WIDTHS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
_FOUR_LAYERS = {
    "num_hidden_layers": 4,
    "sliding_window": 4,
    "layer_types": _WINDOWS["layer_types"] * 2,
}
_SPARSE_FIRST = {
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    "num_kv_shared_layers": 2,
    "altup_num_inputs": 2,
    "laurel_rank": 4,
}
# as released: several, which share their attention and MLP
_HYBRIDS = ["mamba", "hybrid", "mamba", "hybrid"]
_HYBRID = {
    **_TIED,
    **_CONVOLUTION,
    "num_hidden_layers": 4,
    "layers_block_type": _HYBRIDS,
    "head_dim": None,
}
_NGRAMS = {
    "ple_layer_ids": [1],
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 64,
    "split_ngram_parts": 2,
}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_compress_ratio": 4,
}
_DBRX_EXPERTS = {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}
_SINK = {
    **_of(4, "swa_num_attention_heads", "sliding_window_size", "d_rel"),
    "swa_head_dim": 8,
    "rel_extent": 16,
}
_MODERN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_CHUNKS = {"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 8}
_ZERO_EXPERTS = {
    "n_routed_experts": 4,
    "moe_topk": 2,
    "zero_expert_num": 2,
    "expert_ffn_hidden_size": 16,
}
_BLOCKS = {
    **_of(2, "index_n_heads", "index_topk_blocks"),
    **_of(4, "rotary_dim", "index_block_size"),
    "index_head_dim": 8,
}
_NEMOTRON_STATES = {
    "ssm_state_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "chunk_size": 8,
}
_HYBRID_WINDOWS = {"sliding_window": 4, "layer_types": ["hybrid_sliding", "hybrid"]}
_DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse"]}
_USUAL = [
    "apertus",
    "arcee",
    "bitnet",
    "diffllama",
    "glm",
    "glm4",
    "gpt_neox",
    "helium",
    "hrm_text",
    "hunyuan_v1_dense",
    "internlm3",
    "iquestcoder",
    "jais2",
    "llama",
    "ministral3",
    "nanochat",
    "nemotron",
    "olmo",
    "persimmon",
    "qwen2",
    "qwen3",
    "rwkv",
    "seed_oss",
]
_USUAL_TIED = [
    "biogpt",
    "bloom",
    "ernie4_5",
    "gemma",
    "gpt2",
    "gpt-sw3",
    "gpt_bigcode",
    "gpt_neox_japanese",
    "mpt",
    "openai-gpt",
]
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in _USUAL},
    **dict.fromkeys(_USUAL_TIED, _TIED),
    "afmoe": {**_EXPERTS, **_WINDOWS, "num_dense_layers": 1, "mup_enabled": True},
    "aria_text": {"moe_num_experts": 4},
    "axk1": {**_MLA, **_GROUPED},
    "axk2": {**_DSA, **_ROUTED, "n_group": None, "topk_group": None, "gated_norm_rank": 4},
    "bailing_hybrid": {
        **{name: size for name, size in _MLA.items() if name != "q_lora_rank"},
        **_EXPERTS,
        **_LINEAR_FIRST,
        **_DENSE_FIRST,
        "num_local_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "head_dim": 8,
    },
    "bamba": {**_STATES, **_NO_HEAD_DIM, "attn_layer_indices": [1]},
    "beam": {
        **_EXPERTS,
        **_WINDOWS,
        **_DENSE_FIRST,
        "n_group": 2,
        "topk_group": 1,
        "final_logit_softcapping": 3.0,
    },
    "codegen": {"rotary_dim": 4},
    "cohere": {**_TIED, "logit_scale": 0.25},
    "cohere2": {**_TIED, **_WINDOWS, "logit_scale": 0.25},
    "cohere2_moe": {**_TIED, **_WINDOWS, **_EXPERTS, "logit_scale": 0.25},
    "cohere_compass_text": {
        **_TIED,
        **_WINDOWS,
        "rope_parameters": {"sliding_attention": _COMPASS_ROPE, "full_attention": None},
    },
    "cpmant": {
        **_TIED,
        **_of(4, "prompt_types", "prompt_length", "segment_types"),
        "dim_head": 8,
        "dim_ff": 48,
    },
    "ctrl": {**_TIED, "dff": 48},
    "cwm": {**_WINDOWS, "bos_token_id": 1, "eos_token_id": 2},
    "dbrx": {
        "d_model": 32,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": _DBRX_EXPERTS,
    },
    "deepseek_v2": {**_MLA, **_ROUTED, "first_k_dense_replace": 1},
    "deepseek_v3": {**_MLA, **_GROUPED, "first_k_dense_replace": 1},
    "deepseek_v32": {**_DSA, **_GROUPED},
    "deepseek_v4": {
        **_ROUTED,
        **_of(2, "hc_mult", "o_groups", "index_n_heads"),
        **_of(8, "head_dim", "q_lora_rank", "o_lora_rank", "index_head_dim"),
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "index_topk": 4,
        "sliding_window": 4,
        "layer_types": _COMPRESSED,
        "compress_rates": {_COMPRESSED[1]: 2, _COMPRESSED[2]: 4},
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    },
    "doge": {"keep_window_size": 8},
    "dots1": {**_ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note_text": {
        **_DSA,
        **_ROUTED,
        "num_hidden_layers": 3,
        "head_dim": 12,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "shared_experts_intermediate_size": 16,
        **{f"swa_{name}": size for name, size in _RANKS.items()},
        **_of(4, "sliding_window", "swa_num_attention_heads", "swa_num_key_value_heads"),
        "swa_head_dim": 12,
    },
    "ernie4_5_moe": {
        **_TIED,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_num_shared_experts": 2,
    },
    "exaone4": {**_WINDOWS},
    "exaone_moe": {**_WINDOWS, **_EXPERTS},
    "falcon": {**_TIED, **_NO_HEAD_DIM},
    "falcon_h1": {**_MAMBA, **_STATES, "mamba_rms_norm": True, "mamba_d_ssm": 64},
    "falcon_mamba": {**_NO_HEAD_DIM, "state_size": 4, "num_attention_heads": None},
    "flex_olmo": {**_EXPERTS},
    "flint": {**_EXPERTS, **_WINDOWS, **_SHARED, "mlp_only_layers": [0]},
    "gemma2": {**_GEMMA, **_WINDOWS, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {**_GEMMA, **_WINDOWS},
    "gemma3n_text": {**_TIED, **_GEMMA_WIDTHS, **_FOUR_LAYERS, **_SPARSE_FIRST},
    "gemma4_text": {
        **_TIED,
        **_FOUR_LAYERS,
        **_GEMMA_WIDTHS,
        "num_kv_shared_layers": 2,
        "global_head_dim": 16,
        "final_logit_softcapping": 3.0,
    },
    "gemma4_unified_text": {**_TIED, **_WINDOWS, "global_head_dim": 16},
    "glm4_moe": {**_ROUTED, "use_qk_norm": True},
    "glm4_moe_lite": {**_MLA, **_ROUTED, "head_dim": None},
    "glm_moe_dsa": {**_DSA, **_ROUTED},
    "gpt_neo": {**_TIED, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gpt_oss": {**_LOCAL, "sliding_window": 4},
    "gptj": {"rotary_dim": 4},
    "granite": {**_GRANITE},
    "granite_swa": {**_TIED, **_GRANITE, **_WINDOWS, **_NO_HEAD_DIM},
    "granitemoe": {**_GRANITE_EXPERTS},
    "granitemoe_swa": {**_GRANITE_EXPERTS, **_WINDOWS},
    "granitemoehybrid": {
        **_STATES,
        **_GRANITE_EXPERTS,
        "shared_intermediate_size": 16,
        "layer_types": ["mamba", "attention"],
    },
    "granitemoeshared": {**_GRANITE_EXPERTS, "shared_intermediate_size": 16},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hy_v3": {**_EXPERTS},
    "hy_v4": {**_DSA, **_ROUTED, "hc_mult": 2, "indexer_types": ["full", "shared"]},
    "hyperclovax": {**_GRANITE},
    "inkling_text": {
        **_ROUTED,
        **_SINK,
        **_DENSE_FIRST,
        "layer_types": ["hybrid_sliding", "hybrid"],
        "swa_num_key_value_heads": 2,
    },
    "inkling2_text": {
        **_ROUTED,
        **_SINK,
        "layer_types": ["hybrid_sliding", "hybrid"],
        "swa_num_key_value_heads": 2,
        "n_layers_per_attn_res_block": 1,
        "unpadded_vocab_size": VOCAB,
    },
    "jamba": {
        **_CONVOLUTION,
        "num_experts": 4,
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "jetmoe": {**_TIED, **_LOCAL, "kv_channels": 8, "head_dim": None},
    "kimi_linear": {
        **_MLA,
        **_EXPERTS,
        **_LINEAR_FIRST,
        "n_group": 1,
        "topk_group": 1,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "kolibri1": {**_EXPERTS, **_WINDOWS, **_SHARED},
    "laguna": {**_EXPERTS, **_WINDOWS, **_SHARED},
    "lfm2": {**_TIED, "layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "lfm2_moe": {
        **_TIED,
        **_EXPERTS,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
    },
    "lfm3": {
        **_TIED,
        "num_hidden_layers": 3,
        "sliding_window": 4,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
    },
    "llama4_text": {
        **_LOCAL,
        **_CHUNKS,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 48,
        "no_rope_layers": [1, 0],
        "moe_layers": [1],
    },
    "longcat_flash": {
        **_MLA,
        **_ZERO_EXPERTS,
        "num_layers": 2,
        "num_hidden_layers": None,
        "ffn_hidden_size": 48,
        "head_dim": 4,
    },
    "mamba": {**_TIED, "head_dim": None, "num_attention_heads": None},
    "mamba2": {
        **_MAMBA,
        "head_dim": 16,
        "num_heads": 4,
        "state_size": 8,
        "n_groups": 2,
        "num_attention_heads": None,
    },
    "mellum": {**_EXPERTS, **_WINDOWS},
    "mimo_v2_flash": {**_ROUTED, **_WINDOWS, "v_head_dim": 6},
    "minicpm3": {**_TIED, **_MLA, "v_head_dim": 6},
    "minimax": {**_LOCAL, "layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "minimax_m2": {**_LOCAL},
    "minimax_m3_vl_text": {
        **_LOCAL,
        **_BLOCKS,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        **_DENSE_FIRST,
        "dense_intermediate_size": 48,
        "shared_intermediate_size": 16,
    },
    "ministral": {**_WINDOWS},
    "mistral": {"sliding_window": 4},
    "mixtral": {**_LOCAL, "sliding_window": 4},
    "modernbert-decoder": {
        **_TIED,
        **_MODERN_IDS,
        "local_attention": 8,
        "layer_types": _WINDOWS["layer_types"],
    },
    "nemotron_h": {
        **_ROUTED,
        **_NEMOTRON_STATES,
        "moe_shared_expert_intermediate_size": 16,
        "n_groups": 2,
    },
    "olmo2": {**_NO_HEAD_DIM},
    "olmo3": {**_NO_HEAD_DIM, **_WINDOWS},
    "olmo_hybrid": {**_LINEAR, **_NO_HEAD_DIM, "linear_num_key_heads": 4},
    "olmoe": {**_EXPERTS},
    "opt": {**_TIED, "ffn_dim": 48, "word_embed_proj_dim": 16},
    "phi": {**_NO_HEAD_DIM},
    "phi3": {**_NO_HEAD_DIM, "sliding_window": 4},
    "phimoe": {**_LOCAL, "sliding_window": 4},
    "qwen2_moe": {**_EXPERTS, **_SHARED},
    "qwen3_5_text": {**_LINEAR},
    "qwen3_5_moe_text": {**_LINEAR, **_EXPERTS, **_SHARED},
    "qwen3_moe": {**_EXPERTS},
    "qwen3_next": {**_LINEAR, **_EXPERTS, **_SHARED},
    "qwen4_exp_text": {
        **_LINEAR,
        **_EXPERTS,
        **_SHARED,
        **_NGRAMS,
        **_INDEXER,
        "hc_count": 2,
        "hc_lowrank": 8,
        "make_ngram_vocab_size_divisible_by": 8,
        "indexer_budget": 8,
        "eos_token_id": 0,
    },
    "recurrent_gemma": {**_TIED, "num_hidden_layers": 3, "attention_window_size": 4},
    "smollm3": {**_TIED, "no_rope_layers": [1, 0]},
    "solar_open": {**_ROUTED},
    "stablelm": {**_NO_HEAD_DIM},
    "starcoder2": {**_TIED, "sliding_window": 4},
    "vaultgemma": {**_GEMMA, **_WINDOWS},
    "xglm": {**_TIED, "ffn_dim": 48},
    "xlstm": {"num_heads": 4, "chunk_size": 8, "ffn_round_up_to_multiple_of": 8},
    "youtu": {**_TIED, **_MLA},
    "zamba": {**_HYBRID, "n_mamba_heads": 2},
    "zamba2": {**_HYBRID, "n_mamba_heads": 4, "chunk_size": 8, "adapter_rank": 4},
    "zaya": {
        **_TIED,
        **_EXPERTS,
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
        **_HYBRID_WINDOWS,
    },
}
FAMILIES = dict(sorted(FAMILIES.items()))

VARIANTS: dict[str, dict[str, Any]] = {
    "granitemoehybrid attention": {
        **_STATES,
        **_GRANITE_EXPERTS,
        "shared_intermediate_size": 16,
        "layer_types": ["attention"] * 2,
    },
    "phi3 longrope unreached": {
        **_NO_HEAD_DIM,
        "rope_parameters": {**_LONGROPE, _ORIGINAL: 64},
        _ORIGINAL: 64,
    },
    "phi3 longrope": {**_NO_HEAD_DIM, "rope_parameters": _LONGROPE, _ORIGINAL: 8},
    "llama dynamic unreached": {"rope_parameters": _DYNAMIC},
    "llama dynamic": {"max_position_embeddings": 8, "rope_parameters": _DYNAMIC},
}
LEFT_OUT = {
    "of several parts, whose text part is tried under a name of its own": [
        "dots3_note",
        "gemma3",
        "gemma3n",
        "gemma4",
        "gemma4_unified",
        "got_ocr2",
        "llama4",
        "fuyu",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen4_exp",
    ],
    "of several parts, whose text part has no name of its own in that list": [
        "emu3",
        "mllama",
        "git",
        "phi4_multimodal",
    ],
    "bytes in patches: four models in one": ["blt"],
    "drafts tokens for another model": ["gemma4_assistant", "gemma4_unified_assistant"],
    "audio": ["moshi", "moss_transcribe_diarize", "musicgen", "musicgen_melody"],
    "the decoder of an encoder-decoder": [
        "bart",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "marian",
        "mbart",
        "mvp",
        "pegasus",
        "plbart",
        "prophetnet",
        "trocr",
        "whisper",
    ],
    "an encoder, which sees later tokens": [
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
        "reformer",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xlnet",
        "xmod",
    ],
}


def family_settings(name: str, **changes: Any) -> dict[str, Any]:
    """What the configuration of a family or variant is made with."""
    settings = {**COMMON, **(FAMILIES | VARIANTS)[name], **changes}
    removed = {key for key in COMMON if settings[key] is None and COMMON[key] is not None}
    return {key: value for key, value in settings.items() if key not in removed}
