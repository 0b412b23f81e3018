"""Read a model from one GGUF file, through transformers; compare declared sizes with weights.

The weights are expanded to the type that the model computes in. The gguf package makes an object
for each value of a header, so a header of 50 bytes that claims 2^60 values would exhaust memory:
all lengths are checked first. See https://github.com/ggml-org/ggml/blob/master/docs/gguf.md for the
format.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Final

from treegen.common.files import open_regular
from treegen.errors import ModelError, install

_PART: Final = re.compile(r"-\d{5}-of-\d{5}$")
_PACKAGES: Final = ("gguf", "accelerate")
_WIDTHS: Final = (".vocab_size", ".embedding_length")
_DEPTHS: Final = (".block_count",)
_PLAIN: Final = frozenset({"F16", "BF16", "F32", "F64"})


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file, by its suffix."""
    return path.suffix.lower() == ".gguf"


def gguf_arguments(path: Path) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a GGUF file; empty for other checkpoints."""
    return {"gguf_file": str(path.resolve())} if is_gguf(path) else {}


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Properties of the tensors in a GGUF file."""

    data_start: int
    """Bytes before the first tensor."""
    stores: str
    """The type of most numbers, such as "Q4_K"."""
    is_plain: bool
    """Whether no number is quantized."""
    num_bytes: int
    """Bytes of all tensors."""


def read_header(file: Path) -> GgufHeader:
    """Return properties of the tensors in a GGUF file.

    Raises:
        ModelError: a package is missing, or the file is only a part of a model, is cut off or is
            not GGUF.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ModelError(
            f"reading the GGUF file {file} requires {' and '.join(missing)}: {install('gguf')}"
        )
    if _PART.search(file.stem):
        raise ModelError(
            f"{file} is one part of a split model; merge the parts into one file: "
            "llama-gguf-split --merge FIRST MERGED"
        )
    status = file.stat()
    return _read(file, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=8)
def _read(file: Path, size: int, changed: int) -> GgufHeader:
    from gguf import GGUFReader

    try:
        check_lengths(file)
        reader = GGUFReader(file)
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelError(
            f"{file} is not a GGUF file or is truncated ({size:,} bytes; {reason}); download it "
            "again"
        ) from None
    sizes: Counter[str] = Counter()
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_bytes)
    if not sizes:
        raise ModelError(f"{file} has no tensors; download it again")
    _check_sizes(file, reader)
    return GgufHeader(
        data_start=int(reader.data_offset),
        stores=sizes.most_common(1)[0][0],
        is_plain=sizes.keys() <= _PLAIN,
        num_bytes=sum(sizes.values()),
    )


def _check_sizes(file: Path, reader: Any) -> None:
    """Raise ModelError if the header has sizes that no tensor has."""
    stored = Stored()
    for tensor in reader.tensors:
        stored.add(str(tensor.name), [int(size) for size in tensor.shape])
    sizes: dict[tuple[str, ...], dict[str, int]] = {_WIDTHS: {}, _DEPTHS: {}}
    for name, entry in reader.fields.items():
        for ends, by_name in sizes.items():
            if name.endswith(ends) and isinstance(value := entry.contents(), int):
                by_name[name] = value
    check_sizes(file, "the tensors in the file", stored, sizes[_WIDTHS], sizes[_DEPTHS])


MAX_VALUES: Final = 1 << 23
"""Maximum values in a header; the largest vocabularies with their merges have about a million."""
_SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH: Final = 4
_MIN_PAIR_BYTES: Final = 8 + 4 + 1
_MIN_TENSOR_BYTES: Final = 8 + 4 + 4 + 8


def check_lengths(file: Path) -> None:
    """Check that no length in a header exceeds the file or the limits of headers.

    Args:
        file: The GGUF file.

    Raises:
        OSError: The file cannot be read.
        ValueError: A length is impossible.
    """
    with open(open_regular(file), "rb") as stream:
        _HeaderChecker(stream, file.stat().st_size).header()


class _HeaderChecker:
    """Walks over a header, keeps nothing, and checks every length before using it."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self._remaining, self._values = stream, size, 0
        self._order = "<"

    def header(self) -> None:
        """Walk over the counts, the pairs and the tensors."""
        if self._read(4) != b"GGUF":
            raise ValueError("the file does not begin with GGUF")
        version = self._read(4)
        if version[:2] == b"\0\0":
            self._order = ">"
        tensors, pairs = self._count(_MIN_TENSOR_BYTES), self._count(_MIN_PAIR_BYTES)
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
            if depth == _MAX_DEPTH:
                raise ValueError("arrays are nested too deeply")
            item_kind = self._number(4)
            min_bytes = _SIZES.get(item_kind, 8 if item_kind == _STRING else 12)
            length = self._count(min_bytes)
            if item_kind in _SIZES:
                self._skip(length * min_bytes)
            else:
                for _ in range(length):
                    self._value(item_kind, depth + 1)
        elif kind in _SIZES:
            self._skip(_SIZES[kind])
        else:
            raise ValueError(f"unknown value type {kind}")

    def _count(self, min_bytes: int) -> int:
        """Read a count of items that take at least `min_bytes` bytes each."""
        count = self._check_count(self._number(8), min_bytes)
        self._values += count
        if self._values > MAX_VALUES:
            raise ValueError(f"its header has more than {MAX_VALUES:,} values")
        return count

    def _check_count(self, number: int, min_bytes: int) -> int:
        if number * min_bytes > self._remaining:
            raise ValueError(
                f"its header declares {number:,} entries, but only {self._remaining:,} bytes follow"
            )
        return number

    def _string(self) -> None:
        self._skip(self._check_count(self._number(8), 1))

    def _number(self, size: int) -> int:
        number: int = struct.unpack(self._order + ("I" if size == 4 else "Q"), self._read(size))[0]
        return number

    def _read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._remaining -= len(data)
        if len(data) < size:
            raise ValueError("the file is truncated")
        return data

    def _skip(self, size: int) -> None:
        if size > self._remaining:
            raise ValueError("the file is truncated")
        self._remaining -= size
        self._stream.seek(size, 1)


