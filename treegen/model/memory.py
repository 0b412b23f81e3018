"""How much memory the key-value cache gets."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from treegen.errors import CacheFullError, CapacityError
from treegen.formats import format_bytes
from treegen.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOGITS: Final = 2**28  # bytes to leave for logits


def total_bytes(device: torch.device) -> int:
    """Bytes of all memory of a GPU, or of the host as far as the container may use it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    total: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # "max" is no limit
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def check_cache_bytes(size: int, device: torch.device) -> None:
    """Check the size of a cache against all memory of its device.

    Raises:
        CapacityError: the cache is larger.
    """
    total = total_bytes(device)
    if size > total:
        raise CapacityError(
            f"memory {format_bytes(size)} is more than all that {device} has "
            f"({format_bytes(total)}); give the cache less (memory=, --memory)"
        )


def default_bytes(device: torch.device, activations: int = 0) -> int:
    """Bytes of the cache if the user gives no size.

    On a GPU that is most of the memory that is free; the rest is for activations, logits and CUDA
    graphs. On the host it is an eighth of the memory, and at most 1 GiB.

    activations: about how many bytes a pass takes.
    """
    if device.type == "cuda":
        free_unused(device)
        free, _ = torch.cuda.mem_get_info(device)
        return max(free - max(int(free * 0.15), activations * 5 // 4 + _LOGITS), 0)
    return min(2**30, total_bytes(device) // 8)


def activation_bytes(module: PreTrainedModel, num_tokens: int) -> int:
    """About how many bytes a pass over some tokens holds at once, without its logits.

    At its peak it holds the widest products of a layer and some of the layer's inputs.
    """
    skipped = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    head = module.get_output_embeddings()
    if head is not None:
        skipped.add(id(head.weight))
    experts = getattr(module.config.get_text_config(), "num_experts_per_tok", None) or 1
    most = 0
    for weight in module.parameters():
        if weight.dim() < 2 or id(weight) in skipped:
            continue
        # The experts of a layer lie in one tensor. Each token goes through a few of them.
        copies = experts if weight.dim() > 2 else 1
        narrow, wide = sorted(weight.shape[-2:])
        # The gate, what it multiplies and their product are as wide as the widest matrix.
        most = max(most, copies * (3 * wide + 4 * narrow) * weight.element_size())
    return most * num_tokens


def free_unused(device: torch.device) -> None:
    """Give back the memory of a GPU that models and caches no longer in use have taken.

    They refer to themselves, so Python frees them only when it next looks for cycles. torch keeps
    memory that was freed, which then counts as taken.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def pages_in(memory: int, spec: ModelSpec, page_size: int) -> int:
    """Return how many pages fit into `memory` bytes beside the padding page.

    Raises:
        CacheFullError: not one page fits.
    """
    page_bytes = page_size * spec.kv_bytes_per_token
    pages = memory // page_bytes - 1
    if pages < 1:
        raise CacheFullError(
            f"{format_bytes(memory)} hold no page of {page_size} tokens at "
            f"{spec.kv_bytes_per_token:,} bytes each; give at least {2 * page_bytes:,} bytes"
        )
    return int(pages)
