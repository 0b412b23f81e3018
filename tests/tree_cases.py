"""Random ragged trees of token ids, with the degenerate shapes that rollouts may have."""

from __future__ import annotations

import numpy as np

from treegen.prompts.rollout_tree import RolloutTree, Segment, tree_of


def random_tree(seed: int, *, depth: int, vocab_size: int = 320, longest: int = 6) -> RolloutTree:
    """Return a tree with `depth` levels at most; some samples end at inner nodes or are equal."""
    rng = np.random.default_rng(seed)
    segments: list[Segment] = []
    last: list[int] = []

    def grow(parent: int | None, level: int) -> None:
        here = len(segments)
        length = int(rng.choice([1, 1, 2, longest, longest + 3]))
        tokens = tuple(rng.integers(3, vocab_size, length).tolist())
        segments.append(Segment(tokens, parent, ()))
        width = int(rng.integers(1, 4)) if level < depth else 0
        last.extend([here] * (int(rng.integers(0, 2)) if width else int(rng.integers(1, 3))))
        for _ in range(width):
            grow(here, level + 1)

    for _ in range(int(rng.integers(1, 3))):  # several roots: forks at position 0
        grow(None, 1)
    order = rng.permutation(len(last))
    return RolloutTree(tuple(segments), tuple(last[at] for at in order))


def degenerate_trees() -> dict[str, RolloutTree]:
    """Return trees of shapes at the edge, by name."""
    return {
        "one branch": tree_of([[5, 6, 7, 8, 9]]),
        "one token": tree_of([[5], [6, 7], [6, 7]]),
        "empty completion": tree_of([[5, 6, 7], [5, 6, 7, 8], [5, 6, 7]]),
        "an empty text": tree_of([[], [5, 6], [5, 7]]),
        "an empty root": RolloutTree(
            (
                Segment((), None, ()),
                Segment((5, 6), 0, ()),
                Segment((), 1, ()),
                Segment((8,), 1, ()),
            ),
            (1, 2, 3),
        ),
        "segments in breadth-first order": RolloutTree(
            (
                Segment((5, 6), None, ()),
                Segment((7,), 0, ()),
                Segment((8, 9), 0, ()),
                Segment((10, 11), 1, ()),
                Segment((12,), 1, ()),
                Segment((13,), 2, ()),
            ),
            (3, 4, 5, 1),
        ),
        "equal segments below one node": RolloutTree(
            (Segment((5, 6), None, ()), Segment((7, 8), 0, ()), Segment((7, 8), 0, ())), (1, 2)
        ),
    }
