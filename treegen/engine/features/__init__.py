"""The optional features of a run: recurrent states, images, grammars, thinking budgets and others.

The engine calls them at fixed points and does not depend on how they work. A feature that no row
uses takes no time in a step.

A point of a run                        Features
a segment is opened, computed, closed   `SegmentStates`, which the segment store calls
a row begins                            `ThinkingBudgets`, `ConfidenceStops`, `RowGrammars`
a row starts, leaves                    `RowStates`, which the row queue calls
inputs of a prefill pass                `EncoderCache`, `RowStates`, `SegmentStates`
rows of a decode step                   `ThinkingBudgets`
inputs of a decode step                 `ThinkingBudgets`, `RowStates`, `ExpandedKVCache`
draws                                   `RowGrammars`
a token is recorded                     `ConfidenceStops`
a sample ends                           `ConfidenceStops`, `RowGrammars`
"""

from __future__ import annotations

from dataclasses import dataclass

from treegen.engine.features.budgets import ThinkingBudgets
from treegen.engine.features.confidence import ConfidenceStops
from treegen.engine.features.encoder_cache import EncoderCache
from treegen.engine.features.expanded_kv import ExpandedKVCache
from treegen.engine.features.grammars import RowGrammars
from treegen.engine.features.recurrent_states import InPlaceRowStates, RecurrentSegmentStates
from treegen.engine.features.update_lists import RowUpdateLists
from treegen.engine.rows.engine_run import RowFeature, RowStates
from treegen.engine.rows.table import RowTable
from treegen.engine.segments.segment import SegmentStates
from treegen.ops.cache.state_cache import StateCache


@dataclass(slots=True)
class Features:
    """The optional features of one run."""

    states: RowStates
    """Recurrent states of the rows."""
    budgets: ThinkingBudgets
    """Thinking budgets."""
    confidence: ConfidenceStops
    """Minimum confidences."""
    grammars: RowGrammars
    """Grammars."""
    images: EncoderCache | None
    """Image embeddings of prompts; None for a model that takes no images."""
    expanded: ExpandedKVCache | None
    """Expanded keys and values; None for a model without latents."""

    @property
    def row_features(self) -> list[RowFeature]:
        """The features that set up new rows."""
        return [self.budgets, self.confidence]


def make_segment_states(cache: StateCache | None, *, recomputes_last: bool) -> SegmentStates:
    """Return the recurrent states of a run's segments.

    Args:
        cache: The state slots; None for a model without recurrent layers.
        recomputes_last: Whether last tokens of segments may be computed again.
    """
    return (
        SegmentStates()
        if cache is None
        else RecurrentSegmentStates(cache, recomputes_last=recomputes_last)
    )


def make_row_states(
    rows: RowTable, cache: StateCache | None, *, recomputes_last: bool
) -> RowStates:
    """Return the recurrent states of a run's rows.

    Args:
        rows: The table of rows.
        cache: The state slots; None for a model without recurrent layers.
        recomputes_last: Whether samples become segments, whose last tokens may be computed again.
    """
    if cache is None:
        return RowStates()
    if cache.delta is not None:
        return RowUpdateLists(rows, cache)
    return InPlaceRowStates(rows, cache, per_row=2 if recomputes_last else 1)
