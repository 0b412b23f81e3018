"""The prefix tree of a batch of texts, such as the prompts and completions of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from treegen.common.checks import as_int, check_int
from treegen.errors import InputError
from treegen.prompts.plan.requests import as_token_ids
from treegen.prompts.radix import RadixNode, build
from treegen.prompts.tree import as_list


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that all samples below share."""

    tokens: tuple[int, ...]
    """Their ids."""
    parent: int | None
    """The index of the segment before them; None for the first segment of a text."""
    samples: tuple[int, ...]
    """The rollouts that contain them, by their indices in the batch."""


@dataclass(frozen=True, slots=True)
class RolloutTree:
    """The prefix tree of prompts and completions. Parents come before their children."""

    segments: tuple[Segment, ...]
    """All segments."""
    last: tuple[int, ...]
    """For each sample the index of the segment that it ends in."""

    def __post_init__(self) -> None:
        """Check the tree.

        Raises:
            InputError: tokens are no token ids, a parent is not before its children, or a sample
                ends in no segment.
        """
        for at, segment in enumerate(self.segments):
            as_token_ids(f"segment {at} of the tree", segment.tokens)
            parent = segment.parent
            if parent is not None and not 0 <= as_int(f"the parent of segment {at}", parent) < at:
                raise InputError(
                    f"segment {at} of the tree has parent {segment.parent}; list parents before "
                    "their children"
                )
        num = len(self.segments)
        if wrong := [at for at in self.last if not 0 <= as_int("an index in last", at) < num]:
            raise InputError(
                f"a sample of the tree ends in segment {wrong[0]}, but the tree has {num} "
                "segments; use the index of a segment of the tree"
            )

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

    def check_prompt_lengths(self, prompt_lengths: Sequence[SupportsIndex] | None) -> list[int]:
        """Return how many first tokens of each sample get no log-probability.

        Args:
            prompt_lengths: The numbers, one for each sample. Default: 1 each, because nothing
                predicts the first token of a text.

        Raises:
            InputError: a number is missing, or is not between 1 and the length of the sample.
        """
        num, stops = len(self.last), list[int]()
        for segment in self.segments:
            start = 0 if segment.parent is None else stops[segment.parent]
            stops.append(start + len(segment.tokens))
        totals = [stops[at] for at in self.last]
        if prompt_lengths is None:
            return [min(1, total) for total in totals]
        lengths = as_list("prompt_lengths", prompt_lengths)
        if len(lengths) != num:
            raise InputError(
                f"prompt_lengths must have one length for each of the {num} samples, got "
                f"{len(lengths)} lengths"
            )
        for sample, total in enumerate(totals):
            name = f"prompt_lengths[{sample}]"
            lengths[sample] = as_int(name, lengths[sample])
            check_int(name, lengths[sample], minimum=min(1, total), maximum=total)
        return lengths

    def split(
        self, prompt_lengths: Sequence[SupportsIndex] | None
    ) -> list[tuple[list[int], list[int]]]:
        """Return the token ids of each sample: those without and those with log-probabilities.

        Args:
            prompt_lengths: As for `check_prompt_lengths`.
        """
        lengths = self.check_prompt_lengths(prompt_lengths)
        texts = [self.text(sample) for sample in range(len(self.last))]
        return [(text[:num], text[num:]) for text, num in zip(texts, lengths, strict=True)]


def tree_of(texts: Sequence[Sequence[int]]) -> RolloutTree:
    """Return the prefix tree of the token ids of each sample's prompt and completion.

    Raises:
        InputError: a text is no list of token ids.
    """
    arrays = [as_token_ids(f"text {at}", text) for at, text in enumerate(as_list("texts", texts))]
    segments: list[Segment] = []
    last = [0] * len(arrays)
    waiting: list[tuple[RadixNode, int | None, int]] = [(n, None, 0) for n in build(arrays)[::-1]]
    while waiting:
        node, parent, start = waiting.pop()
        index = len(segments)
        tokens = tuple(arrays[node.first][start : node.stop].tolist())
        segments.append(Segment(tokens, parent, tuple(sorted(_list_samples(node)))))
        for sample in node.sequences:
            last[sample] = index
        waiting += [(child, index, node.stop) for child in node.children[::-1]]
    return RolloutTree(tuple(segments), tuple(last))


def _list_samples(node: RadixNode) -> list[int]:
    samples: list[int] = []
    waiting = [node]
    while waiting:
        branch = waiting.pop()
        samples += branch.sequences
        waiting += branch.children
    return samples
