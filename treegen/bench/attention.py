"""Benchmark of the attention operator alone, against the same attention without sharing.

Rows of a decode step share a prefix, and each has its own suffix. These are compared:

    two levels     the operator, with every implementation that runs on the device
    "copies"       the operator with one level whose page tables refer to a copy of the prefix for
                   each row
    "reread"       the operator with one level whose page tables refer to one prefix, which every
                   row reads again
    torch          dense attention on a copy for each row, with heads folded into rows

The results of some rows are checked against the reference.

Legend: R rows, H query heads, K key heads, G groups, P pages, S keys, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from treegen.bench.ceilings import Ceilings, kernels_for
from treegen.bench.timing import Spread, Stopwatch, free_bytes
from treegen.common.formatting import format_bytes, summarize_error
from treegen.errors import CapacityError, InputError, NumericsError
from treegen.model.memory import empty_device_cache
from treegen.ops.attention import Level, attend, prepare
from treegen.ops.attention.registry import LOADERS, load

COPIES: Final = "copies"
REREAD: Final = "reread"
_CHECKED_ROWS: Final = 3
# Rounding alone causes no larger error, as a share of the largest number.
_TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one attention layer."""

    q_heads: int = 8
    """Number of query heads."""
    kv_heads: int = 1
    """Number of key heads."""
    width: int = 128
    """Numbers in a query, a key and a value of one head."""


@dataclass(frozen=True, slots=True)
class LevelShape:
    """One level: `groups` groups with `keys` keys each."""

    keys: int
    groups: int


@dataclass(frozen=True, slots=True)
class AttentionResult:
    """The result of one configuration; times in microseconds, spreads over repeats."""

    rows: int
    """Number of rows."""
    prefix: int
    """Number of keys of the shared prefix."""
    suffix: int
    """Number of keys of each row's suffix."""
    shared: dict[str, Spread]
    """By implementation, the time of both levels."""
    fastest: str
    """The fastest implementation."""
    prefix_us: Spread
    """The time of the prefix's level alone, with the fastest implementation."""
    unshared: dict[str, Spread]
    """By kernel and how it reads the prefix, the time without sharing."""
    over_copies: float | None
    """Speedup of the fastest implementation over the fastest kernel that reads a copy of the prefix
    for each row; None if no such kernel was timed."""
    over_reread: float | None
    """Speedup over kernels in which all rows read one prefix again, largely from a cache."""
    prefix_flops: float
    """FLOP/s in the prefix's level."""
    prefix_share: float
    """`prefix_flops` as a share of the attention ceiling."""
    floor_us: float
    """The minimum time of both levels."""
    share: float
    """The floor as a share of the fastest implementation's time."""
    error: float
    """See `Cascade.check`."""
    skipped: dict[str, str] = field(default_factory=dict)
    """The implementations and kernels that were not timed, and why."""


def implementations(device: torch.device) -> list[str]:
    """Return the implementations to time: all that run on the device except the reference."""
    names = [name for name in LOADERS if name != "reference"]
    return [name for name in names if not isinstance(load(name, device), str)]


def measure(
    grid: list[tuple[int, int, int]],
    heads: Heads,
    ceilings: Ceilings,
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int = 20,
) -> Iterator[AttentionResult]:
    """Time each (rows, prefix, suffix) of a grid.

    Args:
        grid: (rows, keys of the prefix, keys of each suffix) of each configuration.
        heads: The heads of the attention layer.
        ceilings: The device's sustained rates, for the minimum times.
        device: The device to measure.
        dtype: The type of queries, keys and values.
        repeats: Timed calls of each configuration. Default: 20.

    Raises:
        NumericsError: a result is wrong.
        CapacityError: the keys do not fit, or no implementation can run.
    """
    stopwatch = Stopwatch(device)
    for rows, prefix, suffix in grid:
        case = _Case(rows, prefix, suffix, heads, device, dtype)
        yield _measure(case, ceilings, stopwatch, repeats)
        del case
        empty_device_cache(device)


class Cascade:
    """Random queries, a pool of random keys and values, and levels over it.

    Attributes:
        tables: The pages [G, P] of each part.
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
                f"{num_pages * self.page_size:,} keys need {format_bytes(need)}, but only "
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
        """Return the minimum seconds: the larger of FLOP and memory time, summed over levels."""
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
        first = 0
        levels: list[Level] = []
        for part, pages_GP in zip(self.parts, self.tables, strict=True):
            group_R = chosen_R * part.groups // self.rows
            used_G, rows_G = group_R.unique_consecutive(return_counts=True)
            stop_G = rows_G.cumsum(0)
            levels.append(self.level(stop_G - rows_G, stop_G, pages_GP[used_G], part.keys, first))
            first += part.keys
        return levels

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
        rejected: dict[str, str] = {}
        for name in implementations(self.device):
            try:
                errors.append(self._error(name))
            except (InputError, RuntimeError) as problem:  # unsupported shape, or out of memory
                rejected[name] = summarize_error(problem)
        return max(errors, default=0.0), rejected

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
                    skipped[name] = summarize_error(problem)
        return times

    def _error(self, impl: str) -> float:
        rows = torch.linspace(0, self.rows - 1, min(self.rows, _CHECKED_ROWS)).long()
        out = self.call(self.levels(), impl)()[rows.to(self.device)].float()
        q_RHD = self.q_RHD[rows.to(self.device)]
        expected = attend(q_RHD, self.keys, self.values, self.levels(rows), impl="reference")
        expected = expected.float()
        error = ((out - expected).abs().max() / expected.abs().max()).item()
        if not error <= _TOLERANCE[self.dtype]:
            parts = ", ".join(f"{part.keys} x {part.groups}" for part in self.parts)
            raise NumericsError(
                f"impl {impl!r} returned wrong results for {self.rows} rows and {parts} (keys x "
                f"groups): the error is {error:.2g} times the largest value in {self.dtype}"
            )
        return error

    def random(self, *shape: int) -> Tensor:
        """Return random normal numbers in the type of the keys."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)


