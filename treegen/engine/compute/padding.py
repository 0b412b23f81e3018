"""Numbers of rows to which CUDA graphs are padded: few sizes, so that few graphs are captured."""

from __future__ import annotations

from typing import Final

MOST_TOKENS: Final = 1024
"""Maximum number of tokens of a prefill pass that may be captured."""
_SEVERAL: Final = 32


def pad_num_rows(num_rows: int) -> int:
    """Return the number of rows of the graph that decodes `num_rows` live rows."""
    if num_rows <= 16:
        # Never 1, for which the compiler would make separate kernels at the end of a run.
        return 1 << max(num_rows - 1, 1).bit_length()
    # With many rows, matrix products compute 128 or more rows at a time.
    step = 16 if num_rows <= 128 else 64 if num_rows <= 512 else 128
    return -(-num_rows // step) * step


def pad_num_query_rows(num_rows: int) -> int:
    """Return the same for rows with several query rows, whose number differs from step to step."""
    return -(-num_rows // _SEVERAL) * _SEVERAL
