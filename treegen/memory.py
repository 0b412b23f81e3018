"""How much memory the key-value cache gets."""

from __future__ import annotations

import os
import re

import torch

from treegen.errors import CapacityError, InputError
from treegen.model_spec import ModelSpec

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
          "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}  # fmt: skip

PAGE_SIZE = {"cpu": 16, "cuda": 64}


def parse_bytes(amount: int | str) -> int:
    """Bytes of an amount such as 2_000_000, "512MiB" or "2 GiB"; InputError if it is none."""
    if isinstance(amount, int) and not isinstance(amount, bool) and amount > 0:
        return amount
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(amount))
    if match and match[2].lower() in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2].lower()])
        if size > 0:
            return size
    raise InputError(f"memory must be a number of bytes or like '2GiB', got {amount!r}")


def default_bytes(device: torch.device) -> int:
    """Cache size if the user gives none: 90% of free GPU memory, a small part of the host's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.9)
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(2**30, available // 8)


def pages_in(memory: int, spec: ModelSpec, page_size: int) -> int:
    """Usable pages of a cache of some bytes, the padding page not counted."""
    page_bytes = page_size * spec.kv_bytes_per_token
    pages = memory // page_bytes - 1
    if pages < 1:
        raise CapacityError(
            f"{memory:,} bytes hold no page of {page_size} tokens at "
            f"{spec.kv_bytes_per_token:,} bytes each; give at least {2 * page_bytes:,}"
        )
    return int(pages)
