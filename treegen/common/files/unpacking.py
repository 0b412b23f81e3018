"""Limits the size of unpacked content, so that a small file cannot fill the memory."""

from typing import Final

# Data sets and logs unpack to 3 to 50 times the size of their packed files, malicious files to a
# thousand times or more.
_LEAST: Final = 1 << 26
_MOST: Final = 1 << 30
_TIMES: Final = 100
_TIMES_LARGE: Final = 8


def most_unpacked(size: int) -> int:
    """Return the maximum number of bytes that a packed file may unpack to.

    Args:
        size: Size of the packed file in bytes.
    """
    return max(_LEAST, min(_TIMES * size, _MOST), _TIMES_LARGE * size)
