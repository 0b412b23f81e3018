"""The largest few of short rows, against a sort; the kernel on a GPU or in Triton's interpreter."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from devices import DEVICES, INTERPRETED
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from treegen.model.graph_passes import GraphPass, topk_rows


def found(scores: Tensor, num: int) -> tuple[Tensor, Tensor]:
    if not INTERPRETED:
        both: tuple[Tensor, Tensor] = topk_rows(scores, num)
        return both
    from treegen.model.linear.row_kernels import largest as kernel

    values = torch.full((*scores.shape[:-1], num), torch.nan, dtype=scores.dtype)
    indices = torch.full(values.shape, -7)
    kernel(scores, values, indices)
    return values, indices


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("shape", "num"),
    [
        ((9, 128), 8),
        ((1, 1), 1),
        ((5, 7), 7),
        ((0, 4), 2),
        ((3, 8, 32), 2),
        ((33, 100), 4),
        ((6, 1024), 16),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_largest_are_those_of_a_stable_sort(
    shape: tuple[int, ...], num: int, dtype: torch.dtype, device: str
) -> None:
    """Few different values, so that many are equal; some rows have infinities, and no numbers."""
    torch.manual_seed(num)
    scores = torch.randint(-3, 4, shape).to(dtype)
    scores[torch.rand(shape) < 0.1] = -torch.inf
    scores[torch.rand(shape) < 0.02] = torch.inf
    scores[torch.rand(shape) < 0.02] = torch.nan
    if len(scores):
        scores[-1] = -torch.inf
    rows = scores.double().nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    order = rows.reshape(-1, shape[-1]).numpy().tolist()
    want = [sorted(range(shape[-1]), key=lambda at: -row[at])[:num] for row in order]
    values, indices = (each.cpu() for each in found(scores.to(device), num))
    assert values.shape == indices.shape == (*shape[:-1], num)
    assert indices.reshape(-1, num).tolist() == want
    assert torch.equal(values.nan_to_num(), scores.gather(-1, indices).nan_to_num())
    assert torch.equal(values.isnan(), scores.gather(-1, indices).isnan())


def test_short_rows_of_a_graph_are_taken_and_no_others() -> None:
    def choose(short: Tensor, long: Tensor, whole: Tensor) -> list[Tensor]:
        return [
            *short.topk(3),
            *short.unflatten(1, (4, 5)).topk(2, dim=-1, sorted=False),
            *short.topk(17),
            *short.topk(2, largest=False),
            *short.topk(2, dim=0),
            *long.topk(2),
            *whole.topk(2),
        ]

    given = torch.randn(6, 20), torch.randn(3, 1025), torch.randint(0, 9, (4, 5))
    module: Any = make_fx(choose, tracing_mode="fake")(*given)
    GraphPass(False)(module.graph)
    module.recompile()
    targets = [node.target for node in module.graph.nodes if "getitem" not in str(node.target)]
    assert targets.count(torch.ops.treegen.topk_rows.default) == 2
    assert targets.count(torch.ops.aten.topk.default) == 5
    for got, want in zip(module(*given), choose(*given), strict=True):
        assert torch.equal(got.sort(-1).values, want.sort(-1).values)


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs g++ on a CPU")
def test_the_compiler_takes_the_pass() -> None:
    router = torch.nn.Linear(8, 24).requires_grad_(False)

    def choose(rows: Tensor) -> Any:
        values, indices = router(rows).softmax(-1).topk(2, dim=-1)
        return values / values.sum(-1, keepdim=True) + indices

    compiled = torch.compile(
        choose,
        dynamic=True,
        fullgraph=True,
        options={"post_grad_custom_pre_pass": GraphPass(False)},
    )
    rows = torch.randn(9, 8)
    got, code = run_and_get_code(compiled, rows)
    torch.testing.assert_close(got, choose(rows))
    assert "treegen.topk_rows" in code[0] and "ops.aten.topk" not in code[0]
