"""Products of rows by matrices in 4 bits, compared with bfloat16 and with the roofline of bytes.

Times are of CUDA graphs that call a product on one matrix after another, of more bytes in all than
the L2 cache holds, as the layers of a model do. Each 4-bit product is first compared with float64.
It is measured in both ways that treegen has: expanded in registers, and expanded into scratch
memory first. Where a wrong one is chosen, the threshold in `fp4_expansion` is to be changed. The
next command also measures other sizes of tiles, which processes compile in parallel, and lists
the fastest ones of each product:

    python examples/benchmarks/quantized_products.py --tune

Legend: R rows, E experts, N outputs, K inputs.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import click
import torch
from fp4_cases import PRODUCTS, Case, Product

from treegen.bench.ceilings import Ceilings
from treegen.bench.timing import Stopwatch
from treegen.cli.bench import measure_rates
from treegen.cli.bench.options import DEVICE, bounded_option, int_list_option, int_option
from treegen.cli.main import script
from treegen.cli.options.options import add_options
from treegen.cli.terminal.render import echo, json_line, notice, print_table
from treegen.common.formatting import summarize_error
from treegen.errors import InputError, arg
from treegen.model.linear.blocks import rows_of_block
from treegen.report.tables import PrintableTable

_USUAL: Final = "27b-gate-up,27b-down,32b-qkv,32b-o,30b-a3b-gate-up,30b-a3b-down"
_BEST: Final = 5  # tiles that --tune lists
_WORKERS: Final = 10


@dataclass(frozen=True, slots=True)
class ProductResult:
    """The result of one product with one number of rows; times in microseconds."""

    name: str
    rows: int
    plain_us: float
    """In 16 bits, or in the type of --dtype."""
    us: float
    """In 4 bits, expanded in registers."""
    expanded_us: float
    """In 4 bits, expanded into scratch memory first."""
    expands: bool
    """Whether treegen chooses the second way."""
    floor_us: float
    """The minimum time in 4 bits: for the bytes that are read and written, or the products."""
    plain_floor_us: float
    error: float
    """The largest error, as a share of the sum of the sizes of its products."""
    split_us: float
    """The time in which rows are put into the order that the kernel needs."""
    tiles: dict[str, float | str] = field(default_factory=dict)
    """Microseconds by tiles, fastest first, or why they do not run."""


_TILES: Final = (
    # outputs, inputs, warps, stages
    (64, 128, 4, 4),
    (64, 256, 4, 3),
    (128, 128, 8, 3),
    (128, 128, 8, 5),
    (128, 256, 8, 2),
    (128, 256, 8, 3),
    (128, 256, 8, 4),
    (256, 128, 8, 3),
)


def tiles_to_try(product: Product, rows: int) -> Iterator[Any]:
    """Yield the tiles that --tune measures for a product with some rows."""
    from treegen.model.linear.fp4_kernels import Tiles

    columns = -(-product.outputs // 128)
    is_narrow = not product.experts and columns < 264
    if product.experts:
        size = rows_of_block(rows * product.chosen, product.experts)
    else:
        size = min(max(1 << (rows - 1).bit_length(), 16), 128)
    shares = [(1, False)]
    if is_narrow and rows <= 128:
        shares += [(parts, True) for parts in (2, 4, 8)]
    elif is_narrow:
        shares += [(4, False), (8, False)]
    for outputs, inputs, warps, stages in _TILES:
        if size * outputs > 128 * 128 and inputs > 128:
            continue
        for parts, apart in shares:
            yield Tiles(size, outputs, inputs, warps, stages, parts, apart)
    if size == 128 and not product.experts:
        for parts, apart in shares:
            yield Tiles(256, 128, 128, 8, 3, parts, apart)
            yield Tiles(256, 128, 128, 8, 2, parts, apart)


def _compile(name: str, rows: int, dtype: torch.dtype, tiles: Any) -> str:
    """Compile and check one product in this process, so that others find it in Triton's cache."""
    case = _case(name, rows, dtype)
    try:
        case.error(tiles)
    except Exception as error:
        return f"{type(error).__name__}: {summarize_error(error)}"[:100]
    return ""


_cases: dict[Any, Case] = {}


def _case(name: str, rows: int, dtype: torch.dtype) -> Case:
    key = name, rows
    if key not in _cases:
        _cases.clear()
        _cases[key] = Case(PRODUCTS[name], rows, dtype, torch.device("cuda"))
    return _cases[key]


