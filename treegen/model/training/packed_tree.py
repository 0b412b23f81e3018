"""A tree of texts as one sequence, in which every token of the tree occurs once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treegen.ops.attention.tree import TreeLayout
from treegen.prompts.rollout_tree import RolloutTree

# T tokens, N tokens of a sample


@dataclass(frozen=True, slots=True, eq=False)
class PackedTree:
    """The tokens of a tree, packed depth first."""

    tokens: NDArray[np.int64]
    """The token ids [T]."""
    positions: NDArray[np.int64]
    """The position of each token in its texts [T]."""
    layout: TreeLayout
    """The places of the segments."""
    samples: tuple[NDArray[np.int64], ...]
    """For each sample, the places of its tokens among the packed ones [N]."""


def pack_tree(tree: RolloutTree) -> PackedTree:
    """Pack the tokens of a tree."""
    num = len(tree.segments)
    children: list[list[int]] = [[] for _ in range(num)]
    roots: list[int] = []
    for at, segment in enumerate(tree.segments):
        (roots if segment.parent is None else children[segment.parent]).append(at)
    order: list[int] = []
    waiting = roots[::-1]
    while waiting:
        order.append(waiting.pop())
        waiting += children[order[-1]][::-1]
    lengths = np.array([len(segment.tokens) for segment in tree.segments], dtype=np.int64)
    totals, depths = lengths.copy(), np.zeros(num, dtype=np.int64)
    for at in range(num - 1, -1, -1):
        if (parent := tree.segments[at].parent) is not None:
            totals[parent] += totals[at]
    for at, segment in enumerate(tree.segments):
        if segment.parent is not None:
            depths[at] = depths[segment.parent] + lengths[segment.parent]
    starts = np.empty(num, dtype=np.int64)
    starts[order] = np.cumsum(lengths[order]) - lengths[order]
    layout = TreeLayout(starts[order], (starts + totals)[order], depths[order], int(lengths.sum()))
    tokens = [token for at in order for token in tree.segments[at].tokens]
    places: list[NDArray[np.int64]] = []  # of the tokens of each segment and of those before it
    for at, segment in enumerate(tree.segments):
        here = starts[at] + np.arange(lengths[at])
        before = () if segment.parent is None else (places[segment.parent],)
        places.append(np.concatenate([*before, here]))
    samples = tuple(places[at] for at in tree.last)
    return PackedTree(np.array(tokens, dtype=np.int64), layout.positions(), layout, samples)
