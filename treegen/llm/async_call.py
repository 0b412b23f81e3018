"""One call of an AsyncLLM, passed from the encoding threads to the engine thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from treegen.common.params import SamplingParams
from treegen.prompts.tree import Message

if TYPE_CHECKING:
    from treegen.prompts.plan.plan import Request
    from treegen.prompts.radix import Tokens

Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(slots=True, eq=False)
class AsyncCall:
    """One call: prompts with the same parameters, and their state.

    params: sampling parameters; None only scores the prompts.
    streams: whether tokens are handed out as they are drawn.
    loop: the caller's event loop.
    rows: rows that count towards the limit of waiting samples; 0 once no caller waits.
    due: number of results that the engine has not handed out.
    first: with a seed, index of the first sample to draw.
    top: number of likeliest tokens to report per token, where prompts are only scored.
    prompts, requests: token ids of the prompts, and their requests, once they are encoded.
    queue: batches of (index of the prompt, item), or an error, for the caller.
    numbers: numbers of its requests in the run.
    is_over: whether the engine has finished or dropped the call.
    """

    params: SamplingParams | None
    streams: bool
    loop: asyncio.AbstractEventLoop
    rows: int
    due: int
    first: int = 0
    top: int = 0
    prompts: list[Tokens] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    queue: asyncio.Queue[list[tuple[int, Any]] | Exception] = field(default_factory=asyncio.Queue)
    numbers: list[int] = field(default_factory=list)
    is_over: bool = False
