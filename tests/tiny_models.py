"""Tiny checkpoints with random weights, of every model family, with a byte-level tokenizer.

The weights are spread wide enough that greedy decoding wanders over the vocabulary, windows are
short enough that every prompt exceeds them, and heads are grouped where a family can group them.
"""

import copy
import functools
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from treegen.model.checkpoint.text_part import auto_class

VOCAB_SIZE = 320
CONTEXT_LENGTH = 256
WINDOW = 8
SELECTED = 64
"""Keys that a tiny model's sparse attention may select; its context ends there."""
_TEXT = (
    "Question: Ann has 3 apples and Bob has 14. How many apples do they have together?\n"
    "Answer: They have 3 + 14 = 17 apples. The answer is 17.\n\n"
)
_BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    # A tied head favours the token that was just read.
    "tie_word_embeddings": False,
}
_HEAD = {"head_dim": 8}
_FULL = {"num_key_value_heads": 4}
_MIXED = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
}
_MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    **_FULL,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DEEPSEEK = {
    **_MLA,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT_LENGTH}
_GEMMA2 = {
    **_HEAD,
    **_MIXED,
    "query_pre_attn_scalar": 8,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
}
_GEMMA4 = {
    **_HEAD,
    **_MIXED,
    "global_head_dim": 16,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
}
_INDEXED = {
    **_DEEPSEEK,
    "num_hidden_layers": 3,
    "max_position_embeddings": SELECTED,
    "index_topk": SELECTED,
    "index_head_dim": 8,
    "index_n_heads": 2,
}
_LLAMA4 = {
    **_HEAD,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 48,
    "attention_chunk_size": 12,
    "floor_scale": 9,
}
_ONE_GROUP = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
# Positions in three dimensions, which are the same three for text.
_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 2],
    }
}
# Sizes of image and sound towers, under all the names that they have.
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "num_hidden_layers": 1,
    "num_layers": 1,
    "n_layers": 1,
    "encoder_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_heads": 2,
    "attention_heads": 2,
    "encoder_attention_heads": 2,
    "embed_dim": 16,
    "d_model": 16,
    "encoder_ffn_dim": 16,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
    "vocab_size": VOCAB_SIZE,
}

