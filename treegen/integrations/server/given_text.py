"""Text that clients append to nodes: its limits, and the rendering of messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from treegen.errors import ContextError
from treegen.integrations.server.node_types import ExtendFields
from treegen.integrations.server.nodes import ServedNode
from treegen.integrations.server.requests import RequestError, read_message, read_part
from treegen.llm.async_llm import AsyncLLM
from treegen.prompts.token_bounds import TokenLowerBound
from treegen.prompts.tree import Parts
from treegen.search.live.backend import LiveBackend
from treegen.search.live.pending import LiveContext

_MOST_GIVEN: Final = 2**20  # characters of given text that one operation may encode


class GivenText:
    """Checks and renders text that clients append to nodes."""

    def __init__(self, served: AsyncLLM) -> None:
        """Create an object for the tokenizer and the context of a model."""
        self._served, self._bound = served, TokenLowerBound(served.llm.tokenizer)

    async def prepare_extension(
        self, node: ServedNode, ask: ExtendFields
    ) -> Callable[[LiveBackend], LiveContext]:
        """Return a function that extends a node; render messages and decode images before."""
        if ask.text is not None:
            self.check("text", ask.text)
            text = ask.text
            return lambda backend: backend.extend(node.context, text)
        if ask.parts is not None:
            parts: Parts = [read_part(part) for part in ask.parts]
            self.check("parts", *(part.get("text", "") for part in parts))
            await self._served.open_images(parts)
            return lambda backend: backend.extend(node.context, parts)
        turns = [read_message(message) for message in ask.messages or ()]
        rendered, images = await self._served.render_turns(
            turns, before=node.tree.messages, template=node.tree.template
        )
        self.check("messages", rendered)
        return lambda backend: backend.extend(node.context, rendered, images)

    def check(self, param: str, *texts: str) -> None:
        """Reject texts that are too long, before they are encoded.

        Args:
            param: Field of the request that has the texts.
            *texts: The texts.

        Raises:
            RequestError: They have too many characters.
            ContextError: A text is longer than the model's context.
        """
        if sum(map(len, texts)) > _MOST_GIVEN:
            raise RequestError(
                f"one operation takes at most {_MOST_GIVEN:,} characters; give less", param
            )
        for text in texts:
            self.check_context(self._bound.of_text(text))

    def check_context(self, num_tokens: int) -> None:
        """Raise ContextError if that many tokens do not fit the model's context."""
        most = self._served.llm.spec.context_length
        if num_tokens > most:
            raise ContextError(
                f"the text up to there has at least {num_tokens:,} tokens, and the model's context "
                f"{most:,}; give less"
            )
