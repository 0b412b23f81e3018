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
from treegen.engine.rows.engine_run import RowFeature, RowStates


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
