"""Merge linear layers with the same input into one product: queries, keys, values; gate, up.

A stock layer computes them one after another. Each product is a kernel launch, and with few rows or
few outputs it leaves part of the GPU idle. docs/performance.md has measurements.

In gated layers in FP8, silu(gate) * up is computed and rounded in one kernel. A stock layer writes
silu(gate) * up in 16 bits. The compiler rounds it to FP8 in a kernel that computes each number
twice: once for the largest of its row, once to round it.

Legend: M rows, F width of gate and up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from treegen.model.latent import make_subclass
from treegen.model.linear.batch_invariant import (
    BatchInvariantLinear,
    batch_invariant_linear,
    needs_invariant_kernel,
)
from treegen.model.linear.fp4 import Fp4Linear, fp4_linear
from treegen.model.linear.fp8 import (
    MIN_AMAX,
    Fp8Linear,
    fp8_linear,
    quantize_rows,
    scaled_product,
)
from treegen.ops.attention.types import E4M3_MAX, FP8


class GatedLinears:
    """The FP8 layers whose input is silu(gate) * up of two merged layers, replaced until `undo`."""

    def __init__(self, module: nn.Module, run: Callable[[], object]) -> None:
        """Find the layers by their inputs in a forward pass.

        Args:
            module: The model.
            run: Runs a forward pass of the model.
        """
        self._parts: list[_Gated] = []
        calls: list[_Call] = []

        def note(part: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
            """Record a call; a forward hook.

            Args:
                part: The layer.
                inputs: Its inputs.
                out: Its output.
            """
            calls.append((part, inputs[0], out))

        with ExitStack() as hooks:
            for part in module.modules():
                if isinstance(part, Fp8Linear):
                    hooks.enter_context(part.register_forward_hook(note))
            run()
        for gate, up, down in zip(calls, calls[1:], calls[2:], strict=False):
            if (
                type(down[0]) is Fp8Linear
                and _are_pair(gate[0], up[0])
                and _is_gated(gate, up, down)
            ):
                down[0].__class__ = _Gated
                part = cast(_Gated, down[0])
                part.merged = cast(MergedLinearPart, up[0]).merged
                part.merged.keeps = True
                self._parts.append(part)

    def undo(self) -> None:
        """Make each layer round its own input again."""
        for part in self._parts:
            part.merged.keeps = False
            del part.merged
            cast(nn.Module, part).__class__ = Fp8Linear
        self._parts.clear()


class _Gated(Fp8Linear):
    """An FP8 layer that recomputes its input from the merged product of gate and up."""

    merged: MergedLinear

    def forward(self, input: Tensor) -> Tensor:
        product, self.merged.product = self.merged.product, None
        if product is None:
            return super().forward(input)
        rows, scale_M = silu_mul_quantize(product.reshape(-1, 2 * self.in_features))
        return scaled_product(rows, scale_M, self.weight, self.scale, self.bias, like=input)


def _are_pair(gate: nn.Module, up: nn.Module) -> bool:
    """Return whether two layers are computed together, and no other layer with them."""
    if not (
        isinstance(gate, MergedLinearPart)
        and isinstance(up, MergedLinearPart)
        and gate.merged is up.merged
    ):
        return False
    return len(gate.merged.sizes) == 2 and (gate.index, up.index) == (0, 1)


_Call = tuple[nn.Module, Tensor, Tensor]  # a layer, its input, and its output


def _is_gated(gate: _Call, up: _Call, down: _Call) -> bool:
    """Return whether a layer's input is silu(gate) * up. All-zero numbers do not show this."""
    shapes = gate[2].shape, up[2].shape
    if shapes != (down[1].shape, down[1].shape) or not down[1].any():
        return False
    return torch.equal(silu(gate[2]) * up[2], down[1])


