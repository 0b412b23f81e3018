"""When a sample ends: end of sequence, stop tokens, stop strings and length.

    StopConditions        all conditions of one set of sampling parameters, and how a sample ends
    StopConditionsCache   the conditions that were used last
    StopStrings           the stop strings alone, searched for in the text of a sample

`may_end` is a table over the vocabulary: whether a sample can be over after a token. The decode
loop checks a row in Python only where this table is true.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treegen.common.outputs import FinishReason
from treegen.common.params import SamplingParams
from treegen.common.structured_outputs import STRUCTURES
from treegen.errors import InputError, arg
from treegen.prompts.grammars import grammar_of
from treegen.prompts.thinking import ThinkingTags, thinking_of
from treegen.prompts.token_text import (
    MAX_CHARACTER_TOKENS,
    NUM_PROBES,
    PARTIAL,
    Detokenizer,
    special_tokens,
)
from treegen.prompts.tree import describe_lone_surrogate

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from treegen.prompts.token_text import Tokens

_MAX_CACHED: Final = 32
_MAX_CHANGED_CHARACTERS: Final = 8  # at the start of a text, which may lose a space, for example

Ending = tuple[FinishReason, str | int | None, str]
"""Finish reason, what stopped a sample, and its text."""


class StopConditions:
    """The stop conditions of one set of sampling parameters.

    Attributes:
        may_end: Bool [vocab_size], tokens after which a sample may be over.
        ids: Tokens after which a sample is over.
        thinking: Finds the reasoning in a sample; None if it is not separated from the answer.
        bad_words: The tokens of words that may not be drawn.
        grammar: The grammar that a sample must match; None if there is none.
    """

    def __init__(
        self, params: SamplingParams, tokenizer: Any, eos_token_ids: Sequence[int], vocab_size: int
    ) -> None:
        """Compile the stop conditions.

        Args:
            params: The sampling parameters.
            tokenizer: The model's tokenizer.
            eos_token_ids: The model's end-of-sequence ids.
            vocab_size: Number of the model's logits per token.
        """
        eos = () if params.ignore_eos else eos_token_ids
        self._detokenizer = Detokenizer(tokenizer)
        # No text shows a special token; a text that spells one consists of other tokens. So a stop
        # string that names a special token is matched by id.
        special = special_tokens(tokenizer, self._detokenizer) if params.stops else {}
        self._named = {special[stop]: stop for stop in params.stops if stop in special}
        self._strings = StopStrings(tokenizer, params.stops, vocab_size) if params.stops else None
        self._eos = frozenset(eos)
        self._requested = frozenset((*params.stop_token_ids, *self._named))
        self.ids = frozenset(id for id in self._eos | self._requested if id < vocab_size)
        self._include_stop, self._min_tokens = params.include_stop, params.min_tokens
        self.may_end: NDArray[np.bool_] = np.zeros(vocab_size, dtype=np.bool_)
        if self._strings is not None:
            self.may_end |= self._strings.may_end
        self.may_end[list(self.ids)] = True
        self.bad_words = word_tokens(params.banned_words, tokenizer, vocab_size)
        self.grammar = grammar_of(params.structure, tokenizer, eos_token_ids, vocab_size)
        self.thinking = thinking_of(params, tokenizer)
        if self.thinking is not None and params.max_thinking_tokens is not None:
            self._check_forced(self.thinking, vocab_size)

    def _check_forced(self, thinking: ThinkingTags, vocab_size: int) -> None:
        bad = [id for id in thinking.end if id in self.ids or id >= vocab_size]
        if bad or not thinking.end:
            what = (
                f"token {bad[0]}, which ends a sample or is not in the model's vocabulary"
                if bad
                else "no tokens"
            )
            raise InputError(
                f"the text that ends the reasoning, {thinking.tags.end!r}, contains {what}; pass "
                f"another {arg('thinking_end')}"
            )

    def endings(
        self, prompts: Sequence[Tokens], samples: Sequence[Sequence[int]], limits: Sequence[int]
    ) -> list[Ending | None]:
        """Return how samples end; None for those that continue.

        Args:
            prompts: The tokens of each sample's prompt.
            samples: The tokens of each sample.
            limits: The maximum number of tokens of each sample.
        """
        endings: list[Ending | None] = [None] * len(samples)
        over: list[int] = []
        for at, (prompt, tokens, limit) in enumerate(zip(prompts, samples, limits, strict=True)):
            if tokens[-1] in self.ids:
                over.append(at)
                continue
            hit = None
            # Only the last token can have completed a stop string: the sample had not ended before.
            may_end = self._strings is not None and self._strings.may_end[tokens[-1]]
            if self._strings and may_end and len(tokens) > self._min_tokens:
                hit = self._strings.find_stop(prompt, tokens, num_new=1, since=self._min_tokens)
            if hit is not None:
                text, stop = hit
                endings[at] = "stop", stop, text + stop * self._include_stop
            elif len(tokens) >= limit:
                over.append(at)
        texts = self._detokenizer.texts(
            [prompts[at] for at in over], [self.strip_stop_token(samples[at]) for at in over]
        )
        for at, text in zip(over, texts, strict=True):
            token = samples[at][-1]
            if token not in self.ids:
                endings[at] = "length", None, text
                continue
            name = self._named.get(token, "")
            # An end of sequence is reported by its id, even if a stop string names the same token.
            end = name if name and token not in self._eos else token
            endings[at] = "stop", end, text + name * self._include_stop
        return endings

    def text(self, prompt: Tokens, tokens: Tokens) -> str:
        """Return the text of a sample that no stop condition has ended."""
        return self._detokenizer.text(prompt, tokens)

    def strip_stop_token(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens whose text a finished sample has.

        A stop token is left out unless the caller requested it and `include_stop` is set.
        """
        last = tokens[-1]
        stays = last not in self.ids or (self._include_stop and last in self._requested)
        return tokens if stays else tokens[:-1]


