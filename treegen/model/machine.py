"""Check options against the machine, before any model is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treegen.model.linear.fp8 import check_device as check_fp8
from treegen.model.memory import check_cache_bytes
from treegen.model.options import EngineOptions
from treegen.model.rank_processes import devices_of
from treegen.model.reproducible import check_reproducible
from treegen.ops.attention.registry import check_reads_fp8, choose

if TYPE_CHECKING:
    import torch


def check_machine(options: EngineOptions, device: torch.device) -> None:
    """Raise InputError or CapacityError for options that the device supports with no model."""
    choose(options.impl, device)
    if options.quantization == "fp8":
        check_fp8(device, "quantization")
    if options.kv_cache_dtype == "fp8":
        check_fp8(device, "kv_cache_dtype")
        check_reads_fp8(options.impl)
    if options.tensor_parallel_size > 1:
        devices_of(options.tensor_parallel_size, options.device)
    if options.reproducible:
        check_reproducible(device, options.impl, options.sizes(device.type).page_size)
    if options.cache_bytes is not None:
        check_cache_bytes(options.cache_bytes, device)
