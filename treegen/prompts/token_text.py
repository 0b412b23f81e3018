"""The text of single tokens, as log-probabilities name them."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from treegen.prompts.detokenize import CONTEXT_TOKENS, PARTIAL, Detokenizer


class NamedToken(NamedTuple):
    """One token of a text.

    text: its own, or its name in the vocabulary. logprob: None where none is known.
    top: the texts of the likeliest tokens in its place, each with its log-probability.
    num_characters: what it adds to the whole text.
    """

    text: str
    logprob: float | None
    top: list[tuple[str, float]]
    num_characters: int


def chat_logprobs(tokens: Iterable[NamedToken]) -> list[dict[str, Any]]:
    """Tokens as OpenAI's protocol has those of a chat, which other programs have taken over."""
    return [
        {**_told(each.text, each.logprob), "top_logprobs": [_told(*pair) for pair in each.top]}
        for each in tokens
    ]


def _told(token: str, logprob: float | None) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "replace"))}


class Text:
    """The text of tokens, whole and one by one."""

    def __init__(self, tokenizer: Any, *, shown: Collection[str] = ()) -> None:
        """Text by a tokenizer that is only used to decode. shown: special tokens that are text."""
        self.tokenizer, self._detokenizer = tokenizer, Detokenizer(tokenizer, shown=shown)

    def of(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """What tokens add to the text of those before."""
        return self._detokenizer.text(before, tokens)

    def named(
        self,
        before: Sequence[int],
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[Sequence[tuple[int, float]]] = (),
    ) -> Iterator[NamedToken]:
        """The tokens of a sample one by one, with what is recorded of each.

        before: the tokens before them. tops: (token id, logprob) pairs of each, if there are any.
        """
        context = list(before[-CONTEXT_TOKENS:])
        every = zip(tokens, logprobs, tops or [()] * len(tokens), strict=True)
        for token, logprob, top in every:
            shown = self.of(context[-CONTEXT_TOKENS:], [token])
            likeliest = [(self.token(context, each), value) for each, value in top]
            yield NamedToken(self._name(shown, token), logprob, likeliest, len(shown))
            context.append(token)

    def token(self, before: Sequence[int], token: int) -> str:
        """The text of one token; its name in the vocabulary if it shows none of its own."""
        return self._name(self.of(before[-CONTEXT_TOKENS:], [token]), token)

    def _name(self, shown: str, token: int) -> str:
        if shown and PARTIAL not in shown:
            return shown
        known = token < len(self.tokenizer)
        name = self.tokenizer.convert_ids_to_tokens(token) if known else None
        return str(name or f"<{token}>")
