"""A timer for waits that must end at a time limit."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

PATIENCE: Final = 600.0
"""Seconds that Ray may take to place the first worker, and that a worker may take to answer."""
_GAP: Final = 5.0  # maximum number of seconds that count between two checks


@dataclass(slots=True)
class WaitTimer:
    """A wait that is checked repeatedly.

    Time without checks, for example while the process was stopped, counts for at most a few
    seconds. Setting the system clock has no effect.
    """

    _seconds: float = 0.0
    _last: float = field(default_factory=time.monotonic)

    def has_timed_out(self, *, goes_on: bool) -> bool:
        """Record whether the wait continues; return whether it has exceeded the time limit."""
        now = time.monotonic()
        self._seconds = self._seconds + min(now - self._last, _GAP) if goes_on else 0.0
        self._last = now
        return self._seconds > PATIENCE
