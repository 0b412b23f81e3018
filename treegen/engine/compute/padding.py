"""How many rows a CUDA graph has for so many live ones: few sizes, so that few are captured."""

from __future__ import annotations

from typing import Final

MOST_TOKENS: Final = 1024
"""Tokens of a prefill pass that may be captured."""
_SEVERAL: Final = 32


def pad_num_rows(num_rows: int) -> int:
    """The number of rows of the graph that decodes `num_rows` live rows."""
    if num_rows <= 16:
        # Never 1: the compiler would make other kernels for it when a run is nearly over.
        return 1 << max(num_rows - 1, 1).bit_length()
    # Of many rows, matrix products take 128 or more at a time.
    step = 16 if num_rows <= 128 else 64 if num_rows <= 512 else 128
    return -(-num_rows // step) * step


def pad_num_query_rows(num_rows: int) -> int:
    """The same where a row has several query rows, whose number is another in each step."""
    return -(-num_rows // _SEVERAL) * _SEVERAL
