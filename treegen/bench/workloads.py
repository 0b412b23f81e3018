"""Workloads: prompt trees and samples of stated lengths, and the modes in which they run.

Tokens are drawn at random, because time depends on their number and on what is shared, but not on
the tokens themselves. Importing this module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from treegen.errors import InputError, arg
from treegen.prompts.tree import Node

if TYPE_CHECKING:
    from treegen.common.params import SamplingParams
    from treegen.prompts.plan.cost_model import Sharing

SHARING_MODES: Final = ("auto", "all", "one", "off")
"""treegen with this value of `sharing`."""
NO_ATTENTION: Final = "no-attention"
"""treegen with attention replaced by zeros: the upper bound of all other modes."""
DECODE_MODES: Final = ("all", "one", "off", NO_ATTENTION)
"""The modes that `treegen bench decode` compares."""
REFILLS: Final = 8
TIME_LIMIT: Final = 120.0
"""Seconds; runs whose minimum time is longer are skipped."""
_MAX_LENGTHS: Final = 4  # the longest sample has this many times the mean length


@dataclass(frozen=True, slots=True)
class Workload:
    """A tree: prefixes, problems under each, samples under each problem. Lengths are in tokens.

    Raises:
        InputError: a number is too low, or several problems have no tokens.
    """

    name: str
    prefix: int
    """The length of a prefix."""
    new_tokens: int
    """The length of a sample, or its mean with `random_ends`."""
    samples: int
    """Samples of each problem."""
    problems: int = 1
    """Problems under each prefix."""
    problem_tokens: int = 0
    """The length of a problem; 0 puts the samples under the prefixes."""
    prefixes: int = 1
    """Number of roots, which share nothing."""
    max_rows: int | None = None
    """Maximum samples decoded at once; None for as many as memory admits in the mode."""
    equal: bool = False
    """If max_rows is None, whether all modes decode only as many rows as fit in each of them."""
    random_ends: bool = False
    """Whether each token ends its sample with probability 1 / new_tokens, if all tokens are about
    equally likely, as with random weights. A stop string is searched for too."""

    def __post_init__(self) -> None:
        for name in ("prefix", "new_tokens", "samples", "problems", "prefixes"):
            if getattr(self, name) < 1:
                raise InputError(f"{arg(name)} must be at least 1, got {getattr(self, name)}")
        if self.problem_tokens < 0 or (not self.problem_tokens and self.problems > 1):
            raise InputError(
                f"{arg('problem_tokens')} must be at least {int(self.problems > 1)}, got "
                f"{self.problem_tokens}"
            )

    @property
    def rows(self) -> int:
        """Number of samples of the workload."""
        return self.prefixes * self.problems * self.samples

    @property
    def prompt_tokens(self) -> int:
        """Length of one whole prompt."""
        return self.prefix + self.problem_tokens

    @property
    def max_tokens(self) -> int:
        """Maximum tokens that a sample generates."""
        return self.new_tokens * (_MAX_LENGTHS if self.random_ends else 1)

    @property
    def mean_generated(self) -> float:
        """Mean number of tokens that a live row has generated."""
        # If samples end at random, a live one has on average new_tokens tokens left, and as many
        # generated.
        return self.new_tokens if self.random_ends else self.new_tokens / 2

    def params(self, vocab_size: int) -> SamplingParams:
        """Return sampling parameters: every sample has all its tokens, unless ends are random."""
        from treegen.common.params import SamplingParams

        if not self.random_ends:
            return SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)
        # At least one token, also if the mean length is larger than the vocabulary.
        first_end = min(self.new_tokens, vocab_size) - 1
        return SamplingParams(
            max_tokens=self.max_tokens,
            stop_token_ids=tuple(range(first_end, vocab_size, self.new_tokens)),
            stop=("\n\n##",),
            ignore_eos=True,
        )

    def scale(self, jobs: float, lengths: float) -> Workload:
        """Return the workload with a share of the problems, and with all lengths scaled.

        Numbers other than 0 stay at least 1.

        Args:
            jobs: The share of the problems.
            lengths: Factor for all lengths.
        """

        def part(number: int, factor: float) -> int:
            return max(math.ceil(number * factor), 1) if number else 0

        # Reduce the roots before the problems per root, so that prefixes are shared as before.
        prefixes = part(self.prefixes, jobs)
        return replace(
            self,
            prefix=part(self.prefix, lengths),
            problem_tokens=part(self.problem_tokens, lengths),
            new_tokens=part(self.new_tokens, lengths),
            prefixes=prefixes,
            problems=part(self.problems, jobs * self.prefixes / prefixes),
        )

    def first(self, rows: int, new_tokens: int | None = None) -> Workload:
        """Return the smallest part of the workload that has its first rows.

        Args:
            rows: Number of rows.
            new_tokens: The length of a sample, if it should be shorter.
        """
        rows = min(rows, self.rows)
        return replace(
            self,
            new_tokens=min(self.new_tokens, new_tokens or self.new_tokens),
            prefixes=min(self.prefixes, -(-rows // (self.problems * self.samples))),
            problems=min(self.problems, -(-rows // self.samples)),
            samples=min(self.samples, rows),
        )

    def rows_stored(self, sharing: Sharing, num_pages: int, page_size: int) -> int:
        """Return how many rows fit in a pool if each row stores its own copy of unshared keys.

        This is what an engine with these levels admits. (treegen itself stores every prompt token
        once, however it is read.)

        Args:
            sharing: The levels: "off" shares nothing, "one" the prefixes, others also the problems.
            num_pages: Pages of the pool.
            page_size: Tokens per page.
        """
        per_prefix = 0 if sharing == "off" else self.prefix
        per_problem = self.problem_tokens if sharing in ("auto", "all") else 0
        per_row = self.prompt_tokens - per_prefix - per_problem + self.new_tokens
        row, shared = -(-per_row // page_size), -(-per_problem // page_size)
        pages = num_pages - self.prefixes * -(-per_prefix // page_size)
        problems, remainder = divmod(max(pages, 0), row * self.samples + shared)
        return problems * self.samples + max(remainder - shared, 0) // row

    def tree(self, tokenizer: Any, vocab_size: int) -> Node:
        """Return the prompts. Siblings differ in their first token if the vocabulary allows it."""
        import numpy as np

        rng = np.random.default_rng(0)
        # Prompts are tokens of words, so finished samples are decoded after text as in real runs.
        ids = tokenizer("the quick brown fox jumps over a lazy dog", add_special_tokens=False)[
            "input_ids"
        ]
        words = np.unique([i for i in ids if i < vocab_size])

        def content(length: int, number: int) -> list[int]:
            tokens: list[int] = rng.choice(words, length).tolist()
            return [number % vocab_size, *tokens[1:]]

        roots = []
        for root in range(self.prefixes):
            prefix = content(self.prefix, root)
            if not self.problem_tokens:
                roots.append(Node(prefix, samples=self.samples, id=f"{root}"))
                continue
            leaves = [
                Node(content(self.problem_tokens, leaf), samples=self.samples, id=f"{root}/{leaf}")
                for leaf in range(self.problems)
            ]
            roots.append(Node(prefix, children=leaves, samples=0))
        return roots[0] if len(roots) == 1 else Node("", children=roots, samples=0)


@dataclass(frozen=True, slots=True)
class Case:
    """A workload, and the modes to run it in."""

    workload: Workload
    modes: tuple[str, ...]


def decode_cases(
    rows: Sequence[int],
    prefixes: Sequence[int],
    new_tokens: int,
    *,
    problems: int = 1,
    problem_tokens: int = 0,
    modes: Sequence[str] = DECODE_MODES,
    refill: bool = False,
) -> list[Case]:
    """Return a case for every number of rows and every prefix.

    Without problem tokens there is one level, so "one" and "all" are the same mode, which runs
    once.

    Args:
        rows: Numbers of rows decoded at once.
        prefixes: Lengths of the prefix, in tokens.
        new_tokens: Tokens of each sample.
        problems: Problems below the prefix, among which the rows are divided. Default: 1.
        problem_tokens: Tokens of each problem. Default: 0.
        modes: Modes to run. Default: those of `treegen bench decode`.
        refill: Whether samples end at random, with a mean of `new_tokens` tokens, and others take
            their places. There are REFILLS times as many samples as rows. Default: False.

    Raises:
        InputError: rows cannot be divided evenly among problems.
    """
    cases = []
    if not problem_tokens:
        modes = tuple(dict.fromkeys("all" if mode == "one" else mode for mode in modes))
    for prefix in prefixes:
        for number in rows:
            if number % problems:
                raise InputError(
                    f"--rows must be a multiple of the number of problems ({problems}), got "
                    f"{number}"
                )
            workload = Workload(
                name="refill" if refill else "decode",
                prefix=prefix,
                new_tokens=new_tokens,
                samples=number // problems * (REFILLS if refill else 1),
                problems=problems,
                problem_tokens=problem_tokens,
                max_rows=number,
                random_ends=refill,
            )
            cases.append(Case(workload, tuple(modes)))
    return cases
