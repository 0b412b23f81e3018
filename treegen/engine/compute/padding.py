"""Numbers of rows to which CUDA graphs are padded, and when padding costs as much as a capture.

There are few sizes, so that few graphs are captured. Capturing a graph takes as long as many steps.
Until then a larger graph is used, whose additional rows are wasted. A graph is captured once
padding has cost as much as a capture. Together both then cost at most twice the optimum (the ski
rental problem). Both costs are estimated from the size of the model and never measured. So equal
runs of a new LLM capture the same graphs, and the rows of their products have the same bits. A
later run of the LLM finds the graphs of earlier runs, and may use different ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from treegen.model.model import Model

MOST_TOKENS: Final = 1024
"""Maximum number of tokens of a prefill pass that may be captured."""
_SEVERAL: Final = 32
_CAPTURE: Final = 0.08  # seconds that the GPU loses by a capture
# A row takes two operations per weight, as many as a 16-bit weight has bytes. An 8-bit weight has
# half of the bytes, and its operations are twice as fast.
_BYTES: Final = 650e12  # bytes of weights with which one row is computed in a second


def pad_num_rows(num_rows: int) -> int:
    """Return the number of rows of the graph that decodes `num_rows` live rows."""
    if num_rows <= 16:
        # Never 1, for which the compiler would make separate kernels at the end of a run.
        return 1 << max(num_rows - 1, 1).bit_length()
    # With many rows, matrix products compute 128 or more rows at a time.
    step = 16 if num_rows <= 128 else 64 if num_rows <= 512 else 128
    return -(-num_rows // step) * step


def pad_num_query_rows(num_rows: int) -> int:
    """Return the same for rows with several query rows, whose number differs from step to step."""
    return -(-num_rows // _SEVERAL) * _SEVERAL


class CaptureBudget:
    """Sums the cost of padding since the last capture."""

    def __init__(self, row_seconds: float) -> None:
        """Set up a budget; `row_seconds` is the time of one row in a pass of many."""
        self._row_seconds = row_seconds
        self._cost = 0.0

    def should_capture(self, size: int, graph_size: int) -> bool:
        """Return whether a step of `size` rows costs too much in a graph of `graph_size` rows."""
        return self._cost + self._cost_of(size, graph_size) > _CAPTURE

    def add_padding_cost(self, size: int, graph_size: int) -> None:
        """Count a step of `size` rows that a graph of `graph_size` rows has computed."""
        self._cost += self._cost_of(size, graph_size)

    def reset(self) -> None:
        """Restart from zero after a capture."""
        self._cost = 0.0

    def _cost_of(self, size: int, graph_size: int) -> float:
        return (graph_size - size) * self._row_seconds


def estimate_row_seconds(model: Model) -> float:
    """Estimate the seconds of one row in a pass of many; only a token's active experts count."""
    config = model.module.config.get_text_config(decoder=True)
    experts = getattr(config, "num_experts_per_tok", None) or 1
    num_bytes: float = sum(
        weight.nbytes * (min(experts / len(weight), 1.0) if weight.dim() == 3 else 1.0)
        for weight in model.module.parameters()
    )
    return num_bytes / _BYTES
