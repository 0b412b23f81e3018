"""Models to measure: random weights in the shapes of well-known models, or a checkpoint.

Speed does not depend on the values of the weights, so none are downloaded. Tokens come from a
byte-level tokenizer made in memory; most ids of a large vocabulary have no text in it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from treegen.common.files import read_text
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
    """The sizes of a decoder-only transformer with gated feed-forward layers."""

    name: str
    model_type: str
    """Transformers' name of the architecture."""
    hidden: int
    """Width of the model."""
    intermediate: int
    """Width of the feed-forward layers."""
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool = False
    """Whether the output matrix is the embedding."""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further settings of the configuration, for other kinds of models."""

    @property
    def num_weights(self) -> int:
        """Number of weights in its matrices."""
        if self.settings:
            return _num_weights(self)
        heads = 2 * (self.q_heads + self.kv_heads) * self.head_dim
        layer = self.hidden * (heads + 3 * self.intermediate)
        return self.layers * layer + (1 if self.tied else 2) * self.vocab_size * self.hidden


def _read_shapes() -> dict[str, Shape]:
    rows = json.loads(read_text(Path(__file__).with_name("shapes.json")))
    return {row["name"]: Shape(**row) for row in rows}


SHAPES: Final = _read_shapes()


def shape_of(name: str) -> Shape:
    """Return the shape with a name.

    Raises:
        InputError: no shape has the name.
    """
    if name not in SHAPES:
        raise InputError(f"{arg('shape')} must be one of {', '.join(SHAPES)}, got {name!r}")
    return SHAPES[name]


def byte_tokenizer() -> Any:
    """Return a tokenizer whose tokens are <s>, </s> and the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: i + 2 for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def load_or_build(
    shape: str | None, model: str | None, *, layers: int | None = None, **kind: Any
) -> tuple[Model, Any]:
    """Return the model of a checkpoint or of a shape, and its tokenizer.

    Args:
        shape: The name of a shape; None for the checkpoint.
        model: The directory or hub name of a checkpoint; None for the shape.
        layers: Layers of the shape; None for all.
        kind: How the model is made, as for `build_model`.

    Raises:
        InputError: no shape has the name, or the dtype or the device cannot be used.
        ModelError: the checkpoint or its tokenizer cannot be loaded.
        CapacityError: the weights do not fit.
    """
    if model is None:
        sizes = shape_of(shape or "")
        return build_model(sizes if layers is None else replace(sizes, layers=layers), **kind)
    from treegen.model.options import EngineOptions
    from treegen.model.rank_processes import load_from_options
    from treegen.model.tokenizer import load_tokenizer

    kind["tensor_parallel_size"] = kind.pop("ranks", 1)
    tokenizer = load_tokenizer(model)
    return load_from_options(EngineOptions(model=model, **kind)), tokenizer


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
        quantization: Quantization of the weights, as for `load_model`. Default: None.
        kv_cache_dtype: Type of keys and values in the cache, as for `load_model`.

    Raises:
        CapacityError: the weights do not fit.
        InputError: the dtype or the device cannot be used, or `quantization` is set with several
            ranks.
    """
    from treegen.model.rank_processes import load_with_ranks

    if ranks > 1:
        if quantization not in (None, "none"):
            raise InputError(
                f"quantization {quantization} is not supported for a shape on {ranks} GPUs; use "
                "one GPU, or no quantization"
            )
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
        **shape.settings,
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
    from treegen.model.linear.fp4_checkpoint import (
        MXFP4_BYTES_PER_NUMBER,
        replace_with_empty_fp4,
        replace_with_empty_mxfp4,
    )
    from treegen.model.load import from_module
    from treegen.model.memory import empty_device_cache

    config = _config(shape)
    target = resolve_device(device)
    kind = resolve_dtype(dtype, config, target)
    empty_device_cache(target)
    size, free = shape.num_weights * kind.itemsize, free_bytes(target)
    size //= ranks.size if ranks is not None else 1
    if quantization == "mxfp4" and shape.model_type != "gpt_oss":
        raise InputError(
            f"mxfp4 is supported only for gpt-oss shapes, got {shape.name}; choose another --shape"
        )
    bytes_per_number = {"fp8": 1.0, "mxfp4": MXFP4_BYTES_PER_NUMBER, "nvfp4": 9 / 16}
    if quantization in bytes_per_number:  # all weights except those of the vocabulary
        size = int(shape.num_weights * bytes_per_number[quantization])
        size += shape.vocab_size * shape.hidden * 4
    if size > free:
        raise CapacityError(
            f"the weights of {shape.name} need {format_bytes(size)} in {kind}, but {target} has "
            f"only {format_bytes(free)} free; choose a smaller --shape"
        )
    with torch.random.fork_rng([target] if target.type == "cuda" else []):
        torch.manual_seed(0)
        is_unsplit = ranks is None and quantization is None
        with torch.device(target if is_unsplit else "meta"):
            module = AutoModelForCausalLM.from_config(config, dtype=kind)
        if quantization == "mxfp4":
            with torch.device("meta"):
                replace_with_empty_mxfp4(module)
        elif quantization == "nvfp4":
            replace_with_empty_fp4(module)
        if not is_unsplit:
            module = _fill_random(module, target, ranks, quantization)
        if any(weight.dim() == 3 for weight in module.parameters()):
            # Similar embeddings would route all rows to the same experts.
            module.get_input_embeddings().weight.data.normal_()
    return from_module(module, name=shape.name, kv_cache_dtype=kv_cache_dtype, ranks=ranks)


def _fill_random(
    module: Any, device: torch.device, ranks: Ranks | None, quantization: str | None
) -> Any:
    """Return a module without data, or a rank's part of it, filled with random weights.

    Ranks need not share the weights. Each part is quantized as soon as it is made, so a model that
    fits in 8 bits need not fit in 16.
    """
    import torch

    from treegen.model.linear.fp4 import Fp4Experts, Fp4Linear
    from treegen.model.linear.fp4_checkpoint import fill_random_fp4
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
        if isinstance(part, Fp4Linear | Fp4Experts):
            fill_random_fp4(part)
            continue
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
