"""Products of rows by matrices in 4 bits with random numbers, for `quantized_products.py`.

Legend: R rows, E experts, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from treegen.bench.ceilings import Ceilings
from treegen.bench.timing import Stopwatch
from treegen.errors import NumericsError
from treegen.model.checkpoint.fp4 import dequantize_fp4
from treegen.model.linear.experts import group_by_expert, grouped_product
from treegen.model.linear.fp4 import fp4_product, grouped_fp4_product, split_rows


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
_BYTES: Final = 2**28  # of the matrices that a graph reads; more than an L2 cache
_MAX_COPIES: Final = 16  # matrices
_CHECKED: Final = 64  # rows that are compared with float64
_COLUMNS: Final = 4096  # about as many outputs of them
_TOLERANCE: Final = 2**-8


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
        copies = 2 if device.type == "cpu" else min(max(-(-_BYTES // size), 2), _MAX_COPIES)
        self.calls = _MAX_COPIES if product.experts and device.type == "cuda" else int(copies)
        # Scales between 2^-4 and 2^4, and factors that make sums of about 1.
        low, high = (24, 88) if product.group == 16 else (123, 132)
        self.weights, self.scales, self.factors, self.routes = [], [], [], []
        for _ in range(int(copies)):
            packed = (*shape, product.inputs // 2), (*shape, product.inputs // product.group)
            weight = torch.randint(0, 256, packed[0], dtype=torch.uint8, device=device)
            scale = torch.randint(low, high, packed[1], dtype=torch.uint8, device=device)
            factor = torch.rand(shape, device=device) / product.inputs
            self.weights.append(weight)
            self.scales.append(scale.view(torch.float8_e4m3fn) if product.group == 16 else scale)
            self.factors.append(factor if product.group == 16 else None)
        for _ in range(self.calls if product.experts else 0):
            chosen = torch.rand(rows, product.experts, device=device).topk(product.chosen).indices
            self.routes.append((chosen, *group_by_expert(chosen, product.experts)))
        self.num_inputs = rows * product.chosen if product.rows_each else rows
        self.x = torch.randn(self.num_inputs, product.inputs, device=device).to(dtype)
        self.quarters = split_rows(self.x)
        self.pairs_per_row = 1 if product.rows_each else product.chosen

    def plain(self) -> list[Tensor]:
        """Return expanded matrices."""
        matrices = []
        for weight, scale, factor in zip(self.weights, self.scales, self.factors, strict=True):
            matrix = torch.empty(
                (*weight.shape[:2], self.product.inputs), dtype=self.dtype, device=weight.device
            )
            for at in range(len(weight)):
                part = dequantize_fp4(weight[at], scale[at])
                matrix[at] = part if factor is None else part * factor[at, :, None]
            matrices.append(matrix)
        return matrices

    def split(self, _: int) -> Tensor:
        """Return the rows in the order that the kernel needs."""
        return split_rows(self.x)

    def plain_product(self, copies: Sequence[Tensor], at: int) -> Tensor:
        """Return the product in 16 bits of matrices [E, N, K], for the routes at a place."""
        matrix = copies[at % len(copies)]
        if not self.product.experts:
            return self.x @ matrix[0].T
        _, order, blocks = self.routes[at]
        out: Tensor = grouped_product(
            self.x, None, matrix, None, None, order, blocks, self.pairs_per_row, False, self.dtype
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
                product: Tensor = grouped_fp4_product(
                    self.quarters,
                    weight,
                    scale,
                    factor,
                    None,
                    order,
                    blocks,
                    self.pairs_per_row,
                    False,
                )
                return product
            assert factor is not None
            product = fp4_product(self.quarters, weight[0], scale[0], factor[0], None, False)
            return product
        from treegen.model.linear import fp4_expansion, fp4_kernels

        num = self.rows * self.product.chosen
        out = self.x.new_empty(num, self.product.outputs) if out is None else out
        scale = scale.view(torch.uint8)
        kernels: Any = fp4_expansion if expands else fp4_kernels
        divided = {} if expands else {"tiles": tiles}
        if self.product.experts:
            _, order, blocks = self.routes[at]
            matrices, routes = (weight, scale, factor, None), (order, blocks, self.pairs_per_row)
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
            matrix = dequantize_fp4(
                self.weights[0][expert, ::skipped], self.scales[0][expert, ::skipped]
            ).double()
            factor = self.factors[0]
            if factor is not None:
                matrix *= factor[expert, ::skipped, None].double()
            rows = (
                self.x[pair // self.pairs_per_row][None] if self.product.experts else self.x[pairs]
            )
            want, size = rows.double() @ matrix.T, rows.double().abs() @ matrix.abs().T
            far = ((got[pairs, ::skipped].double() - want).abs() - want.abs() * _TOLERANCE) / size
            if not bool((far <= 2e-6).all()):
                raise NumericsError(
                    f"the outputs with {tiles or 'the usual tiles'} differ from the reference "
                    f"by {float(far.max()):.2g} of the size of their products, which is more "
                    "than the limit of 2e-6"
                )
            largest = max(
                largest, float(((got[pairs, ::skipped].double() - want).abs() / size).max())
            )
        return largest

    def floors(self, rates: Ceilings) -> tuple[float, float]:
        """Return the minimum microseconds in 4 bits and in 16 bits."""
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