MAX_LAYER_RATIO: Final = 4
"""Maximum ratio of declared layers to numbers in tensor names; some layers share weights."""


@dataclass
class Stored:
    """The sizes that the stored weights of a model show."""

    max_dimension: int = 0
    """The largest dimension of any tensor."""
    numbers: set[str] = field(default_factory=set)
    """The numbers in tensor names, such as those of layers."""

    def add(self, name: str, shape: Sequence[int]) -> None:
        """Take a tensor into account.

        Args:
            name: The name of the tensor.
            shape: Its shape.
        """
        self.max_dimension = max([self.max_dimension, *shape])
        self.numbers.update(re.findall(r"\.(\d+)\.", name))


def check_sizes(
    file: Path,
    weights_name: str,
    stored: Stored,
    widths: Mapping[str, object],
    depths: Mapping[str, object],
    packed: int = 1,
) -> None:
    """Raise ModelError for a description with sizes that no stored weight has.

    Args:
        file: The file with the description, for the message.
        weights_name: What the message calls the weights.
        stored: The sizes of the weights.
        widths: Row or column counts by name; values that are not integers are ignored.
        depths: Numbers of layers by name; values that are not integers are ignored.
        packed: Maximum numbers packed into one stored value.
    """
    max_width, num_numbers = stored.max_dimension, len(stored.numbers)
    max_depth = MAX_LAYER_RATIO * max(1, num_numbers)
    for sizes, limit, found in (
        (widths, max_width * packed, f"have at most {max_width:,} rows or columns"),
        (depths, max_depth, f"have only {num_numbers:,} different numbers in their names"),
    ):
        for name, size in sizes.items():
            if isinstance(size, int) and size > limit:
                raise ModelError(
                    f"{file} sets {name} to {size:,}, but {weights_name} {found}; the files do "
                    "not belong to the same model; download the model again"
                )
