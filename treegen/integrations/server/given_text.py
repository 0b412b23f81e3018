"""Text that clients append to nodes: its limits, and the rendering of messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from treegen.errors import CapacityError, ContextError, InputError, StoppedError
from treegen.integrations.server.errors import for_client
from treegen.integrations.server.node_types import ExtendFields
from treegen.integrations.server.nodes import ServedNode
from treegen.integrations.server.requests import RequestError, read_message, read_part
from treegen.llm.async_llm import AsyncLLM
from treegen.prompts.images.table import PlacedImage
from treegen.prompts.radix import Tokens
from treegen.prompts.token_bytes import TokenLowerBound
from treegen.search.live.appended import AppendedText

_MOST_GIVEN: Final = 2**20  # characters of given text that one operation may encode


class GivenText:
    """Checks and renders text that clients append to nodes."""

    def __init__(self, served: AsyncLLM) -> None:
        """Create an object for the tokenizer and the context of a model."""
        self._served, self._bound = served, TokenLowerBound(served.llm.tokenizer)

    async def encode_extension(self, node: ServedNode, ask: ExtendFields) -> AppendedText:
        """Return the text that a request appends to a node, encoded in a thread."""
        content: Any = None
        images: Sequence[PlacedImage] = ()
        if ask.text is not None:
            param, content = "text", ask.text
            self.check(param, ask.text)
        elif ask.parts is not None:
            param, content = "parts", [read_part(part) for part in ask.parts]
            self.check(param, *(part.get("text", "") for part in content))
        else:
            param = "messages"
            turns = [read_message(message) for message in ask.messages or ()]
        async with node.tree.client.encoding:
            with blaming(param):
                if param == "messages":
                    content, images = await self._served.render_turns(
                        turns, before=node.tree.messages, template=node.tree.template
                    )
                    self.check(param, content)
                return await self._served.encode_extension(node.context, content, images)

    async def encode_scored(self, node: ServedNode, texts: Sequence[str]) -> list[Tokens]:
        """Return the token ids of texts that a request scores after a node."""
        self.check("texts", *texts)
        async with node.tree.client.encoding:
            with blaming("texts"):
                return await self._served.encode_scored(node.context, texts)

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


@contextmanager
def blaming(param: str) -> Iterator[None]:
    """Name the field that has the text in errors of the block about the text.

    Args:
        param: The field.
    """
    try:
        yield
    except (RequestError, StoppedError):
        raise
    except (InputError, CapacityError) as error:
        raise RequestError(for_client(str(error)), param) from error
