"""The library for matrix products of few rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch

_ROWS: Final = range(17, 129)  # rows for which cuBLASLt chooses faster kernels than cuBLAS
_MIN_WIDTH: Final = 2560  # smallest width of a model for which it does


@contextmanager
def prefer_fast_blas(rows: int, width: int, device: torch.device) -> Iterator[None]:
    """Compute products with cuBLASLt where it is faster than cuBLAS; see measurements.md.

    A preference of the user for another library than cuBLAS stays.

    Args:
        rows: Number of rows.
        width: Width of the model.
        device: Device of the products.
    """
    if rows not in _ROWS or width < _MIN_WIDTH or not _is_hopper(device):
        yield
        return
    backends = torch.backends.cuda
    before: Any = backends.preferred_blas_library()
    if before.name not in ("Default", "Cublas"):
        yield
        return
    backends.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        backends.preferred_blas_library("cublas" if before.name == "Cublas" else "default")


@cache
def _is_hopper(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)
