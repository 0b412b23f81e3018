"""Attention over latents alone: a prefix that all rows share, and latents of each row's own.

Three forms are compared: all latents absorbed; the prefix read from an expanded copy and the rest
absorbed, as for wide segments; and all keys and values expanded, as in other models. Each has a
roofline, computed level by level.

The figures of docs/benchmarks/features.md come from

    python examples/benchmarks/latents.py --shape glm-4.7-flash --rows 1,64,256,1024

Legend: R rows, H heads, K and V widths of a head's key and value, X numbers that are expanded from
a latent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from treegen.bench.ceilings import Ceilings
from treegen.bench.table import format_us, skip_reasons
from treegen.bench.timing import Spread, Stopwatch, free_bytes
from treegen.cli.bench import measure_rates, medians
from treegen.cli.bench.options import DEVICE, bounded_option, int_list_option, int_option
from treegen.cli.main import script
from treegen.cli.options.options import add_options
from treegen.cli.terminal.render import echo, json_line, notice, print_table
from treegen.common.formatting import format_bytes, summarize_error
from treegen.common.spec import LatentSpec
from treegen.errors import CapacityError, NumericsError
from treegen.model.memory import empty_device_cache
from treegen.ops.attention import HostLevel, attend, prepare_host
from treegen.ops.attention.latent import attend_latents, write_expanded
from treegen.report.tables import PrintableTable

FORMS: Final = {
    "glm-4.7-flash": LatentSpec(heads=20, rank=512, rope=64, nope=192, v_dim=256),
    "deepseek-v2-lite": LatentSpec(heads=16, rank=512, rope=64, nope=128, v_dim=128),
    "deepseek-v3": LatentSpec(heads=128, rank=512, rope=64, nope=128, v_dim=128),
    "tiny-mla": LatentSpec(heads=4, rank=32, rope=16, nope=16, v_dim=16),
}
"""The heads of models with latent attention, by the name of the shape."""
ABSORBED, CHOSEN, EXPANDED = "absorbed", "prefix expanded", "expanded"
_CHECKED: Final = 4  # rows
_TOLERANCE: Final = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}


@dataclass(frozen=True, slots=True)
class LatentResult:
    """The result of one configuration; times in microseconds.

    rows, prefix, suffix: rows, latents of the prefix, and latents of each row's own.
    times: by form.
    floors_us: by form, the minimum time of its levels.
    floor_us: the minimum time if each level has the cheaper form.
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

    Args:
        grid: (rows, latents of the prefix, latents of each row's own) of each configuration.
        form: Sizes of the latents and of what is expanded from them.
        ceilings: The device's sustained rates, for the minimum times.
        device: The device to measure.
        dtype: The type of queries and latents.
        repeats: Timed calls of each form. Default: 20.

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
                skipped[name] = summarize_error(problem)
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
        prefix_pages, row_pages = -(-prefix // size), -(-suffix // size)
        per_page = form.copy_pages(dtype.itemsize, dtype.itemsize)
        self.block = -(-(prefix_pages + rows * row_pages) // per_page)
        num_pages = (self.block + prefix_pages) * per_page
        need, free = num_pages * size * form.cached_dim * dtype.itemsize, free_bytes(device)
        if need > free:
            raise CapacityError(
                f"{rows:,} rows of latents take {format_bytes(need)}, but only "
                f"{format_bytes(free)} are free; use fewer --rows or a shorter --suffix"
            )
        self.q_RHK = self.random(rows, form.heads, form.k_dim)
        self.up_HXR = self.random(form.heads, form.nope + form.v_dim, form.rank) / 16
        self.pool = self.random(num_pages, size, 1, form.cached_dim)
        zero, row_R = np.zeros(1, dtype=np.int64), np.arange(rows)
        self.levels = [
            HostLevel(zero, zero + rows, np.arange(prefix_pages)[None], zero + prefix, zero, False)
        ]
        if suffix:
            pages = prefix_pages + np.arange(rows * row_pages).reshape(rows, row_pages)
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
        """The levels, with the prefix read from its expanded copy."""
        first, *later_levels = self.levels
        pages = first.pages_GP + self.block
        return [replace(first, pages_GP=pages, copied=True, memo={}), *later_levels]

    def calls(self) -> dict[str, Callable[[], Callable[[], Tensor]]]:
        """Return by form a function that prepares the function to time."""
        calls = {ABSORBED: lambda: self.call(self.levels), EXPANDED: self.make_expanded_call}
        if self.suffix:
            calls[CHOSEN] = lambda: self.call(self.copied)
        return calls

    def call(
        self, levels: list[HostLevel], impl: str = "auto", rows: int | None = None
    ) -> Callable[[], Tensor]:
        """Return a function that attends. Levels are prepared only once, as in a decode step.

        Args:
            levels: The levels to attend to.
            impl: The implementation. Default: "auto".
            rows: Use only this many first rows. Default: all.
        """
        prepared = prepare_host(levels, None, self.device, impl)
        q_RHK, scale = self.q_RHK[:rows], self.form.k_dim**-0.5
        return lambda: attend_latents(
            q_RHK, self.pool, self.up_HXR, self.form, prepared, scale=scale
        )

    def make_expanded_call(self) -> Callable[[], Tensor]:
        """Return a call of attention to keys and values of all heads, which must fit in memory."""
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
        """Return the largest error of the first rows.

        Raises:
            NumericsError: the error is larger than rounding explains.
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
            raise NumericsError(
                f"attention to latents differs from the reference by {max(errors):.2g} of "
                "its largest output, which is more than the limit of "
                f"{_TOLERANCE[self.dtype]:.2g}"
            )
        return max(errors)

    def floors(self, ceilings: Ceilings) -> tuple[dict[str, float], float]:
        """Return the minimum microseconds by form, and with the cheaper form for each level.

        A level takes the time of its products or of its bytes, whichever is longer.
        """
        form, sizes = self.form, self.dtype.itemsize

        def layer_seconds(level: HostLevel, numbers: int, width: int) -> float:
            """Return the minimum microseconds of a level.

            Args:
                level: The level.
                numbers: Numbers that are read per key.
                width: Width of a key plus width of a value.
            """
            keys = float(level.kv_len_G.sum())
            pairs = float(((level.stop_G - level.start_G) * level.kv_len_G).sum())
            flops = 2 * pairs * form.heads * width
            return 1e6 * max(flops / ceilings.attention, keys * numbers * sizes / ceilings.memory)

        absorbed = [
            layer_seconds(level, form.cached_dim, form.cached_dim + form.rank)
            for level in self.levels
        ]
        expanded = [
            layer_seconds(level, form.expanded, form.k_dim + form.v_dim) for level in self.levels
        ]
        floors = {ABSORBED: sum(absorbed), EXPANDED: sum(expanded)}
        if self.suffix:
            floors[CHOSEN] = expanded[0] + sum(absorbed[1:])
        return floors, sum(map(min, absorbed, expanded))


def latent_line(result: LatentResult) -> str:
    """Return one result as one line, to print when it arrives."""
    times = ", ".join(f"{name} {spread.median:,.1f} us" for name, spread in result.times.items())
    return f"{result.rows:,} rows, prefix {result.prefix:,}, suffix {result.suffix:,}: {times}"


def latent_table(results: Sequence[LatentResult]) -> PrintableTable:
    """Return a table of attention to latents in each form, with the minimum time of each."""
    columns: dict[str, str | Callable[[LatentResult], str]] = {
        "Rows": "{0.rows:,}",
        "Prefix": "{0.prefix:,}",
        "Suffix": "{0.suffix:,}",
        "cheapest forms us": "{0.floor_us:,.1f}",
    }
    for name in dict.fromkeys(name for r in results for name in r.times):
        columns |= {f"{name} {title}": partial(text, name) for title, text in _BY_FORM.items()}
    lines = skip_reasons((f"{r.rows:,} rows, suffix {r.suffix:,}", r.skipped) for r in results)
    return PrintableTable.of(results, columns, lines=lines)


_BY_FORM: Final[dict[str, Callable[[str, LatentResult], str]]] = {
    "us": lambda form, r: format_us(r.times.get(form)),
    "roofline us": lambda form, r: f"{r.floors_us.get(form, 0):,.1f}",
}
"""Columns of each form."""


@script
@bounded_option(
    "--shape",
    FORMS.__contains__,
    f"one of {', '.join(FORMS)}",
    default="glm-4.7-flash",
    show_default=True,
    metavar="NAME",
    help=f"The heads of this model: {', '.join(FORMS)}.",
)
@int_list_option("--rows", "Query rows.", default="64,256,1024,4096")
@int_list_option("--prefix", "Latents that all rows share.", default="2048")
@int_list_option("--suffix", "Latents of each row's own.", default="0,1000", minimum=0)
@int_option("--repeats", 20, "Calls that are timed.")
@add_options(*DEVICE)
def main(
    shape: str, rows: list[int], prefix: list[int], suffix: list[int], repeats: int, **options: Any
) -> None:
    """The attention operator over latents, in each form compared with its roofline."""
    form = FORMS[shape]
    grid = [
        (number, shared, suffix_len)
        for suffix_len in suffix
        for shared in prefix
        for number in rows
    ]
    device, dtype, machine, rates = measure_rates(**options)
    results = []
    for result in measure(grid, form, rates, device=device, dtype=dtype, repeats=repeats):
        notice(latent_line(result))
        results.append(result)
    echo(f"{shape}: {form.heads} heads; {medians(repeats)}")
    print_table(latent_table(results))
    json_line(
        {
            "bench": "latent",
            "machine": machine,
            "ceilings": rates,
            "heads": form,
            "results": results,
        }
    )


if __name__ == "__main__":
    main()
