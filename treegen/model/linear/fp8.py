"""Linear layers in FP8: weights with a scale per output, inputs rounded with a scale per row.

A number in e4m3 has three bits of mantissa, so one product is off by about 4% of its spread; errors
of rows and outputs average out over a layer. A GPU multiplies FP8 twice as fast as bfloat16 and
reads half the bytes. Other devices multiply the same rounded numbers in float32, slowly.

Legend: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from treegen.errors import InputError
from treegen.model.latent import is_latent_layer
from treegen.ops.attention.types import E4M3_MAX, FP8

MIN_AMAX: Final = 1e-12  # a row of zeros must not be divided by zero
MULTIPLE: Final = 16  # the GPU's product needs multiples of this many inputs and outputs
_CAPABILITY: Final = (8, 9)
_CHUNK_NUMBERS: Final = 2**24  # numbers of a matrix quantized at once
_CAST_TO_WEIGHT: Final = ("indexer.weights_proj",)
"""Layers whose inputs transformers casts to the type of their weights. Some families do not list
them among the modules that stay in float32."""


class Fp8Linear(nn.Linear):
    """A linear layer whose weight [out_features, in_features] is in FP8."""

    scale: nn.Parameter
    """[out_features], float32, the scale of each output's weights."""
    rounds_inputs = True
    """Whether inputs are rounded to FP8 too."""

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ weight.T + bias, [..., out_features], in the type of the input."""
        if not self.rounds_inputs:
            weight = (self.weight.to(torch.float32) * self.scale[:, None]).to(input.dtype)
            return linear(input, weight, self.bias)
        return fp8_linear(input, self.weight, self.scale, self.bias)


@contextlib.contextmanager
def disable_input_rounding(module: nn.Module) -> Iterator[None]:
    """While open, inputs are not rounded to FP8.

    A rounded input may jump when one bit of it changes. In a deep model such jumps hide whether two
    ways to compute attention agree.
    """
    parts: list[Any] = [part for part in module.modules() if hasattr(type(part), "rounds_inputs")]
    for part in parts:
        part.rounds_inputs = False
    try:
        yield
    finally:
        for part in parts:
            del part.rounds_inputs


def check_device(device: torch.device, option: str) -> None:
    """Check that a device computes with FP8, or is a CPU, which does so slowly.

    Args:
        device: The device.
        option: The name of the option that needs FP8, for the message.

    Raises:
        InputError: the device is a GPU that cannot multiply FP8.
    """
    if device.type == "cuda" and not can_multiply(device):
        raise InputError(
            f"{torch.cuda.get_device_name(device)} does not support FP8, which requires compute "
            f"capability {_CAPABILITY[0]}.{_CAPABILITY[1]}; remove {option}"
        )


def can_multiply(device: torch.device) -> bool:
    """Return whether a device multiplies FP8 fast; assumed of CUDA devices if none is available."""
    if device.type != "cuda":
        return False
    has_gpu = torch.cuda.is_available()
    return not has_gpu or torch.cuda.get_device_capability(device) >= _CAPABILITY


def iter_fp8_linears(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the name and module of each linear layer that may run in FP8.

    Excluded are the output matrix, routers of experts, layers whose sizes are not multiples of 16,
    layers that the family keeps in float32, and up-projections of latents, because queries and
    results are multiplied by these. Fused experts are handled by
    `treegen.model.linear.fp8_experts`.
    """
    head, num_experts, float32_names = None, None, set(_CAST_TO_WEIGHT)
    if isinstance(module, PreTrainedModel):
        head, config = module.get_output_embeddings(), module.config.get_text_config(decoder=True)
        num_experts = getattr(config, "num_experts", getattr(config, "num_local_experts", None))
        float32_names |= {*(module._keep_in_fp32_modules or ())}
        float32_names |= {*(module._keep_in_fp32_modules_strict or ())}
    ups = [part.kv_b_proj for part in module.modules() if is_latent_layer(part)]
    for name, part in module.named_modules():
        if type(part) is not nn.Linear or part is head or part.out_features == num_experts:
            continue
        if any(part is up for up in ups):
            continue
        if any(f".{float32_name}." in f".{name}.weight." for float32_name in float32_names):
            continue
        if not any(size % MULTIPLE for size in part.weight.shape):
            yield name, part


def quantize_linears(module: nn.Module, device: torch.device) -> None:
    """Turn the linear layers that may run in FP8 into FP8 on a device.

    Matrices on another device are moved in pieces, so the device only needs memory for FP8.
    """
    for _, part in iter_fp8_linears(module):
        replace_weight(part, *quantize_in_chunks(part.weight.data, device))


def quantize_in_chunks(weight: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Quantize rows as `quantize_rows` does, for a matrix [N, K] that may be on another device."""
    rounded = torch.empty(weight.shape, dtype=FP8, device=device)
    scale_N = torch.empty(len(weight), dtype=torch.float32, device=device)
    step = max(_CHUNK_NUMBERS // weight.shape[1], 1)
    for at in range(0, len(weight), step):
        rows = slice(at, at + step)
        rounded[rows], scale_N[rows] = quantize_rows(weight[rows].to(device))
    return rounded, scale_N


def replace_weight(part: nn.Linear, weight: Tensor, scale_N: Tensor) -> None:
    """Turn a linear layer into an `Fp8Linear`.

    Args:
        part: The layer, which is changed.
        weight: The FP8 weight [N, K].
        scale_N: The scale of each output, float32 [N].
    """
    part.weight = nn.Parameter(weight, requires_grad=False)
    part.__class__ = Fp8Linear
    cast(Fp8Linear, part).scale = nn.Parameter(scale_N, requires_grad=False)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [N, K] rounded to FP8, and the scale of each row [N] in float32."""
    rows = weight.float()
    scale_N = rows.abs().amax(dim=-1).clamp(min=MIN_AMAX) / E4M3_MAX
    return (rows / scale_N[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(FP8), scale_N


def fp8_linear(input: Tensor, weight: Tensor, scale_N: Tensor, bias: Tensor | None) -> Tensor:
    """Return input [..., K], rounded to FP8, times the transpose of an FP8 weight, [..., N].

    Args:
        input: Inputs [..., K]; the result has their type.
        weight: The FP8 weight [N, K].
        scale_N: The scale of each output, float32 [N].
        bias: Bias [N]; None for none.
    """
    rows, scale_M = quantize_rows(input.reshape(-1, input.shape[-1]))
    return scaled_product(rows, scale_M, weight, scale_N, bias, like=input)


def scaled_product(
    rows: Tensor,
    scale_M: Tensor,
    weight: Tensor,
    scale_N: Tensor,
    bias: Tensor | None,
    *,
    like: Tensor,
) -> Tensor:
    """Return FP8 rows [M, K] times the transpose of an FP8 weight [N, K], as [..., N].

    Args:
        rows: FP8 rows [M, K].
        scale_M: The scale of each row, float32 [M].
        weight: The FP8 weight [N, K].
        scale_N: The scale of each output, float32 [N].
        bias: Bias [N]; None for none.
        like: A tensor [..., K] with M rows; the result has its type and leading sizes.
    """
    if rows.device.type == "cuda":
        out = torch._scaled_mm(
            rows,
            weight.t(),
            scale_M[:, None],
            scale_N[None],
            out_dtype=like.dtype if like.dtype != torch.float32 else torch.bfloat16,
            use_fast_accum=True,
        ).to(like.dtype)
    else:
        out = (linear(rows.float(), weight.float()) * scale_M[:, None] * scale_N).to(like.dtype)
    out = out if bias is None else out + bias
    return out.reshape(*like.shape[:-1], len(scale_N))
