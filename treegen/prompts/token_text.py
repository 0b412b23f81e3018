"""The text of single tokens, as log-probabilities name them."""

import codecs
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from treegen.prompts.detokenize import CONTEXT_TOKENS, PARTIAL, Detokenizer
from treegen.prompts.token_bytes import token_bytes


class NamedToken(NamedTuple):
    """One token of a text, or one that was likely in its place.

    text: its own. A piece of a character is named by its bytes, as `\\xf0\\x9f`; a token without
    text by its name in the vocabulary.
    bytes: those of its text, so that the bytes of all tokens joined are the text.
    logprob: None where none is known.
    top: the likeliest tokens in its place.
    num_characters: what it adds to the whole text.
    """

    text: str
    bytes: bytes
    logprob: float | None
    top: "tuple[NamedToken, ...]" = ()
    num_characters: int = 0


def chat_logprobs(tokens: Iterable[NamedToken]) -> list[dict[str, Any]]:
    """Tokens as OpenAI's protocol has those of a chat, which other programs have taken over."""
    return [
        {**_format_token(each), "top_logprobs": [_format_token(other) for other in each.top]}
        for each in tokens
    ]


def _format_token(token: NamedToken) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}


class TokenText:
    """The text of tokens, whole and one by one."""

    def __init__(self, tokenizer: Any, *, shown: Collection[str] = ()) -> None:
        """Text by a tokenizer that is only used to decode. shown: special tokens that are text."""
        self.tokenizer, self._detokenizer = tokenizer, Detokenizer(tokenizer, shown=shown)

    def of(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """What tokens add to the text of those before."""
        return self._detokenizer.text(before, tokens)

    def iter_named_tokens(
        self,
        before: Sequence[int],
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[Sequence[tuple[int, float]]] = (),
    ) -> Iterator[NamedToken]:
        """The tokens of a sample one by one, with what is recorded of each.

        Args:
            before: The tokens before them.
            tops: (token id, logprob) pairs of each, if there are any.
        """
        context = list(before[-CONTEXT_TOKENS:])
        pieces = _Pieces()
        for token in context:
            pieces.add(self._bytes(token), "")
        every = zip(tokens, logprobs, tops or [()] * len(tokens), strict=True)
        for token, logprob, top in every:
            shown = self._after(context, token)
            likeliest = tuple(
                NamedToken(*self._name_token(self._after(context, each), each), value)
                for each, value in top
            )
            num = pieces.add(self._bytes(token), shown)
            yield NamedToken(*self._name_token(shown, token), logprob, likeliest, num)
            context.append(token)

    def token(self, before: Sequence[int], token: int) -> str:
        """Return the text of one token, as `NamedToken` has it."""
        return self._name_token(self._after(before, token), token)[0]

    def _after(self, before: Sequence[int], token: int) -> str:
        """Return what a token adds to the text of those before."""
        own = self._bytes(token)
        if len(before) and own and not _is_piece(own):
            return own.decode()
        return self.of(before[-CONTEXT_TOKENS:], [token])  # a text may lose its first space

    def _name_token(self, shown: str, token: int) -> tuple[str, bytes]:
        """Return the text of a token and its bytes. shown: what it adds to the text before it."""
        own = self._bytes(token)
        if _is_piece(own):
            return "".join(f"\\x{byte:02x}" for byte in own), own
        text = shown if shown and PARTIAL not in shown else own.decode()
        if text:
            return text, text.encode("utf-8", "replace")
        known = token < len(self.tokenizer)
        name = self.tokenizer.convert_ids_to_tokens(token) if known else None
        return str(name or f"<{token}>"), b""

    def _bytes(self, token: int) -> bytes:
        return _bytes_of(self.tokenizer, len(self.tokenizer)).get(token, b"")


class _Pieces:
    """Counts characters whose bytes come in pieces: each counts for the token that ends it."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, own: bytes, shown: str) -> int:
        """Return how many characters a token adds. own: its bytes. shown: its text."""
        if _is_piece(own):
            return len(self._decoder.decode(own))
        unfinished = len(self._decoder.decode(b"", final=True))
        return unfinished + len(shown)


def _is_piece(own: bytes) -> bool:
    try:
        own.decode()
    except UnicodeDecodeError:
        return True
    return False


@functools.lru_cache(maxsize=4)
def _bytes_of(tokenizer: Any, size: int) -> Mapping[int, bytes]:
    """The bytes of tokens; none if they are not known. size: the length of the tokenizer."""
    return token_bytes(tokenizer) or {}
