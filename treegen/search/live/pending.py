"""The contexts of live nodes, and tickets for the results that searches wait for.

Text that follows contexts is encoded without the engine, so any thread may encode it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from treegen.common.spec import ModelSpec
from treegen.engine.segments.segment import LiveRequest, LiveSegment
from treegen.errors import InputError
from treegen.prompts.chat_images import render_parts
from treegen.prompts.images.table import ImageTable, PlacedImage
from treegen.prompts.plan.requests import check_scored, check_vocabulary
from treegen.prompts.radix import Tokens
from treegen.prompts.tokens import TAIL, AppendablePrompt, PromptAppender, append_text
from treegen.prompts.tree import Parts
from treegen.search.backend import PendingResults, T


@dataclass(slots=True, eq=False)
class LiveContext:
    """The context of a node."""

    segment: LiveSegment
    """The segment that ends with the node."""
    prompt: AppendablePrompt | None
    """The text or token ids of the context; None if some of it was generated."""
    released: bool = False
    """Whether it was released."""
    _ids: Tokens | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens from the start of the prompt."""
        return self.segment.stop

    @property
    def ids(self) -> Tokens:
        """Token ids that appended text has to look at: the last ones, or all of given text.

        Only the thread of the engine may read them the first time.
        """
        if self._ids is None:
            self._ids = self.tail() if self.prompt is None else self.segment.path_tokens()
        return self._ids

    def path_tokens(self) -> list[int]:
        """Return all token ids, from the start of the prompt."""
        tokens: list[int] = self.segment.path_tokens().tolist()
        return tokens

    def tail(self) -> Tokens:
        """Return the last tokens, as many as appending text has to look at."""
        parts: list[Tokens] = []
        missing = TAIL
        for segment in self.segment.path():
            parts.append(segment.tokens[-missing:])
            missing -= len(parts[-1])
            if missing <= 0:
                break
        return np.concatenate(parts[::-1])


@dataclass(slots=True, eq=False)
class LiveResults(PendingResults[T]):
    """Results that a search waits for, which requests of the scheduler compute."""

    requests: dict[LiveRequest, int] = field(default_factory=dict)
    """Unfinished requests of the scheduler, each with the index of its first result."""


@dataclass(frozen=True, slots=True, eq=False)
class AppendedText:
    """Encoded text that follows a context."""

    tokens: Tokens
    """Token ids of the text, or of everything up to its end if `prompt` is not None."""
    prompt: AppendablePrompt | None
    """Everything up to its end; None if some of it was generated."""
    images: Sequence[PlacedImage] = ()
    """The images in the text, which their table keeps until the text is a segment."""


class AppendedTextEncoder:
    """Encodes text that follows contexts.

    One thread at a time may use it. It reads only `LiveContext.ids` and `LiveContext.num_tokens`,
    so this need not be the thread of the engine if the engine's thread has read `ids` before.
    """

    def __init__(self, tokenizer: Any, spec: ModelSpec, images: ImageTable | None) -> None:
        """Create an encoder.

        Args:
            tokenizer: The model's tokenizer; no other thread may use it at the same time.
            spec: The model's sizes and limits.
            images: The model's images; None if it takes none.
        """
        self._tokenizer, self._spec, self._images = tokenizer, spec, images
        self._appender = PromptAppender(tokenizer)

    def encode_extension(
        self, context: LiveContext, content: str | Parts, images: Sequence[PlacedImage] = ()
    ) -> AppendedText:
        """Return text, or texts and images, that is appended to a context.

        Args:
            context: The context.
            content: Text, or parts with images.
            images: The images whose placeholders are in the text. Default: none.

        Raises:
            InputError: The content cannot be encoded.
        """
        prompt, table = context.prompt, self._images
        if not isinstance(content, str):
            content, images = render_parts(content, self._tokenizer, table, "extension")
        if prompt is not None and not images:
            prompt, ids = self._appender.append(prompt, context.ids, content)
        else:
            ids = append_text(self._tokenizer, context.ids[-TAIL:], content)
            if table is not None and images:
                ids = table.replace_placeholders(ids, images, "extension")
            if prompt is not None:
                prompt, ids = AppendablePrompt(None, False), np.concatenate([context.ids, ids])
        check_vocabulary("extension", ids, self._spec, table)
        return AppendedText(ids, prompt, images)

    def encode_scored(self, context: LiveContext, texts: Sequence[str]) -> list[Tokens]:
        """Return the token ids of texts that are scored after a context.

        Args:
            context: The context.
            texts: The texts.

        Raises:
            InputError: A text has no tokens, or cannot be encoded.
            CapacityError: A text is too long.
        """
        tail = context.ids[-TAIL:]
        encoded = [append_text(self._tokenizer, tail, text) for text in texts]
        for text, ids in zip(texts, encoded, strict=True):
            if not len(ids):
                raise InputError(
                    f"text {text!r:.80} has no tokens; pass a text with at least one token"
                )
            check_vocabulary("score", ids, self._spec)
            check_scored(
                f"the node with text {text!r:.80}", context.num_tokens + len(ids), self._spec
            )
        return encoded
