"""How much memory the key-value cache gets."""

from __future__ import annotations

import gc
import os

import torch

from treegen.errors import CapacityError
from treegen.model_spec import ModelSpec
from treegen.units import format_bytes

PAGE_SIZE = {"cpu": 16, "cuda": 64}


def default_bytes(device: torch.device) -> int:
    """Cache size if the user gives none: most of a free GPU, a small part of the host's memory.

    What is left of a GPU is for the activations and logits of a pass.
    """
    if device.type == "cuda":
        free_unused(device)
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.85)
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(2**30, available // 8)


def free_unused(device: torch.device) -> None:
    """Give a GPU back what models and caches that nobody uses any more have taken.

    They refer to themselves, so that Python frees them when it next looks for cycles; and torch
    keeps freed memory, which then counts as taken.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def pages_in(memory: int, spec: ModelSpec, page_size: int) -> int:
    """Usable pages of a cache of some bytes, the padding page not counted."""
    page_bytes = page_size * spec.kv_bytes_per_token
    pages = memory // page_bytes - 1
    if pages < 1:
        raise CapacityError(
            f"{format_bytes(memory)} hold no page of {page_size} tokens at "
            f"{spec.kv_bytes_per_token:,} bytes each; give at least {2 * page_bytes:,} bytes"
        )
    return int(pages)
