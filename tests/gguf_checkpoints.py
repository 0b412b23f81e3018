"""Tiny GGUF files, written with the gguf package from tiny checkpoints."""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER[part]}.{kind}"


def _turned(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order in which llama.cpp turns them by position."""
    shape = (heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return value.reshape(shape).swapaxes(1, 2).reshape(value.shape)


def write_gguf(
    source: Path, file: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
) -> None:
    """Write a tiny checkpoint of llama or qwen2 as a GGUF file; matrices are stored as `kind`."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(file, config["model_type"])
    writer.add_name("tiny")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    _write_tokenizer(writer, json.loads((source / "tokenizer.json").read_text())["model"])
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for name, value in load_file(source / "model.safetensors").items():
        of = [config[field] for part, field in heads.items() if part in name]
        if of and config["model_type"] == "llama":
            value = _turned(value, of[0])
        value = np.ascontiguousarray(value, dtype=np.float32)
        if value.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(_gguf_name(name), value)
        else:
            packed = gguf.quants.quantize(value, kind)
            writer.add_tensor(_gguf_name(name), packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_tokenizer(writer: gguf.GGUFWriter, model: dict[str, object]) -> None:
    vocabulary = model["vocab"]
    merges = model["merges"]
    assert isinstance(vocabulary, dict) and isinstance(merges, list)
    tokens = sorted(vocabulary, key=lambda token: int(vocabulary[token]))
    special = {"<s>", "</s>", "<pad>"}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens]
    )
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else str(m) for m in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
