"""Attention over latents alone: a prefix that all rows share, and latents of each row's own.

Three forms are compared: all latents absorbed; the prefix read from a copy, and the rest absorbed,
as wide segments are; and all keys and values expanded, as other models keep theirs. For each there
is a roofline, level by level.

Legend: R rows, H heads, K and V widths of a head's key and value, X numbers that are made of a
latent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from treegen.bench.ceilings import Ceilings
from treegen.bench.timing import Spread, Stopwatch, free_bytes
from treegen.common.formatting import format_bytes
from treegen.common.spec import LatentSpec
from treegen.errors import CapacityError, NumericsError
from treegen.model.memory import empty_device_cache
from treegen.ops.attention import HostLevel, attend, prepare_host
from treegen.ops.attention.latent import attend_latents, write_expanded

FORMS: Final = {
    "glm-4.7-flash": LatentSpec(heads=20, rank=512, rope=64, nope=192, v_dim=256),
    "deepseek-v2-lite": LatentSpec(heads=16, rank=512, rope=64, nope=128, v_dim=128),
    "deepseek-v3": LatentSpec(heads=128, rank=512, rope=64, nope=128, v_dim=128),
    "tiny-mla": LatentSpec(heads=4, rank=32, rope=16, nope=16, v_dim=16),
}
"""The heads of models with latent attention, by name of a shape."""
ABSORBED, CHOSEN, EXPANDED = "absorbed", "prefix expanded", "expanded"
_CHECKED: Final = 4  # rows
_TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}


@dataclass(frozen=True, slots=True)
class LatentResult:
    """One configuration; times in microseconds.

    rows, prefix, suffix: rows, latents of the prefix, and latents of each row's own.
    times: by form.
    floors_us: by form, the least time of its levels.
    floor_us: the least time if each level has the cheaper form.
    error: the largest error of some rows, as a share of their largest number.
    skipped: forms that were not timed, and why.
    """

    rows: int
    prefix: int
    suffix: int
    times: dict[str, Spread]
    floors_us: dict[str, float]
    floor_us: float
    error: float
    skipped: dict[str, str] = field(default_factory=dict)


def measure(
    grid: list[tuple[int, int, int]],
    form: LatentSpec,
    ceilings: Ceilings,
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int = 20,
) -> Iterator[LatentResult]:
    """Time each (rows, prefix, suffix) of a grid.

    Raises:
        NumericsError: a result is wrong.
        CapacityError: the latents do not fit.
    """
    stopwatch = Stopwatch(device)
    for rows, prefix, suffix in grid:
        case = _Case(rows, prefix, suffix, form, device, dtype)
        times: dict[str, Spread] = {}
        skipped: dict[str, str] = {}
        error = case.check()
        for name, make in case.calls().items():
            try:
                times[name] = stopwatch.microseconds(make(), repeats)
            except (RuntimeError, CapacityError) as problem:
                skipped[name] = str(problem).splitlines()[0]
            empty_device_cache(device)
        floors, best = case.floors(ceilings)
        yield LatentResult(rows, prefix, suffix, times, floors, best, error, skipped)
        del case
        empty_device_cache(device)


class _Case:
    """Random queries, a pool of random latents with a copy of the prefix, and levels over it."""

    def __init__(
        self,
        rows: int,
        prefix: int,
        suffix: int,
        form: LatentSpec,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.rows, self.prefix, self.suffix, self.form = rows, prefix, suffix, form
        self.device, self.dtype = device, dtype
        self.size = size = 64 if device.type == "cuda" else 16
        shared, own = -(-prefix // size), -(-suffix // size)
        per = form.copy_pages(dtype.itemsize, dtype.itemsize)
        self.block = -(-(shared + rows * own) // per)
        num_pages = (self.block + shared) * per
        need, free = num_pages * size * form.kept * dtype.itemsize, free_bytes(device)
        if need > free:
            raise CapacityError(
                f"{rows:,} rows of latents take {format_bytes(need)}, {format_bytes(free)} are "
                "free; use fewer --rows or a shorter --suffix"
            )
        self.q_RHK = self.random(rows, form.heads, form.k_dim)
        self.up_HXR = self.random(form.heads, form.nope + form.v_dim, form.rank) / 16
        self.pool = self.random(num_pages, size, 1, form.kept)
        zero, row_R = np.zeros(1, dtype=np.int64), np.arange(rows)
        self.levels = [
            HostLevel(zero, zero + rows, np.arange(shared)[None], zero + prefix, zero, False)
        ]
        if suffix:
            pages = shared + np.arange(rows * own).reshape(rows, own)
            lengths = np.full(rows, suffix)
            self.levels.append(
                HostLevel(row_R, row_R + 1, pages, lengths, np.full(rows, prefix), False)
            )
        at = torch.arange(prefix, device=device)
        write_expanded(self.pool, at, at + self.block * size, self.up_HXR, form, dtype)

    def random(self, *shape: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(len(shape))
        return torch.randn(*shape, generator=generator, device=self.device, dtype=self.dtype)

    @property
    def copied(self) -> list[HostLevel]:
        """The levels, of which the prefix is read from its copy."""
        first, *others = self.levels
        pages = first.pages_GP + self.block
        return [replace(first, pages_GP=pages, copied=True, memo={}), *others]

    def calls(self) -> dict[str, Callable[[], Callable[[], Tensor]]]:
        """What makes the functions that attend, by form."""
        calls = {ABSORBED: lambda: self.call(self.levels), EXPANDED: self.make_expanded_call}
        if self.suffix:
            calls[CHOSEN] = lambda: self.call(self.copied)
        return calls

    def call(
        self, levels: list[HostLevel], impl: str = "auto", rows: int | None = None
    ) -> Callable[[], Tensor]:
        """A function that attends; levels are prepared here, as a step does it once."""
        prepared = prepare_host(levels, None, self.device, impl)
        q_RHK, scale = self.q_RHK[:rows], self.form.k_dim**-0.5
        return lambda: attend_latents(
            q_RHK, self.pool, self.up_HXR, self.form, prepared, scale=scale
        )

    def make_expanded_call(self) -> Callable[[], Tensor]:
        """Attention to keys and values of all heads, for which there must be room."""
        form = self.form
        pages = 1 + max(int(level.pages_GP.max()) for level in self.levels)
        need = pages * self.size * form.expanded * self.dtype.itemsize
        free = free_bytes(self.device)
        if need > free:
            raise CapacityError(f"take {format_bytes(need)}, {format_bytes(free)} are free")
        keys, values = (
            self.random(pages, self.size, form.heads, width) for width in (form.k_dim, form.v_dim)
        )
        prepared = prepare_host(self.levels, None, self.device)
        return lambda: attend(self.q_RHK, keys, values, prepared)

    def check(self) -> float:
        """The largest error of the first rows.

        Raises:
            NumericsError: it is larger than by rounding.
        """
        rows = min(self.rows, _CHECKED)

        def few(levels: list[HostLevel]) -> list[HostLevel]:
            return [
                replace(
                    level,
                    start_G=level.start_G[:rows],
                    stop_G=level.stop_G[:rows].clip(max=rows),
                    pages_GP=level.pages_GP[:rows],
                    kv_len_G=level.kv_len_G[:rows],
                    kv_start_G=level.kv_start_G[:rows],
                    memo={},
                )
                for level in levels
            ]

        want = self.call(few(self.levels), "reference", rows)()
        forms = [self.levels, *([self.copied] if self.suffix else [])]
        errors = [
            ((self.call(levels)()[:rows] - want).abs().max() / want.abs().max()).item()
            for levels in forms
        ]
        if not max(errors) <= _TOLERANCE[self.dtype]:
            raise NumericsError(f"attention to latents is off by {max(errors):.2g} of its numbers")
        return max(errors)

    def floors(self, ceilings: Ceilings) -> tuple[dict[str, float], float]:
        """Least microseconds by form, and with the cheaper form of each level.

        Of each level what products or bytes take, whichever is longer.
        """
        form, sizes = self.form, self.dtype.itemsize

        def least(level: HostLevel, numbers: int, width: int) -> float:
            keys = float(level.kv_len_G.sum())
            pairs = float(((level.stop_G - level.start_G) * level.kv_len_G).sum())
            flops = 2 * pairs * form.heads * width
            return 1e6 * max(flops / ceilings.attention, keys * numbers * sizes / ceilings.memory)

        absorbed = [least(each, form.kept, form.kept + form.rank) for each in self.levels]
        expanded = [least(each, form.expanded, form.k_dim + form.v_dim) for each in self.levels]
        floors = {ABSORBED: sum(absorbed), EXPANDED: sum(expanded)}
        if self.suffix:
            floors[CHOSEN] = expanded[0] + sum(absorbed[1:])
        return floors, sum(map(min, absorbed, expanded))