# Name of a family here -> (model_type, settings beside the base)
EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", _HEAD),
    "qwen3_moe": ("qwen3_moe", {**_HEAD, **_EXPERTS}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_swa": ("mistral", {"sliding_window": WINDOW}),
    "mixtral": ("mixtral", {**_LOCAL_EXPERTS, "sliding_window": None}),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {}),
    "gemma": ("gemma", _HEAD),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmoe": ("olmoe", {**_EXPERTS, "intermediate_size": 16}),
    "cohere": ("cohere", {"use_qk_norm": True, "logit_scale": 0.5}),
    "granite": ("granite", {"attention_multiplier": 0.3, "logits_scaling": 2.0}),
    "granitemoe": ("granitemoe", {**_LOCAL_EXPERTS, "attention_multiplier": 0.3}),
    "glm": ("glm", _HEAD),
    "glm4": ("glm4", _HEAD),
    "glm4_moe": (
        "glm4_moe",
        {
            **_HEAD,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
        },
    ),
    "gpt_neox": ("gpt_neox", {}),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "deepseek_v2": (
        "deepseek_v2",
        {**_DEEPSEEK, "topk_method": "group_limited_greedy", "aux_loss_alpha": 0.0},
    ),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "ernie4_5": ("ernie4_5", _HEAD),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", _HEAD),
    "apertus": ("apertus", {}),
    "seed_oss": ("seed_oss", _HEAD),
    "helium": ("helium", _HEAD),
    "arcee": ("arcee", {}),
    "persimmon": ("persimmon", {"qk_layernorm": True}),
    "bitnet": ("bitnet", {}),
    "minimax_m2": ("minimax_m2", {**_HEAD, **_LOCAL_EXPERTS, "intermediate_size": 16}),
    "nanochat": ("nanochat", {}),
    "ministral3": ("ministral3", _HEAD),
    "gpt2": ("gpt2", _GPT2),
    "codegen": ("codegen", {**_GPT2, "rotary_dim": 4}),
    "gptj": ("gptj", {**_GPT2, "rotary_dim": 4}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gemma2": ("gemma2", _GEMMA2),
    "gemma3": ("gemma3_text", {**_HEAD, **_MIXED, "query_pre_attn_scalar": 8}),
    "gemma3n": (
        "gemma3n_text",
        {
            **_HEAD,
            **_MIXED,
            "intermediate_size": [48] * 4,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
        },
    ),
    "gemma4": ("gemma4_text", _GEMMA4),
    "olmo3": ("olmo3", _MIXED),
    "cohere2": ("cohere2", {**_MIXED, "logit_scale": 0.5}),
    "exaone4": ("exaone4", {**_HEAD, **_MIXED}),
    "ministral": ("ministral", {**_HEAD, **_MIXED}),
    "gpt_oss": ("gpt_oss", {**_HEAD, **_MIXED, **_LOCAL_EXPERTS}),
    "afmoe": ("afmoe", {**_HEAD, **_MIXED, **_EXPERTS, "num_dense_layers": 1}),
    "aria_text": (
        "aria_text",
        {**_HEAD, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    ),
    "axk1": ("axk1", _DEEPSEEK),
    "axk2": (
        "axk2",
        {**_INDEXED, "mlp_layer_types": ["dense", "sparse", "sparse"], "gated_norm_rank": 4},
    ),
    "beam": ("beam", {}),
    "biogpt": ("biogpt", {}),
    "cohere2_moe": ("cohere2_moe", {**_HEAD, **_MIXED, **_EXPERTS, "logit_scale": 0.5}),
    "ctrl": ("ctrl", {**_GPT2, "dff": 48, "tie_word_embeddings": False}),
    "cwm": ("cwm", {**_HEAD, **_MIXED}),
    "dbrx": (
        "dbrx",
        {
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": CONTEXT_LENGTH,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "deepseek_v32": ("deepseek_v32", _INDEXED),
    "dory": (
        "dory",
        {
            **_HEAD,
            **_MIXED,
            "n_input_layers": 1,
            "n_recurrent_layers": 2,
            "n_output_layers": 1,
            "n_recurrent_loops": 3,
            "initializer_range": 1.0,  # the unit of its scales
        },
    ),
    "dots1": ("dots1", {**_HEAD, **_DEEPSEEK}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            **_HEAD,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 16,
            "moe_layer_start_index": 1,
        },
    ),
    "exaone": ("exaone", {}),
    "exaone_moe": ("exaone_moe", {**_HEAD, **_MIXED, **_EXPERTS, **_ONE_GROUP}),
    "flex_olmo": ("flex_olmo", _EXPERTS),
    "flint": ("flint", _HEAD),
    "gemma4_unified": ("gemma4_unified_text", _GEMMA4),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        {**_INDEXED, "n_group": 1, "indexer_types": ["full", "shared", "full"]},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {**_DEEPSEEK, "n_group": 1}),
    "gpt_sw3": ("gpt-sw3", _GPT2),
    "gpt_bigcode": ("gpt_bigcode", _GPT2),
    "granite_swa": ("granite_swa", _MIXED),
    "granitemoe_swa": ("granitemoe_swa", {**_MIXED, **_LOCAL_EXPERTS}),
    "granitemoeshared": ("granitemoeshared", {**_LOCAL_EXPERTS, "shared_intermediate_size": 16}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {**_HEAD, "num_experts": 4, "moe_topk": 2}),
    "hy_v3": (
        "hy_v3",
        {**_HEAD, **_EXPERTS, "num_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "hy_v4": (
        "hy_v4",
        {
            **_INDEXED,
            "n_group": 1,
            "head_dim": 12,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "indexer_types": ["full", "shared", "full"],
        },
    ),
    "hyperclovax": ("hyperclovax", {}),
    "internlm3": ("internlm3", _HEAD),
    "iquestcoder": ("iquestcoder", _HEAD),
    "jais2": ("jais2", _HEAD),
    "jetmoe": ("jetmoe", {**_LOCAL_EXPERTS, "kv_channels": 8}),
    "kolibri1": ("kolibri1", {**_HEAD, **_EXPERTS}),
    "laguna": ("laguna", {**_HEAD, **_MIXED, **_EXPERTS}),
    "llama4": ("llama4_text", _LLAMA4),
    "longcat_flash": (
        "longcat_flash",
        {
            **_MLA,
            "head_dim": 4,
            "num_layers": 2,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 16,
            "n_routed_experts": 4,
            "moe_topk": 2,
            "zero_expert_num": 2,
        },
    ),
    "mellum": ("mellum", {**_HEAD, **_MIXED, **_EXPERTS}),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {
            **_HEAD,
            **_MIXED,
            "v_head_dim": 6,
            "swa_head_dim": 8,
            "swa_v_head_dim": 6,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
    ),
    "minicpm3": ("minicpm3", _MLA),
    "mistral4": ("mistral4", _DEEPSEEK),
    "modernbert_decoder": ("modernbert-decoder", {**_MIXED, **_FULL, "local_attention": 16}),
    "moshi": ("moshi", {**_HEAD, "ffn_dim": 48}),
    "phimoe": ("phimoe", {**_LOCAL_EXPERTS, "sliding_window": None}),
    "qwen2_moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 16}),
    "sarvam_mla": ("sarvam_mla", _DEEPSEEK),
    "sarvam_moe": (
        "sarvam_moe",
        {
            **_HEAD,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "solar_open": (
        "solar_open",
        {**_HEAD, **_EXPERTS, **_ONE_GROUP, "n_routed_experts": 4, "n_shared_experts": 1},
    ),
    "vaultgemma": ("vaultgemma", _GEMMA2),
    "youtu": ("youtu", _MLA),
}
# Models that take images or sound too: the settings are the text part's.
_WRAPPED: dict[str, dict[str, Any]] = {
    "apertus1p5": {},
    "aria": {},
    "aya_vision": {},
    "cohere2_vision": {},
    "cohere_compass": {"rope_parameters": {"full_attention": _MROPE["rope_parameters"]}},
    "cosmos3_edge": {**_HEAD, **_MROPE},
    "cosmos3_omni": {**_HEAD, **_MROPE},
    "deepseek_vl": {},
    "deepseek_vl_hybrid": {},
    "dots3_note": {
        **_INDEXED,
        "n_group": 1,
        "layer_types": ["sliding_attention", "indexed_attention", "indexed_attention"],
        "sliding_window": WINDOW,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "shared_experts_intermediate_size": 16,
        "head_dim": 12,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 12,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "ernie4_5_vl_moe": {
        **_MROPE,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": [16, 16],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "exaone4_5": {},
    "fuyu": {},
    "gemma3": {**_HEAD, **_MIXED, "query_pre_attn_scalar": 8},
    "gemma4": _GEMMA4,
    "gemma4_unified": _GEMMA4,
    "glm46v": {**_HEAD, **_MROPE},
    "glm4v": {**_HEAD, **_MROPE},
    "glm4v_moe": {
        **_HEAD,
        "rope_parameters": {**_MROPE["rope_parameters"], "partial_rotary_factor": 1.0},
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "glm_ocr": {**_HEAD, **_MROPE},
    "glmasr": {},
    "got_ocr2": {},
    "granite4_vision": {},
    "granite_docling": {},
    "granite_speech": {},
    "granite_speech_plus": {},
    "hyperclovax_vision_v2": {},
    "hy_v4_vl": {
        **_INDEXED,
        "n_group": 1,
        "qk_rope_head_dim": 8,
        "head_dim": 16,
        "rope_parameters": {**_MROPE["rope_parameters"], "mrope_section": [2, 1, 1]},
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full", "shared", "full"],
    },
    "idefics2": {},
    "idefics3": {},
    "internvl": {},
    "kimi_k25": _DEEPSEEK,
    "lighton_ocr": {},
    "llama4": _LLAMA4,
    "llava": {},
    "llava_next": {},
    "llava_next_video": {},
    "llava_onevision": {},
    "minimax_m3_vl": {
        **_HEAD,
        **_LOCAL_EXPERTS,
        "max_position_embeddings": SELECTED,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_block_size": 8,
        "index_topk_blocks": SELECTED // 8,
        "rotary_dim": 4,
        "dense_intermediate_size": 48,
        "shared_intermediate_size": 16,
    },
    "mistral3": {},
    "mistral_large4": {
        **_INDEXED,
        "n_group": 1,
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 1],
        "kv_source_layers": [0, 1, 0, 3],
        "indexer_types": ["full", "shared", "full", "full"],
    },
    "paddleocr_vl": {**_HEAD, **_MROPE},
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "crop_size": 28,
        },
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 8,
        },
    },
    "pp_chart2table": {},
    "qianfan_ocr": {},
    "qwen2_5_vl": _MROPE,
    "qwen2_audio": {},
    "qwen2_vl": _MROPE,
    "qwen3_asr": {},
    "qwen3_vl": {**_HEAD, **_MROPE},
    "qwen3_vl_moe": {**_HEAD, **_MROPE, **_EXPERTS},
    "smolvlm": {},
    "step3p7": {
        **_HEAD,
        **_MIXED,
        "num_sliding_attention_heads": 2,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "moe_intermediate_size": 16,
        "share_expert_dim": 16,
        "n_routed_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limits": [None, None, None, 1.0],
        "swiglu_limits_shared": [None, 1.0, None, 1.0],
    },
    "video_llama_3": {},
    "video_llava": {},
    "vipllava": {},
    "voxtral": {},
}
EXACT |= {f"{name}_on_text": (name, settings) for name, settings in _WRAPPED.items()}
# Settings of wrappers that the sizes of `_TOWER` do not fit: the wrapper's own, then its parts'.
_OUTER: dict[str, dict[str, Any]] = {
    "apertus1p5": {
        "image_token_id": 300,
        "audio_token_id": 301,
        "image_token_offset": 302,
        "audio_token_offset": 310,
        "vision_config": {
            "codebook_size": 8,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "latent_channels": 16,
        },
        "audio_config": {"codebook_size": 8, "codebook_dim": 16},
    },
    "dots3_note": {
        "vision_config": {
            "mlp_layer_types": ["dense"],
            "adapter_in_dim": 16,
            "adapter_out_dim": 32,
        },
        "audio_config": {"adapter_input_size": 16, "adapter_out_dim": 32},
    },
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [1],
        "vision_config": {"hidden_size": 64},
        "qformer_config": {"intermediate_size": 16},
    },
}

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "deepseek_v4": ("deepseek_v4", {}),
    "doge": ("doge", {}),
    "inkling2": ("inkling2_text", {}),
    "diffllama": ("diffllama", {}),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}),
    "mamba": ("mamba", {}),
    "xlstm": ("xlstm", {"num_heads": 4}),
    "rwkv": ("rwkv", {"attention_hidden_size": 32}),
    "git": ("git", {}),
    "openai-gpt": ("openai-gpt", _GPT2),
    "roformer": ("roformer", {"is_decoder": True}),
    "xglm": ("xglm", {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}),
    "recurrent_gemma": ("recurrent_gemma", {}),
    "stablelm": ("stablelm", {}),
    "nemotron": ("nemotron", {}),
    "falcon": ("falcon", {}),
    "mpt": ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4}),
}


