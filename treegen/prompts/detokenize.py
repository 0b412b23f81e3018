"""Detokenization: the text that generated tokens add after a prompt."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    Tokens = Sequence[int] | NDArray[np.int32] | NDArray[np.int64]

PARTIAL: Final = "\ufffd"
"""The replacement character, to which invalid or incomplete bytes decode."""
MAX_CHARACTER_TOKENS: Final = 4
CONTEXT_TOKENS: Final = 8
"""Prompt tokens that are decoded together with generated ones, if they show any text."""
NUM_PROBES: Final = 256
_MANY: Final = 64  # sequences worth waking the tokenizer's threads for, which may take 13 ms


class Detokenizer:
    """Decodes tokens to the text that they add after a prompt.

    The first token of a text may lose its leading space when it is decoded alone, and bytes that
    end a character have no meaning alone. So the end of the prompt is decoded together with the
    tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, shown: Collection[str] = ()) -> None:
        """Create a detokenizer.

        Args:
            tokenizer: The model's tokenizer.
            shown: Special tokens that still count as text.
        """
        from tokenizers.decoders import ByteLevel

        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        # A model may have more token ids than its tokenizer. A fast tokenizer skips those.
        self._limit = None if getattr(tokenizer, "is_fast", False) else len(tokenizer)
        # This decoder shows every whole character, regardless of the bytes next to it.
        self._shows_all = isinstance(getattr(self._backend, "decoder", None), ByteLevel)
        self._hidden: frozenset[int] | None = None
        if shown:
            special = special_tokens(tokenizer, self)
            self._hidden = frozenset(id for name, id in special.items() if name not in shown)
        # Cached, because all samples of a prompt have the same text before them.
        self._shown = functools.lru_cache(maxsize=4096)(self.decode)

    def text(self, prompt_tokens: Tokens, tokens: Tokens) -> str:
        """Return the text that tokens add to the prompt's text, without special tokens.

        A character that the prompt leaves unfinished counts as added if the tokens finish it.
        """
        return self.texts([prompt_tokens], [tokens])[0]

    def texts(self, prompts: Sequence[Tokens], samples: Sequence[Tokens]) -> list[str]:
        """Return the text that each sample's tokens add to its prompt's text, in one batch."""
        # All samples of a prompt come with the same prompt object.
        context_of = {
            key: self._context(prompt) for key, prompt in {id(p): p for p in prompts}.items()
        }
        contexts = [context_of[id(prompt)] for prompt in prompts]
        generated = [_ids(tokens) for tokens in samples]
        wholes = [context + ids for context, ids in zip(contexts, generated, strict=True)]
        return [
            self._get_added_text(context, ids, whole)
            for context, ids, whole in zip(contexts, generated, self._decode(wholes), strict=True)
        ]

    def _get_added_text(self, context: tuple[int, ...], ids: tuple[int, ...], whole: str) -> str:
        """Return the text that the tokens `ids` add to a context; `whole` is the text of both."""
        before = self._shown(context)
        if whole.startswith(before):
            return whole[len(before) :]
        if before.endswith(PARTIAL):
            for cut in range(1, MAX_CHARACTER_TOKENS + 1):
                before = self._shown(context[:-cut])
                if not before.endswith(PARTIAL) and whole.startswith(before):
                    return whole[len(before) :]
        # Bytes that never complete a character change how the end of the prompt decodes. In that
        # case the first generated token is a byte, which has no leading space to lose.
        return self.decode(ids)

    def decode(self, tokens: Tokens) -> str:
        """Return the text of tokens alone, without special tokens."""
        return self._decode([_ids(tokens)])[0]

    def decode_with_special(self, tokens: Tokens) -> str:
        """Return the text of tokens alone, with special tokens shown."""
        ids = [token for token in _ids(tokens) if self._limit is None or token < self._limit]
        shown: str = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return shown

    def _decode(self, sequences: Sequence[tuple[int, ...]]) -> list[str]:
        """Return the text of each sequence of tokens, with all whole characters shown.

        Some decoders show consecutive bytes all together or not at all. An unfinished character at
        the end would then hide the whole characters before it, so the end is decoded separately. (A
        character before it that is itself U+FFFD stays hidden.)
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
        """Return the tokenizer's text of each sequence of tokens."""
        skip = self._hidden is None
        if self._hidden is not None:
            sequences = [[id for id in ids if id not in self._hidden] for ids in sequences]
        if self._limit is None:
            if len(sequences) < _MANY:
                return [self._backend.decode(ids, skip_special_tokens=skip) for ids in sequences]
            texts: list[str] = self._backend.decode_batch(sequences, skip_special_tokens=skip)
            return texts
        in_vocabulary = [[token for token in tokens if token < self._limit] for tokens in sequences]
        return [
            self._tokenizer.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            for ids in in_vocabulary
        ]

    def shows_text(self, tokens: Tokens) -> bool:
        """Whether the tokens show text, wherever they start within a text.

        One visible character is enough: an unfinished character at their start has ended before it.
        """
        return bool(self._shown(_ids(tokens)).replace(PARTIAL, "").strip())

    def _context(self, prompt_tokens: Tokens) -> tuple[int, ...]:
        """Return the shortest end of the prompt that determines the text after it."""
        width = CONTEXT_TOKENS
        while True:
            context = _ids(prompt_tokens[-width:])
            if width >= len(prompt_tokens) or self.shows_text(context):
                return context
            width *= 4


def _ids(tokens: Tokens) -> tuple[int, ...]:
    return tuple(tokens.tolist() if isinstance(tokens, np.ndarray) else tokens)


def special_tokens(tokenizer: PreTrainedTokenizerBase, detokenizer: Detokenizer) -> dict[str, int]:
    """Return the special tokens that decode to no text: their ids by their names."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    also = set(getattr(tokenizer, "all_special_ids", ()))
    ids = {str(token): id for id, token in added.items() if token.special or id in also}
    shown = detokenizer.decode_each([[id] for id in ids.values()])
    return {name: id for (name, id), text in zip(ids.items(), shown, strict=True) if not text}
