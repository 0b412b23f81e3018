"""The kernels over packed trees give the results and gradients of float64.

Without a GPU run it as `TRITON_INTERPRET=1 pytest tests/ops/attention/test_tree_kernels.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import CUDA, INTERPRETED, needs_triton
from torch import Tensor
from tree_cases import degenerate_trees, random_tree

from treegen.model.training.tree_logprobs import pack_tree
from treegen.ops.attention.tree import attend_tree
from treegen.ops.attention.types import AttentionOptions, Window
from treegen.prompts.rollout_tree import RolloutTree, tree_of

pytestmark = needs_triton
if CUDA or INTERPRETED:
    from treegen.ops.attention.gpu import tree_attend
    from treegen.ops.attention.gpu.tree_attend import TileSizes

DEVICE = torch.device("cuda" if CUDA else "cpu")
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])
OPTIONS = {
    "plain": AttentionOptions(0.3),
    "window": AttentionOptions(0.3, window=Window(7)),
    "chunks": AttentionOptions(0.3, window=Window(5, is_chunk=True)),
    "soft cap": AttentionOptions(0.3, softcap=1.5),
    "everything": AttentionOptions(0.2, Window(30), 2.0, SINKS),
}


@pytest.fixture(params=["one program", "a program for each head"], autouse=True)
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose tiles so small that trees have many, and kernels for all types and devices."""
    tiles = TileSizes(16, 32, 4, 2), TileSizes(32, 16, 4, 2), TileSizes(16, 32, 4, 1)
    monkeypatch.setattr(tree_attend, "_TILES", dict.fromkeys((128, 256, 512), tiles))
    monkeypatch.setattr(
        tree_attend, "_MIN_PROGRAMS", 1 if request.param == "one program" else 10**9
    )
    monkeypatch.setattr(tree_attend, "can_attend", lambda q, v: q.dtype != torch.float64)


def check(
    tree: RolloutTree,
    options: AttentionOptions,
    heads: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (16, 24),
    dtype: torch.dtype = torch.float32,
) -> None:
    """Compare with the other operator in float64."""
    packed = pack_tree(tree)
    (num_heads, groups), (k_dim, v_dim), num = heads, widths, len(packed.tokens)
    generator = torch.Generator().manual_seed(0)
    shapes = (num_heads, num, k_dim), (groups, num, k_dim), (groups, num, v_dim)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    upstream = torch.randn(num_heads, num, v_dim, generator=generator).to(dtype)
    if options.sinks_H is not None:
        tensors.append(options.sinks_H)

    def run(device: torch.device, convert: Any) -> list[Tensor]:
        inputs = [convert(x).to(device).requires_grad_() for x in tensors]
        own = AttentionOptions(options.scale, options.window, options.softcap, *inputs[3:])
        # Heads are not first in memory, as in a model.
        q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs[:3])
        out = attend_tree(q, k, v, packed.layout, own)
        grads = torch.autograd.grad(out, inputs, convert(upstream).to(device))
        return [x.detach().cpu().double() for x in (out, *grads)]

    limit = 2e-6 if dtype == torch.float32 else 6e-3
    actual, expected = run(DEVICE, lambda x: x), run(torch.device("cpu"), Tensor.double)
    for got, want in zip(actual, expected, strict=True):
        assert (got - want).norm() <= limit * want.norm()
        assert (got - want).abs().max() <= 10 * limit * want.abs().max()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("depth", [1, 3, 6])
def test_random_trees(depth: int, options: AttentionOptions) -> None:
    check(random_tree(1, depth=depth), options)


@pytest.mark.parametrize("tree", degenerate_trees().values(), ids=degenerate_trees().keys())
def test_degenerate_trees(tree: RolloutTree) -> None:
    check(tree, OPTIONS["everything"])


@pytest.mark.parametrize("heads", [(3, 3), (4, 1), (6, 2)])
def test_grouped_heads_of_other_widths(heads: tuple[int, int]) -> None:
    check(random_tree(4, depth=3), OPTIONS["plain"], heads, (40, 9))


@pytest.mark.parametrize("options", [OPTIONS["plain"], AttentionOptions(0.3, Window(60))])
def test_long_segments_have_blocks_without_a_mask(options: AttentionOptions) -> None:
    prompt = list(range(5, 105))
    tree = tree_of([[*prompt, *range(200 + 50 * at, 240 + 50 * at)] for at in range(3)])
    layout = pack_tree(tree).layout
    arrays = layout.token_stops(), layout.positions(), options.window
    assert tree_attend.visible_blocks(*arrays, 16, 2)[:, 0].sum() > 20
    check(tree, options)


def test_half_precision() -> None:
    check(
        random_tree(7, depth=4), OPTIONS["plain"], dtype=torch.bfloat16 if CUDA else torch.float16
    )


def test_scores_without_bounds_stay_finite() -> None:
    layout = pack_tree(random_tree(5, depth=3)).layout
    shapes = (4, layout.num_tokens, 16), (2, layout.num_tokens, 16), (2, layout.num_tokens, 16)
    tensors = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]
    out = attend_tree(tensors[0], tensors[1], tensors[2], layout, AttentionOptions(1e6, Window(2)))
    out.sum().backward()
    assert out.isfinite().all() and all(x.grad.isfinite().all() for x in tensors)  # type: ignore[union-attr]


@pytest.mark.parametrize("window", [None, Window(9), Window(6, is_chunk=True)])
def test_blocks_cover_exactly_what_is_seen(window: Window | None) -> None:
    for seed in range(5):
        layout = pack_tree(random_tree(seed, depth=4, longest=20)).layout
        stops, positions, num = layout.token_stops(), layout.positions(), layout.num_tokens
        rows = torch.arange(num)[:, None].numpy()
        keys, seen = rows.T, None
        seen = (keys <= rows) & (stops[keys] > rows)
        if window is not None:
            seen &= positions[keys] >= window.start(positions[rows])
        visible = tree_attend.visible_blocks(stops, positions, window, 8, 4)
        for i, j in ((i, j) for i in range(visible.shape[0]) for j in range(visible.shape[2])):
            block = seen[8 * i : 8 * i + 8, 4 * j : 4 * j + 4]
            whole, masked = visible[i, :, j]
            assert block.any() <= (whole or masked) and not (whole and masked)
            assert not whole or (block.all() and block.shape[1] == 4)
