"""Compare a configuration with the headers of its weights before allocating memory of its sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from treegen.errors import ModelError
from treegen.model.checkpoint.files import weight_files
from treegen.model.checkpoint.sizes import Stored, check_sizes

_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
_QUANTISED: Final = ("quantization_config", "compression_config")
_WIDTHS: Final = ("vocab_size", "hidden_size", "n_embd")
_DEPTHS: Final = ("num_hidden_layers", "n_layer", "num_layers")
_DEPTHS_OF_PARTS: Final = (*_DEPTHS, "depth")
_MOST_OF_PARTS: Final = 1_000
"""Layers that a tower or another part may declare without weights numbered that high."""
_MOST_PACKED: Final = 64
"""Maximum numbers that quantised weights pack into one stored value, such as 1 bit of 64."""


def check_headers(directory: Path, raw: Mapping[str, Any]) -> None:
    """Raise ModelError for a configuration with sizes that no stored weight has.

    Smaller differences are reported by name and shape once the model is built. Quantised weights
    are packed into other types and smaller shapes.

    Args:
        directory: The checkpoint's directory.
        raw: The content of config.json. Some configurations build a list as long as the layers.
    """
    text = raw.get("text_config")
    # text_config overrides a number of the wrapper, which may only be a default.
    texts = [settings for settings in (raw, text) if isinstance(settings, Mapping)]
    is_packed = any(settings.get(key) for settings in texts for key in _QUANTISED)
    stored = Stored()
    for name, kind, shape in _headers(directory):
        if len(shape) > 1 and name.endswith("weight") and kind not in _FLOATS and not is_packed:
            if kind.startswith("F8"):
                continue  # reported elsewhere with advice
            raise ModelError(
                f"{name} in {directory} is stored as {kind}, not as floating-point numbers, and "
                "config.json names no quantisation; save the weights again"
            )
        stored.add(name, shape)
    if not stored.most:
        return
    file, weights_name = directory / "config.json", "the weights beside it"
    towers = {  # the checkpoint may lack their weights
        f"{part}.{name}": size
        for part, settings in raw.items()
        for name in (_DEPTHS_OF_PARTS if isinstance(settings, Mapping) else ())
        if isinstance(size := settings.get(name), int) and size > _MOST_OF_PARTS
    }
    check_sizes(file, weights_name, stored, {}, towers)
    widths, depths = (
        {name: settings[name] for settings in texts for name in names if name in settings}
        for names in (_WIDTHS, _DEPTHS)
    )
    check_sizes(file, weights_name, stored, widths, depths, _MOST_PACKED if is_packed else 1)


def _headers(directory: Path) -> Iterator[tuple[str, str, list[int]]]:
    """Yield the name, type and shape of each stored tensor, as far as the files can be read."""
    try:
        files = weight_files(directory)
    except (ModelError, KeyError, TypeError, AttributeError):  # loading reports the error
        return
    for file in files:
        try:
            with safe_open(file, "pt") as stored:
                for name in stored.keys():  # noqa: SIM118 - it is no mapping
                    part = stored.get_slice(name)
                    yield name, str(part.get_dtype()), list(part.get_shape())
        except (OSError, SafetensorError):  # loading reports the error
            continue
