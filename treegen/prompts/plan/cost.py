"""What an attention part of its own costs on a device, and whether it pays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from treegen.common.spec import LatentSpec
from treegen.errors import InputError

Sharing = Literal["auto", "all", "one", "off"]
SHARING: tuple[Sharing, ...] = ("auto", "all", "one", "off")


def check_sharing(sharing: object) -> None:
    """Raise InputError for what is none of SHARING."""
    if sharing not in SHARING:
        raise InputError(f"sharing must be one of {', '.join(SHARING)}, got {sharing!r}")


@dataclass(frozen=True, slots=True)
class CostModel:
    """What an attention part of its own costs on a device, in one layer.

    group_us: microseconds for the part.
    row_us: microseconds for each of its rows: queries are regrouped, partial results merged.
    bytes_per_us: how fast keys and values are read. Without a part of its own every row reads them.
    level_us: microseconds for all parts of a level together (a launch), shared among their rows.
    memory_per_us: bytes that come from memory in a microsecond, of keys that are read once.
    flops_per_us: operations of attention in a microsecond.
    """

    group_us: float
    row_us: float
    bytes_per_us: float
    level_us: float = 0.0
    memory_per_us: float = 14_000.0
    flops_per_us: float = 30_000.0

    def should_expand(self, latent: LatentSpec, rows: int, itemsize: int) -> bool:
        """Whether rows read latents faster by keys and values of all heads that are made of them.

        Those are more to read, and less to compute for each row.

        Args:
            rows: The rows that read the same latents.
            itemsize: Bytes of one number.
        """

        def key_us(numbers: int, widths: int) -> float:
            products = 2 * rows * latent.heads * widths
            return max(numbers * itemsize / self.memory_per_us, products / self.flops_per_us)

        expanded = key_us(latent.expanded, latent.k_dim + latent.v_dim)
        return rows > 1 and expanded < key_us(latent.kept, latent.kept + latent.rank)

    def saving(self, rows: int, tokens: int, layer_bytes: float, live_rows: int) -> float:
        """Microseconds that a part of its own saves in each layer of a step; below 0 if it costs.

        Args:
            rows: The rows that share the part.
            tokens: Its keys.
            layer_bytes: Bytes of one token's keys and values in a layer.
            live_rows: Rows of the whole step.
        """
        again = (rows - 1) * tokens * layer_bytes / self.bytes_per_us
        level = self.level_us * rows / max(live_rows, rows)
        return again - self.group_us - rows * self.row_us - level


# The CPU's costs were fitted to timings of the attention operator on one core, with 8 query heads
# and 2 key heads of width 64. The GPU's costs were fitted to timings on an H200, where keys that
# many rows read again come from the L2 cache. See docs/performance.md.
DEVICE_COSTS = {
    "cpu": CostModel(group_us=40.0, row_us=0.5, bytes_per_us=14_000.0),
    "cuda": CostModel(
        group_us=0.1,
        row_us=0.018,
        bytes_per_us=8_000_000.0,
        level_us=6.0,
        memory_per_us=4_240_000.0,
        flops_per_us=567_000_000.0,
    ),
}


def decide_cascade(
    sharing: Sharing,
    rows: int,
    tokens: int,
    layer_bytes: float,
    cost: CostModel,
    *,
    root: bool,
    live_rows: int,
) -> tuple[bool, str]:
    """Whether a segment is kept as an attention part of its own, and why.

    Args:
        rows: Rows below it.
        live_rows: Rows of the whole step.
        root: Whether nothing is above it.
    """
    if sharing == "off":
        return False, "sharing is off"
    if tokens < 1:
        return False, "no whole block"
    if sharing == "one":
        return (True, "first level") if root else (False, "one level only")
    if rows <= 1:
        return False, "one row" if rows else "no rows"
    if sharing == "all":
        return True, "all levels"
    if cost.saving(rows, tokens, layer_bytes, live_rows) > 0:
        return True, "reading once pays"
    return False, "too short for its rows"
