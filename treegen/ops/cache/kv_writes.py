"""Writing of new keys and values into a layer's page pool.

Legend: T tokens, G key heads, K key dimension, V value dimension.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from treegen.ops.attention.types import FP8

_MOST: Final = 448.0  # the largest number in e4m3


def write_kv(keys: Tensor, values: Tensor, slots_T: Tensor, k_TGK: Tensor, v_TGV: Tensor) -> None:
    """Store the keys and values of T tokens in a layer's pool.

    An FP8 pool stores them rounded, with numbers clamped to its range.

    Args:
        keys: Keys of the pool [pages, page_size, G, K]. Keys and values may be parts of one tensor.
        values: Values of the pool [pages, page_size, G, V].
        slots_T: Cache slot of each token [T], page * page_size + offset.
        k_TGK: New keys [T, G, K].
        v_TGV: New values [T, G, V].
    """
    # view, not flatten: if a pool is not contiguous, flatten would write into a copy.
    slots_k, slots_v = keys.view(-1, *keys.shape[2:]), values.view(-1, *values.shape[2:])
    kernel = _kernel() if k_TGK.device.type == "cuda" else None
    dense = all(tensor.stride(2) == 1 for tensor in (slots_k, slots_v, k_TGK, v_TGV))
    if kernel is None or not dense:
        for slots, new in ((slots_k, k_TGK), (slots_v, v_TGV)):
            if slots.dtype == FP8:
                new = new.clamp(-_MOST, _MOST).to(FP8).view(torch.uint8)
                slots = slots.view(torch.uint8)
            slots.index_copy_(0, slots_T, new)
        return
    num_tokens, num_heads, k_dim = k_TGK.shape
    v_dim = v_TGV.shape[2]
    kernel[(num_tokens,)](
        k_TGK,
        v_TGV,
        slots_k,
        slots_v,
        slots_T,
        k_TGK.stride(0),
        k_TGK.stride(1),
        v_TGV.stride(0),
        v_TGV.stride(1),
        slots_k.stride(0),
        slots_k.stride(1),
        slots_v.stride(0),
        slots_v.stride(1),
        G=num_heads,
        K=k_dim,
        V=v_dim,
        ROOM_G=_next_power_of_2(num_heads),
        ROOM_K=_next_power_of_2(k_dim),
        ROOM_V=_next_power_of_2(v_dim),
        MOST=_MOST if keys.dtype == FP8 else 0.0,
        num_warps=4 if num_heads * k_dim > 512 else 1,
    )


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


@cache
def _kernel() -> Any:
    """Return the kernel that writes keys and values in one launch; None without Triton."""
    try:
        from treegen.ops.attention.gpu.kernels import write_slots
    except ImportError:
        return None
    return write_slots
