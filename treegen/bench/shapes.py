"""Models to measure: random weights in the shapes of well-known models, or a checkpoint.

Speed does not depend on the values of the weights, so none are downloaded. Tokens come from a
byte-level tokenizer made in memory; most ids of a large vocabulary have no text in it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from treegen.common.formatting import format_bytes
from treegen.errors import CapacityError, InputError, arg

if TYPE_CHECKING:
    import torch

    from treegen.model.model import Model
    from treegen.model.parallel.ranks import Ranks

# The context of every shape, long enough for all workloads. Timings do not depend on positions.
_CONTEXT: Final = 65_536


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder-only transformer with gated feed-forward layers.

    model_type: transformers' name of the architecture.
    hidden, intermediate: widths of the model and of its feed-forward layers.
    tied: whether the output matrix is the embedding.
    settings: further settings of the configuration, for other kinds of models.
    """

    name: str
    model_type: str
    hidden: int
    intermediate: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False
    settings: tuple[tuple[str, int | str | tuple[str, ...] | None], ...] = ()

    @property
    def num_weights(self) -> int:
        """Number of weights in its matrices."""
        if self.settings:
            return _num_weights(self)
        heads = 2 * (self.q_heads + self.kv_heads) * self.head_dim
        layer = self.hidden * (heads + 3 * self.intermediate)
        return self.layers * layer + (1 if self.tied else 2) * self.vocab_size * self.hidden


