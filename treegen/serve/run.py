"""The server process: answers until a signal, then finishes what it has begun."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from socket import socket
from types import FrameType
from typing import Final

import uvicorn
from h11 import LocalProtocolError
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from treegen.async_llm import AsyncLLM
from treegen.llm import LLM
from treegen.serve.app import Server
from treegen.serve.sockets import url_of

# Longer than clients keep a connection idle. Who closes it must not be the server, because the next
# request may be on its way.
_IDLE_SECONDS: Final = 75


class _Protocol(H11Protocol):
    """Takes a client that sends rubbish after its request for one that has gone.

    uvicorn's own would try to answer both, and fail with a traceback in the log.
    """

    def send_400_response(self, msg: str) -> None:
        """Answer rubbish, if the request before it was answered to its end, and hang up."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        with suppress(LocalProtocolError):  # there was an answer, and can be no other
            super().send_400_response(msg)
        self.transport.close()


def config_of(app: Starlette, *, drain_seconds: int | None = None) -> uvicorn.Config:
    """How uvicorn is to run the server's application; see `serve`."""
    return uvicorn.Config(
        app, http=_Protocol, log_level="warning", lifespan="off", timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=drain_seconds,
    )  # fmt: skip


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
        config = config_of(server.app(), drain_seconds=drain_seconds)
        try:
            asyncio.run(_Listening(config, on_start).serve([at]))
        finally:
            served.close(drain=False)
