"""The library for matrix products of few rows: chosen for a pass, and as before after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from devices import CUDA

from treegen.model.linear import blas
from treegen.model.linear.blas import prefer_fast_blas

GPU = torch.device("cuda", 0)
needs_cuda = pytest.mark.skipif(not CUDA, reason="only torch for CUDA has cuBLASLt")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that each CUDA device is a Hopper GPU, and restore the library afterwards."""
    before = preferred()
    monkeypatch.setattr(blas, "_is_hopper", lambda device: device.type == "cuda")
    yield
    torch.backends.cuda.preferred_blas_library(before.lower())


def preferred() -> str:
    library: Any = torch.backends.cuda.preferred_blas_library()
    return str(library.name)


@pytest.mark.parametrize(
    ("rows", "width", "device", "changes"),
    [
        pytest.param(17, 4096, GPU, True, marks=needs_cuda),
        pytest.param(128, 2560, GPU, True, marks=needs_cuda),
        (16, 4096, GPU, False),
        (129, 4096, GPU, False),
        (64, 2048, GPU, False),
        (64, 4096, torch.device("cpu"), False),
    ],
)
def test_choice(rows: int, width: int, device: torch.device, changes: bool) -> None:
    torch.backends.cuda.preferred_blas_library("cublas")
    with prefer_fast_blas(rows, width, device):
        assert preferred() == ("Cublaslt" if changes else "Cublas")
    assert preferred() == "Cublas"


@needs_cuda
def test_library_is_restored_after_an_error() -> None:
    torch.backends.cuda.preferred_blas_library("cublas")
    with pytest.raises(ZeroDivisionError), prefer_fast_blas(64, 4096, GPU):
        raise ZeroDivisionError
    assert preferred() == "Cublas"


@needs_cuda
def test_other_preferences_stay() -> None:
    torch.backends.cuda.preferred_blas_library("cublaslt")
    with prefer_fast_blas(64, 4096, GPU):
        pass
    assert preferred() == "Cublaslt"
