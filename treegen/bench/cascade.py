"""Attention over a cascade of levels: the operator's time compared with its roofline.

A level has some groups, all with the same number of keys. The rows are divided evenly among them.

Legend: R rows, H query heads, G groups, P pages, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from treegen.bench.ceilings import Ceilings
from treegen.bench.timing import Spread, Stopwatch, free_bytes
from treegen.common.formatting import format_bytes
from treegen.errors import CapacityError, InputError, NumericsError
from treegen.model.memory import empty_device_cache
from treegen.ops.attention import Level, attend, prepare
from treegen.ops.attention.registry import LOADERS, load

_CHECKED_ROWS = 3
# Rounding alone causes no larger error, as a share of the largest number.
_TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one attention layer.

    q_heads, kv_heads: query heads and key heads.
    width: numbers in a query, a key and a value of one head.
    """

    q_heads: int = 8
    kv_heads: int = 1
    width: int = 128


@dataclass(frozen=True, slots=True)
class LevelShape:
    """One level: `groups` groups with `keys` keys each."""

    keys: int
    groups: int


@dataclass(frozen=True, slots=True)
class CascadeResult:
    """The result of one cascade; times in microseconds, spreads over repeats.

    rows: query rows.
    parts: the levels.
    times: by implementation.
    floor_us: the least time of all levels, one after another.
    ratios: by implementation, the median time over the floor.
    error: see `Cascade.check`.
    skipped: what was not timed, and why.
    """

    rows: int
    parts: tuple[LevelShape, ...]
    times: dict[str, Spread]
    floor_us: float
    ratios: dict[str, float]
    error: float
    skipped: dict[str, str]


def implementations(device: torch.device) -> list[str]:
    """Return the implementations to time: all that run on the device except the reference."""
    names = [name for name in LOADERS if name != "reference"]
    return [name for name in names if not isinstance(load(name, device), str)]


def measure(
    rows: Sequence[int],
    parts: Sequence[LevelShape],
    heads: Heads,
    ceilings: Ceilings,
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int = 20,
) -> Iterator[CascadeResult]:
    """Time one cascade for several numbers of rows.

    Args:
        rows: The numbers of query rows to time.
        parts: The levels of the cascade.
        heads: The heads of the attention layer.
        ceilings: The device's sustained rates, for the least times.
        device: The device to measure.
        dtype: The type of queries, keys and values.
        repeats: Timed calls of each implementation. Default: 20.

    Raises:
        NumericsError: a result is wrong.
        CapacityError: the keys do not fit.
    """
    stopwatch = Stopwatch(device)
    for number in rows:
        cascade = Cascade(number, parts, heads, device, dtype)
        error, skipped = cascade.check()
        times = cascade.times(stopwatch, repeats, skipped)
        floor_us = cascade.floor(ceilings) * 1e6
        ratios = {name: time.median / floor_us for name, time in times.items()}
        yield CascadeResult(number, tuple(parts), times, floor_us, ratios, error, skipped)
        del cascade
        empty_device_cache(device)


