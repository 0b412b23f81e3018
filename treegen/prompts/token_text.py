"""Detokenization: the text that generated tokens add after a prompt, and that of single tokens."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from treegen.prompts.token_bytes import token_bytes

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
_MIN_BATCH: Final = 64  # fewer sequences are decoded one by one: threads may take 13 ms to start


class Detokenizer:
    """Decodes tokens to the text that they add after a prompt.

    The first token of a text may lose its leading space when it is decoded alone, and bytes that
    end a character have no meaning alone. So the end of the prompt is decoded together with the
    tokens.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, visible: Collection[str] = ()
    ) -> None:
        """Create a detokenizer.

        Args:
            tokenizer: The model's tokenizer.
            visible: Special tokens that still count as text.
        """
        from tokenizers.decoders import ByteLevel

        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        # A model may have more token ids than its tokenizer. A fast tokenizer skips those.
        self._limit = None if getattr(tokenizer, "is_fast", False) else len(tokenizer)
        # This decoder shows every whole character, regardless of the bytes next to it.
        self._shows_all = isinstance(getattr(self._backend, "decoder", None), ByteLevel)
        self._hidden: frozenset[int] | None = None
        if visible:
            special = special_tokens(tokenizer, self)
            self._hidden = frozenset(id for name, id in special.items() if name not in visible)
        # Cached, because all samples of a prompt have the same text before them.
        self._decode_cached = functools.lru_cache(maxsize=4096)(self.decode)

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
        full_ids = [context + ids for context, ids in zip(contexts, generated, strict=True)]
        return [
            self._get_added_text(context, ids, text)
            for context, ids, text in zip(contexts, generated, self._decode(full_ids), strict=True)
        ]

    def _get_added_text(self, context: tuple[int, ...], ids: tuple[int, ...], text: str) -> str:
        """Return the text that the tokens `ids` add to a context; `text` is the text of both."""
        before = self._decode_cached(context)
        if text.startswith(before):
            return text[len(before) :]
        if before.endswith(PARTIAL):
            seen = self.keep_visible(context)
            for cut in range(1, MAX_CHARACTER_TOKENS + 1):
                before = self._decode_cached(seen[:-cut])
                if not before.endswith(PARTIAL) and text.startswith(before):
                    return text[len(before) :]
        # Bytes that never complete a character change how the end of the prompt decodes. In that
        # case the first generated token is a byte, which has no leading space to lose.
        return self.decode(ids)

    def decode(self, tokens: Tokens) -> str:
        """Return the text of tokens alone, without special tokens."""
        return self._decode([_ids(tokens)])[0]

    def decode_with_special(self, tokens: Tokens) -> str:
        """Return the text of tokens alone, with special tokens shown."""
        ids = [token for token in _ids(tokens) if self._limit is None or token < self._limit]
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

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
        # Skipped tokens are not bytes of the character.
        seen = {at: self.keep_visible(sequences[at]) for at in unfinished}
        for cut in range(1, MAX_CHARACTER_TOKENS):
            if not unfinished:
                break
            shorter = self.decode_each([seen[at][:-cut] for at in unfinished])
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
            if len(sequences) < _MIN_BATCH:
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
        return bool(self._decode_cached(_ids(tokens)).replace(PARTIAL, "").strip())

    def keep_visible(self, tokens: Tokens) -> tuple[int, ...]:
        """Return the tokens that the tokenizer's decoder sees; it skips the others."""
        return tuple(filter(self._is_decoded, _ids(tokens)))

    def _context(self, prompt_tokens: Tokens) -> tuple[int, ...]:
        """Return the shortest end of the prompt that determines the text after it."""
        width = CONTEXT_TOKENS
        while True:
            context = _ids(prompt_tokens[-width:])
            if width >= len(prompt_tokens) or self.shows_text(context):
                break
            width *= 4
        # A prompt may end with thousands of tokens that are skipped, such as those of images.
        return context if width == CONTEXT_TOKENS else self.keep_visible(context)

    @functools.cached_property
    def _skipped(self) -> Collection[int]:
        """The special tokens that are not text."""
        if self._hidden is not None:
            return self._hidden
        return frozenset(special_tokens(self._tokenizer, self).values())

    def _is_decoded(self, token: int) -> bool:
        """Whether the tokenizer's decoder sees a token; special and unknown tokens are skipped."""
        if self._limit is not None:
            return token < self._limit and token not in self._skipped
        return token not in self._skipped and self._backend.id_to_token(token) is not None


def _ids(tokens: Tokens) -> tuple[int, ...]:
    return tuple(tokens.tolist() if isinstance(tokens, np.ndarray) else tokens)


