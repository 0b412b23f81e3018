"""Randomness of prompts without a name: it belongs to their text and to earlier draws from it.

If unnamed prompts were numbered, the first prompt of every call would get the same random numbers.
The results of separate calls would then go up and down together.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from treegen.prompts.plan.plan import Request
from treegen.prompts.radix import Tokens

_MOST: Final = 2**19  # prompts whose counts are kept, in some 150 MB


def hash_prompt(content: str | Sequence[int] | Tokens) -> str:
    """The origin of an unnamed prompt: a hash of its token ids, or of its text."""
    if isinstance(content, str):
        kind, data = "text", content.encode("utf-8", "surrogatepass")
    else:
        kind, data = "tokens", np.asarray(content, dtype="<i4").tobytes()
    return f"\0{kind} {hashlib.blake2b(data, digest_size=16).hexdigest()}"


class DrawCounter:
    """Counts the samples, and the searches, of each unnamed prompt.

    A run that takes prompts for ever calls `forget`.
    """

    def __init__(self, earlier: DrawCounter | None = None) -> None:
        """Nothing was drawn yet, or only what `earlier` has counted, which is not changed."""
        self._earlier = earlier
        self._num: OrderedDict[str, int] = OrderedDict()  # the one asked for the longest ago first
        self._forgotten = 0  # the highest count that was forgotten

    def num(self, origin: str) -> int:
        """How many samples of an origin were counted."""
        earlier = 0 if self._earlier is None else self._earlier.num(origin)
        return self._num.get(origin, max(earlier, self._forgotten))

    def advance(self, origin: str, num: int) -> int:
        """Count `num` more samples of an origin; returns how many there were before."""
        first = self.num(origin)
        self._set(origin, first + num)
        return first

    def update(self, other: DrawCounter) -> None:
        """Take over the counts of another `DrawCounter` where they are higher."""
        self._forgotten = max(self._forgotten, other._forgotten)
        for origin, num in other._num.items():
            self._set(origin, max(num, self.num(origin)))

    def _set(self, origin: str, num: int) -> None:
        self._num[origin] = num
        self._num.move_to_end(origin)

    def forget(self) -> None:
        """Of all but the prompts asked for last keep the highest count alone.

        A prompt that is not known, or not any more, goes on from there, so nothing is drawn twice.
        """
        while len(self._num) > _MOST:
            self._forgotten = max(self._forgotten, self._num.popitem(last=False)[1])

    def origin_of_search(self, origin: str) -> str:
        """Count one more search of a prompt; returns an origin that no search before it had."""
        first = self.advance(f"{origin} searched", 1)
        return f"{origin} {first}" if first else origin

    def continue_numbering(self, request: Request) -> Request:
        """Return the request, its samples numbered on from earlier draws of its origin.

        A named prompt's request has no origin, and is returned as it is.
        """
        if request.origin is None:
            return request
        return replace(request, first=self.advance(request.origin, request.samples))

    def continue_numbering_flat(
        self, requests: Sequence[Request], seeds: Sequence[int | None]
    ) -> list[Request]:
        """The flat requests of one call, numbered on; those with a seed from 0 in each call."""
        of_seed: dict[int, DrawCounter] = defaultdict(DrawCounter)
        return [
            (self if seed is None else of_seed[seed]).continue_numbering(request)
            for request, seed in zip(requests, seeds, strict=True)
        ]
