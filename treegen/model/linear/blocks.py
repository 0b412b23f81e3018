"""Divide pairs of a token and one of its experts into blocks."""

from __future__ import annotations

from typing import Final

_MIN_ROWS: Final = 16  # minimum rows of tensor cores
_MAX_ROWS: Final = 128


def rows_of_block(num_pairs: int, experts: int) -> int:
    """Return the maximum pairs per block: all of most experts, so that a matrix is read once."""
    return min(max(1 << max(2 * num_pairs // experts - 1, 0).bit_length(), _MIN_ROWS), _MAX_ROWS)


def num_blocks(num_pairs: int, experts: int) -> int:
    """Return the maximum number of blocks: each expert has at most one that is not full."""
    return num_pairs // rows_of_block(num_pairs, experts) + min(experts, num_pairs)


def count_max_blocks(num_pairs: int, experts: int) -> int:
    """Return an upper bound of `num_blocks`, by integer division alone for traced sizes."""
    return num_pairs // _MIN_ROWS + experts
