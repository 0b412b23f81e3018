"""Randomness of prompts without a name: it belongs to what they say, and to how often they were.

Numbers as names would give the first prompt of every call the same random numbers, and outcomes
of separate calls would go up and down together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treegen.plan.plan import Request
from treegen.prompts.radix import Tokens


def origin_of(content: str | Sequence[int] | Tokens) -> str:
    """What the randomness of an unnamed prompt belongs to: a hash of its token ids, or its text."""
    if isinstance(content, str):
        kind, data = "text", content.encode("utf-8", "surrogatepass")
    else:
        kind, data = "tokens", np.asarray(content, dtype="<i4").tobytes()
    return f"\0{kind} {hashlib.blake2b(data, digest_size=16).hexdigest()}"


class DrawnBefore:
    """How many samples, or searches, of each unnamed prompt there were."""

    def __init__(self) -> None:
        """Of none so far."""
        self._num: dict[str, int] = {}

    def take(self, origin: str, num: int) -> int:
        """How many there were, before so many more."""
        first = self._num.get(origin, 0)
        self._num[origin] = first + num
        return first

    def update(self, other: DrawnBefore) -> None:
        """Go on after what others have drawn as well."""
        for origin, num in other._num.items():
            self._num[origin] = max(num, self._num.get(origin, 0))

    def search(self, origin: str) -> str:
        """The origin of one more search of a prompt, which no search before it has."""
        first = self.take(f"{origin} searched", 1)
        return f"{origin} {first}" if first else origin

    def continued(self, request: Request) -> Request:
        """An unnamed request that goes on where the last one stopped; a named one as it is."""
        if request.origin is None:
            return request
        return replace(request, first=self.take(request.origin, request.samples))