def compile_tiles(
    names: Sequence[str], rows: Sequence[int], dtype: torch.dtype
) -> dict[tuple[str, int, Any], str]:
    """Compile and check all tiles; return why each does not run, or an empty text."""
    jobs = [
        (name, num, tiles)
        for name in names
        for num in rows
        for tiles in tiles_to_try(PRODUCTS[name], num)
    ]
    workers = min(_WORKERS, os.cpu_count() or 1)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        names_of_jobs, rows_of_jobs, tiles_of_jobs = zip(*jobs, strict=True)
        dtypes = [dtype] * len(jobs)
        whys = pool.map(_compile, names_of_jobs, rows_of_jobs, dtypes, tiles_of_jobs)
        return dict(zip(jobs, whys, strict=True))


def measure(
    names: Sequence[str],
    rows: Sequence[int],
    rates: Ceilings,
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    tuned: dict[tuple[str, int, Any], str],
) -> Iterator[ProductResult]:
    """Yield the result of each product with each number of rows.

    Args:
        names: The products, of `PRODUCTS`.
        rows: Numbers of rows.
        rates: The ceilings of the device.
        device: The device.
        dtype: The type of the rows and of expanded matrices.
        repeats: Graphs that are timed.
        tuned: Tiles to measure too, from `compile_tiles`.
    """
    watch = Stopwatch(device)
    for name, num in itertools.product(names, rows):
        case = Case(PRODUCTS[name], num, dtype, device)
        error = max(case.error(), case.error(expands=True))
        us = case.time(watch, case.small_product, repeats)
        expanded_us = case.time(watch, partial(case.small_product, expands=True), repeats)
        split_us = case.time(watch, case.split, repeats)
        times: dict[str, float | str] = {}
        for (of, count_, tiles), why in tuned.items():
            if (of, count_) != (name, num):
                continue
            key = "/".join(str(value) for value in tiles)
            times[key] = why or case.time(
                watch, partial(case.small_product, tiles=tiles), max(repeats // 2, 3)
            )
        plain = case.plain()
        plain_us = case.time(watch, partial(case.plain_product, plain), repeats)
        del plain
        floor, plain_floor = case.floors(rates)
        done = sorted((t for t in times.items() if not isinstance(t[1], str)), key=lambda t: t[1])
        failed = [(key, why) for key, why in times.items() if isinstance(why, str)]
        yield ProductResult(
            name,
            num,
            plain_us,
            us,
            expanded_us,
            case.expands,
            floor,
            plain_floor,
            error,
            split_us,
            dict([*done, *failed]),
        )


def product_table(results: Sequence[ProductResult]) -> PrintableTable:
    """Return the results as a table."""
    return PrintableTable.of(
        results,
        {
            "Product": "{0.name}",
            "Rows": "{0.rows:,}",
            "16 bits us": "{0.plain_us:,.1f}",
            "of roofline": lambda result: f"{result.plain_floor_us / result.plain_us:.0%}",
            "4 bits us": "{0.us:,.1f}",
            "roofline": lambda result: f"{result.floor_us / result.us:.0%}",
            "expanded us": lambda result: (
                f"{result.expanded_us:,.1f}{' (chosen)' if result.expands else ''}"
            ),
            "times faster": lambda result: (
                f"{result.plain_us / (result.expanded_us if result.expands else result.us):.2f}"
            ),
            "order us": "{0.split_us:,.1f}",
            "error": "{0.error:.1e}",
        },
    )


@script
@bounded_option(
    "--products",
    lambda text: all(name in PRODUCTS for name in text.split(",")),
    f"some of {', '.join(PRODUCTS)}",
    default=_USUAL,
    metavar="NAME,...",
    help=f"Matrices: {', '.join(PRODUCTS)}.",
)
@int_list_option("--rows", "Rows.", default="1,16,64,256,1024")
@int_option("--repeats", 10, "Graphs that are timed.")
@click.option("--tune", is_flag=True, help="Measure other sizes of tiles too.")
@add_options(*DEVICE)
def main(products: str, rows: list[int], repeats: int, tune: bool, **options: Any) -> None:
    """Matrix products in 4 bits, compared with 16 bits and with their roofline."""
    names = products.split(",")
    device, dtype, machine, rates = measure_rates(**options)
    if tune and device.type != "cuda":
        raise InputError(f"{arg('tune')} needs a GPU, got {device}")
    tuned = compile_tiles(names, rows, dtype) if tune else {}
    results = []
    for result in measure(
        names, rows, rates, device=device, dtype=dtype, repeats=repeats, tuned=tuned
    ):
        notice(f"{result.name}, {result.rows:,} rows: {result.us:,.1f} us")
        for key, taken in [*result.tiles.items()][:_BEST]:
            notice(f"  {key}: {taken if isinstance(taken, str) else f'{taken:,.1f} us'}")
        results.append(result)
    if tuned:
        echo("tiles: rows/outputs/inputs/warps/stages/parts/apart")
    print_table(product_table(results))
    json_line({"bench": "products", "machine": machine, "ceilings": rates, "results": results})


if __name__ == "__main__":
    main()
