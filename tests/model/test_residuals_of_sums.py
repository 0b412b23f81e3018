"""The compiler's graphs add residuals together with sums over ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from killed_ranks import Alone
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from treegen.model.graph_passes import GraphPass
from treegen.model.parallel.ranks import (
    Ranks,
    can_add_residuals,
    join,
    leave,
    linear_over_ranks,
    sum_over_ranks,
)

add_linear: Callable[[Tensor, Tensor], Tensor] = linear_over_ranks
add_up: Callable[[Tensor], Tensor] = sum_over_ranks
ROWS = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[Ranks]:
    leader = Alone()
    yield join(0, 1, torch.device("cpu"), tmp_path, leader)
    leave(leader)


def linear_then_add(residual: Tensor, weight: Tensor) -> Tensor:
    return residual + add_linear(residual.sin(), weight)


def add_to_viewed_sum(residual: Tensor, weight: Tensor) -> Tensor:
    return add_up(residual[0].cos()).view(residual.shape) + residual


def use_the_sum_twice(residual: Tensor, weight: Tensor) -> Tensor:
    total = add_linear(residual, weight)
    return (residual + total) * total


def add_a_bias(residual: Tensor, weight: Tensor) -> Tensor:
    return add_linear(residual, weight) + residual[0, 0]


def add_another_dtype(residual: Tensor, weight: Tensor) -> Tensor:
    return add_linear(residual, weight) + residual.float()


def add_a_size(residual: Tensor, weight: Tensor) -> Tensor:
    return add_linear(residual, weight) + residual.shape[1]


def add_a_part(residual: Tensor, weight: Tensor) -> Tensor:
    return torch.add(residual, add_linear(residual, weight), alpha=0.5)


def add_something_later(residual: Tensor, weight: Tensor) -> Tensor:
    total = add_linear(residual, weight)
    return total + residual.exp()


def add_a_transposed(residual: Tensor, weight: Tensor) -> Tensor:
    square = torch.cat([residual, residual], 1)[:, :8]
    return add_linear(square, weight) + square.mT


def add_two_sums(residual: Tensor, weight: Tensor) -> Tensor:
    return add_linear(residual, weight) + add_up(residual)


@pytest.mark.parametrize(
    ("function", "fused"),
    [
        (linear_then_add, True),
        (add_to_viewed_sum, True),
        (add_two_sums, True),
        (use_the_sum_twice, False),
        (add_a_bias, False),
        (add_another_dtype, False),
        (add_a_size, False),
        (add_a_part, False),
        (add_something_later, False),
        (add_a_transposed, False),
    ],
)
def test_a_residual_is_added_where_nothing_else_uses_the_sum(
    function: Callable[[Tensor, Tensor], Tensor], fused: bool
) -> None:
    traced = make_fx(function, tracing_mode="symbolic")(ROWS, WEIGHT)
    GraphPass(True)(traced.graph)
    traced.graph.lint()
    traced.graph.eliminate_dead_code()
    traced.recompile()
    targets = [node.target for node in traced.graph.nodes]
    assert (torch.ops.aten.add.Tensor not in targets) == fused
    rows = ROWS.clone()
    assert torch.equal(traced(rows, WEIGHT), function(ROWS, WEIGHT))
    assert torch.equal(rows, ROWS)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs g++ on a CPU")
def test_compiled_functions_round_as_uncompiled_ones() -> None:
    def layer(rows: Tensor, weight: Tensor) -> Tensor:
        return add_to_viewed_sum(linear_then_add(rows, weight), weight)

    options: dict[str, Any] = {"post_grad_custom_pre_pass": GraphPass(True)}
    compiled = torch.compile(layer, dynamic=True, fullgraph=True, options=options)
    with torch.inference_mode():
        actual, code = run_and_get_code(compiled, ROWS, WEIGHT)
        torch.testing.assert_close(actual, layer(ROWS, WEIGHT), rtol=2e-2, atol=2e-2)
    assert code[0].count("treegen.linear_over_ranks") >= 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs g++ on a CPU")
def test_a_later_model_is_compiled_anew_if_its_ranks_do_not_share_memory() -> None:
    """Its new followers have no graphs yet, and all ranks must round in the same way."""
    torch._dynamo.reset()
    counters.clear()
    for adds in (True, False, True):
        options: dict[str, Any] = {"post_grad_custom_pre_pass": GraphPass(adds)}
        compiled = torch.compile(linear_then_add, dynamic=True, fullgraph=True, options=options)
        with torch.inference_mode():
            compiled(ROWS, WEIGHT)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize(
    ("size", "shared", "fixed_order", "adds"),
    [
        (2, True, False, True),
        (2, False, False, False),
        # The same samples as in the first model of a process, which shares memory.
        (2, False, True, True),
        (4, False, True, False),
    ],
)
def test_a_fixed_order_rounds_the_same_with_and_without_shared_memory(
    size: int, shared: bool, fixed_order: bool, adds: bool, one_rank: Ranks
) -> None:
    one_rank.size, one_rank.fixed_order = size, fixed_order
    one_rank.shared = Mock() if shared else None
    assert can_add_residuals() == adds
