"""The kernels as compiled, from their own launches, for cards that are not here."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from delta_cases import Case, own_slots

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from treegen.ops.recurrence import gpu, kernels

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    int: "i32",
    float: "fp32",
}
SHARED = {89: 99 << 10, 90: 227 << 10}  # bytes that a program may have, by compute capability


class Compiles:
    """In place of a kernel: compiles it for what it is launched with, and notes what it takes."""

    def __init__(self, kernel: Any, capability: int, found: dict[str, int]) -> None:
        self._kernel, self._capability, self._found = kernel, capability, found

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: Any, num_warps: int = 4, **named: Any) -> None:
        kernel = self._kernel
        given = dict(zip(kernel.arg_names, args, strict=False)) | named
        constants = {p.name: given[p.name] for p in kernel.params if p.is_constexpr}
        types = {
            name: "constexpr"
            if name in constants
            else TYPES[value.dtype if isinstance(value, torch.Tensor) else type(value)]
            for name, value in given.items()
        }
        source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants)
        target = GPUTarget("cuda", self._capability, 32)
        done = compile(source, target=target, options={"num_warps": num_warps})
        self._found[kernel.__name__] = done.metadata.shared


@pytest.mark.parametrize(
    ("capability", "heads", "dtype", "corrects"),
    [
        (90, (16, 32, 128, 128), torch.bfloat16, True),
        (89, (16, 48, 128, 128), torch.bfloat16, True),
        (89, (2, 2, 128, 128), torch.float32, True),
        (90, (2, 6, 8, 12), torch.float32, True),
        (90, (8, 128, 128, 64), torch.bfloat16, False),
        (89, (1, 4, 256, 64), torch.bfloat16, False),
    ],
)
def test_every_kernel_compiles(
    capability: int,
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    corrects: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: dict[str, int] = {}
    names = (
        "convolve",
        "read_bases",
        "read_lists",
        "step_states",
        "fold_lists",
        "convolve_runs",
        "move_windows",
    )
    for name in names:
        kernel = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, Compiles(kernel, capability, found))
    case = Case(0, 3, 1, dtype, heads, by=gpu, corrects=corrects)
    case.list_step(0)
    case.fold(torch.arange(3))
    gpu.step(case.inputs(0), case.states, own_slots(case.own, case.own))
    gpu.scan(case.inputs(0), case.states, case.own, case.own, 1)
    assert sorted(found) == sorted(names)
    assert max(found.values()) <= SHARED[capability], found
