"""Cost model: what a separate attention part costs on a device, and whether it pays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from treegen.common.spec import LatentSpec, ModelSpec
from treegen.errors import InputError, arg

Sharing = Literal["auto", "all", "one", "off"]
SHARING: tuple[Sharing, ...] = ("auto", "all", "one", "off")


def check_sharing(sharing: object) -> None:
    """Raise InputError unless `sharing` is one of `SHARING`."""
    if sharing not in SHARING:
        raise InputError(f"{arg('sharing')} must be one of {', '.join(SHARING)}, got {sharing!r}")


_BUSY_PROGRAMS = 128  # single rows of one key head that keep a GPU busy
_MAX_SPLITS = 16  # programs over which a GPU splits the keys of a row


@dataclass(frozen=True, slots=True)
class CostModel:
    """The cost of a separate attention part on a device, in one layer."""

    group_us: float
    """Microseconds for the part."""
    row_us: float
    """Microseconds for each of its rows, to regroup queries and merge partial results."""
    bytes_per_us: float
    """Read rate of keys and values that each row would read without a separate part."""
    level_us: float = 0.0
    """Microseconds for all parts of a level together (a launch), shared among their rows."""
    key_us: float = 0.0
    """Least microseconds for one more key of every row, however few rows there are, because
    programs wait for memory. Like `level_us`, it is shared among the rows."""
    busy_rows: float = 1.0
    """Rows whose programs keep the device busy. With fewer rows, the keys of a row are split over
    several programs, and `key_us` shrinks in proportion."""
    memory_per_us: float = 14_000.0
    """Bytes per microsecond from memory, for keys that are read once."""
    flops_per_us: float = 30_000.0
    """Attention FLOPs per microsecond."""

    def should_expand(self, latent: LatentSpec, rows: int, itemsize: int) -> bool:
        """Whether rows attend faster over keys and values expanded from latents than over latents.

        Expanded keys and values take more bytes to read and fewer operations per row.

        Args:
            latent: Sizes of the latents and of what is expanded from them.
            rows: The rows that read the same latents.
            itemsize: Bytes of one number.
        """

        def key_us(numbers: int, widths: int) -> float:
            products = 2 * rows * latent.heads * widths
            return max(numbers * itemsize / self.memory_per_us, products / self.flops_per_us)

        expanded = key_us(latent.expanded, latent.k_dim + latent.v_dim)
        return rows > 1 and expanded < key_us(latent.cached_dim, latent.cached_dim + latent.rank)

    def saving(self, rows: int, tokens: int, layer_bytes: float, live_rows: int) -> float:
        """Return the microseconds that a separate part saves per layer and step; may be negative.

        Args:
            rows: The rows that share the part.
            tokens: Number of its keys.
            layer_bytes: Bytes of one token's keys and values in a layer.
            live_rows: Rows of the whole step.
        """
        live_rows = max(live_rows, rows)
        reread_us = (rows - 1) * tokens * layer_bytes / self.bytes_per_us
        # Both a row's keys and the part's are split over at most _MAX_SPLITS programs.
        share = max(min(live_rows / self.busy_rows, 1.0) - 1 / _MAX_SPLITS, 0.0)
        wait_us = tokens * self.key_us * share
        common_us = (wait_us - self.level_us) * rows / live_rows
        return reread_us + common_us - self.group_us - rows * self.row_us


# The CPU costs were fitted to timings of the attention operator on one core, with 8 query heads
# and 2 key heads of width 64. The GPU costs were fitted to timings on an H200, where the L2 cache
# serves keys that many rows read. `cost_of` adds `busy_rows`. See docs/performance.md.
DEVICE_COSTS = {
    "cpu": CostModel(group_us=40.0, row_us=0.5, bytes_per_us=14_000.0),
    "cuda": CostModel(
        group_us=0.1,
        row_us=0.018,
        bytes_per_us=8_000_000.0,
        level_us=7.5,
        key_us=0.005,
        memory_per_us=4_240_000.0,
        flops_per_us=567_000_000.0,
    ),
}


def cost_of(device_type: str, kv_heads: int) -> CostModel:
    """Return the cost model of a device for the attention layers of a model.

    Args:
        device_type: Type of the device, such as "cpu".
        kv_heads: Key heads of a layer.
    """
    if device_type == "cpu":
        return DEVICE_COSTS["cpu"]
    return replace(DEVICE_COSTS["cuda"], busy_rows=_BUSY_PROGRAMS / kv_heads)


def should_expand(spec: ModelSpec, cost: CostModel, rows: int, stop: int) -> bool:
    """Return whether a segment gets keys and values that are expanded from latents.

    Args:
        spec: The model.
        cost: The cost model of the device.
        rows: Number of rows that read the segment.
        stop: Position after the segment's last key.
    """
    latent = spec.latent
    if latent is None or 0 < spec.index_topk <= stop:
        return False  # selected keys are read from latents
    return cost.should_expand(latent, rows, spec.itemsize)


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
    """Return whether a segment is kept as a separate attention part, and why.

    Args:
        sharing: Which segments are kept; see `compile_plan`.
        rows: Rows below the segment.
        tokens: Keys that the part would have, in whole blocks.
        layer_bytes: Bytes of one token's keys and values in a layer.
        cost: The cost model of the device.
        root: Whether the segment is a root.
        live_rows: Rows of the whole step.
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
