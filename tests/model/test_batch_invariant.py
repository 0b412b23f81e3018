"""Layers with few outputs whose sums have one order: products, and which layers are found.

The kernel runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from devices import DEVICES, INTERPRETED, needs_compiler
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from treegen import LLM, SamplingParams
from treegen.model.checkpoint.text_part import auto_class
from treegen.model.linear.batch_invariant import (
    BatchInvariantLayers,
    BatchInvariantLinear,
    batch_invariant_linear,
    needs_invariant_kernel,
)
from treegen.model.linear.experts import GroupedLayers, fused_experts
from treegen.model.linear.merged import MergedLinears

# Rows, outputs, inputs.
SIZES = [(1, 1, 16), (7, 4, 32), (70, 128, 96), (64, 200, 130), (130, 65, 64), (0, 8, 16)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_products_are_those_of_float64(
    sizes: tuple[int, int, int], has_bias: bool, dtype: torch.dtype, device: str
) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies no bfloat16")
    torch.manual_seed(sizes[0])
    rows, outputs, inputs = sizes
    x = (torch.randn(rows, inputs) * torch.rand(rows, 1) * 50).to(dtype)
    weight = torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if has_bias else None
    x_there, weight_there = x.to(device), weight.to(device)
    bias_there = None if bias is None else bias.to(device)
    if INTERPRETED:
        from treegen.model.linear.row_kernels import fixed_linear as kernel

        got = torch.full((rows, outputs), torch.nan, dtype=dtype)
        kernel(x_there, weight_there, bias_there, got)
    else:
        got = batch_invariant_linear(x_there, weight_there, bias_there)
    want = nn.functional.linear(x.double(), weight.double())
    size = nn.functional.linear(x.double().abs(), weight.double().abs())
    if bias is not None:
        want, size = want + bias.double(), size + bias.double().abs()
    limit = 2e-6 * size + torch.finfo(dtype).eps * want.abs() + 1e-6
    assert ((got.cpu().double() - want).abs() <= limit).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 2048), (4, 32), (32, 2048), (128, 2048), (256, 2048), (512, 4096)]
)
def test_bits_of_a_row_do_not_depend_on_the_others(
    outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs, device="cuda").to(dtype)
    rows = torch.randn(4096, inputs, device="cuda").to(dtype)
    bias = torch.randn(outputs, device="cuda").to(dtype)
    whole = batch_invariant_linear(rows, weight, bias)
    for begin, end in ((0, 1), (5, 9), (100, 164), (17, 400), (512, 1536), (1000, 4096)):
        assert torch.equal(batch_invariant_linear(rows[begin:end], weight, bias), whole[begin:end])


@needs_compiler
@pytest.mark.parametrize("number", ["bf16", "fp32"])
def test_the_kernel_compiles(number: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from treegen.model.linear.row_kernels import _fixed_linear

    constants = {
        "N": 256,
        "K": 2048,
        "HAS_BIAS": True,
        "PRECISION": "tf32x3" if number == "fp32" else "tf32",
        "BLOCK_M": 64,
        "BLOCK_N": 64,
        "BLOCK_K": 64,
    }
    types = dict.fromkeys(("rows", "weight", "bias", "out"), f"*{number}") | {"num_rows": "i32"}
    source = ASTSource(_fixed_linear, types | dict.fromkeys(constants, "constexpr"), constants)
    done = compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 3}
    )
    assert done.metadata.shared <= 227 << 10


class _ByLibrary(TorchFunctionMode):
    """Notes products that need an order and that a library would compute."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is nn.functional.linear and needs_invariant_kernel(args[1], args[1].shape[0]):
            self.shapes.append(tuple(args[1].shape))
        if getattr(func, "__name__", "") in ("addmm", "mm", "matmul"):
            self.shapes += [tuple(each.shape) for each in args if isinstance(each, nn.Parameter)]
        return func(*args, **(kwargs or {}))


FAMILIES = tiny_models.EXACT | tiny_models.HYBRID


