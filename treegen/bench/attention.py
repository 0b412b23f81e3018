"""Benchmark of the attention operator alone, against the same attention without sharing.

Rows of a decode step share a prefix, and each has its own suffix. These are compared:

    two levels     the operator, with every implementation that runs on the device
    "copies"       the operator with one level whose page tables refer to a copy of the prefix for
                   each row
    "reread"       the operator with one level whose page tables refer to one prefix, which every
                   row reads again
    torch          dense attention on a copy for each row, with heads folded into rows

The results of some rows are checked against the reference.

Legend: R rows, H query heads, K key heads, P pages, S keys, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from treegen.bench.cascade import Cascade, Heads, LevelShape
from treegen.bench.ceilings import Ceilings, kernels_for
from treegen.bench.timing import Spread, Stopwatch, free_bytes
from treegen.common.formatting import format_bytes
from treegen.model.memory import empty_device_cache
from treegen.ops.attention import Level, attend, prepare

COPIES: Final = "copies"
REREAD: Final = "reread"


@dataclass(frozen=True, slots=True)
class AttentionResult:
    """The result of one configuration; times in microseconds, spreads over repeats.

    rows, prefix, suffix: rows, keys of the prefix, and keys of each suffix.
    shared: by implementation, the time of both levels.
    fastest: the fastest implementation.
    prefix_us: the time of the prefix's level alone, with the fastest implementation.
    unshared: by kernel and how it reads the prefix, the time without sharing.
    over_copies: speedup of the fastest implementation over the fastest kernel that reads a copy of
    the prefix for each row; None if no such kernel was timed.
    over_reread: speedup over kernels in which all rows read one prefix again, largely from a cache.
    prefix_flops: FLOP/s in the prefix's level.
    prefix_share: these as a share of the attention ceiling.
    floor_us: the least time of both levels.
    share: the floor as a share of the fastest implementation's time.
    error: see `Cascade.check`.
    skipped: what was not timed, and why.
    """

    rows: int
    prefix: int
    suffix: int
    shared: dict[str, Spread]
    fastest: str
    prefix_us: Spread
    unshared: dict[str, Spread]
    over_copies: float | None
    over_reread: float | None
    prefix_flops: float
    prefix_share: float
    floor_us: float
    share: float
    error: float
    skipped: dict[str, str] = field(default_factory=dict)


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
        ceilings: The device's sustained rates, for the least times.
        device: The device to measure.
        dtype: The type of queries, keys and values.
        repeats: Timed calls of each configuration. Default: 20.

    Raises:
        NumericsError: a result is wrong.
        CapacityError: the keys do not fit.
    """
    stopwatch = Stopwatch(device)
    for rows, prefix, suffix in grid:
        case = _Case(rows, prefix, suffix, heads, device, dtype)
        yield _measure(case, ceilings, stopwatch, repeats)
        del case
        empty_device_cache(device)


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
        """The pages [R, P] of the suffixes."""
        return self.tables[1] if self.suffix else torch.empty(self.rows, 0, dtype=torch.int64)

    def whole_level(self, pages_RP: Tensor) -> Level:
        """Return one level without sharing: each row reads prefix and suffix through its own table.

        This requires a full last page of the prefix, so its keys are rounded up to whole pages.
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
    fastest = min(shared, key=lambda name: shared[name].median)
    prefix_us = time(case.call(case.levels()[:1], fastest))
    unshared: dict[str, Spread] = {}
    for name, call in _iter_unshared_calls(case, list(shared), skipped):
        try:
            unshared[name] = time(call)
        except RuntimeError as problem:  # out of memory, or a shape that the kernel does not take
            skipped[name] = str(problem).splitlines()[0]
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
        reason = f"copies take {format_bytes(need)}, {format_bytes(free)} are free"
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