class Cascade:
    """Random queries, a pool of random keys and values, and levels over it.

    tables: the pages [G, P] of each part.
    """

    def __init__(
        self,
        rows: int,
        parts: Sequence[LevelShape],
        heads: Heads,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Make the queries and the pool.

        Args:
            rows: Number of query rows.
            parts: The levels of the cascade.
            heads: The heads of the attention layer.
            device: The device to measure.
            dtype: The type of queries, keys and values.

        Raises:
            CapacityError: the keys do not fit.
        """
        self.rows, self.parts, self.heads = rows, tuple(parts), heads
        self.device, self.dtype = device, dtype
        self.page_size = 64 if device.type == "cuda" else 16
        self.tables: list[Tensor] = []
        num_pages = 0
        for part in parts:
            shape = part.groups, -(-part.keys // self.page_size)
            self.tables.append(num_pages + torch.arange(shape[0] * shape[1]).view(shape))
            num_pages += self.tables[-1].numel()
        need, free = num_pages * self.page_size * self.token_bytes, free_bytes(device)
        if need > free:
            raise CapacityError(
                f"{num_pages * self.page_size:,} keys take {format_bytes(need)}, "
                f"{format_bytes(free)} are free; use fewer --rows or fewer keys"
            )
        self.q_RHD = self.random(rows, heads.q_heads, heads.width)
        pool = num_pages, self.page_size, heads.kv_heads, heads.width
        self.keys, self.values = self.random(*pool), self.random(*pool)

    @property
    def token_bytes(self) -> int:
        """Bytes of the key and value of one token."""
        return 2 * self.heads.kv_heads * self.heads.width * self.dtype.itemsize

    @property
    def key_flops(self) -> int:
        """FLOPs of one key that all rows read."""
        return 4 * self.rows * self.heads.q_heads * self.heads.width

    def floor(self, ceilings: Ceilings) -> float:
        """Return the least seconds: the larger of FLOP time and memory time, summed over levels."""
        return sum(
            max(
                self.key_flops * part.keys / ceilings.attention,
                part.groups * part.keys * self.token_bytes / ceilings.memory,
            )
            for part in self.parts
        )

    def levels(self, rows: Tensor | None = None) -> list[Level]:
        """Return a level for each part, with all rows or with some rows, in ascending order."""
        chosen_R = torch.arange(self.rows) if rows is None else rows
        first, found = 0, []
        for part, pages_GP in zip(self.parts, self.tables, strict=True):
            group_R = chosen_R * part.groups // self.rows
            used_G, rows_G = group_R.unique_consecutive(return_counts=True)
            stop_G = rows_G.cumsum(0)
            found.append(self.level(stop_G - rows_G, stop_G, pages_GP[used_G], part.keys, first))
            first += part.keys
        return found

    def level(
        self, start_G: Tensor, stop_G: Tensor, pages_GP: Tensor, keys: int, first: int
    ) -> Level:
        """Return a level of groups, each with its own pages and `keys` keys from position `first`.

        Args:
            start_G: First row of each group, `[G]`.
            stop_G: Row after the last of each group, `[G]`.
            pages_GP: The pages of each group, `[G, P]`.
            keys: Keys of each group.
            first: Position of the first key of each group.
        """

        def ints(values: Tensor) -> Tensor:
            return values.to(dtype=torch.int32, device=self.device)

        return Level(
            q_start_G=ints(start_G),
            q_stop_G=ints(stop_G),
            pages_GP=ints(pages_GP),
            kv_len_G=ints(torch.full_like(start_G, keys)),
            kv_start_G=ints(torch.full_like(start_G, first)),
        )

    def call(self, levels: list[Level], impl: str) -> Callable[[], Tensor]:
        """Return a function that attends. Levels are prepared only once, as in a decode step."""
        prepared = prepare(levels, impl=impl)
        return lambda: attend(self.q_RHD, self.keys, self.values, prepared)

    def check(self) -> tuple[float, dict[str, str]]:
        """Return the largest error of the implementations, and why some reject these levels.

        The error is measured on some rows, as a share of their largest number.

        Raises:
            NumericsError: the error is larger than rounding explains.
        """
        errors: list[float] = []
        refused: dict[str, str] = {}
        for name in implementations(self.device):
            try:
                errors.append(self._error(name))
            except InputError as problem:
                refused[name] = str(problem)
        return max(errors, default=0.0), refused

    def times(
        self, stopwatch: Stopwatch, repeats: int, skipped: dict[str, str]
    ) -> dict[str, Spread]:
        """Return the microseconds by implementation.

        Args:
            stopwatch: The stopwatch of the device.
            repeats: Timed calls of each implementation.
            skipped: The implementations to leave out. Those that fail are added, with the reason.
        """
        times: dict[str, Spread] = {}
        for name in implementations(self.device):
            if name not in skipped:
                try:
                    times[name] = stopwatch.microseconds(self.call(self.levels(), name), repeats)
                except RuntimeError as problem:  # out of memory, or graph capture failed
                    skipped[name] = str(problem).splitlines()[0]
        return times

    def _error(self, impl: str) -> float:
        rows = torch.linspace(0, self.rows - 1, min(self.rows, _CHECKED_ROWS)).long()
        got = self.call(self.levels(), impl)()[rows.to(self.device)].float()
        q_RHD = self.q_RHD[rows.to(self.device)]
        want = attend(q_RHD, self.keys, self.values, self.levels(rows), impl="reference").float()
        error = ((got - want).abs().max() / want.abs().max()).item()
        if not error <= _TOLERANCE[self.dtype]:
            parts = ", ".join(f"{part.keys} x {part.groups}" for part in self.parts)
            raise NumericsError(
                f"impl {impl!r} is wrong at {self.rows} rows, keys x groups {parts}: error "
                f"{error:.2g} of the largest number in {self.dtype}"
            )
        return error

    def random(self, *shape: int) -> Tensor:
        """Return random normal numbers in the type of the keys."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)
