"""The tags around a model's reasoning, and where a sample reasons and where it answers.

    Tags            the text of the two tags, and the text that closes reasoning cut short
    ThinkingTags    the same for one tokenizer: finds where the reasoning of a sample ends
    tags_of         the known tags of a tokenizer
    without_tags    reasoning text without its tags

A sample thinks from its start if its prompt ends with the opening tag, as many chat templates do,
or if the sample begins with that tag. All text before a closing tag counts as thinking too. Tags
may be special tokens, which normal decoding hides, so they are searched for in the text with
special tokens shown.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treegen.common.outputs import Thinking
from treegen.common.params import SamplingParams
from treegen.errors import InputError, arg
from treegen.prompts.token_text import CONTEXT_TOKENS, PARTIAL, Detokenizer
from treegen.prompts.tokens import append_text

if TYPE_CHECKING:
    from treegen.prompts.token_text import Tokens


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags around the reasoning."""

    open: str
    """Text of the opening tag."""
    close: str
    """Text of the closing tag."""
    end: str
    """The text that closes reasoning whose budget is used up; it contains the closing tag."""


def _tags(open: str, close: str) -> Tags:
    return Tags(open, close, f"\n{close}\n\n")


KNOWN: Final = (
    _tags("<think>", "</think>"),
    _tags("[THINK]", "[/THINK]"),
    _tags("<|START_THINKING|>", "<|END_THINKING|>"),
    _tags("<seed:think>", "</seed:think>"),
    # The channels of Harmony.
    Tags(
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
)
_TEXT_BEFORE: Final = "x"
Budgets = Sequence[tuple[int, int | None]]
"""The index of the first token of each sample of a text, and the thinking budget of the sample."""


def tags_of(tokenizer: Any) -> Tags | None:
    """Return the known tags that are a tokenizer's tokens or in its chat template, or None."""
    text = template_text(tokenizer)
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    return next((tags for tags in KNOWN if tags.close in added or tags.close in text), None)


def template_text(tokenizer: Any) -> str:
    """Return a tokenizer's chat template; if it has several, all of them."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(map(str, template.values() if isinstance(template, dict) else [template]))


def without_tags(text: str, tokenizer: Any) -> str:
    """Return reasoning text without the known tags of a tokenizer."""
    tags = tags_of(tokenizer)
    if tags is not None:
        if (bare := text.lstrip()).startswith(tags.open):
            text = bare.removeprefix(tags.open)
        text = text.removesuffix(tags.close)
    return text.strip("\n")


def thinking_of(params: SamplingParams, tokenizer: Any) -> ThinkingTags | None:
    """Return the thinking tags for samples; None if their reasoning is not separated.

    Samples with a grammar get tags whenever the tokenizer has known ones.

    Raises:
        InputError: there is a thinking budget and no known tag that ends the reasoning.
    """
    option, has_budget = params.reasoning_tags, params.max_thinking_tokens is not None
    if option is None and not has_budget and params.structure is None:
        return None
    tags = tags_of(tokenizer) if option is None or isinstance(option, str) else _tags(*option)
    if tags is None:
        if has_budget:
            raise InputError(
                "a reasoning budget requires reasoning tags, but the model's chat template and "
                "tokens contain no known tags; pass the tags: "
                f"{arg('reasoning_tags', ('<think>', '</think>'))}"
            )
        return None
    if params.thinking_end is not None:
        if tags.close not in params.thinking_end:
            raise InputError(
                f"{arg('thinking_end')} must contain the tag that ends the reasoning, "
                f"{tags.close!r}; got {params.thinking_end!r}"
            )
        tags = Tags(tags.open, tags.close, params.thinking_end)
    thinking = ThinkingTags(tags, tokenizer)
    if has_budget and (ends := [stop for stop in params.stops if stop in tags.end]):
        raise InputError(
            f"stop string {ends[0]!r} occurs in the text that ends the reasoning ({tags.end!r}), "
            "so sampling would stop there; remove the stop string, or pass a "
            f"{arg('thinking_end')} without the stop string"
        )
    return thinking


class ThinkingTags:
    """Finds the reasoning in samples of one tokenizer.

    Attributes:
        end: Token ids that close reasoning whose budget is used up.
        num_context: Maximum number of tokens that spell the closing tag, and some more.
        opening_id: The token of the opening tag; None if the tag has several tokens.
        always: Whether every sample begins with one of the tags, as with Harmony's channels.
    """

    def __init__(self, tags: Tags, tokenizer: Any) -> None:
        """Encode the tags with a tokenizer."""
        self.tags = tags
        self._detokenizer = Detokenizer(tokenizer)
        self._opening = tags.open.lstrip()  # space before it may be missing, or be other space
        opening = _encode_within_text(tokenizer, tags.open)
        self.opening_id = opening[0] if len(opening) == 1 else None
        close = _encode_within_text(tokenizer, tags.close)
        added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
        self.always = opening[:1] == close[:1] and opening[0] in added.values()
        self._closing_id = close[0] if len(close) == 1 else None
        self.end = tuple(_encode_within_text(tokenizer, tags.end))
        self._before = tuple(_encode_within_text(tokenizer, _TEXT_BEFORE))
        self.num_context = len(tags.close.encode()) + CONTEXT_TOKENS
        self._completes: dict[int, bool] = {}  # results of `_may_complete`

    def opens(self, prompt: Tokens) -> bool:
        """Whether a prompt ends with the opening tag, optionally followed by space."""
        return self._ends_with(prompt, self.tags.open)

    def closes(self, prompt: Tokens) -> bool:
        """Whether a prompt ends with the closing tag, optionally followed by space."""
        return self._ends_with(prompt, self.tags.close)

    def _ends_with(self, prompt: Tokens, tag: str) -> bool:
        text = self._detokenizer.decode_with_special(prompt[-(len(tag) + 8) :])
        at = len(text.rstrip()) - len(tag.rstrip())
        return at >= 0 and text.startswith(tag, at)  # a tag may end in space itself

    def first_due(self, prompt: Tokens, budget: int) -> int:
        """Return the fewest tokens in which a sample can use up a budget of thinking tokens.

        An opening tag at the start of the sample does not count towards the budget.
        """
        return budget if self.opens(prompt) else budget + 1

    def due(self, prompt: Tokens, tokens: Tokens, budget: int) -> int | None:
        """Return the number of tokens at which a sample's thinking has used up its budget.

        Args:
            prompt: The token ids of the prompt.
            tokens: The tokens of the sample so far.
            budget: Maximum number of thinking tokens.

        Returns:
            The number of tokens. If the sample has only space and the start of the opening tag so
            far, it may still open its reasoning, and the number is one more than it has tokens.
            None if the sample does not think or has finished thinking.
        """
        if self._is_closed(tokens):
            return None
        text = self._detokenizer.decode_with_special(tokens).lstrip()
        if self.opens(prompt) or text.startswith(self._opening):
            return self._budget_ends(prompt, tokens, budget)
        # The last token may be part of a character.
        may_open = self._opening.startswith(text.rstrip("\ufffd"))
        return len(tokens) + 1 if may_open else None

    def may_close(self, tokens: Tokens, num_new: int) -> bool:
        """Whether the last tokens of a text may have closed its reasoning.

        Args:
            tokens: The tokens of the text; `num_context` tokens before the new ones are enough.
            num_new: Number of new tokens.
        """
        if self.num_open(tokens[-num_new:]) == num_new:
            return False
        tail = tokens[-(num_new + self.num_context) :]
        text = self._detokenizer.decode_with_special(tail)
        # If tokens show no text, or the tail begins within a character, the tail may be too short.
        return self.tags.close in text or text.startswith(PARTIAL) or len(text.encode()) < len(tail)

    def num_open(self, new: Tokens) -> int:
        """Return how many of the first new tokens certainly do not close the reasoning."""
        closing = (at for at, token in enumerate(map(int, new)) if self._may_complete(token))
        return next(closing, len(new))

    def _may_complete(self, token: int) -> bool:
        """Whether a token may complete the closing tag, alone or after tokens that spell a part."""
        if token not in self._completes:
            tag, decode = self.tags.close, self._detokenizer.decode_with_special
            texts = decode([token]), decode([*self._before, token])[len(decode(self._before)) :]
            # Some decoders add the space at the end of a word when the next token arrives. A token
            # that is part of a character can complete the character. ASCII is never split.
            self._completes[token] = (
                token == self._closing_id
                or tag[-1].isspace()
                or any(tag in text or (PARTIAL in text and not tag.isascii()) for text in texts)
                or any(text.startswith(tag[at:]) for text in texts for at in range(1, len(tag)))
            )
        return self._completes[token]

    def closed_at(self, prompt: Tokens, tokens: Tokens, budgets: Budgets) -> int:
        """Return how many tokens a text's closed reasoning spans; 0 if no reasoning is closed.

        Tokens that were forced because a budget was used up belong to the reasoning.

        Args:
            prompt: The token ids of the prompt.
            tokens: The tokens of the text, which several samples may have drawn.
            budgets: The budgets of these samples.
        """
        if self.tags.close not in self._detokenizer.decode_with_special(tokens):
            return 0
        num = self._num_thinking(tokens)
        at = bisect_left(budgets, (num,)) - 1  # the sample that closed the reasoning
        start, budget = budgets[at]
        stop = budgets[at + 1][0] if at + 1 < len(budgets) else None
        if budget is not None:
            above = [*prompt, *tokens[:start]] if start else prompt
            due = start + self._budget_ends(above, tokens[start:stop], budget)
            forced = tuple(map(int, tokens[due:stop][: len(self.end)]))
            if due < num and forced == self.end[: len(forced)]:
                return due + len(self.end if stop is None else forced)
        return num

    def begins(self, prompt: Tokens, tokens: Tokens) -> bool:
        """Return whether a sample with a grammar begins with reasoning, which has no grammar.

        The prompt or the first token opens the reasoning. Otherwise the first token is one that the
        grammar allows, and so are all tokens after it, even if they spell the tags.
        """
        if self.closes(prompt):
            return False
        first = self._detokenizer.decode_with_special(tokens[:1])
        return self.always or self._begins(prompt, first)

    def split(
        self,
        prompt: Tokens,
        tokens: Tokens,
        text: str,
        budget: int | None,
        *,
        is_structured: bool = False,
    ) -> Thinking | None:
        """Return where the reasoning of a finished sample ends; None if it has none.

        Args:
            prompt: The token ids of the prompt.
            tokens: The tokens of the sample.
            text: The text of the sample.
            budget: Maximum number of thinking tokens; None for no budget.
            is_structured: Whether the sample has a grammar, whose text may contain the tags.
        """
        if is_structured and not self.begins(prompt, tokens):
            return None
        decoded = self._detokenizer.decode_with_special(tokens)
        if self.tags.close not in decoded:
            if not self._begins(prompt, decoded):
                return None
            return Thinking(len(tokens), len(text), is_closed=False)
        num_tokens = self._num_thinking(tokens)
        is_forced = False
        if budget is not None:
            due = self._budget_ends(prompt, tokens, budget)
            forced = tuple(map(int, tokens[due : due + len(self.end)]))
            is_forced = due < num_tokens and forced == self.end
        at = text.find(self.tags.close)
        if at >= 0:
            end = at + len(self.tags.close)
        else:  # the tag is of special tokens
            end = min(len(self._detokenizer.text(prompt, tokens[:num_tokens])), len(text))
        return Thinking(num_tokens, end, is_closed=True, is_forced=is_forced)

    def _budget_ends(self, prompt: Tokens, tokens: Tokens, budget: int) -> int:
        """Return the number of tokens at which a thinking sample has used up its budget."""
        return budget if self.opens(prompt) else self._num_opening(tokens) + budget

    def _begins(self, prompt: Tokens, text: str) -> bool:
        return text.lstrip().startswith(self._opening) or self.opens(prompt)

    def _is_closed(self, tokens: Tokens) -> bool:
        if self._closing_id is not None and (np.asarray(tokens) == self._closing_id).any():
            return True
        return self.tags.close in self._detokenizer.decode_with_special(tokens)

    def _num_opening(self, tokens: Tokens) -> int:
        """Return the fewest tokens with the whole opening tag; all if they do not begin with it."""

        def is_open(num: int) -> bool:
            text = self._detokenizer.decode_with_special(tokens[:num])
            return text.lstrip().startswith(self._opening)

        return bisect_left(range(len(tokens)), 1, key=is_open)

    def _num_thinking(self, tokens: Tokens) -> int:
        """Return the fewest tokens with the whole closing tag, which the sample must contain."""

        def is_closed(num: int) -> bool:
            return self.tags.close in self._detokenizer.decode_with_special(tokens[:num])

        max_num = len(tokens)
        if self._closing_id is not None:
            at = np.flatnonzero(np.asarray(tokens) == self._closing_id)
            if len(at):
                max_num = int(at[0]) + 1
                if not is_closed(max_num - 1):  # no other tokens spell the tag before it
                    return max_num
        return bisect_left(range(max_num), 1, key=is_closed)


def _encode_within_text(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text in the middle of another text."""
    before = tokenizer([_TEXT_BEFORE], add_special_tokens=False)["input_ids"][0]
    ids: list[int] = append_text(tokenizer, np.array(before, dtype=np.int32), text).tolist()
    return ids
