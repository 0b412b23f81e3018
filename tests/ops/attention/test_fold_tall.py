"""The Gluon kernel for tall units: it compiles for Hopper, on any machine with Triton."""

from __future__ import annotations

import re

import pytest
from devices import needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("first", [True, False])
def test_it_compiles(width: int, first: bool) -> None:
    """Its shared memory leaves room for no second program, but fits."""
    from triton import compile
    from triton.backends.compiler import GPUTarget

    try:
        from triton.experimental.gluon._runtime import GluonASTSource

        from treegen.ops.attention.gpu import fold_tall_kernels as kernels
    except (ImportError, AttributeError):
        pytest.skip("needs Gluon")
    tile = f"tensordesc<bf16[64,{width}],{kernels._SHARED!r}>"
    pointers = {"q": "*bf16", "pages": "*i32", "units": "*i32", "sums": "*fp32", "stats": "*fp32"}
    constants = {"H": 32, "PER_HEAD": 4, "D": width, "FIRST": first}
    types = (
        {"k": tile, "v": tile, "scale": "fp32"} | pointers | dict.fromkeys(constants, "constexpr")
    )
    names = kernels.fold_tall.arg_names
    source = GluonASTSource(
        fn=kernels.fold_tall,
        signature={name: types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name in ("q", "sums", "stats", "q_row", "q_head")
        },
    )
    done = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert done.metadata.shared <= 227 << 10
    products = re.findall(r"wgmma.mma_async.sync.aligned.m64n(\d+)k16", done.asm["ptx"])
    assert set(products) == {"64", str(width), "8"}
