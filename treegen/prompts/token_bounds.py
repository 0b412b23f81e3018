"""How many tokens a text has at least, told from its length: what cannot fit need not be encoded.

A tokenizer encodes about a megabyte in a second, and no signal interrupts it. So a text of many
megabytes, far too long for a model, is better refused by its length.

The bound is proved for byte pair encoding that loses no character. There a token stands for as many
characters at most as its own text has. Of other tokenizers nothing is said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Pre-tokenizers that cut a text and leave none of it out. Split does so unless it removes.
_CUTTING: Final = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")
# NFC makes one character of 4 at most. For no character decomposes into more, and decomposing makes
# no text shorter.
_COMPOSED: Final = 4


class TokenLowerBound:
    """Tells how many tokens texts have at least, for one tokenizer as it is now."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._most = 0  # characters of a token; 0 if that is not known
        self._greedy: list[str] = []  # added tokens that take all spaces beside them
        if getattr(tokenizer, "is_fast", False):
            self._look(tokenizer.backend_tokenizer)

    def of_chars(self, num_chars: int) -> int:
        """A number that texts of so many characters have at least; 0 tells nothing.

        It holds for texts without tokens that take the spaces beside them.
        """
        return -(-num_chars // self._most) if self._most else 0

    def of_text(self, text: str) -> int:
        """A number that a text has at least, without special tokens around it; 0 tells nothing."""
        return 0 if any(token in text for token in self._greedy) else self.of_chars(len(text))

    def _look(self, backend: Any) -> None:
        normalizers = list(_parts(backend.normalizer))
        cutters = list(_parts(backend.pre_tokenizer))
        vocab = backend.get_vocab(with_added_tokens=True)
        shrinks = _shrinks(normalizers)
        if (
            type(backend.model).__name__ != "BPE"
            or shrinks is None
            or any(c["type"] not in _CUTTING or c.get("behavior") == "Removed" for c in cutters)
            or not _has_all_bytes(backend.model, cutters, vocab)
        ):
            return
        greedy = [
            token
            for token in backend.get_added_tokens_decoder().values()
            if token.lstrip or token.rstrip
        ]
        if normalizers and any(token.normalized for token in greedy):
            return  # other texts stand for such a token too
        self._greedy = [token.content for token in greedy]
        self._most = shrinks * max(map(len, vocab), default=0)


def _parts(component: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a normalizer or a pre-tokenizer, those of sequences one by one."""
    if component is None:
        return
    try:
        pending = [json.loads(component.__getstate__())]
    except Exception:  # it is made of Python code, and may do anything
        pending = [{"type": "Python"}]
    while pending:
        part = pending.pop()
        if part["type"] == "Sequence":
            pending += part.get("normalizers", part.get("pretokenizers", ()))
        else:
            yield part


def _shrinks(normalizers: Sequence[Mapping[str, Any]]) -> int | None:
    """Return how many times shorter normalizers make a text at most; None if it is not known."""
    times = 1
    for part in normalizers:
        if part["type"] == "NFC":
            times *= _COMPOSED
        elif part["type"] == "Replace":
            replaced = part["pattern"].get("String")
            if replaced is None or len(part["content"]) < len(replaced):
                return None
        elif part["type"] != "Prepend":
            return None
    return times


def _has_all_bytes(
    model: Any, cutters: Sequence[Mapping[str, Any]], vocab: Mapping[str, int]
) -> bool:
    """Whether each byte of a text comes into a token, whatever its characters are."""
    if any(part["type"] == "ByteLevel" for part in cutters):
        from tokenizers.pre_tokenizers import ByteLevel

        return all(byte in vocab for byte in ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
