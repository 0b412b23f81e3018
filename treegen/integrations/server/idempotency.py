"""Answers stored by the idempotency keys of requests."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from treegen.integrations.server.errors import StatusError

_LONGEST: Final = 255  # characters of a key
_OVERHEAD: Final = 1_000  # bytes that an entry takes in addition to its answer


@dataclass(slots=True, eq=False)
class _Entry:
    request: bytes
    """Hash of the request."""
    call: asyncio.Future[bytes]
    """Computes the answer."""
    size: int = 0
    """Bytes that count towards the limit, once the answer is stored."""
    num_waiting: int = 0
    """Number of requests that wait for the answer."""
    stored: float = 0.0
    """When the answer was stored, on the clock of `time.monotonic`."""


class StoredAnswers:
    """The answers of one client by idempotency key; the oldest ones are dropped first."""

    def __init__(self, max_bytes: int, seconds: float) -> None:
        """Create an empty store.

        Args:
            max_bytes: Maximum size of all answers.
            seconds: Time until an answer is dropped.
        """
        self._max_bytes, self._seconds = max_bytes, seconds
        self._running: dict[str, _Entry] = {}
        self._stored: OrderedDict[str, _Entry] = OrderedDict()  # the oldest answer first
        self._num_bytes = 0

    async def get(self, key: str, request: bytes, compute: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the stored answer of a key, or compute and store it.

        If the answer is being computed already, wait for it. It is cancelled once no request waits
        for it any more. An error is raised for all that wait, and is not stored.

        Args:
            key: The idempotency key.
            request: Everything that the answer depends on.
            compute: Computes the answer.

        Raises:
            StatusError: The key is too long, or was used for another request.
        """
        if len(key) > _LONGEST:
            raise StatusError(
                400, f"the idempotency key has over {_LONGEST} characters; shorten it"
            )
        self._drop_old()
        digest = hashlib.blake2b(request, digest_size=32).digest()
        entry = self._running.get(key) or self._stored.get(key)
        if entry is None:
            entry = self._running[key] = _Entry(digest, asyncio.ensure_future(compute()))
        elif entry.request != digest:
            raise StatusError(
                409, f"the idempotency key {key!r:.80} was used for another request; use a new one"
            )
        entry.num_waiting += 1
        try:
            answer = await asyncio.shield(entry.call)
        except BaseException:
            if entry.call.done() or entry.num_waiting == 1:
                entry.call.cancel()
                if self._running.get(key) is entry:
                    del self._running[key]
            raise
        finally:
            entry.num_waiting -= 1
        if self._running.get(key) is entry:
            self._stored[key] = self._running.pop(key)
            entry.size, entry.stored = _OVERHEAD + len(answer), time.monotonic()
            self._num_bytes += entry.size
            self._drop_old()
        return answer

    def _drop_old(self) -> None:
        oldest = time.monotonic() - self._seconds
        while self._stored:
            entry = next(iter(self._stored.values()))
            if self._num_bytes <= self._max_bytes and entry.stored >= oldest:
                break
            self._stored.popitem(last=False)
            self._num_bytes -= entry.size
