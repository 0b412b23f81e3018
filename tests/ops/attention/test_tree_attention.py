"""Attention over packed trees: results and gradients are those of dense attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from tree_cases import degenerate_trees, random_tree

from treegen.model.training.tree_logprobs import PackedTree, pack_tree
from treegen.ops.attention import tree as tree_module
from treegen.ops.attention.tree import attend_tree
from treegen.ops.attention.types import AttentionOptions, Window
from treegen.prompts.rollout_tree import RolloutTree, Segment, tree_of

# H query heads, G key heads, K and V widths of a head's key and value
H, G, K, V = 4, 2, 3, 5

OPTIONS = {
    "plain": AttentionOptions(0.7),
    "window": AttentionOptions(0.7, window=Window(3)),
    "chunks": AttentionOptions(0.7, window=Window(3, is_chunk=True)),
    "soft cap": AttentionOptions(0.7, softcap=1.5),
    "sinks": AttentionOptions(0.7, sinks_H=torch.tensor([0.3, -1.0, 2.0, 0.0]).double()),
    "everything": AttentionOptions(
        0.5, Window(4), 2.0, torch.tensor([0.3, -1.0, 2.0, 0.0]).double()
    ),
}


@pytest.fixture(params=["one block", "many blocks"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of blocks: the real ones, or so small that every tree has many blocks."""
    if request.param == "many blocks":
        monkeypatch.setattr(tree_module, "_KEYS", 4)
        monkeypatch.setattr(tree_module, "_PACKED", 5)
        monkeypatch.setattr(tree_module, "_SCORES", {"cpu": 1})


def inputs(num_tokens: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (H, num_tokens, K), (G, num_tokens, K), (G, num_tokens, V)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]


def dense(q: Tensor, k: Tensor, v: Tensor, packed: PackedTree, options: Any) -> Tensor:
    """Attend with a mask of all pairs, made from the texts of the samples."""
    num = len(packed.tokens)
    is_seen = torch.zeros(num, num, dtype=torch.bool)
    for sample in packed.samples:
        for at, row in enumerate(sample):
            first = 0 if options.window is None else max(0, options.window.start(at))
            is_seen[row, sample[first : at + 1]] = True
    scores = q @ k.repeat_interleave(H // G, 0).transpose(1, 2) * options.scale
    if options.softcap:
        scores = options.softcap * (scores / options.softcap).tanh()
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if options.sinks_H is not None:
        scores = torch.cat([scores, options.sinks_H[:, None, None].expand(H, num, 1)], -1)
    out: Tensor = scores.softmax(-1)[..., :num] @ v.repeat_interleave(H // G, 0)
    return out


def check(tree: RolloutTree, options: AttentionOptions) -> None:
    packed = pack_tree(tree)
    q, k, v = inputs(len(packed.tokens))
    tensors = [q, k, v]
    if options.sinks_H is not None:
        sinks = options.sinks_H.clone().requires_grad_()
        options = AttentionOptions(options.scale, options.window, options.softcap, sinks)
        tensors.append(sinks)
    got = attend_tree(q, k, v, packed.layout, options)
    want = dense(q, k, v, packed, options)
    reached = torch.zeros(len(packed.tokens), dtype=torch.bool)
    for sample in packed.samples:
        reached[sample] = True
    got, want = got[:, reached], want[:, reached]
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).double()
    for actual, expected in zip(
        torch.autograd.grad(got, tensors, upstream),
        torch.autograd.grad(want, tensors, upstream),
        strict=True,
    ):
        torch.testing.assert_close(actual, expected, atol=1e-11, rtol=1e-11)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("depth", range(1, 7))
def test_random_trees_equal_dense_attention(depth: int, options: AttentionOptions) -> None:
    for seed in range(2):
        check(random_tree(10 * depth + seed, depth=depth), options)


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("tree", degenerate_trees().values(), ids=degenerate_trees().keys())
def test_degenerate_trees_equal_dense_attention(tree: RolloutTree) -> None:
    check(tree, OPTIONS["everything"])


@pytest.mark.usefixtures("sizes")
def test_numerical_derivatives_agree() -> None:
    packed = pack_tree(tree_of([[5, 6, 7], [5, 6, 8], [5, 6], [9]]))
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attend_tree(q, k, v, packed.layout, AttentionOptions(0.5, Window(2), 2.0, sinks))

    assert torch.autograd.gradcheck(attend, (*inputs(len(packed.tokens)), sinks))


def test_large_scores_stay_finite() -> None:
    packed = pack_tree(random_tree(5, depth=3))
    q, k, v = (tensor.detach().float().requires_grad_() for tensor in inputs(len(packed.tokens)))
    out = attend_tree(q, k, v, packed.layout, AttentionOptions(1e6, window=Window(2)))
    out.sum().backward()
    assert out.isfinite().all() and all(x.grad.isfinite().all() for x in (q, k, v))  # type: ignore[union-attr]


def test_half_precision_is_close_and_sums_in_float32() -> None:
    packed = pack_tree(random_tree(7, depth=4))
    tensors = [tensor.detach().bfloat16().requires_grad_() for tensor in inputs(len(packed.tokens))]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    got = attend_tree(tensors[0], tensors[1], tensors[2], packed.layout, OPTIONS["plain"])
    want = attend_tree(exact[0], exact[1], exact[2], packed.layout, OPTIONS["plain"])
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, atol=0.03, rtol=0.03)
    got.sum().backward()
    want.sum().backward()
    for actual, expected in zip(tensors, exact, strict=True):
        assert actual.grad is not None and expected.grad is not None
        scale = expected.grad.abs().max()
        torch.testing.assert_close(
            actual.grad.double() / scale, expected.grad / scale, atol=0.03, rtol=0
        )


def test_memory_follows_distinct_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """No block has more scores than its limit, whatever the tree's size."""
    monkeypatch.setattr(tree_module, "_SCORES", {"cpu": 2**14})
    segments = [(5,) * 3000, *[(6 + at,) * (at % 40 + 1) for at in range(60)]]
    tree = RolloutTree(
        tuple(Segment(tokens, 0 if at else None, ()) for at, tokens in enumerate(segments)),
        tuple(range(1, len(segments))),
    )
    packed = pack_tree(tree)
    blocks = packed.layout.blocks(H, None, torch.device("cpu"))
    sizes = [
        (block.rows.stop - block.rows.start) * (block.keys.stop - block.keys.start)
        for block in blocks
        if isinstance(block.rows, slice) and isinstance(block.keys, slice)
    ]
    assert len(sizes) == len(blocks)
    assert max(sizes) * H <= max(2**14, 16 * 512 * H)
    # Each pair of a query and a key that it sees is in a block, and few others are.
    seen = sum(len(sample) * (len(sample) + 1) // 2 for sample in packed.samples)
    seen -= (len(packed.samples) - 1) * 3000 * 3001 // 2
    assert seen <= sum(sizes) <= 1.2 * seen
