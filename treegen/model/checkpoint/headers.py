"""Compare a configuration with the headers of its weights, before anything of its size is made."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from treegen.errors import ModelError
from treegen.model.checkpoint.files import weight_files

_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
_QUANTISED: Final = ("quantization_config", "compression_config")
_WIDTHS: Final = ("vocab_size", "hidden_size", "n_embd")
_DEPTHS: Final = ("num_hidden_layers", "n_layer", "num_layers")
_DEPTHS_OF_PARTS: Final = (*_DEPTHS, "depth")
_MOST_OF_PARTS: Final = 1_000
"""Layers that a tower or another part may name although no weights are numbered so."""
_SLACK: Final = 4
"""How many times more layers than are numbered a configuration may name: some share weights."""


def check_headers(directory: Path, raw: Mapping[str, Any]) -> None:
    """Raise ModelError for a configuration of sizes that no stored weight has.

    Smaller differences are told by name and shape once the model is made. Quantised weights are
    packed in other shapes and types, so they are not looked at.

    raw: the content of config.json. Some configurations make a list as long as the layers.
    """
    text = raw.get("text_config")
    # Of a number that both have, the text's own counts: a wrapper may have a usual one beside it.
    texts = [each for each in (raw, text) if isinstance(each, Mapping)]
    if any(each.get(key) for each in texts for key in _QUANTISED):
        return
    most, numbers = 0, set[str]()
    for name, kind, shape in _headers(directory):
        if len(shape) > 1 and name.endswith("weight") and kind not in _FLOATS:
            if kind.startswith("F8"):
                continue  # told with what to do about it
            raise ModelError(
                f"{name} in {directory} is stored as {kind}, not as floating-point numbers, and "
                "config.json names no quantisation; save the weights again"
            )
        most = max([most, *shape])
        numbers.update(re.findall(r"\.(\d+)\.", name))
    if not most:
        return
    for part, each in raw.items():  # towers, whose weights the checkpoint may lack
        for name in _DEPTHS_OF_PARTS if isinstance(each, Mapping) else ():
            size = each.get(name)
            if isinstance(size, int) and size > max(_MOST_OF_PARTS, _SLACK * len(numbers)):
                found = f"are numbered up to {len(numbers):,}"
                raise _other_model(directory, f"{part}.{name}", size, found)
    sizes = {name: each[name] for each in texts for name in (*_WIDTHS, *_DEPTHS) if name in each}
    for name, size in sizes.items():
        if not isinstance(size, int):
            continue
        if name in _WIDTHS and size > most:
            found = f"have at most {most:,} rows or columns"
        elif name in _DEPTHS and size > _SLACK * max(1, len(numbers)):
            found = f"are numbered up to {len(numbers):,}"
        else:
            continue
        raise _other_model(directory, name, size, found)


def _other_model(directory: Path, name: str, size: int, found: str) -> ModelError:
    return ModelError(
        f"{directory / 'config.json'} says {name} {size:,}, and the weights beside it {found}; "
        "they are not of one model; download both"
    )


def _headers(directory: Path) -> Iterator[tuple[str, str, list[int]]]:
    """Name, type and shape of each stored tensor, as far as the files can be read."""
    try:
        files = weight_files(directory)
    except (ModelError, KeyError, TypeError, AttributeError):  # loading tells of it
        return
    for file in files:
        try:
            with safe_open(file, "pt") as stored:
                for name in stored.keys():  # noqa: SIM118 - it is no mapping
                    part = stored.get_slice(name)
                    yield name, str(part.get_dtype()), list(part.get_shape())
        except (OSError, SafetensorError):  # loading tells of it
            continue
