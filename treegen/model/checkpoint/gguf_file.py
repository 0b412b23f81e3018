"""Read a model from one GGUF file: configuration, tokenizer and weights, through transformers.

The weights are expanded to the type that the model computes in.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from treegen.errors import ModelError, install
from treegen.model.checkpoint.gguf_bounds import check_lengths
from treegen.model.checkpoint.sizes import Stored, check_sizes

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
    """Properties of the tensors in a GGUF file.

    Attributes:
        data_start: Bytes before the first tensor.
        stores: The type of most numbers, such as "Q4_K".
        is_plain: Whether no number is quantised.
        num_bytes: Bytes of all tensors.
    """

    data_start: int
    stores: str
    is_plain: bool
    num_bytes: int


def read_header(file: Path) -> GgufHeader:
    """Return properties of the tensors in a GGUF file.

    Raises:
        ModelError: a package is missing, or the file is only a part of a model, is cut off or is
            not GGUF.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ModelError(
            f"{file} is GGUF, which is read with {' and '.join(missing)}, not installed: "
            f"{install('gguf')}"
        )
    if _PART.search(file.stem):
        raise ModelError(
            f"{file} is one part of a model; merge the parts into one file: "
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
            f"{file} is no GGUF file or is cut off ({size:,} bytes; {reason}); download it again"
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
    for name, field in reader.fields.items():
        for ends, by_name in sizes.items():
            if name.endswith(ends) and isinstance(value := field.contents(), int):
                by_name[name] = value
    check_sizes(file, "the tensors in it", stored, sizes[_WIDTHS], sizes[_DEPTHS])
