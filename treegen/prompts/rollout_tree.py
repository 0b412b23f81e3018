"""The prefix tree of a batch of texts, such as the prompts and completions of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treegen.prompts.radix import RadixNode, build


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that all samples below share."""

    tokens: tuple[int, ...]
    """Their ids."""
    parent: int | None
    """The index of the segment before them; None for the first segment of a text."""
    samples: tuple[int, ...]
    """The rollouts that contain them, by their places in the batch."""


@dataclass(frozen=True, slots=True)
class RolloutTree:
    """The prefix tree of prompts and completions. Parents come before their children."""

    segments: tuple[Segment, ...]
    """All segments."""
    last: tuple[int, ...]
    """For each sample the index of the segment that it ends in."""

    def path(self, sample: int) -> list[int]:
        """Return the segments of a sample, from its first token on."""
        indices: list[int] = []
        at: int | None = self.last[sample]
        while at is not None:
            indices.append(at)
            at = self.segments[at].parent
        return indices[::-1]

    def text(self, sample: int) -> list[int]:
        """Return the token ids of a sample, from its first token on."""
        return [token for at in self.path(sample) for token in self.segments[at].tokens]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all segments: those to compute when shared ones are computed once."""
        return sum(len(segment.tokens) for segment in self.segments)


def tree_of(texts: Sequence[Sequence[int]]) -> RolloutTree:
    """Return the prefix tree of the token ids of each sample's prompt and completion."""
    arrays = [np.asarray(text, dtype=np.int32) for text in texts]
    segments: list[Segment] = []
    last = [0] * len(texts)
    waiting: list[tuple[RadixNode, int | None, int]] = [(n, None, 0) for n in build(arrays)[::-1]]
    while waiting:
        node, parent, start = waiting.pop()
        here = len(segments)
        tokens = tuple(arrays[node.first][start : node.stop].tolist())
        segments.append(Segment(tokens, parent, tuple(sorted(_below(node)))))
        for sample in node.sequences:
            last[sample] = here
        waiting += [(child, here, node.stop) for child in node.children[::-1]]
    return RolloutTree(tuple(segments), tuple(last))


def _below(node: RadixNode) -> list[int]:
    samples: list[int] = []
    waiting = [node]
    while waiting:
        branch = waiting.pop()
        samples += branch.sequences
        waiting += branch.children
    return samples
