"""The attention operator alone, against the same attention without sharing.

Rows of a decode step share a prefix, and each has a suffix of its own. Compared are the operator
with two levels by every implementation that runs here; the same with one level, whose page tables
lead to a copy of the prefix for each row ("copies") or to one that all rows read again ("reread");
and torch's dense attention on a copy for each row, its heads folded into rows. What was computed is
checked against the reference on some rows.

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

from treegen.attention import Level, attend, prepare
from treegen.attention.api import LOADERS
from treegen.bench.ceilings import Ceilings, kernels_for
from treegen.bench.timing import Spread, Stopwatch, free_bytes, free_memory
from treegen.errors import CapacityError, NumericsError
from treegen.units import format_bytes

COPIES: Final = "copies"
REREAD: Final = "reread"
_CHECKED_ROWS = 3
# Largest error as a share of the largest number, by rounding alone.
_TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class Heads:
    """Of one attention layer."""

    q_heads: int = 8
    kv_heads: int = 1
    width: int = 128


@dataclass(frozen=True, slots=True)
class AttentionResult:
    """One configuration; times in microseconds, spreads over repeats.

    shared: by implementation, all levels. prefix: the prefix's level alone, of the fastest.
    unshared: by kernel and how it reads the prefix. skipped: what was not timed, and why.
    prefix_flops: FLOP/s in the prefix's level; prefix_share: of the attention ceiling. floor_us:
    least time of both levels; share: of it in the fastest implementation. speedup: over the
    fastest kernel without sharing.
    """

    rows: int
    prefix: int
    suffix: int
    shared: dict[str, Spread]
    fastest: str
    prefix_us: Spread
    unshared: dict[str, Spread]
    fastest_unshared: str
    speedup: float | None
    prefix_flops: float
    prefix_share: float
    floor_us: float
    share: float
    error: float
    skipped: dict[str, str] = field(default_factory=dict)


def implementations(device: torch.device) -> list[str]:
    """Names of implementations to time on a device; the reference is no contender."""
    names = [name for name in LOADERS if name != "reference"]
    return [name for name in names if LOADERS[name]().refusal(device) is None]


def measure(
    grid: list[tuple[int, int, int]],
    heads: Heads,
    ceilings: Ceilings,
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int = 20,
) -> Iterator[AttentionResult]:
    """Time each (rows, prefix, suffix) of a grid; raises NumericsError where a result is wrong."""
    stopwatch = Stopwatch(device)
    for rows, prefix, suffix in grid:
        case = _Case(rows, prefix, suffix, heads, device, dtype)
        yield _measure(case, ceilings, stopwatch, repeats)
        del case
        free_memory(device)


class _Case:
    """Queries, a pool of keys and values, and levels over it for one configuration."""

    def __init__(
        self,
        rows: int,
        prefix: int,
        suffix: int,
        heads: Heads,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.rows, self.prefix, self.suffix, self.heads = rows, prefix, suffix, heads
        self.device, self.dtype = device, dtype
        self.page_size = 64 if device.type == "cuda" else 16
        self.prefix_pages = -(-prefix // self.page_size)
        self.suffix_pages = -(-suffix // self.page_size)
        need, free = rows * suffix * self.token_bytes, free_bytes(device)
        if need > free:
            raise CapacityError(
                f"{rows:,} rows with {suffix:,} keys each take {format_bytes(need)}, "
                f"{format_bytes(free)} are free; use fewer --rows or a shorter --suffix"
            )
        self.q_RHD = self._random(rows, heads.q_heads, heads.width)
        shape = (
            self.prefix_pages + rows * self.suffix_pages,
            self.page_size, heads.kv_heads, heads.width,
        )  # fmt: skip
        self.keys, self.values = self._random(*shape), self._random(*shape)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def levels(self, rows: Tensor | None = None) -> list[Level]:
        """One group with the prefix, and one group a row with its suffix, if there is one."""
        chosen = torch.arange(self.rows) if rows is None else rows
        found = [self._level([0], [len(chosen)], self.prefix_table()[None], self.prefix, 0)]
        if self.suffix:
            index = list(range(len(chosen) + 1))
            own = self.suffix_tables()[chosen]
            found.append(self._level(index[:-1], index[1:], own, self.suffix, self.prefix))
        return found

    def whole_level(self, prefix_tables: Tensor) -> Level:
        """One level without sharing: each row reads prefix and suffix through its own table.

        The prefix's last page must be full for that, so its keys are rounded up to whole pages.
        """
        tables = torch.cat([prefix_tables, self.suffix_tables()], dim=1)
        index = list(range(self.rows + 1))
        length = self.prefix_pages * self.page_size + self.suffix
        return self._level(index[:-1], index[1:], tables, length, 0)

    def prefix_table(self) -> Tensor:
        return torch.arange(self.prefix_pages)

    def suffix_tables(self) -> Tensor:
        pages = torch.arange(self.rows * self.suffix_pages).view(self.rows, self.suffix_pages)
        return pages + self.prefix_pages

    def _level(
        self, start: list[int], stop: list[int], pages: Tensor, keys: int, first: int
    ) -> Level:
        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        return Level(
            q_start_G=ints(start),
            q_stop_G=ints(stop),
            pages_GP=pages.to(dtype=torch.int32, device=self.device),
            kv_len_G=ints([keys] * len(start)),
            kv_start_G=ints([first] * len(start)),
        )

    def call(self, levels: list[Level], impl: str) -> Callable[[], Tensor]:
        """Attention over levels, prepared, which a step does once for all layers."""
        prepared = prepare(levels, impl=impl)
        return lambda: attend(self.q_RHD, self.keys, self.values, prepared)

    def check(self, impl: str) -> float:
        """Largest error of some rows as a share of their largest number."""
        rows = torch.linspace(0, self.rows - 1, min(self.rows, _CHECKED_ROWS)).long()
        got = self.call(self.levels(), impl)()[rows.to(self.device)].float()
        q_RHD = self.q_RHD[rows.to(self.device)]
        want = attend(q_RHD, self.keys, self.values, self.levels(rows), impl="reference").float()
        error = ((got - want).abs().max() / want.abs().max()).item()
        if not error <= _TOLERANCE[self.dtype]:
            raise NumericsError(
                f"impl {impl!r} is wrong at {self.rows} rows, prefix {self.prefix}, suffix "
                f"{self.suffix}: error {error:.2g} of the largest number in {self.dtype}"
            )
        return error

    @property
    def token_bytes(self) -> int:
        """Bytes of the key and value of one token."""
        return 2 * self.heads.kv_heads * self.heads.width * self.dtype.itemsize


def _measure(
    case: _Case, ceilings: Ceilings, stopwatch: Stopwatch, repeats: int
) -> AttentionResult:
    def time(call: Callable[[], Tensor]) -> Spread:
        return Spread.of([seconds * 1e6 for seconds in stopwatch.seconds(call, repeats)])

    names = implementations(case.device)
    error = max(case.check(name) for name in names)
    shared = {name: time(case.call(case.levels(), name)) for name in names}
    fastest = min(shared, key=lambda name: shared[name].median)
    prefix_us = time(case.call(case.levels()[:1], fastest))
    unshared: dict[str, Spread] = {}
    skipped: dict[str, str] = {}
    for name, call in _unshared(case, names, skipped):
        try:
            unshared[name] = time(call)
        except RuntimeError as problem:  # out of memory, or a kernel that takes no such shape
            skipped[name] = str(problem).splitlines()[0]
        if name in skipped:
            free_memory(case.device)
    best = min(unshared, key=lambda name: unshared[name].median, default="")
    flops = 4 * case.rows * case.heads.q_heads * case.heads.width
    floor = max(
        flops * case.prefix / ceilings.attention, case.prefix * case.token_bytes / ceilings.memory
    )
    own = case.rows * case.suffix
    floor += max(flops * case.suffix / ceilings.attention, own * case.token_bytes / ceilings.memory)
    rate = flops * case.prefix / (prefix_us.median / 1e6)
    return AttentionResult(
        case.rows, case.prefix, case.suffix,
        shared=shared, fastest=fastest, prefix_us=prefix_us,
        unshared=unshared, fastest_unshared=best,
        speedup=unshared[best].median / shared[fastest].median if best else None,
        prefix_flops=rate, prefix_share=rate / ceilings.attention,
        floor_us=floor * 1e6, share=floor * 1e6 / shared[fastest].median,
        error=error, skipped=skipped,
    )  # fmt: skip


def _unshared(
    case: _Case, names: list[str], skipped: dict[str, str]
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The ways to read everything once per row; one after another, so that copies can go."""
    one_table = case.prefix_table().expand(case.rows, -1)
    for name in names:
        yield f"{name} {REREAD}", case.call([case.whole_level(one_table)], name)
    kernels = [f"torch {name}" for name in kernels_for(case.device, case.dtype)]
    need = case.rows * (case.prefix + case.suffix) * case.token_bytes
    free = free_bytes(case.device)
    # Twice: implementations on a CPU may copy what they read.
    if 2 * need > free:
        reason = f"copies take {format_bytes(need)}, {format_bytes(free)} are free"
        skipped.update(dict.fromkeys([*(f"{name} {COPIES}" for name in names), *kernels], reason))
        return
    copied = _Copied(case)
    for name in names:
        yield f"{name} {COPIES}", copied.paged(name)
    del copied
    free_memory(case.device)
    q_RKGD = case.q_RHD.view(case.rows, case.heads.kv_heads, -1, case.heads.width)
    shape = (case.rows, case.heads.kv_heads, case.prefix + case.suffix, case.heads.width)
    k_RKSD, v_RKSD = case._random(*shape), case._random(*shape)
    for name, backend in kernels_for(case.device, case.dtype).items():

        def dense(backend: object = backend) -> Tensor:
            with sdpa_kernel(backend):  # type: ignore[arg-type]
                return scaled_dot_product_attention(q_RKGD, k_RKSD, v_RKSD)

        yield f"torch {name}", dense


class _Copied:
    """A pool with a copy of the prefix for each row, before the rows' suffixes."""

    def __init__(self, case: _Case) -> None:
        self._case = case
        pages = case.prefix_pages
        self._tables = torch.arange(case.rows * pages).view(case.rows, pages)
        self._keys, self._values = (
            torch.cat([pool[:pages].repeat(case.rows, 1, 1, 1), pool[pages:]])
            for pool in (case.keys, case.values)
        )

    def paged(self, impl: str) -> Callable[[], Tensor]:
        case = self._case
        own = case.suffix_tables() - case.prefix_pages + case.rows * case.prefix_pages
        index = list(range(case.rows + 1))
        length = case.prefix_pages * case.page_size + case.suffix
        level = case._level(index[:-1], index[1:], torch.cat([self._tables, own], dim=1), length, 0)
        prepared = prepare([level], impl=impl)
        return lambda: attend(case.q_RHD, self._keys, self._values, prepared)
