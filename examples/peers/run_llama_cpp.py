"""Run a job by llama.cpp: `python examples/peers/run_llama_cpp.py JOB DIR`.

It runs llama.cpp's server as the package xllamacpp has it (`pip install xllamacpp gguf
safetensors`). Weights, of Llama's kind only, are written as a GGUF file of 32 bits beside the
checkpoint. The server computes a prompt once for its samples (`n_cmpl`) in one cache for all rows.
"""

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp
from safetensors.numpy import load_file
from workload import Job, arguments, find_max_sizes, jobs_of, measure, run_job, versions_of

_ROWS = 256  # llama.cpp's limit of sequences
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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


def write_gguf(source: Path, file: Path) -> None:
    """Write a checkpoint of Llama's kind, in float32, with a vocabulary made up."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        sys.exit(
            "this program writes GGUF files only for models of type llama, got "
            f"{config['model_type']}"
        )
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (config["vocab_size"] - 3)
    writer.add_token_types(kinds)
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for name, value in load_file(source / "model.safetensors").items():
        for part, field in heads.items():
            if part in name:  # rows in the order in which llama.cpp turns them by position
                turned = value.reshape(config[field], 2, -1, value.shape[-1])
                value = turned.swapaxes(1, 2).reshape(value.shape)
        stem, prefix = name.removesuffix(".weight"), ""
        if stem.startswith("model.layers."):
            layer, _, stem = stem.removeprefix("model.layers.").partition(".")
            prefix = f"blk.{layer}."
        array = np.ascontiguousarray(value, dtype=np.float32)
        writer.add_tensor(f"{prefix}{_NAMES[stem]}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def start(jobs: list[Job], file: Path, threads: int) -> tuple[Any, dict[str, Any]]:
    """Start the server, and return it with its settings."""
    max_rows, longest = find_max_sizes(jobs)
    rows = min(max_rows, _ROWS)
    settings = {
        "kv_unified": True,
        "cache_prompt": True,
        "n_parallel": rows,
        "n_ctx": rows * longest,
        "n_gpu_layers": -1,
    }
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    for name, value in settings.items():
        setattr(params, name, value)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params), settings | {"n_threads": threads}


def main() -> None:
    """Start the server, run the job and print the table."""
    parser = arguments()
    parser.set_defaults(dtype="float32")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    jobs = jobs_of(options.jobs, options.tokens, kinds=("draw",))
    file = options.checkpoint / "model-f32.gguf"
    if not file.exists():
        write_gguf(options.checkpoint, file)
    server, settings = start(jobs, file, options.threads)

    def ask(prompt: list[int], samples: int, new: int) -> list[list[int]]:
        body = {
            "prompt": prompt,
            "n_cmpl": samples,
            "n_predict": new,
            "ignore_eos": True,
            "cache_prompt": True,
            "temperature": 1.0,
            "samplers": ["temperature"],
            "return_tokens": True,
        }
        request = urllib.request.Request(
            f"{server.listening_address}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as reply:
            got = json.load(reply)
        return [output["tokens"] for output in (got if isinstance(got, list) else [got])]

    def generate(prompts: list[list[int]], samples: int, new: int) -> list[list[list[int]]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: ask(prompt, samples, new), prompts))

    measure(
        "llama.cpp",
        versions_of("xllamacpp"),
        settings,
        jobs,
        options,
        lambda job, run: run_job(job, run, generate),
    )


if __name__ == "__main__":
    main()
