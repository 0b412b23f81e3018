"""Whether a tokenizer's file would let texts grow without bound.

The library of fast tokenizers ends the whole process when memory runs out. A few replacements, one
after the other, make a short text larger than any memory, so they are looked at before it is used.
"""

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from treegen.errors import ModelError
from treegen.model.checkpoint.files import read_object

MOST_TIMES: Final = 256
"""Times that normalizing or decoding may lengthen a text, beside what Unicode itself does."""
MOST_ADDED: Final = 4096
"""Characters that normalizing may put before a text, and that may stand around a part of a word."""
_MOST_COPIES: Final = 8  # of a text in what is made of it with special tokens
_PARTS: Final = ("normalizers", "decoders", "processors")
_AROUND: Final = ("continuing_subword_prefix", "end_of_word_suffix")


def check_growth(directory: Path) -> None:
    """Refuse a tokenizer.json by which a text would grow without bound.

    Args:
        directory: Where the tokenizer's files are. One without a tokenizer.json is taken.

    Raises:
        ModelError: A text would grow.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        return
    try:
        settings = read_object(file)
    except ModelError:  # the library says better what is wrong with it
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
        inner = [each for part in _PARTS if isinstance(step.get(part), list) for each in step[part]]
        if inner:
            left += reversed(inner)
        else:
            yield step


def _growth(given: Any) -> tuple[float, float]:
    """Return how many times as long a text may become, and how many characters are added."""
    times, added = 1.0, 0.0
    for step in _steps(given):
        factor = _factor(step)
        times, added = times * factor, added * factor
        prepended = step.get("prepend")
        added += len(prepended) if isinstance(prepended, str) else 0
    return times, added


def _factor(step: Mapping[str, Any]) -> float:
    """Return how many times as long one step may make a text."""
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
        # The length of a table, the table, and the replacements with zeros in between.
        replaced = data[4 + int.from_bytes(data[:4], "little") :]
        return float(max(map(len, replaced.split(b"\0")), default=1) or 1)
    return 1.0


def _copies(step: Mapping[str, Any]) -> int:
    single = step.get("single")
    if not isinstance(single, list):
        return 1
    return sum(isinstance(each, Mapping) and "Sequence" in each for each in single)