def special_tokens(tokenizer: PreTrainedTokenizerBase, detokenizer: Detokenizer) -> dict[str, int]:
    """Return the special tokens that decode to no text: their ids by their names."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special_ids = set(getattr(tokenizer, "all_special_ids", ()))
    ids = {str(token): id for id, token in added.items() if token.special or id in special_ids}
    texts = detokenizer.decode_each([[id] for id in ids.values()])
    return {name: id for (name, id), text in zip(ids.items(), texts, strict=True) if not text}


class NamedToken(NamedTuple):
    r"""One token of a text, or a likely alternative at its position."""

    text: str
    """The token's own text. Part of a character is shown as its bytes, such as `\xf0\x9f`; a token
    without text by its name in the vocabulary."""
    bytes: bytes
    """The bytes of its text; joined over all tokens they give the text."""
    logprob: float | None
    """None if it is not known."""
    top: tuple[NamedToken, ...] = ()
    """The most likely tokens at its position. The token itself is the last of them if it is not one
    of the requested number of most likely tokens."""
    num_characters: int = 0
    """The number of characters that it adds to the whole text."""


def chat_logprobs(tokens: Iterable[NamedToken], num_top: int) -> list[dict[str, Any]]:
    """Return tokens in the form of chat log-probabilities in OpenAI's protocol.

    As in vLLM's server, the alternatives contain the token itself, and are `num_top` with it.

    Args:
        tokens: The tokens.
        num_top: The number of alternatives of each token.
    """
    logprobs = []
    for token in tokens:
        top = token.top
        if len(top) > num_top:
            top = (*top[: num_top - 1], top[-1]) if num_top else ()
        logprobs.append(
            {**_format_token(token), "top_logprobs": [_format_token(other) for other in top]}
        )
    return logprobs


def _format_token(token: NamedToken) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}


class TokenText:
    """The text of tokens, jointly or one by one."""

    def __init__(self, tokenizer: Any, *, visible: Collection[str] = ()) -> None:
        """Create an instance.

        Args:
            tokenizer: A tokenizer that is only used to decode.
            visible: Special tokens that count as text.
        """
        self.tokenizer, self._detokenizer = tokenizer, Detokenizer(tokenizer, visible=visible)

    def of(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text that `tokens` add after the tokens `before`."""
        return self._detokenizer.text(before, tokens)

    def keep_visible(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that can show text."""
        return self._detokenizer.keep_visible(tokens)

    def iter_named_tokens(
        self,
        before: Sequence[int],
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[Sequence[tuple[int, float]]] = (),
    ) -> Iterator[NamedToken]:
        """Yield the tokens of a sample one by one, with their log-probabilities.

        Args:
            before: The tokens before the sample.
            tokens: The tokens of the sample.
            logprobs: The log-probability of each token; None where it is not known.
            tops: (token id, logprob) pairs of the most likely tokens at each position, if recorded.
        """
        context = list(before[-CONTEXT_TOKENS:])
        characters = _CharacterCounter()
        for token in context:
            characters.add(self._bytes(token), "")
        positions = zip(tokens, logprobs, tops or [()] * len(tokens), strict=True)
        for token, logprob, top in positions:
            text = self._decode_next(context, token)
            most_likely = tuple(
                NamedToken(*self._name_token(self._decode_next(context, other), other), value)
                for other, value in top
            )
            num = characters.add(self._bytes(token), text)
            named = self._name_token(text, token)
            if logprob is not None and all(other != token for other, _ in top):
                most_likely += (NamedToken(*named, logprob),)
            yield NamedToken(*named, logprob, most_likely, num)
            context.append(token)

    def token(self, before: Sequence[int], token: int) -> str:
        """Return the text of one token, in the form of `NamedToken.text`."""
        return self._name_token(self._decode_next(before, token), token)[0]

    def _decode_next(self, before: Sequence[int], token: int) -> str:
        """Return the text that a token adds after the tokens `before`."""
        data = self._bytes(token)
        if len(before) and data and not _is_partial_utf8(data):
            return data.decode()
        return self.of(before[-CONTEXT_TOKENS:], [token])  # a text may lose its first space

    def _name_token(self, added_text: str, token: int) -> tuple[str, bytes]:
        """Return the text of a token and its bytes.

        Args:
            added_text: The text that the token adds to its context.
            token: The token id.
        """
        data = self._bytes(token)
        if _is_partial_utf8(data):
            return "".join(f"\\x{byte:02x}" for byte in data), data
        text = added_text if added_text and PARTIAL not in added_text else data.decode()
        if text:
            return text, text.encode("utf-8", "replace")
        in_vocabulary = token < len(self.tokenizer)
        name = self.tokenizer.convert_ids_to_tokens(token) if in_vocabulary else None
        return str(name or f"<{token}>"), b""

    def _bytes(self, token: int) -> bytes:
        return _read_token_bytes(self.tokenizer, len(self.tokenizer)).get(token, b"")


class _CharacterCounter:
    """Counts characters whose bytes span several tokens; each counts for the token that ends it."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data: bytes, text: str) -> int:
        """Return how many characters a token adds.

        Args:
            data: Its bytes.
            text: Its text.
        """
        if _is_partial_utf8(data):
            return len(self._decoder.decode(data))
        unfinished = len(self._decoder.decode(b"", final=True))
        return unfinished + len(text)


def _is_partial_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return True
    return False


@functools.lru_cache(maxsize=4)
def _read_token_bytes(tokenizer: Any, size: int) -> Mapping[int, bytes]:
    """Return the bytes of tokens; empty if unknown.

    Args:
        tokenizer: The model's tokenizer.
        size: The length of the tokenizer, for the cache.
    """
    return token_bytes(tokenizer) or {}
