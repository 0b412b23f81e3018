"""The state of a text in its grammar: which tokens it has read, and whether the grammar has begun.

A text that begins with reasoning has no grammar there. In a search, a text continues the grammar of
the tokens that were drawn for it on the path to its node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from treegen.common.params import SamplingParams
from treegen.engine.compute.levels import Ints
from treegen.engine.param_set import ParamSet
from treegen.engine.segments.segment import LiveSegment
from treegen.errors import InputError
from treegen.prompts.radix import Tokens
from treegen.prompts.thinking import Budgets

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from treegen.prompts.grammars import Grammar

_HASH_BASE: Final = 6364136223846793005
_HASH_BITS: Final = 2**63 - 1
_Hash = TypeVar("_Hash", int, Ints)


@dataclass(slots=True, eq=False)
class GrammarState:
    """The state of a text in its grammar."""

    prompt: Tokens
    """The end of the prompt before the text."""
    path_tokens: list[int]
    """Drawn tokens on the path to a node of a search; the text begins with them."""
    budgets: Budgets
    """Thinking budgets of the samples of the text; the row's is the last."""
    matcher: LLMatcher
    """The matcher, which has read the text so far."""
    lane: int
    """Lane of the matcher, as in `Grammar.start`."""
    begins: int | None
    """Number of tokens before the grammar begins; None while the text may still be reasoning."""
    num_read: int = 0
    """Number of tokens of the text that were read."""

    @property
    def is_bound(self) -> bool:
        """Whether the grammar restricts the next token."""
        return self.num_read == 0 if self.begins is None else self.num_read >= self.begins

    def copy(self) -> GrammarState:
        """Return an independent copy for another row."""
        return replace(self, matcher=self.matcher.deep_copy())

    def read(self, tokens: Sequence[int], param_set: ParamSet) -> None:
        """Read the tokens of a text that were not read yet; `tokens` is the whole text."""
        start = max(self.num_read, self.begins or 0)
        if self.begins is None:
            self.begins = _find_grammar_start(self.prompt, tokens, param_set, self.budgets)
            start = self.begins or 0
        if self.begins is not None:
            self.matcher.consume_tokens(list(tokens[start:]))
        self.num_read = len(tokens)


def start_state(
    segment: LiveSegment, prompt: Tokens, param_set: ParamSet, grammar: Grammar, lane: int = 0
) -> GrammarState:
    """Return the grammar state in which a text below a segment starts.

    Args:
        segment: The segment at the end of the prompt.
        prompt: Tokens of the prompt; the end is enough.
        param_set: Sampling parameters of the text.
        grammar: Its grammar.
        lane: As in `Grammar.start`.

    Raises:
        InputError: the tokens drawn on the path to the segment do not fit the grammar.
    """
    stopping = param_set.stopping
    path_tokens, budgets = _find_path_tokens(segment, param_set.params)
    if path_tokens:
        prompt = segment.path_tokens()[: -len(path_tokens)]
    thinks = stopping.thinking is not None and not stopping.thinking.closes(prompt)
    state = GrammarState(
        prompt, path_tokens, budgets, grammar.start(lane), lane, None if thinks else 0
    )
    if path_tokens:
        state.read(path_tokens, param_set)
    elif thinks and (tags := stopping.thinking) and (tags.always or tags.opens(prompt)):
        state.num_read = -1  # so that the grammar does not restrict the first token
    _check_node_text(state.matcher, param_set.params)
    return state


def check_start(
    segment: LiveSegment, prompt: Tokens, param_set: ParamSet, grammar: Grammar
) -> None:
    """Check that a text below a segment can start, before its request is added to a run.

    Args:
        segment: The segment at the end of the prompt.
        prompt: Tokens of the prompt; the end is enough.
        param_set: Sampling parameters of the text.
        grammar: Its grammar.

    Raises:
        InputError: the tokens drawn on the path to the segment do not fit the grammar, or no token
            can follow them.
    """
    state = start_state(segment, prompt, param_set, grammar)
    if state.is_bound:
        state.matcher.compute_bitmask()  # fails if no token can follow
        _check_node_text(state.matcher, param_set.params)


def _check_node_text(matcher: LLMatcher, params: SamplingParams) -> None:
    """Raise InputError if a matcher has failed on the text of a node."""
    if matcher.is_error():
        raise InputError(
            f"the text of the node is not a valid beginning of its {(params.structure or '?')[0]} "
            f"({describe_failure(matcher)}); sample the node without this structure, or sample "
            "from a node above"
        )


def _find_path_tokens(segment: LiveSegment, params: SamplingParams) -> tuple[list[int], Budgets]:
    """Return the tokens up to a segment's end, from the first one drawn for the same grammar.

    Args:
        segment: The segment at the end of a row's prompt.
        params: The sampling parameters of the row.

    Returns:
        The tokens, and `GrammarState.budgets` of the row.
    """
    path: list[LiveSegment] = []
    first = 0  # number of segments of the path that count
    for above in segment.path():
        path.append(above)
        if above.params is None:
            continue
        if above.params is not params and above.params.structure != params.structure:
            break
        first = len(path)
    tokens: list[int] = []
    budgets: list[tuple[int, int | None]] = []
    for above in path[:first][::-1]:
        if above.params is not None:
            budgets.append((len(tokens), above.params.max_thinking_tokens))
        tokens += map(int, above.tokens)
    return tokens, [*budgets, (len(tokens), params.max_thinking_tokens)]


def get_opening_tokens(state: GrammarState, param_set: ParamSet) -> Sequence[int]:
    """Return tokens allowed first in addition to the grammar's: the one that opens reasoning."""
    tags = param_set.stopping.thinking
    if tags is None or state.begins is not None or state.num_read or tags.opening_id is None:
        return ()
    return (tags.opening_id,)


def _find_grammar_start(
    prompt: Tokens, tokens: Sequence[int], param_set: ParamSet, budgets: Budgets
) -> int | None:
    """Return how many tokens of a text precede its grammar; None while it is reasoning."""
    tags, ids = param_set.stopping.thinking, np.array(tokens, dtype=np.int32)
    if tags is None or not tags.begins(prompt, ids):
        return 0
    return tags.closed_at(prompt, ids, budgets) or None


def describe_failure(matcher: LLMatcher) -> str:
    """Return why a matcher has failed, in one line."""
    return shorten((matcher.get_error().splitlines() or ["no reason is given"])[0], 200)


def extend_hash(text_hash: _Hash, tokens: Iterable[_Hash]) -> _Hash:
    """Return the hash of a text with further tokens: ints, or arrays for several texts."""
    for token in tokens:
        text_hash = (text_hash * _HASH_BASE + token + 1) & _HASH_BITS
    return text_hash


def find_distinct(keys: Ints) -> tuple[Ints, Ints]:
    """Return the first index of each distinct key, ascending, and each key's index there."""
    _, firsts, positions = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    return firsts[order], np.argsort(order)[positions]
