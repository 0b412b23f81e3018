"""Check whether a tokenizer's file would let texts grow without bound.

The library of fast tokenizers aborts the whole process when memory runs out. A few replacements in
a row can make a short text larger than any memory, so they are checked before the tokenizer is
used.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from treegen.errors import ModelError
from treegen.model.checkpoint.files import read_object

MOST_TIMES: Final = 256
"""Maximum factor by which normalizing or decoding may lengthen a text, apart from Unicode's own."""
MOST_ADDED: Final = 4096
"""Maximum characters that normalizing may prepend, and in a prefix or suffix of word parts."""
_MOST_COPIES: Final = 8  # of a text in the result with special tokens
_PARTS: Final = ("normalizers", "decoders", "processors")
_AROUND: Final = ("continuing_subword_prefix", "end_of_word_suffix")


def check_growth(directory: Path) -> None:
    """Raise ModelError for a tokenizer.json that would make a text grow without bound.

    Args:
        directory: The directory of the tokenizer's files. One without a tokenizer.json is accepted.

    Raises:
        ModelError: A text would grow.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        return
    try:
        settings = read_object(file)
    except ModelError:  # the library's own error is clearer
        return
    for name in ("normalizer", "decoder"):
        times, added = _growth(settings.get(name))
        if times > MOST_TIMES or added > MOST_ADDED:
            raise ModelError(
                f"{file}: its {name} may make a text {times:,.3g} times as long and add "
                f"{added:,.3g} characters, more than {MOST_TIMES} times and {MOST_ADDED:,}; use "
                "another tokenizer"
            )
    copies = max((_copies(step) for step in _steps(settings.get("post_processor"))), default=1)
    if copies > _MOST_COPIES:
        raise ModelError(
            f"{file}: its post_processor writes a text {copies:,} times, more than "
            f"{_MOST_COPIES}; use another tokenizer"
        )
    model = settings.get("model")
    around = {name: model.get(name) for name in _AROUND} if isinstance(model, Mapping) else {}
    for name, text in around.items():
        if isinstance(text, str) and len(text) > MOST_ADDED:
            raise ModelError(
                f"{file}: {name} has {len(text):,} characters, more than {MOST_ADDED:,}; use "
                "another tokenizer"
            )


def _steps(given: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer, a decoder or a post-processor, in order."""
    left = [given]
    while left:
        step = left.pop()
        if not isinstance(step, Mapping):
            continue
        inner = [
            child for part in _PARTS if isinstance(step.get(part), list) for child in step[part]
        ]
        if inner:
            left += reversed(inner)
        else:
            yield step


def _growth(given: Any) -> tuple[float, float]:
    """Return the maximum factor by which a text may grow, and how many characters are added."""
    times, added = 1.0, 0.0
    for step in _steps(given):
        factor = _factor(step)
        times, added = times * factor, added * factor
        prepended = step.get("prepend")
        added += len(prepended) if isinstance(prepended, str) else 0
    return times, added


def _factor(step: Mapping[str, Any]) -> float:
    """Return the maximum factor by which one step may lengthen a text."""
    content, pattern = step.get("content"), step.get("pattern")
    if isinstance(content, str) and pattern is not None:
        text = pattern.get("String") if isinstance(pattern, Mapping) else pattern
        if isinstance(text, str) and text:
            return max(1.0, len(content) / len(text))
        return 1.0 + len(content)  # a regular expression may match between any two characters
    charsmap = step.get("precompiled_charsmap")
    if isinstance(charsmap, str):
        try:
            data = base64.b64decode(charsmap)
        except (binascii.Error, ValueError):
            return 1.0  # the library refuses it
        # The data is the length of a table, the table, and replacements separated by zeros.
        replaced = data[4 + int.from_bytes(data[:4], "little") :]
        return float(max(map(len, replaced.split(b"\0")), default=1) or 1)
    return 1.0


def _copies(step: Mapping[str, Any]) -> int:
    single = step.get("single")
    if not isinstance(single, list):
        return 1
    return sum(isinstance(item, Mapping) and "Sequence" in item for item in single)
