"""The server process: answers until a signal, then finishes what it has begun."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from socket import socket
from types import FrameType

import uvicorn

from treegen.async_llm import AsyncLLM
from treegen.llm import LLM
from treegen.serve.app import Server
from treegen.serve.sockets import url_of


class _Listening(uvicorn.Server):
    """Ends by the first signal once all requests are answered, by the second at once."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[str], None]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            self._on_start(url_of(sockets[0]))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def serve(
    llm: LLM,
    at: socket,
    *,
    name: str,
    api_key: str | None = None,
    max_waiting: int | None = None,
    max_body: int = 16 * 2**20,
    drain_seconds: int = 60,
    on_start: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve a model until SIGTERM or SIGINT. Then answer what was asked, and return.

    at: where to listen.
    drain_seconds: how long answering may take after the signal; the rest is dropped.
    on_start: called with the URL once requests are taken.

    Raises:
        InputError: max_waiting cannot be used.
    """
    with AsyncLLM(llm, max_waiting=max_waiting) as served:
        server = Server(served, name=name, api_key=api_key, max_body=max_body)
        config = uvicorn.Config(
            server.app(), log_level="warning", lifespan="off",
            timeout_graceful_shutdown=drain_seconds,
        )  # fmt: skip
        try:
            asyncio.run(_Listening(config, on_start).serve([at]))
        finally:
            served.close(drain=False)
