"""When padding has cost as much as a CUDA graph of the right size.

To capture a graph takes as long as many steps. Until then a larger graph serves, whose further rows
are computed in vain. Who rents until the rent has come to the price pays at most twice the least
(the ski rental problem). Both are estimates by the size of the model, never measured. So the same
runs of a new LLM capture the same graphs, and their products have rows of the same bits. A later
run of the LLM finds the graphs of those before it, and may use others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from treegen.model.model import Model

_CAPTURE: Final = 0.08  # seconds that the GPU loses by a capture
# A row takes two operations for each weight: as many as 16-bit weights have bytes. Those of 8 bits
# have half of the bytes, and are computed with twice as fast.
_BYTES: Final = 650e12  # of weights that a row is computed with in a second


class CaptureBudget:
    """Counts what padding has cost since the last capture."""

    def __init__(self, row_seconds: float) -> None:
        """row_seconds: what a row takes in a pass of many."""
        self._row_seconds = row_seconds
        self._cost = 0.0

    def should_capture(self, size: int, graph_size: int) -> bool:
        """Whether a step of `size` rows costs too much in a graph of so many."""
        return self._cost + self._cost_of(size, graph_size) > _CAPTURE

    def add_padding_cost(self, size: int, graph_size: int) -> None:
        """Count a step of `size` rows that a graph of so many has computed."""
        self._cost += self._cost_of(size, graph_size)

    def reset(self) -> None:
        """Begin anew, for a graph was captured."""
        self._cost = 0.0

    def _cost_of(self, size: int, graph_size: int) -> float:
        return (graph_size - size) * self._row_seconds


def estimate_row_seconds(model: Model) -> float:
    """What a row takes in a pass of many, about; of all experts those count that a token has."""
    config = model.module.config.get_text_config(decoder=True)
    experts = getattr(config, "num_experts_per_tok", None) or 1
    num_bytes: float = sum(
        each.nbytes * (min(experts / len(each), 1.0) if each.dim() == 3 else 1.0)
        for each in model.module.parameters()
    )
    return num_bytes / _BYTES
