"""The library for matrix products of few rows: chosen for a pass, and as before after it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devices import CUDA

from treegen.model.linear import blas
from treegen.model.linear.blas import prefer_fast_blas, require_cublaslt

GPU = torch.device("cuda", 0)
NAMES = {"default": "Cublas", "cublas": "Cublas", "cublaslt": "Cublaslt"}


class Library:
    """The setting of torch for CUDA, on a machine without it."""

    def __init__(self) -> None:
        self.name = "Cublas"

    def __call__(self, name: str | None = None) -> SimpleNamespace:
        if name is not None:
            self.name = NAMES[name]
        return SimpleNamespace(name=self.name)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pretend that each CUDA device is a Hopper GPU, and restore the library afterwards."""
    if not CUDA:
        monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", Library())
    before = preferred()
    monkeypatch.setattr(blas, "_is_hopper", lambda device: device.type == "cuda")
    torch.backends.cuda.preferred_blas_library("cublas")
    yield
    torch.backends.cuda.preferred_blas_library(before.lower())


def preferred() -> str:
    library: Any = torch.backends.cuda.preferred_blas_library()
    return str(library.name)


@pytest.mark.parametrize(
    ("rows", "width", "device", "changes"),
    [
        (17, 4096, GPU, True),
        (128, 2560, GPU, True),
        (16, 4096, GPU, False),
        (129, 4096, GPU, False),
        (64, 2048, GPU, False),
        (64, 4096, torch.device("cpu"), False),
    ],
)
def test_choice(rows: int, width: int, device: torch.device, changes: bool) -> None:
    with prefer_fast_blas(rows, width, device):
        assert preferred() == ("Cublaslt" if changes else "Cublas")
    assert preferred() == "Cublas"


def test_library_is_restored_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), prefer_fast_blas(64, 4096, GPU):
        raise ZeroDivisionError
    assert preferred() == "Cublas"


def test_other_preferences_stay() -> None:
    torch.backends.cuda.preferred_blas_library("cublaslt")
    with prefer_fast_blas(64, 4096, GPU):
        pass
    assert preferred() == "Cublaslt"


def test_passes_of_two_threads() -> None:
    """The one that ends first does not change the library of the other."""
    first, second = (prefer_fast_blas(64, 4096, GPU) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert preferred() == "Cublaslt"
    second.__exit__(None, None, None)
    assert preferred() == "Cublas"


def test_a_requirement_outlives_a_pass() -> None:
    """A reproducible model may be made while another thread computes a pass."""
    with prefer_fast_blas(64, 4096, GPU):
        require_cublaslt()
    assert preferred() == "Cublaslt"
    torch.backends.cuda.preferred_blas_library("cublas")
    with prefer_fast_blas(64, 4096, GPU):
        pass
    assert preferred() == "Cublas"
