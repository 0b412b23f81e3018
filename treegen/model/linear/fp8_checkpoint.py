"""Restore FP8 matrices of a checkpoint in a model that was loaded with expanded weights.

A stored matrix is e4m3 numbers times a grid of scales: one for all, one per output, or one per
block. `Fp8Linear` has one scale per output, so the first two are used as stored. Blocks are rounded
to the scale of their output's largest block, and the rounding error is measured; it is nearly zero
for scales that are powers of two (MXFP8, ue8m0).

Legend: N outputs, K inputs, n and k numbers of blocks along them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from treegen.model.checkpoint.files import read_headers, weight_files
from treegen.model.linear.experts import FusedExperts
from treegen.model.linear.fp8 import iter_fp8_linears, replace_weight
from treegen.model.linear.fp8_experts import install_experts, rounding_experts
from treegen.ops.attention.types import FP8

_SCALES: Final = ("weight_scale_inv", "weight_scale", "qscale_weight", "scale")
_EXPERTS: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_NUM_CHECKED_ROWS: Final = 8  # rows that are compared with transformers' dequantized weight


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The FP8 matrices that were restored in a model."""

    count: int
    """Matrices in FP8."""
    rounded: int
    """Matrices in FP8 whose blocks were rounded to one scale per output."""
    error: float
    """The rounding error of the rounded matrices, as a share of their spread."""
    expanded: int
    """FP8 matrices of the checkpoint that stay expanded."""


