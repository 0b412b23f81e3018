"""What an attention part of its own costs on a device, and whether it pays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Sharing = Literal["auto", "all", "one", "off"]
SHARING: tuple[Sharing, ...] = ("auto", "all", "one", "off")


@dataclass(frozen=True, slots=True)
class CostModel:
    """What one layer's attention part costs on a device, in microseconds.

    A part of its own costs group_us once and row_us per row (queries regrouped, partial results
    written and merged), and its share of level_us, by rows, which the parts of a level cost
    together (a launch); without it every row reads the keys again at bytes_per_us.
    """

    device: str
    group_us: float
    row_us: float
    bytes_per_us: float
    level_us: float = 0.0

    def saving(self, rows: int, tokens: int, layer_bytes: float, live_rows: int) -> float:
        """Microseconds per layer and step that a part of its own saves; negative if it costs.

        live_rows: of the whole step.
        """
        again = (rows - 1) * tokens * layer_bytes / self.bytes_per_us
        level = self.level_us * rows / max(live_rows, rows)
        return again - self.group_us - rows * self.row_us - level


# The CPU's were fitted to timings of the attention operator (8 query heads, 2 KV heads of width 64,
# one core), the GPU's to timings on an H200, where keys that many rows read again come from the L2
# cache; see docs/performance.md.
DEVICE_COSTS = {
    "cpu": CostModel("cpu", group_us=40.0, row_us=0.5, bytes_per_us=14_000.0),
    "cuda": CostModel("cuda", group_us=0.1, row_us=0.018, bytes_per_us=8_000_000.0, level_us=6.0),
}


def keep_or_fold(
    sharing: Sharing,
    rows: int,
    tokens: int,
    layer_bytes: float,
    cost: CostModel,
    *,
    root: bool,
    live_rows: int,
) -> tuple[bool, str]:
    """Whether a segment is an attention part of its own, and why. rows: of live_rows below it."""
    if sharing == "off":
        return False, "sharing is off"
    if sharing == "one":
        return (True, "first level") if root else (False, "one level only")
    if rows <= 1:
        return False, "one row" if rows else "no rows"
    if sharing == "all":
        return True, "all levels"
    if cost.saving(rows, tokens, layer_bytes, live_rows) > 0:
        return True, "reading once pays"
    return False, "too short for its rows"