_GATED_DELTA = {
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_KIMI = {
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 16}
_QSA = {
    "max_position_embeddings": SELECTED,
    "layer_types": [*["linear_attention"] * 3, "indexed_attention"],
    "hc_count": 2,
    "hc_lowrank": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": SELECTED,
    "indexer_compress_ratio": 4,
}
_MAMBA2 = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
_SHARED_BLOCKS = {
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "mamba_d_state": 8,
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
    **_FULL,
}
# Some layers bound time steps from below where they take a text as a whole, and not where they take
# one token, so that the two differ in transformers itself.
_NO_FLOOR = 1e-9
_CONV = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}

# The same of families of which some layers are recurrent.
HYBRID: dict[str, tuple[str, dict[str, Any]]] = {
    "bailing_hybrid": (
        "bailing_hybrid",
        {
            **_MLA,
            **_KIMI,
            "head_dim": 8,
            "num_hidden_layers": 4,
            "layer_group_size": 2,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "bamba": ("bamba", {**_MAMBA2, "attn_layer_indices": [1]}),
    "falcon_h1": ("falcon_h1", {**_MAMBA2, **_HEAD, "mamba_d_ssm": 64}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_MAMBA2,
            **_LOCAL_EXPERTS,
            "shared_intermediate_size": 16,
            "layer_types": ["mamba", "attention", "mamba"],
        },
    ),
    "jamba": (
        "jamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            **_MLA,
            **_KIMI,
            "head_dim": 8,
            "num_hidden_layers": 4,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "num_expert_group": 1,
            "topk_group": 1,
            "layer_types": [*["linear_attention"] * 3, "full_attention"],
        },
    ),
    "lara_mini": (
        "lara_mini",
        {
            **_HEAD,
            **_GATED_DELTA,
            **_SHARED_EXPERT,
            "layer_types": [
                "linear_attention",
                "sliding_attention",
                "linear_attention",
                "full_attention",
            ],
            "sliding_window": WINDOW,
        },
    ),
    "lfm2": ("lfm2", {**_CONV, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2_moe", {**_CONV, **_EXPERTS, "num_dense_layers": 1}),
    "lfm3": ("lfm3", _CONV),
    "minimax": (
        "minimax",
        {
            **_HEAD,
            **_LOCAL_EXPERTS,
            "block_size": 8,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **_HEAD,
            "layers_block_type": ["mamba", "attention", "moe", "mamba", "mlp"],
            "time_step_min": _NO_FLOOR,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "olmo_hybrid": ("olmo_hybrid", _GATED_DELTA),
    "qwen3_5": ("qwen3_5_text", {**_HEAD, **_GATED_DELTA}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**_HEAD, **_GATED_DELTA, **_SHARED_EXPERT}),
    "qwen3_next": ("qwen3_next", {**_HEAD, **_GATED_DELTA, **_SHARED_EXPERT}),
    "zamba": ("zamba", {**_SHARED_BLOCKS, "mamba_dt_rank": 4, "n_mamba_heads": 2}),
    "zamba2": (
        "zamba2",
        {
            **_SHARED_BLOCKS,
            "time_step_min": _NO_FLOOR,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "chunk_size": 8,
            "num_mem_blocks": 1,
            "adapter_rank": 4,
        },
    ),
    "zaya": (
        "zaya",
        {
            "num_hidden_layers": 2,
            **_HEAD,
            **_EXPERTS,
            "num_experts_per_tok": 1,
            "router_hidden_size": 16,
        },
    ),
    "glm5_next_on_text": (
        "glm5_next",
        {
            **_INDEXED,
            "n_group": 1,
            "qk_rope_head_dim": 0,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "indexed_attention"] * 2,
            "indexer_types": ["full", "full", "full", "full"],
            "mlp_layer_types": ["dense", "sparse"] * 2,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "index_kpool": 4,
        },
    ),
    "qwen4_exp": (
        "qwen4_exp_text",
        {
            **_HEAD,
            **_GATED_DELTA,
            **_SHARED_EXPERT,
            **_QSA,
        },
    ),
    "qwen4_exp_on_text": (
        "qwen4_exp",
        {**_HEAD, **_GATED_DELTA, **_SHARED_EXPERT, **_QSA, **_MROPE},
    ),
    "qwen3_5_on_text": ("qwen3_5", {**_HEAD, **_GATED_DELTA, **_MROPE}),
    "qwen3_5_moe_on_text": ("qwen3_5_moe", {**_HEAD, **_GATED_DELTA, **_SHARED_EXPERT, **_MROPE}),
    "lfm2_vl_on_text": ("lfm2_vl", _CONV),
    "lfm3_vl_on_text": ("lfm3_vl", _CONV),
}


# Families whose configurations here need the names or the defaults of newer versions.
_SINCE = dict.fromkeys(("glm5_next", "granite4_vision", "qwen4_exp", "qwen4_exp_text"), "5.23")


def known(model_type: str) -> bool:
    """Whether the installed transformers has the model type, as it is used here."""
    is_new = Version(transformers.__version__) >= Version(_SINCE.get(model_type, "0"))
    return model_type in CONFIG_MAPPING and is_new


def config_of(model_type: str, **settings: Any) -> Any:
    """Return a tiny configuration; settings override the base, of a wrapper those of its text."""
    settings = copy.deepcopy(settings)  # a configuration changes the dicts that it is given
    if "text_config" in CONFIG_MAPPING[model_type].sub_configs:
        return _wrapper(model_type, settings)
    # Families that spell sizes their own way refuse or ignore the common names.
    own_names = {"n_embd", "n_layer", "d_model"} & set(settings)
    base = {} if own_names else _BASE
    small = {key: _BASE[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    return AutoConfig.for_model(model_type, **{**small, **base, **settings})


def _wrapper(model_type: str, settings: dict[str, Any]) -> Any:
    """A tiny configuration with a text part, made by the settings, and towers for the rest."""
    full = CONFIG_MAPPING[model_type]()
    parts: dict[str, Any] = {}
    for name in full.sub_configs:
        part = full.to_dict().get(name)
        if isinstance(part, dict):
            sizes = {**_BASE, **settings} if name == "text_config" else _TOWER
            own = {"model_type": part["model_type"]} if "model_type" in part else {}
            known = sizes if name == "text_config" else {k: sizes[k] for k in sizes if k in part}
            parts[name] = {**known, **own}
    outer = {"tie_word_embeddings": False, **copy.deepcopy(_OUTER.get(model_type, {}))}
    for name, part in parts.items():
        part.update(outer.pop(name, {}))
    return AutoConfig.for_model(model_type, **parts, **outer)


def save_tiny_model(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Path:
    """Write a checkpoint with random weights and a tokenizer to a directory and return it."""
    model_type, own = (EXACT | HYBRID)[family]
    config = config_of(model_type, **{**own, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # for what is not spread below
        model = auto_class(config).from_config(config)
    spread_weights(model, seed)
    model.to(dtype).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def tiny_module(family: str = "llama", seed: int = 0, **settings: Any) -> PreTrainedModel:
    """Return a module with random weights."""
    module: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(family, **settings))
    spread_weights(module, seed)
    return module


def save_drawn(model: Any, directory: Path, seed: int = 7, chat_template: str | None = None) -> Any:
    """Draw the weights of a model, write it with a tokenizer to a directory, and return it."""
    spread_weights(model, seed)
    model.save_pretrained(directory)
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    return model.eval()


@torch.no_grad()
def spread_weights(model: torch.nn.Module, seed: int) -> None:
    """Draw every weight anew, wide enough that different contexts give different next tokens."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim < 2:  # norms, biases, sinks: keep what the family starts from
            weight.add_(0.2 * noise)
        elif "embed" in name or "wte" in name or "wpe" in name:
            weight.copy_(noise)
        else:
            weight.copy_(1.5 * noise / weight.shape[-1] ** 0.5)


@functools.cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of VOCAB_SIZE tokens: <s> 0, </s> 1, <pad> 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