def restore_fp8(module: nn.Module, directory: Path, device: torch.device) -> RestoreReport:
    """Replace expanded weights by the FP8 matrices of a checkpoint, on a device.

    Matrices that cannot be matched with a linear layer stay expanded.

    Args:
        module: The model as transformers loaded it from the directory, with expanded weights. It is
            changed.
        directory: The checkpoint's directory.
        device: The device of the FP8 matrices.
    """
    stored = _Stored(directory)
    count = rounded = 0
    before = after = torch.zeros((), dtype=torch.float64)

    def requantize(matrix_and_grid: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return a matrix with one scale per output, on the device, and update the counts."""
        nonlocal count, rounded, before, after
        weight, scale_N, changed, total = requantize_per_row(
            *(tensor.to(device) for tensor in matrix_and_grid)
        )
        count += 1
        if changed:
            rounded += 1
            after, before = after + changed, before + total
        return weight, scale_N

    for name, part in iter_fp8_linears(module):
        matrix_and_grid = stored.read(f"{name}.weight", part.weight)
        if matrix_and_grid is not None:
            replace_weight(part, *requantize(matrix_and_grid))
    for name, experts in [*rounding_experts(module)]:
        sides = _experts(stored, name, experts)
        if sides is not None:
            install_experts(experts, *(_stack_experts(side, requantize) for side in sides))
    error = float(after / before) ** 0.5 if rounded else 0.0
    return RestoreReport(count, rounded, error, stored.num_matrices - count)


_Grids = list[tuple[Tensor, Tensor]]


def _experts(stored: _Stored, name: str, experts: FusedExperts) -> list[list[_Grids]] | None:
    """Return the matrices of both tensors of experts; None if not all are known.

    Each list has, for every expert, its matrices from top to bottom.
    """
    up, down = (getattr(experts.module, tensor_name) for tensor_name in experts[1:])
    num_up_parts = 2 if experts.module.has_gate else 1
    for above in _EXPERTS:
        names = above[2 - num_up_parts :]
        sides: list[list[_Grids]] = [[], []]
        for at in range(len(up)):
            parts = [*up[at].chunk(num_up_parts), down[at]]
            read = [
                stored.read(f"{name}.{at}.{matrix_name}.weight", part)
                for matrix_name, part in zip(names, parts, strict=True)
            ]
            if any(matrix is None for matrix in read):
                break
            *ups, last = cast(_Grids, read)
            sides[0].append(ups)
            sides[1].append([last])
        else:
            return sides
    return None


def _stack_experts(
    side: list[_Grids], requantize: Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return the matrices of experts as one tensor [E, N, K], and its scales [E, N]."""
    parts_of_experts = [[requantize(stored) for stored in parts] for parts in side]
    weights = torch.stack(
        [torch.cat([weight for weight, _ in parts]) for parts in parts_of_experts]
    )
    return weights, torch.stack(
        [torch.cat([scale_N for _, scale_N in parts]) for parts in parts_of_experts]
    )


def requantize_per_row(weight: Tensor, grid: Tensor) -> tuple[Tensor, Tensor, float, float]:
    """Convert an FP8 matrix with scales of blocks to one scale per output.

    Args:
        weight: FP8 numbers [N, K].
        grid: Scales of blocks of one size, float32 [n, k].

    Returns:
        The matrix [N, K], its scales [N], and two sums of squares: of the changes, and of the
            stored matrix. Both are 0 if nothing had to be rounded.
    """
    rows, width = weight.shape
    grid_Nk = grid.repeat_interleave(rows // grid.shape[0], dim=0)
    scale_N = grid_Nk.amax(dim=1)
    scale_N = scale_N.where(scale_N > 0, torch.ones_like(scale_N))
    if grid_Nk.shape[1] == 1:
        return weight, scale_N, 0.0, 0.0
    exact = weight.float()
    exact *= (grid_Nk / scale_N[:, None]).repeat_interleave(width // grid.shape[1], dim=1)
    rounded = exact.to(FP8)
    squared_error = ((rounded.float() - exact) * scale_N[:, None]).double().square().sum()
    total = (exact * scale_N[:, None]).double().square().sum()
    return rounded, scale_N, float(squared_error), float(total)


def fp8_tensors(directory: Path) -> dict[str, Path]:
    """Return the names of a checkpoint's e4m3 matrices and the file of each."""
    return {
        name: file
        for file in weight_files(directory)
        for name, kind, _ in read_headers(file)
        if name.endswith(".weight") and kind == "F8_E4M3"
    }


class _Stored:
    """The FP8 matrices in the files of a checkpoint."""

    def __init__(self, directory: Path) -> None:
        self._files = fp8_tensors(directory)
        self._open: dict[Path, Any] = {}
        self._scales: dict[str, Path] = {}
        for file in weight_files(directory):
            names = self._open_file(file).keys()
            self._scales |= {name: file for name in names if name.endswith(_SCALES)}
        self._names_by_suffix: dict[str, list[str]] = defaultdict(list)
        for name in self._files:
            self._names_by_suffix[_shared_suffix(name)].append(name)
        self.num_matrices = len(self._files)

    def read(self, name: str, loaded: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return numbers [N, K] and scales [n, k] from which a loaded weight was made, or None.

        Models and files may use different names above a layer's number. The stored matrix must
        match what transformers expanded; otherwise the result is None.
        """
        matches = [name] if name in self._files else self._names_by_suffix[_shared_suffix(name)]
        if len(matches) != 1:
            return None
        weight = self._open_file(self._files[matches[0]]).get_tensor(matches[0])
        grid = self._grid(matches[0].removesuffix("weight"))
        if grid is None or weight.shape != loaded.shape:
            return None
        rows, width = (size // n for size, n in zip(weight.shape, grid.shape, strict=True))
        if weight.shape != (rows * grid.shape[0], width * grid.shape[1]):
            return None
        first = slice(_NUM_CHECKED_ROWS)
        scales = grid.repeat_interleave(rows, dim=0)[first].repeat_interleave(width, dim=1)
        expanded = (weight[first].float() * scales).to(loaded.dtype)
        same = torch.allclose(expanded.float(), loaded[first].float(), rtol=2**-6, atol=0.0)
        return (weight, grid) if same else None

    def _grid(self, prefix: str) -> Tensor | None:
        for end in _SCALES:
            if prefix + end in self._scales:
                scale: Tensor = self._open_file(self._scales[prefix + end]).get_tensor(prefix + end)
                if scale.dtype == torch.uint8:
                    scale = (scale.float() - 127).exp2()  # ue8m0 as bytes
                scale = scale.float()
                return scale if scale.dim() == 2 else scale.reshape(-1, 1)
        return None

    def _open_file(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(file, "pt")
        return self._open[file]


def _shared_suffix(name: str) -> str:
    """Return the part of a tensor's name that models and files share, from its layer's number on.

    The layer's name for the part with experts is left out.
    """
    _, layers, end = name.rpartition(".layers.")
    above, experts, suffix = end.partition(".experts.")
    if experts:
        return f"{above.partition('.')[0]}{experts}{suffix}"
    return end if layers else name
