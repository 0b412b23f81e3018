"""Confidence stops: ends rows whose mean confidence over their last tokens is too low."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treegen.engine.compute.levels import Ints
from treegen.engine.rows.engine_run import EngineRun, RowFeature
from treegen.engine.segments.segment import LiveRequest
from treegen.prompts.stops import Ending


class ConfidenceStops(RowFeature):
    """The minimum confidences of the rows of one run.

    The attributes are arrays over the slots of the row table.

    Attributes:
        min_confidence: A row ends once its mean confidence over its last `window` tokens is below
            this.
        window: Number of tokens over which the mean is taken; 0 for a row without a minimum.
        total: Sum of the confidences of the row's last `window` tokens.
        is_low: Whether the row ends because its confidence is below the minimum.
    """

    def __init__(self, run: EngineRun) -> None:
        """Set up a run in which no row has a minimum yet."""
        super().__init__(run)
        self.min_confidence = self.total = np.zeros(0, dtype=np.float64)
        self.window: Ints = np.zeros(0, dtype=np.int64)
        self.is_low = np.zeros(0, dtype=np.bool_)

    def begin(self, requests: Sequence[LiveRequest], slots_PN: Ints) -> None:
        """Set the minima of new rows, in place of those of earlier rows in the same slots.

        Args:
            requests: The requests of the rows.
            slots_PN: Slots of the rows, [requests, rows of each].
        """
        sets = [self._run.param_sets[request.params].params for request in requests]
        min_confidences = [
            params.min_confidence if request.min_confidence is None else request.min_confidence
            for request, params in zip(requests, sets, strict=True)
        ]
        self.used |= any(min_confidence is not None for min_confidence in min_confidences)
        if not self.used:
            return
        self._grow_arrays()
        self.window[slots_PN], self.total[slots_PN], self.is_low[slots_PN] = 0, 0.0, False
        for slots, min_confidence, params in zip(slots_PN, min_confidences, sets, strict=True):
            if min_confidence is not None:
                self.min_confidence[slots], self.window[slots] = (
                    min_confidence,
                    params.confidence_window,
                )

    def update(self, slots: Ints) -> NDArray[np.bool_]:
        """Add the confidence of each slot's last token; return which rows end by it.

        It must be called only if a minimum is `used`. Sums are float64, in which adding and
        subtracting float32 numbers of similar size is exact.
        """
        rows, store = self._run.rows, self._run.rows.generated
        confidences = store.signals[..., 0]
        count, window = rows.count[slots], self.window[slots]
        latest = store.at(confidences, slots, count - 1)
        total = self.total[slots] + latest.astype(np.float64)
        sliding = np.flatnonzero((window > 0) & (count > window))  # a token leaves the window
        if len(sliding):
            leaving = count[sliding] - 1 - window[sliding]
            total[sliding] -= store.at(confidences, slots[sliding], leaving)
        self.total[slots] = total
        is_whole = (window > 0) & (count >= window)
        is_low: NDArray[np.bool_] = is_whole & (
            total / np.maximum(window, 1) < self.min_confidence[slots]
        )
        self.is_low[slots] = is_low
        return is_low

    def add_endings(
        self,
        endings: dict[int, Ending],
        slots: Ints,
        tokens: Sequence[Sequence[int]],
        requests: Sequence[LiveRequest],
    ) -> None:
        """Add the endings of samples that end only because of low confidence.

        Args:
            endings: How samples end, by index into `slots`.
            slots: Slots of rows.
            tokens: The tokens of each.
            requests: The request of each.
        """
        if not self.used:
            return
        for at in np.flatnonzero(self.is_low[slots]).tolist():
            if at not in endings:
                stopping = self._run.param_sets[requests[at].params].stopping
                text = stopping.text(requests[at].spec.tokens, tokens[at])
                endings[at] = "confidence", None, text
