"""Lets the weights of a model change only between two steps, and counts their versions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from treegen.errors import InputError, ModelError


class UpdateGate:
    """Lets only one step, or one update of the weights, of a model run at a time.

    Attributes:
        version: Number of updates so far, which is the version of the weights.
    """

    def __init__(self) -> None:
        """Set up a model with the weights that it was loaded with."""
        self.version = 0
        self._lock, self._turnstile = threading.RLock(), threading.RLock()
        self._is_mixed = False
        self._stepping: int | None = None  # the thread that computes a step

    @contextmanager
    def step(self) -> Iterator[None]:
        """Hold the weights for a step.

        Raises:
            ModelError: an update was interrupted.
        """
        # Steps follow each other at once, so an update that waits must hold up the next step.
        with self._turnstile:
            pass
        with self._lock:
            self.check()
            self._stepping = threading.get_ident()
            try:
                yield
            finally:
                self._stepping = None

    @contextmanager
    def update(self) -> Iterator[int]:
        """Hold the weights to replace them; yield the version that they have afterwards.

        Raises:
            InputError: a function that a step calls, such as a draft function, updates the weights.
        """
        if self._stepping == threading.get_ident():
            raise InputError("treegen is computing a step; update the weights between two steps")
        with self._turnstile, self._lock:
            self._is_mixed = True
            yield self.version + 1
            self._is_mixed = False
            self.version += 1

    def check(self) -> None:
        """Raise ModelError if an update was interrupted."""
        if self._is_mixed:
            raise ModelError(
                "an update of the weights was interrupted, so some weights are old and some are "
                "new; update all weights again"
            )
