"""The radix tree of token sequences: which sequences share which tokens. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


@dataclass(slots=True)
class RadixNode:
    """Tokens up to `stop`, shared by every sequence at or below this node."""

    stop: int
    """Number of tokens from the start of a sequence to the end of this node."""
    children: list[RadixNode] = field(default_factory=list)
    """The nodes below, in order of first appearance."""
    sequences: list[int] = field(default_factory=list)
    """Indices of the sequences that end exactly here."""
    first: int = 0
    """The smallest index of a sequence at or below the node."""


def build(sequences: Sequence[Tokens]) -> list[RadixNode]:
    """Return the roots of the radix tree of token sequences, in order of first appearance.

    Equal sequences end at one node. Sorting the sequences brings shared prefixes next to each
    other. One pass over the common prefixes of neighbours then builds the tree, as a suffix tree is
    built from an LCP array. This takes O(n log n) comparisons.
    """
    # Big-endian bytes sort in the order of the sequences.
    keys = [np.asarray(tokens, dtype=">u4").tobytes() for tokens in sequences]
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    roots: list[RadixNode] = []
    stack: list[RadixNode] = []

    def close(shared: int) -> None:
        """Pop nodes that end after `shared` tokens, joining the last one under that length."""
        while stack and stack[-1].stop > shared:
            last = stack.pop()
            if stack and stack[-1].stop >= shared:
                stack[-1].children.append(last)
            elif shared <= 0:
                roots.append(last)
            else:
                stack.append(RadixNode(stop=shared, children=[last]))

    previous = np.empty(0, dtype=np.int32)
    for index in order:
        tokens = sequences[index]
        shared = common_prefix(previous, tokens)
        close(shared)
        if stack and stack[-1].stop == len(tokens):
            stack[-1].sequences.append(index)
        else:
            stack.append(RadixNode(stop=len(tokens), sequences=[index]))
        previous = tokens
    close(-1)  # also an empty sequence, whose node has all others below it
    _sort_by_appearance(roots)
    return roots


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Return the length of the common prefix of two sequences."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


def _sort_by_appearance(roots: list[RadixNode]) -> None:
    nodes: list[RadixNode] = []
    stack = list(roots)
    while stack:
        node = stack.pop()
        nodes.append(node)
        stack.extend(node.children)
    for node in reversed(nodes):  # children before their parents
        node.sequences.sort()
        node.children.sort(key=lambda child: child.first)
        node.first = min(node.sequences[:1] + [child.first for child in node.children[:1]])
    roots.sort(key=lambda node: node.first)