class _Case(Cascade):
    """One prefix for all rows, and a suffix for each row unless its length is 0."""

    def __init__(
        self,
        rows: int,
        prefix: int,
        suffix: int,
        heads: Heads,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        parts = [LevelShape(prefix, 1), *([LevelShape(suffix, rows)] if suffix else [])]
        super().__init__(rows, parts, heads, device, dtype)
        self.prefix, self.suffix = prefix, suffix
        self.prefix_pages = self.tables[0].shape[1]

    def suffix_tables(self) -> Tensor:
        """Return the pages [R, P] of the suffixes."""
        return self.tables[1] if self.suffix else torch.empty(self.rows, 0, dtype=torch.int64)

    def whole_level(self, pages_RP: Tensor) -> Level:
        """Return one level without sharing: each row reads prefix and suffix through its own table.

        The suffix starts on a new page, so the prefix counts with whole pages of keys.
        """
        row_R = torch.arange(self.rows)
        length = self.prefix_pages * self.page_size + self.suffix
        return self.level(row_R, row_R + 1, pages_RP, length, 0)


def _measure(
    case: _Case, ceilings: Ceilings, stopwatch: Stopwatch, repeats: int
) -> AttentionResult:
    def time(call: Callable[[], Tensor]) -> Spread:
        return stopwatch.microseconds(call, repeats)

    error, skipped = case.check()
    shared = case.times(stopwatch, repeats, skipped)
    if not shared:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise CapacityError(
            f"no implementation can attend {case.rows:,} rows to {case.prefix:,} and "
            f"{case.suffix:,} keys ({reasons}); use fewer --rows or fewer keys"
        )
    fastest = min(shared, key=lambda name: shared[name].median)
    prefix_us = time(case.call(case.levels()[:1], fastest))
    unshared: dict[str, Spread] = {}
    for name, call in _iter_unshared_calls(case, list(shared), skipped):
        try:
            unshared[name] = time(call)
        except RuntimeError as problem:  # out of memory, or a shape that the kernel does not take
            skipped[name] = summarize_error(problem)
        if name in skipped:
            empty_device_cache(case.device)

    def speedup(*, reread: bool) -> float | None:
        times = [t.median for name, t in unshared.items() if name.endswith(REREAD) == reread]
        return min(times) / shared[fastest].median if times else None

    floor = case.floor(ceilings)
    rate = case.key_flops * case.prefix / (prefix_us.median / 1e6)
    return AttentionResult(
        case.rows,
        case.prefix,
        case.suffix,
        shared=shared,
        fastest=fastest,
        prefix_us=prefix_us,
        unshared=unshared,
        over_copies=speedup(reread=False),
        over_reread=speedup(reread=True),
        prefix_flops=rate,
        prefix_share=rate / ceilings.attention,
        floor_us=floor * 1e6,
        share=floor * 1e6 / shared[fastest].median,
        error=error,
        skipped=skipped,
    )


def _iter_unshared_calls(
    case: _Case, names: list[str], skipped: dict[str, str]
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield the calls that read all keys once per row. Copies are freed before dense attention."""
    reread_RP = torch.cat([case.tables[0].expand(case.rows, -1), case.suffix_tables()], dim=1)
    for name in names:
        yield f"{name} {REREAD}", case.call([case.whole_level(reread_RP)], name)
    kernels = [f"torch {name}" for name in kernels_for(case.device, case.dtype)]
    need = case.rows * (case.prefix + case.suffix) * case.token_bytes
    free = free_bytes(case.device)
    # Memory must hold the copies twice, because CPU implementations may copy what they read.
    if 2 * need > free:
        reason = f"the copies need {format_bytes(need)}, but only {format_bytes(free)} are free"
        skipped.update(dict.fromkeys([*(f"{name} {COPIES}" for name in names), *kernels], reason))
        return
    copied = _PrefixCopies(case)
    for name in names:
        yield f"{name} {COPIES}", copied.make_paged_call(name)
    del copied
    empty_device_cache(case.device)
    q_RKGD = case.q_RHD.view(case.rows, case.heads.kv_heads, -1, case.heads.width)
    shape = (case.rows, case.heads.kv_heads, case.prefix + case.suffix, case.heads.width)
    k_RKSD, v_RKSD = case.random(*shape), case.random(*shape)
    for name, backend in kernels_for(case.device, case.dtype).items():

        def dense(backend: object = backend) -> Tensor:
            with sdpa_kernel(backend):  # type: ignore[arg-type]
                return scaled_dot_product_attention(q_RKGD, k_RKSD, v_RKSD)

        yield f"torch {name}", dense


class _PrefixCopies:
    """A pool with a copy of the prefix for each row, followed by the rows' suffixes."""

    def __init__(self, case: _Case) -> None:
        self._case = case
        pages = case.prefix_pages
        copies_RP = torch.arange(case.rows * pages).view(case.rows, pages)
        suffixes_RP = case.suffix_tables() + (case.rows - 1) * pages
        self._pages_RP = torch.cat([copies_RP, suffixes_RP], dim=1)
        self._keys, self._values = (
            torch.cat([pool[:pages].repeat(case.rows, 1, 1, 1), pool[pages:]])
            for pool in (case.keys, case.values)
        )

    def make_paged_call(self, impl: str) -> Callable[[], Tensor]:
        """Return a call of attention over one level that reads the copies."""
        prepared = prepare([self._case.whole_level(self._pages_RP)], impl=impl)
        return lambda: attend(self._case.q_RHD, self._keys, self._values, prepared)