@pytest.mark.parametrize("family", FAMILIES)
def test_no_product_is_left_to_a_library(family: str) -> None:
    """Of models in float32, whose numbers stay the same."""
    model_type, settings = FAMILIES[family]
    if not tiny_models.known(model_type):
        pytest.skip(f"this transformers has no {model_type}")
    config = tiny_models.config_of(model_type, **settings)
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    module = auto_class(config).from_config(config).eval().requires_grad_(False)
    tiny_models.spread_weights(module, 0)
    ids = torch.randint(3, 250, (1, 70))
    GroupedLayers(module)
    want = module(input_ids=ids, use_cache=False).logits
    fixed = BatchInvariantLayers(module)
    with _ByLibrary() as found:
        got = module(input_ids=ids, use_cache=False).logits
    if family == "jamba":  # which has recurrent layers of transformers, and is refused
        found.shapes = [shape for shape in found.shapes if shape != (64, 4)]
    assert not found.shapes
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    fixed.undo()


def test_undone_all_classes_are_the_stock_ones(tmp_path: Path) -> None:
    llm = LLM(
        str(tiny_models.save_tiny_model(tmp_path, "qwen3_moe")), device="cpu", dtype="float32"
    )
    module = llm.engine.model.module
    kinds = [type(part) for part in module.modules()]
    fixed = BatchInvariantLayers(module)
    assert kinds != [type(part) for part in module.modules()]
    fixed.undo()
    assert kinds == [type(part) for part in module.modules()]


def renamed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate a method as transformers does where an argument has another name than before."""

    @functools.wraps(forward)
    def mapped(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return forward(self, *args, **kwargs)

    return mapped


class Router(nn.Module):
    """A router whose method is decorated."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16), requires_grad=False)

    @renamed
    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the logits of the experts."""
        return functional.linear(hidden_states, self.weight)


class Above(nn.Module):
    """A module that only has a layer called `linear`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Router()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return what the layer makes of it."""
        out: Tensor = self.linear(hidden_states)
        return out


def test_a_decorated_router_is_found() -> None:
    torch.manual_seed(0)
    module, x = Above(), torch.randn(5, 16)
    want = module(x)
    fixed = BatchInvariantLayers(module)
    assert type(module) is Above and type(module.linear) is not Router
    with _ByLibrary() as found:
        got = module(x)
    assert not found.shapes
    torch.testing.assert_close(got, want)
    fixed.undo()
    assert type(module.linear) is Router


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_5_moe"])
def test_the_compiler_takes_routers_whole(family: str) -> None:
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_config(tiny_models.config_of(family)).requires_grad_(False)
    for weight in module.parameters():
        weight.normal_(std=0.3)
    BatchInvariantLayers(module)
    name = next(fused_experts(module))[0]
    parent = module.get_submodule(name.rpartition(".")[0])
    router = next(part for part in parent.children() if "Router" in type(part).__name__)
    traced: Any = torch.compile(router, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (5, 9, 70):
        x = torch.randn(rows, router.weight.shape[1])
        for got, want in zip(traced(x), router(x), strict=True):
            assert torch.equal(got, want)


def test_joined_layers_are_one_product() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(16, 8), nn.Linear(16, 24), nn.Linear(16, 600)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.a(x), self.b(x), self.c(x)

    for few in (True, False):
        module = Parent().requires_grad_(False)
        if few:
            module.c = nn.Linear(16, 40).requires_grad_(False)
        module.bfloat16()
        x = torch.randn(5, 16).bfloat16()
        want = module(x)
        fixed = BatchInvariantLayers(module)
        assert (
            isinstance(module.a, BatchInvariantLinear)
            and isinstance(module.c, BatchInvariantLinear) == few
        )
        joined = MergedLinears(module, lambda: module(x))  # noqa: B023
        with _ByLibrary() as found:
            got = module(x)
        assert not found.shapes  # 632 outputs together are many
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)
        joined.undo()
        assert isinstance(module.a, BatchInvariantLinear)
        fixed.undo()
        assert [type(part) for part in module.children()] == [nn.Linear] * 3


@pytest.mark.parametrize("device", DEVICES[1:])
def test_reproducible_experts_use_them(device: str, tmp_path: Path) -> None:
    tiny_models.save_tiny_model(tmp_path, "qwen3_moe", head_dim=16)
    llm = LLM(str(tmp_path), device=device, dtype="bfloat16", memory="32MiB", reproducible=True)
    with _ByLibrary() as found:
        llm.generate(["Q: 3 + 4?\nA:"], SamplingParams(max_tokens=4))
    assert not found.shapes