_DELTA: Final = (
    ("linear_num_key_heads", 16),
    ("linear_num_value_heads", 32),
    ("linear_key_head_dim", 128),
    ("linear_value_head_dim", 128),
)
_MLA: Final = (
    ("kv_lora_rank", 512),
    ("qk_rope_head_dim", 64),
    ("n_routed_experts", 64),
    ("first_k_dense_replace", 1),
    ("n_group", 1),
    ("topk_group", 1),
)
_MAMBA2: Final = (
    ("mamba_d_state", 128),
    ("mamba_d_head", 64),
    ("mamba_n_groups", 1),
    ("num_local_experts", 0),
    ("num_experts_per_tok", 0),
)
SHAPES: Final = {
    shape.name: shape
    for shape in (
        Shape("tiny", "llama", 64, 192, 2, 8, 2, 8, 512),
        Shape("llama2-7b", "llama", 4096, 11_008, 32, 32, 32, 128, 32_000),
        Shape("codellama-7b", "llama", 4096, 11_008, 32, 32, 32, 128, 32_016),
        Shape("codellama-13b", "llama", 5120, 13_824, 40, 40, 40, 128, 32_016),
        Shape("yi-6b", "llama", 4096, 11_008, 32, 32, 4, 128, 64_000),
        Shape("llama3-8b", "llama", 4096, 14_336, 32, 32, 8, 128, 128_256),
        Shape("llama3-70b", "llama", 8192, 28_672, 80, 64, 8, 128, 128_256),
        Shape("llama3.2-1b", "llama", 2048, 8192, 16, 32, 8, 64, 128_256, tied=True),
        Shape("smollm2-360m", "llama", 960, 2560, 32, 15, 5, 64, 49_152, tied=True),
        Shape("qwen3-0.6b", "qwen3", 1024, 3072, 28, 16, 8, 128, 151_936, tied=True),
        Shape("qwen3-4b", "qwen3", 2560, 9728, 36, 32, 8, 128, 151_936, tied=True),
        # Three of four layers use the gated delta rule.
        Shape(
            "tiny-delta",
            "qwen3_5_moe_text",
            64,
            64,
            4,
            4,
            2,
            16,
            512,
            settings=(
                ("linear_num_key_heads", 2),
                ("linear_num_value_heads", 4),
                ("linear_key_head_dim", 16),
                ("linear_value_head_dim", 16),
                ("num_experts", 4),
                ("num_experts_per_tok", 2),
                ("moe_intermediate_size", 32),
                ("shared_expert_intermediate_size", 32),
            ),
        ),
        Shape(
            "qwen3.5-4b",
            "qwen3_5_text",
            2560,
            9216,
            32,
            16,
            4,
            256,
            248_320,
            tied=True,
            settings=_DELTA,
        ),
        Shape("qwen3.5-9b", "qwen3_5_text", 4096, 12_288, 32, 16, 4, 256, 248_320, settings=_DELTA),
        Shape(
            "qwen3.6-35b-a3b",
            "qwen3_5_moe_text",
            2048,
            6144,
            40,
            16,
            2,
            256,
            248_320,
            settings=(
                *_DELTA,
                ("num_experts", 256),
                ("num_experts_per_tok", 8),
                ("moe_intermediate_size", 512),
                ("shared_expert_intermediate_size", 512),
            ),
        ),
        # Mixtures of experts in every layer.
        Shape(
            "qwen3-30b-a3b",
            "qwen3_moe",
            2048,
            6144,
            48,
            32,
            4,
            128,
            151_936,
            settings=(
                ("num_experts", 128),
                ("num_experts_per_tok", 8),
                ("moe_intermediate_size", 768),
                ("norm_topk_prob", True),
            ),
        ),
        Shape(
            "gpt-oss-20b",
            "gpt_oss",
            2880,
            2880,
            24,
            64,
            8,
            64,
            201_088,
            settings=(
                ("num_local_experts", 32),
                ("num_experts_per_tok", 4),
            ),
        ),
        Shape(
            "gpt-oss-120b",
            "gpt_oss",
            2880,
            2880,
            36,
            64,
            8,
            64,
            201_088,
            settings=(
                ("num_local_experts", 128),
                ("num_experts_per_tok", 4),
            ),
        ),
        # Latent attention.
        Shape(
            "tiny-mla",
            "deepseek_v3",
            64,
            96,
            2,
            4,
            4,
            16,
            512,
            settings=(
                ("q_lora_rank", 32),
                ("kv_lora_rank", 32),
                ("qk_rope_head_dim", 16),
                ("qk_nope_head_dim", 16),
                ("v_head_dim", 16),
                ("n_routed_experts", 4),
                ("num_experts_per_tok", 2),
                ("n_shared_experts", 1),
                ("moe_intermediate_size", 32),
                ("first_k_dense_replace", 1),
                ("n_group", 1),
                ("topk_group", 1),
            ),
        ),
        Shape(
            "deepseek-v2-lite",
            "deepseek_v2",
            2048,
            10_944,
            27,
            16,
            16,
            64,
            102_400,
            settings=(
                *_MLA,
                ("q_lora_rank", None),
                ("qk_nope_head_dim", 128),
                ("v_head_dim", 128),
                ("num_experts_per_tok", 6),
                ("n_shared_experts", 2),
                ("moe_intermediate_size", 1408),
                ("topk_method", "greedy"),
            ),
        ),
        Shape(
            "glm-4.7-flash",
            "glm4_moe_lite",
            2048,
            10_240,
            47,
            20,
            20,
            64,
            154_880,
            settings=(
                *_MLA,
                ("q_lora_rank", 768),
                ("qk_nope_head_dim", 192),
                ("v_head_dim", 256),
                ("num_experts_per_tok", 4),
                ("n_shared_experts", 1),
                ("moe_intermediate_size", 1536),
            ),
        ),
        # Nine of ten layers are Mamba2 layers.
        Shape(
            "tiny-mamba2",
            "granitemoehybrid",
            64,
            64,
            4,
            4,
            2,
            16,
            512,
            tied=True,
            settings=(
                *_MAMBA2,
                ("mamba_n_heads", 8),
                ("mamba_d_head", 16),
                ("mamba_d_state", 16),
                ("shared_intermediate_size", 64),
                ("layer_types", ("mamba", "attention", "mamba", "mamba")),
            ),
        ),
        Shape(
            "granite-4.0-h-micro",
            "granitemoehybrid",
            2048,
            8192,
            40,
            32,
            8,
            64,
            100_352,
            tied=True,
            settings=(
                *_MAMBA2,
                ("mamba_n_heads", 64),
                ("shared_intermediate_size", 8192),
                (
                    "layer_types",
                    (
                        *["mamba"] * 5,
                        *["attention", *["mamba"] * 9] * 3,
                        "attention",
                        *["mamba"] * 4,
                    ),
                ),
            ),
        ),
    )
}


def shape_of(name: str) -> Shape:
    """Return the shape with a name.

    Raises:
        InputError: no shape has the name.
    """
    if name not in SHAPES:
        raise InputError(f"{arg('shape')} must be one of {', '.join(SHAPES)}, got {name!r}")
    return SHAPES[name]


