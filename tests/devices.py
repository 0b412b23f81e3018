"""Devices on which tests run kernels: a GPU, or a CPU with Triton's interpreter."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not CUDA
DEVICE = "cuda" if CUDA else "cpu"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
needs_triton = pytest.mark.skipif(
    not CUDA and not INTERPRETED, reason="needs a GPU, or TRITON_INTERPRET=1"
)
needs_compiler = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton's compiler",
)
