"""Token ids of prompts that were encoded lately, for those that are asked for again."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

from treegen.prompts.radix import Tokens

_MOST: Final = 2**22  # tokens of all together
ENTRY: Final = 64
"""Tokens that each prompt counts beside its own, for the memory of its key and its array."""


class PromptCache:
    """Texts and conversations with their token ids. One thread uses it."""

    def __init__(self, most: int = _MOST) -> None:
        """Nothing is known yet. most: tokens that are kept; the least recently used leave."""
        self._most, self._num_tokens = most, 0
        self._tokens: OrderedDict[bytes, Tokens] = OrderedDict()

    def get(self, key: bytes | None) -> Tokens | None:
        """The token ids of a prompt, if they are known."""
        if key is None or key not in self._tokens:
            return None
        self._tokens.move_to_end(key)
        return self._tokens[key]

    def put(self, key: bytes | None, tokens: Tokens) -> None:
        """Note the token ids of a prompt that is not known yet."""
        if key is None or key in self._tokens:
            return
        self._tokens[key] = tokens
        self._num_tokens += len(tokens) + ENTRY
        while self._num_tokens > self._most:
            self._num_tokens -= len(self._tokens.popitem(last=False)[1]) + ENTRY


def key_of(content: object, template: Mapping[str, Any]) -> bytes | None:
    """What stands for a prompt; None for token ids, and for what has no JSON.

    It is a hash, because a conversation may have much that its template does not show.

    Args:
        template: Arguments of the chat template.
    """
    if isinstance(content, str):
        return None if template else _hash(f"text {content}")
    if not isinstance(content, list) or not content or not isinstance(content[0], Mapping):
        return None
    try:
        return _hash(json.dumps([content, template]))
    except (TypeError, ValueError, RecursionError):
        return None


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest()
