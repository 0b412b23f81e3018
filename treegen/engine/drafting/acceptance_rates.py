"""Running estimate of the acceptance rate of draft tokens."""

from __future__ import annotations

from treegen.common.drafter import Ints

_FIRST = 0.7  # estimate before any draft token was tried
_TRUST = 8.0  # prior weight of that estimate, in tried tokens
_MEMORY = 0.99  # weight of earlier steps, relative to the next step


class AcceptanceEstimator:
    """The probability that a draft token is accepted if the ones before it were."""

    def __init__(self) -> None:
        """Set up an estimate before any draft token was tried."""
        self._accepted, self._tried = _FIRST * _TRUST, _TRUST

    @property
    def value(self) -> float:
        """The share of tried draft tokens that were accepted."""
        return self._accepted / self._tried

    def learn(self, tried_R: Ints, accepted_R: Ints) -> None:
        """Record how many draft tokens of each row were tried, and how many were accepted."""
        self._tried = _MEMORY * self._tried + int(tried_R.sum())
        self._accepted = _MEMORY * self._accepted + int(accepted_R.sum())
