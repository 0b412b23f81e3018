"""Randomness of prompts without a name: it belongs to their text and to earlier draws from it.

If unnamed prompts were numbered, the first prompt of every call would get the same random numbers.
The results of separate calls would then go up and down together.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treegen.plan.plan import Request
from treegen.prompts.radix import Tokens


def origin_of(content: str | Sequence[int] | Tokens) -> str:
    """The origin of an unnamed prompt: a hash of its token ids, or of its text."""
    if isinstance(content, str):
        kind, data = "text", content.encode("utf-8", "surrogatepass")
    else:
        kind, data = "tokens", np.asarray(content, dtype="<i4").tobytes()
    return f"\0{kind} {hashlib.blake2b(data, digest_size=16).hexdigest()}"


class DrawnBefore:
    """Counts the samples, and the searches, of each unnamed prompt."""

    def __init__(self, earlier: DrawnBefore | None = None) -> None:
        """Nothing was drawn yet, or only what `earlier` has counted, which is not changed."""
        self._earlier = earlier
        self._num: dict[str, int] = {}

    def num(self, origin: str) -> int:
        """How many samples of an origin were counted."""
        earlier = 0 if self._earlier is None else self._earlier.num(origin)
        return self._num.get(origin, earlier)

    def take(self, origin: str, num: int) -> int:
        """Count `num` more samples of an origin; returns how many there were before."""
        first = self.num(origin)
        self._num[origin] = first + num
        return first

    def update(self, other: DrawnBefore) -> None:
        """Take over the counts of another `DrawnBefore` where they are higher."""
        for origin, num in other._num.items():
            self._num[origin] = max(num, self.num(origin))

    def origin_of_search(self, origin: str) -> str:
        """Count one more search of a prompt; returns an origin that no search before it had."""
        first = self.take(f"{origin} searched", 1)
        return f"{origin} {first}" if first else origin

    def continued(self, request: Request) -> Request:
        """Return the request, its samples numbered on from earlier draws of its origin.

        A named prompt's request has no origin, and is returned as it is.
        """
        if request.origin is None:
            return request
        return replace(request, first=self.take(request.origin, request.samples))

    def continued_flat(
        self, requests: Sequence[Request], seeds: Sequence[int | None]
    ) -> list[Request]:
        """The flat requests of one call, numbered on; those with a seed from 0 in each call."""
        of_seed: dict[int, DrawnBefore] = defaultdict(DrawnBefore)
        return [
            (self if seed is None else of_seed[seed]).continued(request)
            for request, seed in zip(requests, seeds, strict=True)
        ]
