"""How long something is waited for that may never come."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

PATIENCE: Final = 600.0
"""Seconds for Ray to find room for workers if there are none, and for a worker to answer."""
_GAP: Final = 5.0  # seconds that count at most from one look to the next


@dataclass(slots=True)
class WaitTimer:
    """A wait that is looked at again and again.

    Time in which nobody looks, such as that of a process that was stopped, hardly counts. Nor does
    it matter if the clock is set.
    """

    _seconds: float = 0.0
    _last: float = field(default_factory=time.monotonic)

    def has_timed_out(self, *, goes_on: bool) -> bool:
        """Note that the wait goes on, or is over; whether it has been too long by now."""
        now = time.monotonic()
        self._seconds = self._seconds + min(now - self._last, _GAP) if goes_on else 0.0
        self._last = now
        return self._seconds > PATIENCE
