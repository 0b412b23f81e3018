"""The library for matrix products of few rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any, Final

import torch

_ROWS: Final = range(17, 129)  # rows for which cuBLASLt chooses faster kernels than cuBLAS
_MIN_WIDTH: Final = 2560  # smallest width of a model for which it does


class _Preference:
    """Which library torch prefers, which is one setting for all threads of the process."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_passes = 0  # passes that prefer cuBLASLt now
        self._before = "default"  # the library before them
        self._is_required = False  # whether cuBLASLt stays after them

    def require(self) -> None:
        """Prefer cuBLASLt for the rest of the process."""
        with self._lock:
            self._is_required = True
            _prefer("cublaslt")

    def begin(self) -> bool:
        """Prefer cuBLASLt until `end`; return False, and do nothing, if it or another is chosen."""
        with self._lock:
            library: Any = torch.backends.cuda.preferred_blas_library()
            if not self._num_passes:
                if library.name not in ("Default", "Cublas"):
                    return False
                self._before, self._is_required = library.name.lower(), False
                _prefer("cublaslt")
            self._num_passes += 1
            return True

    def end(self) -> None:
        """Restore the library after the last pass."""
        with self._lock:
            self._num_passes -= 1
            if not self._num_passes and not self._is_required:
                _prefer(self._before)


_preference = _Preference()


def require_cublaslt() -> None:
    """Compute all matrix products of this process with cuBLASLt."""
    _preference.require()


@contextmanager
def prefer_fast_blas(rows: int, width: int, device: torch.device) -> Iterator[None]:
    """Compute products with cuBLASLt where it is faster than cuBLAS; see measurements.md.

    A preference of the user for another library than cuBLAS stays. So does that of
    `require_cublaslt`, even if another thread calls it meanwhile.

    Args:
        rows: Number of rows.
        width: Width of the model.
        device: Device of the products.
    """
    if rows not in _ROWS or width < _MIN_WIDTH or not _is_hopper(device):
        yield
        return
    if not _preference.begin():
        yield
        return
    try:
        yield
    finally:
        _preference.end()


def _prefer(library: str) -> None:
    _hide_warning()
    torch.backends.cuda.preferred_blas_library(library)


@cache  # each further filter would make Python repeat warnings that it shows once
def _hide_warning() -> None:
    """Ignore torch's warning, at the first choice of another library, that the setting is new."""
    warnings.filterwarnings("ignore", message="torch.backends.cuda.preferred_blas_library is an")


@cache
def _is_hopper(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)