class StopConditionsCache:
    """Caches stop conditions, because the table of a large vocabulary is slow to build."""

    def __init__(self) -> None:
        self._cache = functools.lru_cache(maxsize=_MAX_CACHED)(_make)
        self._last: tuple[SamplingParams, tuple[Any, ...], StopConditions] | None = None

    def of(
        self, params: SamplingParams, tokenizer: Any, eos_token_ids: Sequence[int], vocab_size: int
    ) -> StopConditions:
        """Return the stop conditions of sampling parameters, from the cache if possible.

        Args:
            params: The sampling parameters.
            tokenizer: The model's tokenizer.
            eos_token_ids: The model's end-of-sequence ids.
            vocab_size: Number of the model's logits per token.

        Raises:
            InputError: a bad word has no tokens, or a thinking budget has no known tags.
        """
        # The length is part of the key, because tokens may be added to a tokenizer later.
        key = tokenizer, len(tokenizer), tuple(eos_token_ids), vocab_size
        last = self._last
        if last is not None and last[0] is params and last[1] == key:
            return last[2]  # all nodes of a search have the same parameters
        stops = SamplingParams(
            stop=params.stops,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            include_stop=params.include_stop,
            min_tokens=params.min_tokens,
            max_tokens=max(params.min_tokens, 1),
            # Only whether there is a budget matters here, not its size.
            max_thinking_tokens=None if params.max_thinking_tokens is None else 0,
            reasoning_tags=params.reasoning_tags,
            thinking_end=params.thinking_end,
            bad_words=params.banned_words,
            **{name: value for name in STRUCTURES if (value := getattr(params, name)) is not None},
        )
        stopping = self._cache(stops, *key)
        self._last = params, key, stopping
        return stopping


def _make(
    stops: SamplingParams, tokenizer: Any, size: int, eos_ids: tuple[int, ...], vocab_size: int
) -> StopConditions:
    return StopConditions(stops, tokenizer, eos_ids, vocab_size)


