"""Prompts, and text that clients append to nodes: limits, and the rendering of messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from treegen.errors import CapacityError, ContextError, InputError, StoppedError
from treegen.integrations.nodes.params import Sampling
from treegen.integrations.nodes.protocol import ExtendFields, RootFields
from treegen.integrations.server.errors import for_client
from treegen.integrations.server.nodes import Client, ServedNode
from treegen.integrations.server.requests import (
    RequestError,
    check_chat_template,
    check_no_images,
    read_message,
    read_part,
)
from treegen.llm.async_llm import AsyncLLM
from treegen.prompts.images.table import PlacedImage
from treegen.prompts.plan.plan import Request
from treegen.prompts.radix import Tokens
from treegen.prompts.token_bytes import TokenLowerBound
from treegen.prompts.tree import Message, chat_arguments
from treegen.search.live.pending import AppendedText

_CONTENTS: Final = ("text", "parts", "messages")  # fields that have the text of an extension
_MAX_GIVEN_CHARS: Final = 2**20  # characters of given text that one operation may encode


@dataclass(frozen=True, slots=True)
class RootPrompt:
    """The prompt of a request for a root."""

    field: str
    """The field that has the prompt."""
    content: Any
    """Text, token ids or messages."""
    messages: Sequence[Message]
    """The messages; empty for other prompts."""
    template: Mapping[str, Any]
    """Arguments of the chat template."""


class GivenText:
    """Checks and renders prompts, and text that clients append to nodes."""

    def __init__(self, served: AsyncLLM) -> None:
        """Create an object for the tokenizer and the context of a model."""
        self._served, self._bound = served, TokenLowerBound(served.llm.tokenizer)

    def read_root(self, fields: RootFields) -> RootPrompt:
        """Return the prompt of a request.

        Raises:
            RequestError: The request has no prompt or several, or the model reads no messages.
        """
        if (fields.prompt is None) == (fields.messages is None):
            raise RequestError("pass exactly one of prompt and messages", "prompt")
        if "chat_template" in (fields.chat_template_kwargs or {}):
            raise RequestError(
                "chat_template_kwargs must not contain chat_template; remove chat_template",
                "chat_template_kwargs",
            )
        if fields.messages is None:
            if fields.tools or fields.chat_template_kwargs:
                raise RequestError(
                    "tools and chat_template_kwargs are supported only with messages", "tools"
                )
            check_no_images(fields.prompt, self._served.llm.images)
            return RootPrompt("prompt", fields.prompt, (), {})
        check_chat_template(self._served.llm.tokenizer)
        messages = [read_message(message) for message in fields.messages]
        template = chat_arguments(fields.tools, fields.chat_template_kwargs)
        return RootPrompt("messages", messages, messages, template)

    async def encode_root(self, client: Client, prompt: RootPrompt) -> Request:
        """Return a client's prompt with its token ids and images, encoded in a thread."""
        async with client.encoding:
            with name_field_in_errors(prompt.field):
                (request,) = await self._served.encode_requests(
                    [prompt.content], chat_template_kwargs=prompt.template
                )
        return request

    @staticmethod
    def field_of(fields: ExtendFields) -> str:
        """Return the field that has the text of an extension.

        Raises:
            RequestError: The request has none or several.
        """
        names = [name for name in _CONTENTS if getattr(fields, name) is not None]
        if len(names) != 1:
            raise RequestError("pass exactly one of text, parts and messages", "text")
        return names[0]

    async def encode_extension(self, node: ServedNode, fields: ExtendFields) -> AppendedText:
        """Return the text that a request appends to a node, encoded in a thread."""
        content: Any = None
        images: Sequence[PlacedImage] = ()
        param = self.field_of(fields)
        if fields.text is not None:
            content = fields.text
            self.check(param, fields.text)
        elif fields.parts is not None:
            content = [read_part(part, "parts") for part in fields.parts]
            self.check(param, *(part.get("text", "") for part in content))
        else:
            turns = [read_message(message) for message in fields.messages or ()]
        async with node.tree.client.encoding:
            with name_field_in_errors(param):
                if param == "messages":
                    content, images = await self._served.encoder.render_turns(
                        turns, before=node.tree.messages, template=node.tree.template
                    )
                    self.check(param, content)
                return await self._served.encoder.encode_extension(node.context, content, images)

    async def encode_scored(self, node: ServedNode, texts: Sequence[str]) -> list[Tokens]:
        """Return the token ids of texts that a request scores after a node."""
        self.check("texts", *texts)
        async with node.tree.client.encoding:
            with name_field_in_errors("texts"):
                return await self._served.encoder.encode_scored(node.context, texts)

    def check(self, param: str, *texts: str) -> None:
        """Reject texts that are too long, before they are encoded.

        Args:
            param: Field of the request that has the texts.
            *texts: The texts.

        Raises:
            RequestError: They have too many characters.
            ContextError: A text is longer than the model's context.
        """
        if sum(map(len, texts)) > _MAX_GIVEN_CHARS:
            raise RequestError(
                f"one operation accepts at most {_MAX_GIVEN_CHARS:,} characters; send less text",
                param,
            )
        for text in texts:
            self.check_context(self._bound.of_text(text))

    def check_context(self, num_tokens: int) -> None:
        """Raise ContextError if that many tokens do not fit the model's context."""
        max_tokens = self._served.llm.spec.context_length
        if num_tokens > max_tokens:
            raise ContextError(
                f"the text has at least {num_tokens:,} tokens, but the model's context has only "
                f"{max_tokens:,}; send less text"
            )


@contextmanager
def name_field_in_errors(param: str) -> Iterator[None]:
    """Name the field at fault in errors of the block.

    Args:
        param: The field. For params, the errors also name the sampling parameter at fault.
    """
    try:
        yield
    except (RequestError, StoppedError):
        raise
    except (InputError, CapacityError) as error:
        if param == "params" and error.parameter in Sampling.model_fields:
            param = f"params.{error.parameter}"
        raise RequestError(for_client(str(error)), param) from error


def read_judged_text(node: ServedNode) -> tuple[str, str]:
    """Return what a verifier reads of a node: the prompt, and the text after it.

    Raises:
        RequestError: The prompt was not given as text.
    """
    if node.tree.prompt is None:
        raise RequestError(
            "the verifier needs the prompt as text, but this root was created from token ids "
            "or messages; create the root from text",
            "nodes",
        )
    return node.tree.prompt, "".join(above.own_text for above in [*node.ancestors()][-2::-1])
