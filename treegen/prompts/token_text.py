"""The text of single tokens, as reported with log-probabilities."""

import codecs
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from treegen.prompts.detokenize import CONTEXT_TOKENS, PARTIAL, Detokenizer
from treegen.prompts.token_bytes import token_bytes


class NamedToken(NamedTuple):
    r"""One token of a text, or a likely alternative at its position."""

    text: str
    """The token's own text. Part of a character is shown as its bytes, such as `\xf0\x9f`; a token
    without text by its name in the vocabulary."""
    bytes: bytes
    """The bytes of its text; joined over all tokens they give the text."""
    logprob: float | None
    """None if it is not known."""
    top: "tuple[NamedToken, ...]" = ()
    """The likeliest tokens at its position."""
    num_characters: int = 0
    """The number of characters that it adds to the whole text."""


def chat_logprobs(tokens: Iterable[NamedToken]) -> list[dict[str, Any]]:
    """Return tokens in the form of chat log-probabilities in OpenAI's protocol."""
    return [
        {**_format_token(token), "top_logprobs": [_format_token(other) for other in token.top]}
        for token in tokens
    ]


def _format_token(token: NamedToken) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}


class TokenText:
    """The text of tokens, jointly or one by one."""

    def __init__(self, tokenizer: Any, *, shown: Collection[str] = ()) -> None:
        """Create an instance.

        Args:
            tokenizer: A tokenizer that is only used to decode.
            shown: Special tokens that count as text.
        """
        self.tokenizer, self._detokenizer = tokenizer, Detokenizer(tokenizer, shown=shown)

    def of(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text that `tokens` add after the tokens `before`."""
        return self._detokenizer.text(before, tokens)

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
            tops: (token id, logprob) pairs of the likeliest tokens at each position, if recorded.
        """
        context = list(before[-CONTEXT_TOKENS:])
        pieces = _Pieces()
        for token in context:
            pieces.add(self._bytes(token), "")
        every = zip(tokens, logprobs, tops or [()] * len(tokens), strict=True)
        for token, logprob, top in every:
            shown = self._after(context, token)
            likeliest = tuple(
                NamedToken(*self._name_token(self._after(context, other), other), value)
                for other, value in top
            )
            num = pieces.add(self._bytes(token), shown)
            yield NamedToken(*self._name_token(shown, token), logprob, likeliest, num)
            context.append(token)

    def token(self, before: Sequence[int], token: int) -> str:
        """Return the text of one token, in the form of `NamedToken.text`."""
        return self._name_token(self._after(before, token), token)[0]

    def _after(self, before: Sequence[int], token: int) -> str:
        """Return the text that a token adds after the tokens `before`."""
        data = self._bytes(token)
        if len(before) and data and not _is_piece(data):
            return data.decode()
        return self.of(before[-CONTEXT_TOKENS:], [token])  # a text may lose its first space

    def _name_token(self, shown: str, token: int) -> tuple[str, bytes]:
        """Return the text of a token and its bytes.

        Args:
            shown: The text that the token adds to its context.
            token: The token id.
        """
        data = self._bytes(token)
        if _is_piece(data):
            return "".join(f"\\x{byte:02x}" for byte in data), data
        text = shown if shown and PARTIAL not in shown else data.decode()
        if text:
            return text, text.encode("utf-8", "replace")
        in_vocabulary = token < len(self.tokenizer)
        name = self.tokenizer.convert_ids_to_tokens(token) if in_vocabulary else None
        return str(name or f"<{token}>"), b""

    def _bytes(self, token: int) -> bytes:
        return _bytes_of(self.tokenizer, len(self.tokenizer)).get(token, b"")


class _Pieces:
    """Counts characters whose bytes span several tokens; each counts for the token that ends it."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data: bytes, shown: str) -> int:
        """Return how many characters a token adds.

        Args:
            data: Its bytes.
            shown: Its text.
        """
        if _is_piece(data):
            return len(self._decoder.decode(data))
        unfinished = len(self._decoder.decode(b"", final=True))
        return unfinished + len(shown)


def _is_piece(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return True
    return False


@functools.lru_cache(maxsize=4)
def _bytes_of(tokenizer: Any, size: int) -> Mapping[int, bytes]:
    """Return the bytes of tokens; empty if unknown.

    Args:
        tokenizer: The model's tokenizer.
        size: The length of the tokenizer, for the cache.
    """
    return token_bytes(tokenizer) or {}