def build_model(
    shape: Shape,
    *,
    dtype: str = "auto",
    device: str = "auto",
    ranks: int = 1,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> tuple[Model, Any]:
    """Return a model of a shape with random weights on the device, and its tokenizer.

    Args:
        shape: The shape.
        dtype: The type of the weights; "auto" is bfloat16 on a GPU and float32 on a CPU.
        device: The device; "auto" is a GPU if there is one.
        ranks: GPUs that compute the model together. Default: 1.
        quantization: Quantisation of the weights, as for `load_model`. Default: None.
        kv_cache_dtype: Type of keys and values in the cache, as for `load_model`.

    Raises:
        CapacityError: the weights do not fit.
        InputError: the dtype or the device cannot be used.
    """
    from treegen.bench.tiny import byte_tokenizer
    from treegen.model.rank_processes import load_with_ranks

    if ranks > 1:
        make = functools.partial(_build, shape, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
        return load_with_ranks(make, ranks, device), byte_tokenizer()
    model = _build(
        shape, dtype=dtype, device=device, quantization=quantization, kv_cache_dtype=kv_cache_dtype
    )
    return model, byte_tokenizer()


def _config(shape: Shape) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        shape.model_type,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=shape.tied,
        bos_token_id=0,
        eos_token_id=1,
        **{name: [*each] if isinstance(each, tuple) else each for name, each in shape.settings},
    )


@functools.cache
def _num_weights(shape: Shape) -> int:
    """Return the number of weights in the matrices of a shape that is not a plain decoder."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(_config(shape))
    return sum(weight.numel() for weight in module.parameters() if weight.dim() > 1)


def _build(
    shape: Shape,
    *,
    dtype: str,
    device: str | torch.device,
    ranks: Ranks | None = None,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
) -> Model:
    """Return a model of a shape, or one rank's part of it."""
    import torch
    from transformers import AutoModelForCausalLM

    from treegen.bench.timing import free_bytes
    from treegen.model.config import resolve_device, resolve_dtype
    from treegen.model.linear.mxfp4 import BYTES_PER_NUMBER, replace_with_empty
    from treegen.model.load import from_module
    from treegen.model.memory import empty_device_cache

    config = _config(shape)
    target = resolve_device(device)
    kind = resolve_dtype(dtype, config, target)
    empty_device_cache(target)
    size, free = shape.num_weights * kind.itemsize, free_bytes(target)
    size //= ranks.size if ranks is not None else 1
    if quantization == "fp8":
        size = shape.num_weights + shape.vocab_size * shape.hidden * 4  # but for the vocabulary's
    elif quantization == "mxfp4":
        if shape.model_type != "gpt_oss":
            raise InputError(
                f"mxfp4 is for shapes of gpt-oss, and {shape.name} is none; choose one of those"
            )
        size = int(shape.num_weights * BYTES_PER_NUMBER) + shape.vocab_size * shape.hidden * 4
    if size > free:
        raise CapacityError(
            f"the weights of {shape.name} take {format_bytes(size)} in {kind}, and {target} has "
            f"{format_bytes(free)} free; choose a smaller --shape"
        )
    with torch.random.fork_rng([target] if target.type == "cuda" else []):
        torch.manual_seed(0)
        whole = ranks is None and quantization is None
        with torch.device(target if whole else "meta"):
            module = AutoModelForCausalLM.from_config(config, dtype=kind)
        if quantization == "mxfp4":
            with torch.device("meta"):
                replace_with_empty(module)
        if not whole:
            module = _fill_random(module, target, ranks, quantization)
        if any(weight.dim() == 3 for weight in module.parameters()):
            # Similar embeddings would route all rows to the same experts.
            module.get_input_embeddings().weight.data.normal_()
    return from_module(module, name=shape.name, kv_cache_dtype=kv_cache_dtype, ranks=ranks)


def _fill_random(
    module: Any, device: torch.device, ranks: Ranks | None, quantization: str | None
) -> Any:
    """Return a module without data, or a rank's part of it, filled with random weights.

    Ranks need not share the weights. Each part is quantised as soon as it is made, so a model that
    fits in 8 bits need not fit in 16.
    """
    import torch

    from treegen.model.linear.fp8_experts import quantize_matrices
    from treegen.model.parallel.shards import shard, tie_head

    if ranks is not None:
        shard(module, ranks.rank, ranks.size)
    with torch.device(device):
        if module.model.rotary_emb is not None:
            module.model.rotary_emb = type(module.model.rotary_emb)(config=module.config)
    head = module.get_output_embeddings()
    for part in module.modules():
        if not any(weight.is_meta for weight in part.parameters(recurse=False)):
            continue
        part.to_empty(device=device, recurse=False)
        for weight in part.parameters(recurse=False):
            if weight.dtype == torch.uint8:  # scales are [E, N, groups], numbers have one more
                weight.data.random_(*((114, 118) if weight.dim() == 3 else (0, 256)))
            elif weight.dim() > 1:
                weight.data.normal_(0.0, 0.02)
            else:
                weight.data.fill_(1.0)
        # Submodules come after their module.
        is_whole = not any(weight.is_meta for weight in part.parameters())
        if quantization == "fp8" and part is not head and is_whole:
            quantize_matrices(part, device)
            if device.type == "cuda":
                # Release the 16-bit matrix: a smaller one in its place would waste the rest.
                torch.cuda.empty_cache()
    module.tie_weights()
    if ranks is not None:
        tie_head(module, ranks.rank, ranks.size)
    return module
