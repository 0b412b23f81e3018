"""The radix tree over tokens, against its definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treegen.prompts.radix import RadixNode, build, common_prefix


def arrays(lists: list[list[int]]) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
    return [np.array(tokens, dtype=np.int32) for tokens in lists]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=14))
def test_shared_prefixes_are_nodes_and_nothing_else_is(lists: list[list[int]]) -> None:
    roots = build(arrays(lists))
    seen: list[int] = []

    def visit(node: RadixNode, start: int) -> list[int]:
        assert node.stop > start
        below = list(node.sequences)
        for child in node.children:
            below += visit(child, node.stop)
        # A node is where sequences end or part; all below it agree up to its end.
        assert node.sequences or len(node.children) > 1
        assert len({tuple(lists[i][: node.stop]) for i in below}) == 1
        assert all(len(lists[i]) == node.stop for i in node.sequences)
        next_tokens = [lists[child.first][node.stop] for child in node.children]
        assert len(set(next_tokens)) == len(next_tokens)
        assert node.first == min(below)
        assert [c.first for c in node.children] == sorted(c.first for c in node.children)
        return below

    for root in roots:
        seen += visit(root, 0)
    assert sorted(seen) == list(range(len(lists)))
    assert len({lists[root.first][0] for root in roots}) == len(roots)


def test_common_prefix() -> None:
    a, b, empty = arrays([[1, 2, 3], [1, 2, 4, 5], []])
    assert common_prefix(a, b) == 2
    assert common_prefix(a, a) == 3
    assert common_prefix(a[:2], b) == 2
    assert common_prefix(empty, b) == 0


def test_an_empty_sequence_is_the_root_of_all_others() -> None:
    (root,) = build(arrays([[1, 2], [], [1, 3], [4]]))
    assert root.stop == 0 and root.sequences == [1] and root.first == 0
    assert [child.stop for child in root.children] == [1, 1]
    assert [child.sequences for child in root.children] == [[], [3]]
    (root,) = build(arrays([[], []]))
    assert root.sequences == [0, 1] and not root.children
