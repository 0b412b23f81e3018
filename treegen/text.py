"""From generated tokens to text, and the search for stop strings in it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treegen.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    Tokens = Sequence[int] | NDArray[np.int32] | NDArray[np.int64]

PARTIAL: Final = "\ufffd"
"""What bytes that are no character, or not yet, decode to."""
MAX_CHARACTER_TOKENS: Final = 4
CONTEXT_TOKENS: Final = 8
"""Prompt tokens that are decoded along with the generated ones, if they show any text."""
NUM_PROBES: Final = 256
_MANY: Final = 64  # sequences worth waking the tokenizer's threads for, which may take 13 ms


class Detokenizer:
    """Decodes tokens to the text that they add after a prompt.

    Decoded alone, the first token of a text may lose its leading space, and bytes that end a
    character mean nothing. So the end of the prompt is decoded along with them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from tokenizers.decoders import ByteLevel

        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        # Models have more rows than the tokenizer has tokens. A fast tokenizer skips such ids.
        self._limit = None if getattr(tokenizer, "is_fast", False) else len(tokenizer)
        # This decoder shows every whole character, whatever bytes stand next to it.
        self._shows_all = isinstance(getattr(self._backend, "decoder", None), ByteLevel)
        # The samples of a prompt come after the same text.
        self._shown = functools.lru_cache(maxsize=4096)(self.decode)

    def text(self, prompt_tokens: Tokens, tokens: Tokens) -> str:
        """Return what the tokens add to the text of the prompt, without special tokens.

        A character that the prompt leaves unfinished counts as added if they finish it.
        """
        return self.texts([prompt_tokens], [tokens])[0]

    def texts(self, prompts: Sequence[Tokens], samples: Sequence[Tokens]) -> list[str]:
        """Return what each sample's tokens add to the text of its prompt, all at once."""
        # The samples of a prompt come with one object.
        context_of = {
            key: self._context(prompt) for key, prompt in {id(p): p for p in prompts}.items()
        }
        contexts = [context_of[id(prompt)] for prompt in prompts]
        generated = [_ids(tokens) for tokens in samples]
        wholes = [context + ids for context, ids in zip(contexts, generated, strict=True)]
        return [
            self._added(context, ids, whole)
            for context, ids, whole in zip(contexts, generated, self._decode(wholes), strict=True)
        ]

    def _added(self, context: tuple[int, ...], ids: tuple[int, ...], whole: str) -> str:
        """Return what tokens add to the text of a context, given the text of all."""
        before = self._shown(context)
        if whole.startswith(before):
            return whole[len(before) :]
        if before.endswith(PARTIAL):
            for cut in range(1, MAX_CHARACTER_TOKENS + 1):
                before = self._shown(context[:-cut])
                if not before.endswith(PARTIAL) and whole.startswith(before):
                    return whole[len(before) :]
        # Bytes that never become a character spoil those of the prompt that stand before them.
        # What is generated then starts with a byte, which has no leading space to lose.
        return self.decode(ids)

    def decode(self, tokens: Tokens) -> str:
        """Return the text of tokens on their own, without special tokens."""
        return self._decode([_ids(tokens)])[0]

    def _decode(self, sequences: Sequence[tuple[int, ...]]) -> list[str]:
        """Return the text of each sequence of tokens, with all whole characters shown.

        Some decoders take bytes in a row as one, all or none: an unfinished character at the end
        would hide those before it. (It does if one of those is U+FFFD itself.)
        """
        texts = self.decode_each(sequences)
        if self._shows_all:
            return texts
        unfinished = [at for at, text in enumerate(texts) if text.endswith(PARTIAL)]
        for cut in range(1, MAX_CHARACTER_TOKENS):
            if not unfinished:
                break
            shorter = self.decode_each([sequences[at][:-cut] for at in unfinished])
            finished = dict(zip(unfinished, shorter, strict=True))
            unfinished = [at for at, text in finished.items() if text.endswith(PARTIAL)]
            for at in finished.keys() - unfinished:
                if not texts[at].startswith(finished[at]):
                    texts[at] = finished[at] + PARTIAL * cut
        return texts

    def decode_each(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence of tokens, as the tokenizer gives it."""
        if self._limit is None:
            if len(sequences) < _MANY:
                return [self._backend.decode(ids, skip_special_tokens=True) for ids in sequences]
            texts: list[str] = self._backend.decode_batch(sequences, skip_special_tokens=True)
            return texts
        known = [[token for token in tokens if token < self._limit] for tokens in sequences]
        return [
            self._tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            for ids in known
        ]

    def shows_text(self, tokens: Tokens) -> bool:
        """Whether the tokens have text of their own, however they start.

        One visible character is enough: before it ends whatever they start in the middle of.
        """
        return bool(self._shown(_ids(tokens)).replace(PARTIAL, "").strip())

    def _context(self, prompt_tokens: Tokens) -> tuple[int, ...]:
        """Return as many last tokens of the prompt as text after it depends on."""
        width = CONTEXT_TOKENS
        while True:
            context = _ids(prompt_tokens[-width:])
            if width >= len(prompt_tokens) or self.shows_text(context):
                return context
            width *= 4


def _ids(tokens: Tokens) -> tuple[int, ...]:
    return tuple(tokens.tolist() if isinstance(tokens, np.ndarray) else tokens)


def special_tokens(tokenizer: PreTrainedTokenizerBase, detokenizer: Detokenizer) -> dict[str, int]:
    """The tokens that no text shows, by how they are written."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    also = set(getattr(tokenizer, "all_special_ids", ()))
    found = {str(token): id for id, token in added.items() if token.special or id in also}
    shown = detokenizer.decode_each([[id] for id in found.values()])
    return {name: id for (name, id), text in zip(found.items(), shown, strict=True) if not text}


class StopStrings:
    """Strings that end a sample: a table of the tokens that may complete one, and a search.

    may_end: bool [vocab_size], false only for tokens after which no stop string can just have
    been completed.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], vocab_size: int
    ) -> None:
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in self.stops:
            if not isinstance(stop, str) or not stop:
                raise InputError(f"stop string {stop!r}: give strings of at least one character")
        self._detokenizer = Detokenizer(tokenizer)
        self._longest = max(map(len, self.stops), default=0)
        self.may_end: NDArray[np.bool_] = self._table(vocab_size)

    def find(self, text: str, after: int = 0) -> tuple[int, str] | None:
        """Return where the earliest stop string starts and which it is; of several there, the
        one that was given first. after: characters within which it must not end.
        """
        found = [
            (text.find(stop, max(after - len(stop) + 1, 0)), order, stop)
            for order, stop in enumerate(self.stops)
        ]
        position, _, stop = min((f for f in found if f[0] >= 0), default=(-1, 0, ""))
        return (position, stop) if stop else None

    def hit(
        self,
        prompt_tokens: Tokens,
        tokens: Tokens,
        *,
        num_new: int | None = None,
        since: int = 0,
    ) -> tuple[str, str] | None:
        """Return the generated text up to the earliest stop string, and that string, if any.

        num_new: how many of the last tokens were not searched yet. The text of the others is
        known to have no stop string, so nearly all of it need not be decoded again.
        since: tokens in the text of which a stop string that ends there does not count.
        """
        if num_new is not None and not self._in_tail(prompt_tokens, tokens, num_new):
            return None
        text = self._detokenizer.text(prompt_tokens, tokens)
        before = self._detokenizer.text(prompt_tokens, tokens[:since]) if since else ""
        found = self.find(text, len(before))
        return (text[: found[0]], found[1]) if found else None

    def _in_tail(self, prompt_tokens: Tokens, tokens: Tokens, num_new: int) -> bool:
        """Whether a stop string may end in the text of the last num_new tokens."""
        width = num_new + self._longest
        while width < len(tokens):
            earlier = list(tokens[max(0, len(tokens) - width - CONTEXT_TOKENS) : -width])
            if len(earlier) < CONTEXT_TOKENS:
                earlier = [*prompt_tokens[-CONTEXT_TOKENS:], *earlier]
            if not self._detokenizer.shows_text(earlier):
                return True
            tail = self._detokenizer.text(earlier, tokens[-width:])
            if self.find(tail) is not None:
                return True
            # Special tokens and parts of a character show less than one character each.
            old = self._detokenizer.text(earlier, tokens[-width:-num_new])
            if len(old.replace(PARTIAL, "")) >= self._longest:
                return False
            width *= 2
        return True

    def _table(self, vocab_size: int) -> NDArray[np.bool_]:
        """Return may_end.

        A stop string was completed by a token if it lies within the token's text or one of its
        ends is how that text starts. A token has two texts: at the start of a text, where a space
        may be lost, and after others.
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
        ends = tuple({stop[start:] for stop in self.stops for start in range(len(stop))})
        # A token that is part of a character can complete it, and with it what the character is
        # part of. ASCII characters have no parts.
        parts = () if all(stop.isascii() for stop in self.stops) else (PARTIAL,)
        within = (*self.stops, *parts)
        for token, texts in enumerate(zip(alone, after, strict=True)):
            first, other = texts[0], texts[1].removeprefix(before)
            table[token] = (
                first.startswith(ends)
                or other.startswith(ends)
                or any(part in first or part in other for part in within)
            )
        return table

    def _is_local(self, anchor: int, before: str, after: Sequence[str]) -> bool:
        """Whether the decoder shows a token at once, whatever follows; tried on some tokens.

        One that adds the space after a word when the next token comes would complete a stop
        string with a token that has nothing to do with it.
        """
        step = max(1, len(after) // NUM_PROBES)
        again = after[anchor].removeprefix(before)
        tokens = [t for t in range(0, len(after), step) if PARTIAL not in after[t]]
        texts = self._detokenizer.decode_each([[anchor, token, anchor] for token in tokens])
        return all(
            text == after[token] + again and after[token].startswith(before)
            for token, text in zip(tokens, texts, strict=True)
        )
