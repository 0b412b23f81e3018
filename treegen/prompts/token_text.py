"""The text of single tokens, as log-probabilities name them."""

from collections.abc import Sequence
from typing import Any

from treegen.prompts.detokenize import CONTEXT_TOKENS, PARTIAL, Detokenizer
from treegen.prompts.thinking import tags_of


class Text:
    """The text of tokens, whole and one by one."""

    def __init__(self, tokenizer: Any) -> None:
        """Text by a tokenizer that is only used to decode."""
        self.tokenizer, self._detokenizer = tokenizer, Detokenizer(tokenizer)

    def of(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """What tokens add to the text of those before."""
        return self._detokenizer.text(before, tokens)

    def thinking(self, text: str) -> str:
        """The text of a thinking without the tags around it."""
        tags = tags_of(self.tokenizer)
        if tags is not None:
            if (bare := text.lstrip()).startswith(tags.open):
                text = bare.removeprefix(tags.open)
            text = text.removesuffix(tags.close)
        return text.strip("\n")

    def token(self, before: Sequence[int], token: int) -> str:
        """The text of one token; its name in the vocabulary if it shows none of its own."""
        text = self.of(before[-CONTEXT_TOKENS:], [token])
        if text and PARTIAL not in text:
            return text
        known = token < len(self.tokenizer)
        name = self.tokenizer.convert_ids_to_tokens(token) if known else None
        return str(name or f"<{token}>")
