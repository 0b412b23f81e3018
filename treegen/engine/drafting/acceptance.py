"""How often guesses were right of late."""

from __future__ import annotations

from treegen.common.drafter import Ints

_FIRST = 0.7  # an estimate, before any guess was tried
_TRUST = 8.0  # tokens tried that it counts for
_MEMORY = 0.99  # of what was learned at the step before


class AcceptanceEstimator:
    """The chance that a guessed token is right if those before it were."""

    def __init__(self) -> None:
        """Nothing was tried."""
        self._accepted, self._tried = _FIRST * _TRUST, _TRUST

    @property
    def value(self) -> float:
        """The share of guesses that were right."""
        return self._accepted / self._tried

    def learn(self, tried_R: Ints, accepted_R: Ints) -> None:
        """Note, for each row, how many guesses were tried and how many were right."""
        self._tried = _MEMORY * self._tried + int(tried_R.sum())
        self._accepted = _MEMORY * self._accepted + int(accepted_R.sum())