def word_tokens(
    words: Sequence[str], tokenizer: Any, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of words, each encoded at the start of a text and after a space.

    Args:
        words: The words.
        tokenizer: The model's tokenizer.
        vocab_size: Number of the model's logits per token.

    Raises:
        InputError: a word has half of a surrogate pair, no tokens, or a token that the model does
            not have.
    """
    encoded: dict[tuple[int, ...], None] = {}
    for word in words:
        if problem := describe_lone_surrogate(word):
            raise InputError(f"{arg('bad_words')}: the word {word!r} {problem}")
        for text in (word, " " + word.lstrip()) if word.strip() else (word,):
            tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not tokens or max(tokens) >= vocab_size:
                raise InputError(
                    f"the bad word {word!r} has no tokens in the vocabulary of the model; "
                    "remove the word"
                )
            encoded[tokens] = None
    return tuple(encoded)


class StopStrings:
    """Strings that end a sample: a table of tokens that may complete one, and a search.

    Attributes:
        may_end: Bool [vocab_size], false only for tokens that cannot complete a stop string.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], vocab_size: int
    ) -> None:
        self.stops = tuple(stops)
        self._detokenizer = Detokenizer(tokenizer)
        self._longest = max(map(len, self.stops), default=0)
        self.may_end: NDArray[np.bool_] = self._table(vocab_size)

    def find(self, text: str, after: int = 0) -> tuple[int, str] | None:
        """Return where the earliest stop string starts, and the string; None if there is none.

        If several start at the same place, the first in the user's order counts.

        Args:
            text: The text to search.
            after: Stop strings that end within this many first characters do not count. Default: 0.
        """
        candidates = [
            (text.find(stop, max(after - len(stop) + 1, 0)), order, stop)
            for order, stop in enumerate(self.stops)
        ]
        position, _, stop = min((f for f in candidates if f[0] >= 0), default=(-1, 0, ""))
        return (position, stop) if stop else None

    def find_stop(
        self, prompt_tokens: Tokens, tokens: Tokens, *, num_new: int | None = None, since: int = 0
    ) -> tuple[str, str] | None:
        """Return the generated text up to the earliest stop string, and that string, if any.

        Args:
            prompt_tokens: The tokens of the prompt.
            tokens: The generated tokens.
            num_new: How many of the last tokens were not searched yet. The text of the earlier ones
                has no stop string, so most of it is not decoded again. None searches all.
            since: Stop strings that end in the text of this many first tokens do not count.
                Default: 0.
        """
        if num_new is not None and not self._may_end_in_tail(tokens, num_new):
            return None
        text = self._detokenizer.text(prompt_tokens, tokens)
        before = self._detokenizer.text(prompt_tokens, tokens[:since]) if since else ""
        hit = self.find(text, len(before))
        return (text[: hit[0]], hit[1]) if hit else None

    def _may_end_in_tail(self, tokens: Tokens, num_new: int) -> bool:
        """Whether a stop string may end in the text of the last num_new tokens."""
        if any(PARTIAL in stop for stop in self.stops):
            return True
        new = self._detokenizer.decode(tokens[-num_new:])
        # The first characters of a tail may differ from those in the whole text.
        needed = width = len(new) + self._longest + _MAX_CHANGED_CHARACTERS
        while width < len(tokens):
            tail = self._detokenizer.keep_visible(tokens[-width:])
            num_shown = needed
            # If the tail begins within a character, some decoders show none of the bytes after it.
            for start in range(MAX_CHARACTER_TOKENS):
                text = self._detokenizer.decode(tail[start:])
                if self.find(text) is not None:
                    return True
                num_shown = min(num_shown, len(text))
                if PARTIAL not in text:
                    break
            if num_shown == needed:
                return False
            width *= 2
        return True

    def _table(self, vocab_size: int) -> NDArray[np.bool_]:
        """Return may_end.

        A token may complete a stop string if its text contains the string, or starts with an end of
        the string. A token has two texts: one at the start of a text, where a space may be lost,
        and one after other tokens.
        """
        table = np.zeros(vocab_size, dtype=np.bool_)
        if not self.stops:
            return table
        alone = self._detokenizer.decode_each([[token] for token in range(vocab_size)])
        letters = (token for token, text in enumerate(alone) if text.isascii() and text.isalpha())
        anchor = next(letters, None)
        if anchor is None:
            return ~table
        before = alone[anchor]
        after = self._detokenizer.decode_each([[anchor, token] for token in range(vocab_size)])
        if not self._is_local(anchor, before, after):
            return ~table
        # No token's text begins with an end that is longer than the longest text. Other ends are
        # looked up by their first character, because a long stop string has many ends.
        longest = max(map(len, (*alone, *after)))
        ends_of: dict[str, list[str]] = defaultdict(list)
        for end in {stop[at:] for stop in self.stops for at in range(-longest, 0)}:
            ends_of[end[0]].append(end)
        ends = {first: tuple(endings) for first, endings in ends_of.items()}
        # A token that is part of a character can complete the character, and with it a stop
        # string. ASCII characters are never split.
        parts = () if all(stop.isascii() for stop in self.stops) else (PARTIAL,)
        within = (*self.stops, *parts)
        for token, texts in enumerate(zip(alone, after, strict=True)):
            first, other = texts[0], texts[1].removeprefix(before)
            table[token] = (
                first.startswith(ends.get(first[:1], ()))
                or other.startswith(ends.get(other[:1], ()))
                or any(part in first or part in other for part in within)
            )
        return table

    def _is_local(self, anchor: int, before: str, after: Sequence[str]) -> bool:
        """Whether a token's text is complete before the next token arrives; probed on some tokens.

        Some decoders add the space after a word when the next token arrives. Any token could then
        complete a stop string that ends in a space.
        """
        step = max(1, len(after) // NUM_PROBES)
        again = after[anchor].removeprefix(before)
        tokens = [t for t in range(0, len(after), step) if PARTIAL not in after[t]]
        texts = self._detokenizer.decode_each([[anchor, token, anchor] for token in tokens])
        return all(
            text == after[token] + again and after[token].startswith(before)
            for token, text in zip(tokens, texts, strict=True)
        )
