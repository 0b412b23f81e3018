"""The ways in which a workload is run, by the names that tables show. No torch here."""

from __future__ import annotations

from typing import Final

SHARING_MODES: Final = ("auto", "all", "one", "off")
"""treegen, with this `sharing`."""
NO_ATTENTION: Final = "no-attention"
"""treegen, with attention replaced by zeros: the ceiling of all others."""
OWN_STATES: Final = "own-states"
"""treegen, where each row reads and writes a recurrent state of its own in each step."""
STRUCTURED: Final = "structured"
"""treegen, where every sample has to be JSON of a schema."""
GENERATE: Final = "generate"
CONTINUOUS: Final = "continuous"
"""transformers' own engines: `generate` and continuous batching."""
STOCK_MODES: Final = (GENERATE, CONTINUOUS)

DECODE_MODES: Final = ("all", "one", "off", NO_ATTENTION)
"""What `treegen bench decode` compares."""
ALONE: Final = {*STOCK_MODES, NO_ATTENTION}
"""Modes of one GPU alone."""

SECONDS: Final = 120.0
GRID_SECONDS: Final = 5.0
"""What takes at least so long a run is left out; of a grid, so that a whole one takes minutes."""
