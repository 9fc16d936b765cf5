"""A tiny model of every family of text-only causal language models that transformers has, and what
is not one.

`COMMON` holds the settings of all, `SIZES` those that only some configurations know. `FAMILIES` has,
by model type, what else a configuration needs to be tiny and to hold every kind of layer of the
family; nothing for most. It has windows and chunks shorter than the documents; None leaves a common setting out.
`VARIANTS` are further forms of some, named family first. `LEFT_OUT` has the other names of
transformers' mapping, with the reason.
"""

import itertools
from importlib.metadata import version

from packaging.version import Version
from toy import VOCAB
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

COMMON = {
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


def _of(value, *names):
    return dict.fromkeys(names, value)


_SIZES = {
    1: """n_group topk_group mamba_n_groups num_dense_layers indexer_kv_heads
        n_layers_per_attn_res_block""",
    2: """num_experts_per_tok moe_k moe_topk moe_num_shared_experts zero_expert_num index_n_heads
        index_topk_blocks indexer_n_heads linear_num_key_heads mamba_expand n_mamba_heads n_groups
        o_groups hc_mult hc_count swa_num_key_value_heads altup_num_inputs num_layers
        heads_per_ngram split_ngram_parts""",
    3: "mamba_d_conv",
    4: """num_experts num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim rotary_dim
        num_heads swa_num_attention_heads d_rel linear_num_heads linear_num_value_heads
        mamba_n_heads mamba_num_heads window_size sliding_window_size attention_window_size
        index_block_size gated_norm_rank laurel_rank adapter_rank indexer_compress_ratio
        prompt_types prompt_length segment_types""",
    8: """q_lora_rank kv_lora_rank o_lora_rank qk_nope_head_dim v_head_dim index_topk index_head_dim
        indexer_head_dim indexer_budget hc_lowrank mamba_d_state mamba_chunk_size chunk_size
        state_size ssm_state_size linear_head_dim linear_key_head_dim linear_value_head_dim
        swa_head_dim attention_chunk_size block_size local_attention keep_window_size dim_head
        kv_channels query_pre_attn_scalar hidden_size_per_layer_input
        make_ngram_vocab_size_divisible_by ffn_round_up_to_multiple_of""",
    16: """moe_intermediate_size expert_ffn_hidden_size router_hidden_size
        shared_expert_intermediate_size shared_experts_intermediate_size
        moe_shared_expert_intermediate_size mamba_d_head mamba_head_dim rel_extent
        block_multiple_of word_embed_proj_dim""",
    48: """dim_ff dff ffn_dim ffn_hidden_size intermediate_size_mlp dense_intermediate_size""",
    64: "mamba_d_ssm ngram_vocab_size_base",
}
"""{value: settings that have it}"""
SIZES = {
    **{name: value for value, names in _SIZES.items() for name in names.split()},
    **_of([1], "attn_layer_indices", "moe_layers", "ple_layer_ids"),
    **_of(True, "mup_enabled", "mamba_rms_norm"),
    "vocab_size_per_layer_input": VOCAB,
    "d_model": 32,
    "residual_multiplier": 0.5,
    "logits_scaling": 3.0,
    "no_rope_layers": [1, 0],
    "attention_types": [[["global", "local"], 1]],
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
}
_WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_TIED = {"tie_word_embeddings": True}
_NO_HEAD_DIM = {"head_dim": None}
_NO_HEADS = {"head_dim": None, "num_attention_heads": None}
_MLA = {"head_dim": None, "num_key_value_heads": 4}
_DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse"]}
_DSA = {**_MLA, **_DENSE_FIRST, "head_dim": 4}
_LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
_CONVOLUTION_FIRST = {"layer_types": ["conv", "full_attention"]}
_GRANITE = {"embedding_multiplier": 2.0}
_SHARED = {"shared_intermediate_size": 16}
_FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 2.0, 4.0, 8.0]}
_ORIGINAL = "original_max_position_embeddings"
_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, _ORIGINAL: 8, **_FACTORS}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
_COMPASS_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_COMPRESSED = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
_FOUR_LAYERS = {
    **_TIED,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "sliding_window": 4,
    "layer_types": _WINDOWS["layer_types"] * 2,
}
# as released: several, which share their attention and MLP
_HYBRID = {
    **_TIED,
    **_NO_HEAD_DIM,
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
}
_HYBRID_WINDOWS = {"layer_types": ["hybrid_sliding", "hybrid"]}
_DBRX_EXPERTS = {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}
_USUAL_TIED = """
    biogpt bloom cpmant ctrl ernie4_5 ernie4_5_moe gemma gpt-sw3 gpt2 gpt_bigcode gpt_neo
    gpt_neox_japanese mpt openai-gpt opt smollm3 xglm
"""
FAMILIES = {
    **_of(_TIED, *_USUAL_TIED.split()),
    **_of(_WINDOWS, "afmoe", "exaone4", "exaone_moe", "kolibri1"),
    **_of(_WINDOWS, "laguna", "mellum", "ministral"),
    **_of(_NO_HEAD_DIM, "bamba", "olmo2", "phi", "stablelm"),
    **_of({"sliding_window": 4}, "gpt_oss", "mistral", "mixtral", "phimoe"),
    **_of(_LINEAR_FIRST, "minimax", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
    **_of({**_TIED, **_WINDOWS}, "gemma3_text", "vaultgemma"),
    **_of({**_TIED, **_NO_HEAD_DIM}, "falcon", "jetmoe"),
    **_of(_GRANITE, "granite", "hyperclovax"),
    **_of({**_TIED, **_CONVOLUTION_FIRST}, "lfm2", "lfm2_moe"),
    "axk1": {**_MLA, "n_group": 2},
    "axk2": {**_DSA, "n_group": None, "topk_group": None},
    "bailing_hybrid": {**_MLA, **_LINEAR_FIRST, **_DENSE_FIRST, "n_group": 2, "head_dim": 8},
    "beam": {**_WINDOWS, **_DENSE_FIRST, "n_group": 2, "final_logit_softcapping": 3.0},
    "cohere": {**_TIED, "logit_scale": 0.25},
    "cohere2": {**_TIED, **_WINDOWS, "logit_scale": 0.25},
    "cohere2_moe": {**_TIED, **_WINDOWS, "logit_scale": 0.25},
    "cohere_compass_text": {
        **_TIED,
        **_WINDOWS,
        "rope_parameters": {"sliding_attention": _COMPASS_ROPE, "full_attention": None},
    },
    "cwm": {**_WINDOWS, "bos_token_id": 1, "eos_token_id": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": _DBRX_EXPERTS,
    },
    **_of({**_MLA, "first_k_dense_replace": 1}, "deepseek_v2", "sarvam_mla"),
    "deepseek_v3": {**_MLA, "n_group": 2, "first_k_dense_replace": 1},
    "deepseek_v32": {**_DSA, "n_group": 2},
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "qk_rope_head_dim": 1,
        "index_topk": 4,
        "sliding_window": 4,
        "layer_types": _COMPRESSED,
        "compress_rates": {_COMPRESSED[1]: 2, _COMPRESSED[2]: 4},
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    },
    "dory": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_output_layers": 1,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note_text": {
        **_DSA,
        "num_hidden_layers": 3,
        "head_dim": 12,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        **_of(8, "swa_q_lora_rank", "swa_kv_lora_rank", "swa_qk_nope_head_dim", "swa_v_head_dim"),
        **_of(4, "sliding_window", "swa_num_attention_heads", "swa_num_key_value_heads"),
        "swa_head_dim": 12,
    },
    "falcon_mamba": _NO_HEADS,
    "flint": {**_WINDOWS, "mlp_only_layers": [0]},
    "gemma2": {
        **_TIED,
        **_WINDOWS,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3n_text": _FOUR_LAYERS,
    "gemma4_text": {**_FOUR_LAYERS, "global_head_dim": 16, "final_logit_softcapping": 3.0},
    "gemma4_unified_text": {**_TIED, **_WINDOWS, "global_head_dim": 16},
    "glm4_moe": {"use_qk_norm": True},
    "glm4_moe_lite": _MLA,
    "glm_moe_dsa": _DSA,
    "granite_swa": {**_TIED, **_GRANITE, **_WINDOWS, **_NO_HEAD_DIM},
    "granitemoe": {**_GRANITE, **_NO_HEAD_DIM},
    "granitemoe_swa": {**_GRANITE, **_NO_HEAD_DIM, **_WINDOWS},
    "granitemoehybrid": {
        **_GRANITE,
        **_NO_HEAD_DIM,
        **_SHARED,
        "layer_types": ["mamba", "attention"],
    },
    "granitemoeshared": {**_GRANITE, **_NO_HEAD_DIM, **_SHARED},
    "hy_v4": {**_DSA, "indexer_types": ["full", "shared"]},
    "inkling_text": {**_HYBRID_WINDOWS, **_DENSE_FIRST},
    "inkling2_text": {**_HYBRID_WINDOWS, "unpadded_vocab_size": VOCAB},
    "inkling2_loop_text": {
        "num_hidden_layers": 3,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "unpadded_vocab_size": VOCAB,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_num_passes": 2,
        "loop_gate_rank": 4,
    },
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**_MLA, **_LINEAR_FIRST},
    "lara_mini": {
        **_TIED,
        "num_hidden_layers": 3,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "linear_attention", "full_attention"],
    },
    "lfm3": {
        **_TIED,
        "num_hidden_layers": 3,
        "sliding_window": 4,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
    },
    "llama4_text": {
        "num_experts_per_tok": 1,
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "longcat_flash": {**_MLA, "head_dim": 4, "num_hidden_layers": None},
    "mamba": {**_TIED, **_NO_HEADS},
    "mamba2": {**_NO_HEADS, "head_dim": 16, "conv_kernel": 3},
    "mimo_v2_flash": {**_WINDOWS, "v_head_dim": 6},
    "minicpm3": {**_TIED, **_MLA, "v_head_dim": 6},
    "minimax_m3_vl_text": {
        **_DENSE_FIRST,
        **_SHARED,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
    },
    "modernbert-decoder": {
        **_TIED,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "layer_types": _WINDOWS["layer_types"],
    },
    "olmo3": {**_NO_HEAD_DIM, **_WINDOWS},
    "olmo_hybrid": {**_LINEAR_FIRST, **_NO_HEAD_DIM, "linear_num_key_heads": 4},
    "phi3": {**_NO_HEAD_DIM, "sliding_window": 4},
    "qwen4_exp_text": {**_LINEAR_FIRST, "eos_token_id": 0},
    "recurrent_gemma": {**_TIED, "num_hidden_layers": 3},
    "starcoder2": {**_TIED, "sliding_window": 4},
    "youtu": {**_TIED, **_MLA},
    "zamba": _HYBRID,
    "zamba2": {**_HYBRID, "n_mamba_heads": 4},
    "zaya": {**_TIED, **_HYBRID_WINDOWS, "num_experts_per_tok": 1, "sliding_window": 4},
}
VARIANTS = {
    "granitemoehybrid attention": {
        **FAMILIES["granitemoehybrid"],
        "layer_types": ["attention"] * 2,
    },
    "phi3 longrope unreached": {
        **_NO_HEAD_DIM,
        "rope_parameters": {**_LONGROPE, _ORIGINAL: 64},
        _ORIGINAL: 64,
    },
    "phi3 longrope": {**_NO_HEAD_DIM, "rope_parameters": _LONGROPE, _ORIGINAL: 8},
    "apertus1p5_text pruned head": {"vocab_size": VOCAB + 64, "output_vocab_size": VOCAB},
    "llama dynamic unreached": {"rope_parameters": _DYNAMIC},
    "llama dynamic": {"max_position_embeddings": 8, "rope_parameters": _DYNAMIC},
}
VARIANTS = {
    name: settings
    for name, settings in VARIANTS.items()
    if name.split()[0] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
}
_LEFT_OUT = {
    "of several parts, whose text part is tried under a name of its own": """
        dots3_note gemma3 gemma3n gemma4 gemma4_unified got_ocr2 llama4 fuyu qwen3_5 qwen3_5_moe
        qwen4_exp
    """,
    "of several parts, whose text part has no name of its own in that list": """
        emu3 mllama git phi4_multimodal
    """,
    "bytes in patches: four models in one": "blt",
    "drafts tokens for another model": "gemma4_assistant gemma4_unified_assistant",
    "audio": "moshi moss_transcribe_diarize musicgen musicgen_melody",
    "the decoder of an encoder-decoder": """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet
        trocr whisper
    """,
    "an encoder, which sees later tokens": """
        bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert reformer
        rembert roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet
        xmod
    """,
}
LEFT_OUT = {reason: names.split() for reason, names in _LEFT_OUT.items()}
_NAMED = {*FAMILIES, *itertools.chain(*LEFT_OUT.values())}
FAMILIES |= _of({}, *(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - _NAMED))
# an older transformers has fewer; its Doge is not causal, and the self-check refuses it
if Version(version("transformers")) < Version("5.23"):
    del FAMILIES["doge"]
FAMILIES = {
    name: FAMILIES[name]
    for name in sorted(FAMILIES.keys() & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys())
}


def family_settings(name, **changes):
    """Return the settings from which the configuration of a family or variant is made."""
    default = AutoConfig.for_model(name.split()[0])
    known = default.to_dict().keys() | default.attribute_map.keys()
    sizes = {key: value for key, value in SIZES.items() if key in known}
    settings = {**sizes, **COMMON, **(FAMILIES | VARIANTS)[name], **changes}
    removed = {key for key in COMMON if settings[key] is None and COMMON[key] is not None}
    return {key: value for key, value in settings.items() if key not in removed}
