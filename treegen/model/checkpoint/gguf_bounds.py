"""Check the lengths in a GGUF file's header before the gguf package uses them.

That package makes an object for each value, so a header of 50 bytes that claims 2^60 values would
exhaust memory. See https://github.com/ggml-org/ggml/blob/master/docs/gguf.md for the format.
"""

import struct
from pathlib import Path
from typing import BinaryIO, Final

from treegen.common.files.regular_files import open_regular

MOST_VALUES: Final = 1 << 23
"""Maximum values in a header; the largest vocabularies with their merges have about a million."""
_SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_DEEPEST: Final = 4
_LEAST_PAIR: Final = 8 + 4 + 1
_LEAST_TENSOR: Final = 8 + 4 + 4 + 8


def check_lengths(file: Path) -> None:
    """Check that no length in a header exceeds the file or the limits of headers.

    Args:
        file: The GGUF file.

    Raises:
        OSError: The file cannot be read.
        ValueError: A length is impossible.
    """
    with open(open_regular(file), "rb") as stream:
        _Walk(stream, file.stat().st_size).header()


class _Walk:
    """A walk over a header that keeps nothing and checks every length before using it."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self._left, self._values = stream, size, 0
        self._order = "<"

    def header(self) -> None:
        """Walk over the counts, the pairs and the tensors."""
        if self._read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._read(4)
        if version[:2] == b"\0\0":
            self._order = ">"
        tensors, pairs = self._count(_LEAST_TENSOR), self._count(_LEAST_PAIR)
        for _ in range(pairs):
            self._string()
            self._value(self._number(4), 0)
        for _ in range(tensors):
            self._string()
            self._skip(8 * self._check_count(self._number(4), 8))
            self._skip(4 + 8)

    def _value(self, kind: int, depth: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            if depth == _DEEPEST:
                raise ValueError("arrays are nested too deeply")
            of = self._number(4)
            least = _SIZES.get(of, 8 if of == _STRING else 12)
            length = self._count(least)
            if of in _SIZES:
                self._skip(length * least)
            else:
                for _ in range(length):
                    self._value(of, depth + 1)
        elif kind in _SIZES:
            self._skip(_SIZES[kind])
        else:
            raise ValueError(f"there is no kind {kind} of values")

    def _count(self, least: int) -> int:
        """Read a count of items that take at least `least` bytes each."""
        count = self._check_count(self._number(8), least)
        self._values += count
        if self._values > MOST_VALUES:
            raise ValueError(f"its header has more than {MOST_VALUES:,} values")
        return count

    def _check_count(self, number: int, least: int) -> int:
        if number * least > self._left:
            raise ValueError(f"its header claims {number:,} things where {self._left:,} bytes are")
        return number

    def _string(self) -> None:
        self._skip(self._check_count(self._number(8), 1))

    def _number(self, size: int) -> int:
        number: int = struct.unpack(self._order + ("I" if size == 4 else "Q"), self._read(size))[0]
        return number

    def _read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if len(data) < size:
            raise ValueError("it is cut off")
        return data

    def _skip(self, size: int) -> None:
        if size > self._left:
            raise ValueError("it is cut off")
        self._left -= size
        self._stream.seek(size, 1)
