"""Calls of an AsyncLLM, passed from its callers to the engine thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from treegen.common.params import SamplingParams
from treegen.prompts.tree import Message

if TYPE_CHECKING:
    from treegen.prompts.plan.plan import Request
    from treegen.prompts.radix import Tokens
    from treegen.search.live.backend import LiveBackend
    from treegen.search.session import Started

Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(slots=True, eq=False)
class AsyncCall:
    """One call: prompts with the same parameters, and their state."""

    params: SamplingParams | None
    """Sampling parameters; None only scores the prompts."""
    streams: bool
    """Whether tokens are handed out as they are drawn."""
    loop: asyncio.AbstractEventLoop
    """The caller's event loop."""
    rows: int
    """Rows that count towards the limit of waiting samples; 0 once no caller waits."""
    due: int
    """Number of results that the engine has not handed out."""
    first: int = 0
    """With a seed, index of the first sample to draw."""
    top: int = 0
    """Number of likeliest tokens to report per token, where prompts are only scored."""
    prompts: list[Tokens] = field(default_factory=list)
    """Token ids of the prompts, once they are encoded."""
    requests: list[Request] = field(default_factory=list)
    """Requests of the prompts, once they are encoded."""
    queue: asyncio.Queue[list[tuple[int, Any]] | Exception] = field(default_factory=asyncio.Queue)
    """Batches of (index of the prompt, item), or an error, for the caller."""
    numbers: list[int] = field(default_factory=list)
    """Numbers of its requests in the run."""
    is_over: bool = False
    """Whether the engine has finished or dropped the call."""


@dataclass(slots=True, eq=False)
class NodeCall:
    """A coroutine that uses nodes of searches, and its state."""

    begin: Callable[[LiveBackend], Coroutine[Any, Any, Any]]
    """Makes the coroutine, which awaits samples and scores of the backend."""
    future: asyncio.Future[Any]
    """The caller waits for it; gets the result."""
    rows: int
    """Rows that count towards the limit of waiting samples; 0 once no caller waits."""
    discard: Callable[[Any], object]
    """Frees a result that no caller gets; called in the engine thread."""
    started: Started[Any] | None = None
    """Its state in the engine thread, once it has started."""
    is_over: bool = False
    """Whether the engine has finished or dropped the call."""
