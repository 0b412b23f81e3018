"""A cache of the token ids of recently encoded prompts."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

from treegen.prompts.radix import Tokens

_MOST: Final = 2**22  # tokens of all prompts together
ENTRY: Final = 64
"""Extra tokens that each prompt counts for, because its key and its array take memory."""


class PromptCache:
    """Maps texts and conversations to their token ids. Not thread-safe."""

    def __init__(self, most: int = _MOST) -> None:
        """Create an empty cache.

        Args:
            most: Maximum tokens to keep, over all prompts; the least recently used prompts are
                evicted.
        """
        self._most, self._num_tokens = most, 0
        self._tokens: OrderedDict[bytes, Tokens] = OrderedDict()

    def get(self, key: bytes | None) -> Tokens | None:
        """Return the token ids of a prompt; None if they are not cached."""
        if key is None or key not in self._tokens:
            return None
        self._tokens.move_to_end(key)
        return self._tokens[key]

    def put(self, key: bytes | None, tokens: Tokens) -> None:
        """Store the token ids of a prompt unless they are cached already."""
        if key is None or key in self._tokens:
            return
        self._tokens[key] = tokens
        self._num_tokens += len(tokens) + ENTRY
        while self._num_tokens > self._most:
            self._num_tokens -= len(self._tokens.popitem(last=False)[1]) + ENTRY


def key_of(content: object, template: Mapping[str, Any]) -> bytes | None:
    """Return the cache key of a prompt; None for token ids and for content that is not JSON.

    The key is a hash, because a conversation may be much larger than the text its template renders.

    Args:
        content: Text, token ids or chat messages.
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
