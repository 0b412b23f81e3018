"""Seeds of samples, and random origins of unnamed prompts.

A seed is a function of the run's seed, the prompt's id or origin and the sample index. The origin
of an unnamed prompt follows from its text and from earlier draws. If unnamed prompts were numbered
per call, the first prompt of every call would get the same random numbers, and the results of
separate calls would be correlated.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from treegen.common.params import MAX_SEED
from treegen.prompts.plan.plan import Request
from treegen.prompts.radix import Tokens


def row_seed(run_seed: int | None, prompt_id: str, sample_index: int) -> int:
    """Return the seed of one sample, 0 to 2**63 - 1: a hash of the arguments and nothing else.

    Args:
        run_seed: The seed of the run; None means 0.
        prompt_id: The id or origin of the prompt.
        sample_index: The sample's number among those of the prompt.
    """
    key = f"{run_seed or 0}\0{sample_index}\0{prompt_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") & MAX_SEED


def sample_seed(run_seed: int | None, request: Request, sample_index: int) -> int:
    """Return the seed of one sample of a request.

    Args:
        run_seed: The seed of the run; None means 0.
        request: The request.
        sample_index: The sample's number within the request.
    """
    return row_seed(run_seed, request.origin or request.id, request.first + sample_index)


_MAX_COUNTED_PROMPTS: Final = 2**19  # prompts whose counts are kept, in about 150 MB


def hash_prompt(content: str | Sequence[int] | Tokens) -> str:
    """Return the origin of an unnamed prompt: a hash of its token ids or its text."""
    if isinstance(content, str):
        kind, data = "text", content.encode("utf-8", "surrogatepass")
    else:
        kind, data = "tokens", np.asarray(content, dtype="<i4").tobytes()
    return f"\0{kind} {hashlib.blake2b(data, digest_size=16).hexdigest()}"


class DrawCounter:
    """Counts the samples and the searches of each unnamed prompt.

    A run that takes prompts indefinitely calls `forget` to bound the memory.
    """

    def __init__(self, earlier: DrawCounter | None = None) -> None:
        """Start from zero, or from the counts of `earlier`, which is not changed."""
        self._earlier = earlier
        self._counts: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._forgotten = 0  # the highest count that was dropped

    def num(self, origin: str) -> int:
        """Return the number of samples counted for an origin."""
        earlier = 0 if self._earlier is None else self._earlier.num(origin)
        return self._counts.get(origin, max(earlier, self._forgotten))

    def advance(self, origin: str, num: int) -> int:
        """Count `num` more samples of an origin, and return how many there were before."""
        first = self.num(origin)
        self._set(origin, first + num)
        return first

    def update(self, other: DrawCounter) -> None:
        """Adopt the counts of another `DrawCounter` where they are higher."""
        self._forgotten = max(self._forgotten, other._forgotten)
        for origin, num in other._counts.items():
            self._set(origin, max(num, self.num(origin)))

    def _set(self, origin: str, num: int) -> None:
        self._counts[origin] = num
        self._counts.move_to_end(origin)

    def forget(self) -> None:
        """Drop the counts of all but the most recent prompts, and keep only their maximum.

        A prompt without a count continues from that maximum, so no random numbers are used twice.
        """
        while len(self._counts) > _MAX_COUNTED_PROMPTS:
            self._forgotten = max(self._forgotten, self._counts.popitem(last=False)[1])

    def origin_of_search(self, origin: str) -> str:
        """Count one more search of a prompt, and return an origin that no earlier search had."""
        first = self.advance(f"{origin} searched", 1)
        return f"{origin} {first}" if first else origin

    def continue_numbering(self, request: Request) -> Request:
        """Return the request with its samples numbered after earlier draws of its origin.

        The request of a named prompt has no origin and is returned unchanged.
        """
        if request.origin is None:
            return request
        return replace(request, first=self.advance(request.origin, request.samples))

    def continue_numbering_flat(
        self, requests: Sequence[Request], seeds: Sequence[int | None]
    ) -> list[Request]:
        """Return one call's flat requests with their samples numbered by `continue_numbering`.

        The numbering of requests with a seed starts at 0 in each call.

        Args:
            requests: The requests of the call.
            seeds: The seed of each request; None for requests that continue the numbering.
        """
        counter_of_seed: dict[int, DrawCounter] = defaultdict(DrawCounter)
        return [
            (self if seed is None else counter_of_seed[seed]).continue_numbering(request)
            for request, seed in zip(requests, seeds, strict=True)
        ]
