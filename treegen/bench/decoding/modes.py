"""The modes in which a workload runs, by the names in tables. Needs no torch."""

from __future__ import annotations

from typing import Final

SHARING_MODES: Final = ("auto", "all", "one", "off")
"""treegen with this value of `sharing`."""
NO_ATTENTION: Final = "no-attention"
"""treegen with attention replaced by zeros: the upper bound of all other modes."""
OWN_STATES: Final = "own-states"
"""treegen, with each row reading and writing its own recurrent state in each step."""
STRUCTURED: Final = "structured"
"""treegen, with every sample forced to be JSON of a schema."""
GENERATE: Final = "generate"
CONTINUOUS: Final = "continuous"
"""transformers' own engines: `generate` and continuous batching."""
STOCK_MODES: Final = (GENERATE, CONTINUOUS)

DECODE_MODES: Final = ("all", "one", "off", NO_ATTENTION)
"""The modes that `treegen bench decode` compares."""
ALONE: Final = {*STOCK_MODES, NO_ATTENTION}
"""Modes that run on a single GPU only."""

SECONDS: Final = 120.0
GRID_SECONDS: Final = 5.0
"""Runs whose least time is longer are skipped. The limit of grids keeps a whole grid to minutes."""
