"""The sustained rates of a device, from which rooflines are computed; measured in the same run.

Legend: H heads, L query rows, S keys, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from treegen.bench.timing import free_bytes, time_sustained
from treegen.errors import CapacityError
from treegen.model.memory import empty_device_cache
from treegen.ops.attention.types import FP8


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Sustained rates of one device in one dtype."""

    dtype: str
    """The type, such as "bfloat16"."""
    matmul: float
    """FLOP/s of a large matrix product."""
    attention: float
    """FLOP/s of dense attention by torch's fastest kernel."""
    memory: float
    """Bytes/s of a large copy, counting bytes read and bytes written."""
    attention_kernel: str
    """The name of that kernel."""
    fp8: float | None = None
    """FLOP/s of a large matrix product in FP8; None if it was not measured."""

    def __str__(self) -> str:
        """Return one line for display."""
        return (
            f"ceilings, sustained, {self.dtype}: matrix products {_rate(self.matmul)}FLOP/s, "
            f"{f'in FP8 {_rate(self.fp8)}FLOP/s, ' if self.fp8 else ''}"
            f"attention {_rate(self.attention)}FLOP/s ({self.attention_kernel}), "
            f"memory {_rate(self.memory)}B/s"
        )


def measure(
    device: torch.device, dtype: torch.dtype, seconds: float | None = None, *, fp8: bool = False
) -> Ceilings:
    """Measure all rates.

    Args:
        device: The device to measure.
        dtype: The type of matrices, queries, keys and values.
        seconds: Time per measurement. Default: 2 on a GPU and 0.1 on a CPU.
        fp8: Whether to measure products in FP8 as well, on a GPU. Default: False.

    Raises:
        CapacityError: the device has no room for the measurement.
    """
    cuda = device.type == "cuda"
    seconds = seconds or (2.0 if cuda else 0.1)
    kernels = dict(_attention(device, dtype, seconds))
    if not kernels:
        raise CapacityError(
            f"torch's attention does not fit into the free memory of {device} in {dtype}; free "
            "some memory"
        )
    best = max(kernels, key=kernels.__getitem__)
    rates = Ceilings(
        dtype=str(dtype).removeprefix("torch."),
        matmul=_matmul(device, dtype, seconds, 8192 if cuda else 512),
        attention=kernels[best],
        memory=_copy(device, seconds, 2**30 if cuda else 2**25),
        attention_kernel=best,
        fp8=_fp8_matmul(device, seconds) if fp8 and cuda else None,
    )
    empty_device_cache(device)
    return rates


def _matmul(device: torch.device, dtype: torch.dtype, seconds: float, size: int) -> float:
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / time_sustained(lambda: torch.mm(left, right, out=out), device, seconds)


def _fp8_matmul(device: torch.device, seconds: float) -> float:
    size = 8192
    left, right = (torch.randn(size, size, device=device).to(FP8) for _ in range(2))
    scale = torch.ones(size, 1, device=device)
    seconds_per_call = time_sustained(
        lambda: torch._scaled_mm(
            left, right.t(), scale, scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        ),
        device,
        seconds,
    )
    return 2 * size**3 / seconds_per_call


def _copy(device: torch.device, seconds: float, size: int) -> float:
    size = min(size, free_bytes(device) // 8)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / time_sustained(lambda: target.copy_(source), device, seconds)


def _attention(
    device: torch.device, dtype: torch.dtype, seconds: float
) -> Iterator[tuple[str, float]]:
    """Yield the FLOP/s of each kernel that runs on the device, without masks."""
    heads, rows, keys, width = (32, 1024, 8192, 128) if device.type == "cuda" else (4, 128, 512, 64)
    q_1HLD, k_1HSD, v_1HSD = (
        torch.randn(1, heads, length, width, device=device).to(dtype)
        for length in (rows, keys, keys)
    )
    flops = 4 * heads * rows * keys * width
    runs_kernel = False
    for name, backend in [*kernels_for(device, dtype).items(), ("math", SDPBackend.MATH)]:
        if name == "math" and runs_kernel:  # plain matrix products count only where no kernel runs
            return
        with sdpa_kernel(backend):
            try:
                seconds_per_call = time_sustained(
                    lambda: scaled_dot_product_attention(q_1HLD, k_1HSD, v_1HSD), device, seconds
                )
            except RuntimeError:  # this kernel does not take the dtype or the device
                continue
        runs_kernel = True
        yield name, flops / seconds_per_call


def kernels_for(device: torch.device, dtype: torch.dtype) -> dict[str, SDPBackend]:
    """Return torch's dense attention kernels that may run on a device in a dtype."""
    if device.type == "cuda" and dtype == torch.float32:
        return {"efficient": SDPBackend.EFFICIENT_ATTENTION}
    flash = {"flash": SDPBackend.FLASH_ATTENTION}
    return flash | {"cudnn": SDPBackend.CUDNN_ATTENTION} if device.type == "cuda" else flash


def _rate(rate: float) -> str:
    """Format a rate with a suitable unit: "655 T", "4.24 T", "38.1 G"."""
    for unit in ("k", "M", "G", "T"):
        rate /= 1e3
        if rate < 1e3 or unit == "T":
            return f"{rate:.3g} {unit}"
    raise AssertionError("there is a last unit")
