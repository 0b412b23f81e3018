"""One call of an AsyncLLM, which the threads hand on to each other."""

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
    """One call: some prompts with the same parameters, and what comes of them.

    params: how they are sampled; None only scores them.
    streams: whether tokens are handed out as they come.
    first: samples of a seed that are left out.
    top: how many likeliest tokens to report where they are only scored.
    rows: what it counts against the samples that may wait; 0 once nobody waits for it.
    due: results that the engine has not handed out.
    requests, prompts: the prompts encoded, and their token ids, once they are.
    numbers: of its requests in the run.
    is_over: whether the engine has done with it.
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
