"""Products of rows by matrices in 4 bits, compared with bfloat16 and with the roofline of bytes.

Times are of CUDA graphs that call a product on one matrix after another, of more bytes in all than
the L2 cache holds, as the layers of a model do. Each 4-bit product is first compared with float64.
It is measured in both ways that treegen has: expanded in registers, and expanded into scratch
memory first. Where a wrong one is chosen, the threshold in `fp4_expansion` is to be changed. The
next command also measures other sizes of tiles, which processes compile in parallel, and lists
the fastest ones of each product:

    python examples/benchmarks/quantised_products.py --tune

Legend: R rows, E experts, N outputs, K inputs.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

import click
import torch
from torch import Tensor

from treegen.bench.ceilings import Ceilings
from treegen.bench.timing import Stopwatch
from treegen.cli.bench.attention import measure_rates
from treegen.cli.bench.options import DEVICE, bounded_option, count, counts
from treegen.cli.main import script
from treegen.cli.options.options import add_options
from treegen.cli.terminal.render import echo, json_line, notice, print_table
from treegen.errors import InputError, NumericsError, arg
from treegen.model.checkpoint.fp4 import dequantize_fp4
from treegen.model.linear.blocks import rows_of_block
from treegen.model.linear.experts import group_by_expert, grouped_product
from treegen.model.linear.fp4 import fp4_product, grouped_fp4_product, split_rows
from treegen.report.tables import PrintableTable


@dataclass(frozen=True, slots=True)
class Product:
    """The matrices of a layer: one, or one for each expert."""

    outputs: int
    inputs: int
    experts: int = 0
    """Number of experts; 0 for one matrix."""
    chosen: int = 1
    """Experts of a row."""
    rows_each: bool = False
    """Whether each pair of a row and an expert has its own input, as behind the gate."""
    group: int = 16
    """Inputs that share a scale: 16 in NVFP4, 32 in MXFP4."""


PRODUCTS: Final = {
    "27b-gate-up": Product(2 * 17408, 5120),
    "27b-down": Product(5120, 17408),
    "32b-qkv": Product((64 + 2 * 8) * 128, 5120),
    "32b-o": Product(5120, 64 * 128),
    "30b-a3b-gate-up": Product(2 * 768, 2048, 128, 8),
    "30b-a3b-down": Product(2048, 768, 128, 8, rows_each=True),
    "gpt-oss-120b-gate-up": Product(2 * 2880, 2880, 128, 4, group=32),
    "tiny": Product(48, 64),
    "tiny-experts": Product(48, 64, 4, 2),
}
_USUAL: Final = "27b-gate-up,27b-down,32b-qkv,32b-o,30b-a3b-gate-up,30b-a3b-down"
_BYTES: Final = 2**28  # of the matrices that a graph reads; more than an L2 cache
_MOST: Final = 16  # matrices
_CHECKED: Final = 64  # rows that are compared with float64
_COLUMNS: Final = 4096  # about as many outputs of them
_TOLERANCE: Final = 2**-8
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
    """The least time in 4 bits: for the bytes that are read and written, or the products."""
    plain_floor_us: float
    error: float
    """The largest error, as a share of the sum of the sizes of its products."""
    split_us: float
    """The time in which rows are put into the order that the kernel needs."""
    tiles: dict[str, float | str] = field(default_factory=dict)
    """Microseconds by tiles, fastest first, or why they do not run."""


class Case:
    """A product with some rows and random numbers."""

    def __init__(self, product: Product, rows: int, dtype: torch.dtype, device: Any) -> None:
        """Make the numbers.

        Args:
            product: The matrices.
            rows: The number of rows.
            dtype: The type of the rows.
            device: The device.
        """
        self.product, self.rows, self.dtype = product, rows, dtype
        torch.manual_seed(0)
        shape = (max(product.experts, 1), product.outputs)
        size = shape[0] * product.outputs * product.inputs / 2
        copies = 2 if device.type == "cpu" else min(max(-(-_BYTES // size), 2), _MOST)
        self.calls = _MOST if product.experts and device.type == "cuda" else int(copies)
        # Scales between 2^-4 and 2^4, and factors that make sums of about 1.
        low, high = (24, 88) if product.group == 16 else (123, 132)
        self.weights, self.scales, self.factors, self.routes = [], [], [], []
        for _ in range(int(copies)):
            packed = (*shape, product.inputs // 2), (*shape, product.inputs // product.group)
            made = torch.randint(0, 256, packed[0], dtype=torch.uint8, device=device)
            scale = torch.randint(low, high, packed[1], dtype=torch.uint8, device=device)
            factor = torch.rand(shape, device=device) / product.inputs
            self.weights.append(made)
            self.scales.append(scale.view(torch.float8_e4m3fn) if product.group == 16 else scale)
            self.factors.append(factor if product.group == 16 else None)
        for _ in range(self.calls if product.experts else 0):
            chosen = torch.rand(rows, product.experts, device=device).topk(product.chosen).indices
            self.routes.append((chosen, *group_by_expert(chosen, product.experts)))
        self.num_inputs = rows * product.chosen if product.rows_each else rows
        self.x = torch.randn(self.num_inputs, product.inputs, device=device).to(dtype)
        self.quarters = split_rows(self.x)
        self.each = 1 if product.rows_each else product.chosen

    def plain(self) -> list[Tensor]:
        """Return expanded matrices."""
        made = []
        for weight, scale, factor in zip(self.weights, self.scales, self.factors, strict=True):
            whole = torch.empty(
                (*weight.shape[:2], self.product.inputs), dtype=self.dtype, device=weight.device
            )
            for at in range(len(weight)):
                part = dequantize_fp4(weight[at], scale[at])
                whole[at] = part if factor is None else part * factor[at, :, None]
            made.append(whole)
        return made

    def split(self, _: int) -> Tensor:
        """Return the rows in the order that the kernel needs."""
        return split_rows(self.x)

    def plain_product(self, copies: Sequence[Tensor], at: int) -> Tensor:
        """Return the product in 16 bits of matrices [E, N, K], for the routes at a place."""
        whole = copies[at % len(copies)]
        if not self.product.experts:
            return self.x @ whole[0].T
        _, order, blocks = self.routes[at]
        out: Tensor = grouped_product(
            self.x, None, whole, None, None, order, blocks, self.each, False, self.dtype
        )
        return out

    def small_product(
        self, at: int, tiles: Any = None, out: Tensor | None = None, *, expands: bool = False
    ) -> Tensor:
        """Return the product in 4 bits for the matrices and routes at a place.

        Args:
            at: The place.
            tiles: How the product is divided. Default: as treegen chooses.
            out: Where to put the outputs. Default: new memory.
            expands: Whether to expand matrices into scratch memory, on a GPU.
        """
        copy = at % len(self.weights)
        weight, scale, factor = self.weights[copy], self.scales[copy], self.factors[copy]
        on_cpu = self.x.device.type == "cpu"
        if tiles is None and out is None and (on_cpu or not expands):
            if self.product.experts:
                _, order, blocks = self.routes[at]
                made: Tensor = grouped_fp4_product(
                    self.quarters, weight, scale, factor, None, order, blocks, self.each, False
                )
                return made
            assert factor is not None
            made = fp4_product(self.quarters, weight[0], scale[0], factor[0], None, False)
            return made
        from treegen.model.linear import fp4_expansion, fp4_kernels

        num = self.rows * self.product.chosen
        out = self.x.new_empty(num, self.product.outputs) if out is None else out
        scale = scale.view(torch.uint8)
        kernels: Any = fp4_expansion if expands else fp4_kernels
        divided = {} if expands else {"tiles": tiles}
        if self.product.experts:
            _, order, blocks = self.routes[at]
            matrices, routes = (weight, scale, factor, None), (order, blocks, self.each)
            kernels.grouped_fp4_product(self.quarters, matrices, routes, out, **divided)
        else:
            assert factor is not None
            matrix = weight[0], scale[0], factor[0], None
            kernels.fp4_linear(self.quarters, matrix, out, **divided)
        return out

    @property
    def expands(self) -> bool:
        """Whether treegen expands matrices into scratch memory for this many rows."""
        if self.x.device.type == "cpu":
            return False
        from treegen.model.linear import fp4_expansion

        num, experts = self.rows * self.product.chosen, self.product.experts
        return fp4_expansion.is_faster(num, experts, self.x.device)

    def error(self, tiles: Any = None, *, expands: bool = False) -> float:
        """Return the largest error, as a share of the sum of the sizes of an output's products.

        Args:
            tiles: As in `small_product`.
            expands: As in `small_product`.

        Raises:
            NumericsError: it is larger than rounding explains, or an output is not written.
        """
        num = self.rows * self.product.chosen
        out = None
        if self.x.device.type == "cuda":
            out = self.x.new_full((num, self.product.outputs), float("nan"))
        got = self.small_product(0, tiles, out, expands=expands)
        largest, skipped = 0.0, self.product.outputs // _COLUMNS | 1
        step = max(num // _CHECKED, 1)
        for pair in [*range(0, num, step), num - 1] if self.product.experts else [0]:
            expert = 0
            pairs = slice(pair, pair + 1)
            if self.product.experts:
                expert = int(self.routes[0][0].reshape(-1)[pair])
            else:
                pairs = slice(None, None, step)
            whole = dequantize_fp4(
                self.weights[0][expert, ::skipped], self.scales[0][expert, ::skipped]
            ).double()
            factor = self.factors[0]
            if factor is not None:
                whole *= factor[expert, ::skipped, None].double()
            rows = self.x[pair // self.each][None] if self.product.experts else self.x[pairs]
            want, size = rows.double() @ whole.T, rows.double().abs() @ whole.abs().T
            far = ((got[pairs, ::skipped].double() - want).abs() - want.abs() * _TOLERANCE) / size
            if not bool((far <= 2e-6).all()):
                raise NumericsError(
                    f"outputs are off by {float(far.max()):.2g} of the sizes of their products "
                    f"with {tiles or 'the usual tiles'}"
                )
            largest = max(
                largest, float(((got[pairs, ::skipped].double() - want).abs() / size).max())
            )
        return largest

    def floors(self, rates: Ceilings) -> tuple[float, float]:
        """Return the least microseconds in 4 bits and in 16 bits."""
        product, used = self.product, 1.0
        if product.experts:
            used = sum(len(chosen.unique()) for chosen, *_ in self.routes) / self.calls
        numbers = product.outputs * product.inputs * used
        moved = (self.x.numel() + self.rows * product.chosen * product.outputs) * self.x.itemsize
        flops = 2 * self.rows * product.chosen * product.outputs * product.inputs
        sizes = (0.5 + 1 / product.group, self.x.itemsize)
        small, plain = (
            1e6 * max((numbers * size + moved) / rates.memory, flops / rates.matmul)
            for size in sizes
        )
        return small, plain

    def time(self, watch: Stopwatch, call: Callable[[int], Tensor], repeats: int) -> float:
        """Return the microseconds of a call, from the median of graphs that call all matrices."""

        def all_of_them() -> list[Tensor]:
            return [call(at) for at in range(self.calls)]

        return watch.microseconds(all_of_them, repeats).median / self.calls


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
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:100]
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
@counts("--rows", "Rows.", default="1,16,64,256,1024")
@count("--repeats", 10, "Graphs that are timed.")
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
    json_line(
        {
            "bench": "products",
            "machine": machine,
            "ceilings": asdict(rates),
            "results": [asdict(result) for result in results],
        }
    )


if __name__ == "__main__":
    main()
