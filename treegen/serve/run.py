"""The server process: listens until a signal, then finishes what it has begun."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from socket import socket
from types import FrameType

import uvicorn

from treegen.async_llm import AsyncLLM
from treegen.llm import LLM
from treegen.serve.app import Server


class _Listening(uvicorn.Server):
    """Ends by the first signal once all requests are answered, by the second at once."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[str], None]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self.servers:
            host, port, *_ = self.servers[0].sockets[0].getsockname()
            self._on_start(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def serve(
    llm: LLM,
    *,
    name: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    max_waiting: int | None = None,
    max_body: int = 16 * 2**20,
    drain_seconds: int = 60,
    on_start: Callable[[str], None] = lambda at: None,
) -> None:
    """Serve a model until SIGTERM or SIGINT. Then answer what was asked, and return.

    drain_seconds: how long answering may take then; what is not done by then is dropped.
    on_start: called with the address once requests are taken.

    Raises:
        InputError: max_waiting cannot be used.
    """
    served = AsyncLLM(llm, max_waiting=max_waiting)
    try:
        server = Server(served, name=name, api_key=api_key, max_body=max_body)
        config = uvicorn.Config(
            server.app(), host=host, port=port, log_level="warning", lifespan="off",
            timeout_graceful_shutdown=drain_seconds,
        )  # fmt: skip
        asyncio.run(_Listening(config, on_start).serve())
    finally:
        served.close(drain=False)