@torch.library.custom_op("treegen::silu_mul_quantize", mutates_args=())
def silu_mul_quantize(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up [M, F] in FP8, and the scale of each row [M].

    Args:
        gate_up: Gates and ups [M, 2 F], gates first.
    """
    gate, up = gate_up.chunk(2, -1)
    if gate_up.device.type != "cuda":
        return quantize_rows(silu(gate.float()) * up.float())
    from treegen.model.linear.row_kernels import silu_quantize

    rounded = torch.empty(gate.shape, dtype=FP8, device=gate_up.device)
    scale_M = torch.empty(len(gate_up), dtype=torch.float32, device=gate_up.device)
    silu_quantize(gate_up.contiguous(), rounded, scale_M, E4M3_MAX, MIN_AMAX)
    return rounded, scale_M


@silu_mul_quantize.register_fake
def _(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = gate_up.shape
    rounded = gate_up.new_empty((rows, width // 2), dtype=FP8)
    return rounded, gate_up.new_empty(rows, dtype=torch.float32)


class MergedLinears:
    """The linear layers of a model that take the same input, computed together until `undo`.

    Results are equal up to rounding, whatever the order in which the layers are called, unless a
    layer changes an input in place. Parameters keep their names and shapes, and in-place writes to
    them take effect. In memory, each now lies next to those that are computed with it.
    """

    def __init__(self, module: nn.Module, run: Callable[[], object]) -> None:
        """Merge the layers. Layers for which memory runs out stay separate.

        Args:
            module: The model.
            run: Runs a forward pass, which shows which layers take the same input.
        """
        self._parts: list[nn.Linear] = []
        for siblings in _find_mergeable(module, run):
            merged = _build_merged(siblings)
            if merged is None:
                break
            for index, part in enumerate(siblings):
                kind: Any = type(part)
                part.__class__ = make_subclass(MergedLinearPart, kind)
                merged_part = cast(MergedLinearPart, part)
                merged_part.merged, merged_part.index = merged, index
                self._parts.append(part)

    def undo(self) -> None:
        """Make each layer compute by itself again."""
        for part in self._parts:
            del part.merged, part.index
            part.__class__ = type(part).__bases__[1]
        self._parts.clear()


class MergedLinear:
    """One product for several linear layers, computed when the first of them is called.

    It is not a module, because its weights already have names in the model. It stores them as
    parameters, because the compiler treats the sizes of parameters as fixed.

    Attributes:
        sizes: The number of outputs of each layer.
        weight: The merged weight [sum of sizes, in_features].
        scale: The merged scales of FP8 or NVFP4 weights; None for other layers.
        factor: The merged factors of NVFP4 weights [sum of sizes]; None for other layers.
        expands: Whether many rows may be multiplied by an expanded matrix, for NVFP4 weights.
        bias: The merged bias [sum of sizes]; None for none.
        keeps: Whether to keep the last product.
        product: The last product [..., sum of sizes] if `keeps` is set. Its user removes it before
            the next one is computed.
    """

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        self.sizes = [part.out_features for part in parts]
        self.weight = _merge_parameters([part.weight for part in parts])
        scales = [part.scale for part in parts if isinstance(part, Fp8Linear | Fp4Linear)]
        self.scale = _merge_parameters(scales) if scales else None
        factors = [part.factor for part in parts if isinstance(part, Fp4Linear)]
        self.factor = _merge_parameters(factors) if factors else None
        self.expands = all(getattr(part, "expands", True) for part in parts)
        biases = [part.bias for part in parts if part.bias is not None]
        self.bias = _merge_parameters(biases) if biases else None
        is_fixed = all(isinstance(part, BatchInvariantLinear) for part in parts)
        is_fixed &= needs_invariant_kernel(self.weight, sum(self.sizes))
        self._linear: Callable[..., Tensor] = batch_invariant_linear if is_fixed else linear
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()
        self.keeps = False
        self.product: Tensor | None = None

    def output(self, input: Tensor, index: int) -> Tensor | None:
        """Return what the layer at `index` computes from an input [..., in_features].

        Returns None if the product was computed from another input.
        """
        if index == 0:
            if self.scale is None:
                output = self._linear(input, self.weight, self.bias)
            elif self.factor is not None:
                output = fp4_linear(
                    input, self.weight, self.scale, self.factor, self.bias, expands=self.expands
                )
            else:
                output = fp8_linear(input, self.weight, self.scale, self.bias)
            self._outputs, self._input = output.split(self.sizes, -1), input
            self.product = output if self.keeps else None
        if self._input is not input:
            return None
        output = self._outputs[index]
        if index == len(self.sizes) - 1:
            self._input, self._outputs = None, ()
        return output


def _build_merged(parts: Sequence[nn.Linear]) -> MergedLinear | None:
    """Return the product for some layers; None if there is no memory for it."""
    for attempt in range(2):
        try:
            return MergedLinear(parts)
        except torch.OutOfMemoryError:
            if attempt == 0:
                # torch keeps the memory of layers merged before, in blocks too small for these.
                torch.cuda.empty_cache()
    return None


class MergedLinearPart(nn.Linear):
    """A linear layer that is computed together with others, mixed into each class of them."""

    merged: MergedLinear
    index: int

    def forward(self, input: Tensor) -> Tensor:
        """Return input @ weight.T + bias, [..., out_features]."""
        output = self.merged.output(input, self.index)
        return super().forward(input) if output is None else output


_MERGEABLE: Final = (nn.Linear, Fp8Linear, Fp4Linear, BatchInvariantLinear)


@torch.no_grad()
def _merge_parameters(parts: Sequence[Tensor]) -> nn.Parameter:
    """Copy parameters one after another into new memory, and make them views of it."""
    sizes = [len(part) for part in parts]
    merged = nn.Parameter(parts[0].data.new_empty(sum(sizes), *parts[0].shape[1:]), False)
    for part, data in zip(parts, merged.data.split(sizes), strict=True):
        data.copy_(part.data)
        part.data = data
    return merged


def _find_mergeable(module: nn.Module, run: Callable[[], object]) -> list[list[nn.Linear]]:
    """Return groups of linear layers of one parent that take the same input, in call order."""
    calls: list[tuple[nn.Linear, Tensor]] = []

    def note(part: nn.Linear, inputs: tuple[Tensor, ...]) -> None:
        calls.extend((part, tensor) for tensor in inputs)  # inputs passed by keyword are not seen

    uses = Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
    with ExitStack() as hooks:
        for part in module.modules():
            if type(part) in _MERGEABLE and all(uses[weight] == 1 for weight in part.parameters()):
                hooks.enter_context(part.register_forward_pre_hook(note))
        run()
    times = Counter(part for part, _ in calls)
    parents = {child: parent for parent in module.modules() for child in parent.children()}
    groups: dict[tuple[object, ...], list[nn.Linear]] = defaultdict(list)
    for part, inputs in calls:
        if times[part] == 1:
            key = parents.get(part), id(inputs), part.weight.dtype, part.bias is None
            groups[key].append(part)
    return [parts for parts in groups.values() if len(parts) > 1]
