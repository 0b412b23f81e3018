"""Lower bounds of a text's number of tokens, from its length alone.

A tokenizer encodes about a megabyte per second, and no signal interrupts it. So a text of many
megabytes, far too long for a model, is rejected by its length without encoding it. The bound is
proved for byte pair encoding that loses no character, where a token covers at most as many
characters as its own text has; for other tokenizers the bound is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from treegen.prompts.token_bytes import component_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Pre-tokenizers that cut a text and drop none of it. Split is one unless its behaviour is removal.
_CUTTING: Final = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")
# NFC composes at most 4 characters into one, because no character decomposes into more and
# decomposing makes no text shorter.
_COMPOSED: Final = 4


class TokenLowerBound:
    """Lower bounds of the number of tokens of texts, for the current state of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._most = 0  # largest number of characters of a token; 0 if it is not known
        self._greedy: list[str] = []  # added tokens that absorb all spaces next to them
        if getattr(tokenizer, "is_fast", False):
            self._look(tokenizer.backend_tokenizer)

    def of_chars(self, num_chars: int) -> int:
        """Return a lower bound for texts of `num_chars` characters; 0 means that nothing is known.

        It holds for texts without added tokens that absorb the spaces next to them.
        """
        return -(-num_chars // self._most) if self._most else 0

    def of_text(self, text: str) -> int:
        """Return a lower bound for a text without special tokens around it; 0 means unknown."""
        return 0 if any(token in text for token in self._greedy) else self.of_chars(len(text))

    def _look(self, backend: Any) -> None:
        normalizers = list(component_parts(backend.normalizer))
        cutters = list(component_parts(backend.pre_tokenizer))
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
            return  # such a token also replaces other texts
        self._greedy = [token.content for token in greedy]
        self._most = shrinks * max(map(len, vocab), default=0)


def _shrinks(normalizers: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the largest factor by which normalizers shorten a text; None if it is not known."""
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
    """Whether every byte of a text ends up in a token, whatever its characters are."""
    if any(part["type"] == "ByteLevel" for part in cutters):
        from tokenizers.pre_tokenizers import ByteLevel

        return all(byte in vocab for byte in ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
