"""The server process: answers until a signal, then finishes what it has begun."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from socket import socket
from threading import current_thread, main_thread
from types import FrameType
from typing import Final

import uvicorn
from h11 import LocalProtocolError
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from treegen.errors import InputError
from treegen.integrations.server.app import Server
from treegen.integrations.server.sockets import prepare_to_listen, url_of
from treegen.llm.async_llm import AsyncLLM
from treegen.llm.base import BaseLLM

# Longer than clients keep a connection idle. Who closes it must not be the server, because the next
# request may be on its way.
_IDLE_SECONDS: Final = 75
_HEAD_SECONDS: Final = 30  # of a request's first lines; the application itself waits for its body
_READ_SECONDS: Final = 60  # for a client to read what waits for it, a few dozen kilobytes
_TOLD_SECONDS: Final = 10  # for telling clients that they are not answered any more

MAX_IMAGE_PIXELS: Final = 2**25
"""Pixels that the images of one request may have together, unless the server is told otherwise."""


class _Protocol(H11Protocol):
    """Hangs up on clients that do not send their requests, do not read, or send rubbish."""

    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, but not for ever."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Read on, and wait for the rest of a request, but not for ever."""
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # it is being answered
            if self._late is not None:
                self._late.cancel()
            self._late = None
        elif self._late is None:
            self._late = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

    def pause_writing(self) -> None:
        """Wait for the client to read, but not for ever: samples wait for it too."""
        super().pause_writing()
        self._unread = self.loop.call_later(_READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Write on."""
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer rubbish, if the request before it was answered to its end, and hang up.

        uvicorn's own would try to answer both, and fail with a traceback in the log.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        with suppress(LocalProtocolError):  # there was an answer, and can be no other
            super().send_400_response(msg)
        self.transport.close()


def config_of(app: Starlette) -> uvicorn.Config:
    """How uvicorn is to run the server's application; see `serve`."""
    return uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        log_level="warning",
        lifespan="off",
        timeout_keep_alive=_IDLE_SECONDS,
    )


class _GracefulServer(uvicorn.Server):
    """Ends by the first signal once requests are answered, or in time; by the second at once."""

    def __init__(
        self,
        config: uvicorn.Config,
        served: AsyncLLM,
        drain_seconds: int,
        on_start: Callable[[str], None],
    ) -> None:
        super().__init__(config)
        self._served, self._drain_seconds, self._on_start = served, drain_seconds, on_start
        config.timeout_graceful_shutdown = drain_seconds + _TOLD_SECONDS

    async def startup(self, sockets: list[socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        for each in sockets or ():
            prepare_to_listen(each)
        try:
            await super().startup(sockets)
        except OSError as error:  # two may have bound one address before either listened
            raise InputError(f"cannot listen: {error}; choose another port") from error
        if self.started and sockets:
            self._on_start(url_of(sockets[0]))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Catch SIGHUP too, which comes when a terminal is closed, unless it is ignored."""
        with super().capture_signals():
            before = signal.getsignal(signal.SIGHUP)
            if before in (None, signal.SIG_IGN) or current_thread() is not main_thread():
                yield
                return
            signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig != signal.SIGHUP:  # a closed terminal sends two
            self._loop.call_soon_threadsafe(self._drop)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        timer = self._loop.call_later(self._drain_seconds, self._drop)
        await super().shutdown(sockets)
        timer.cancel()

    def _drop(self) -> None:
        """End what is under way; who asked for it is told so."""
        self._loop.run_in_executor(None, partial(self._served.close, drain=False))


def serve(
    llm: BaseLLM,
    at: socket,
    *,
    name: str,
    api_key: str | None = None,
    max_waiting: int | None = None,
    max_body: int = 16 * 2**20,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    drain_seconds: int = 60,
    recommended: bool = True,
    tool_format: str | None = None,
    on_start: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve a model until SIGTERM, SIGINT or SIGHUP. Then answer what was asked, and return.

    Args:
        at: Where to listen.
        max_image_pixels: Pixels that the images of one request may have together.
        drain_seconds: How long answering may take after the signal; the rest is dropped.
        recommended: Requests that do not give a sampling parameter get what the checkpoint
            recommends.
        tool_format: How the model writes tool calls, in place of what its chat template tells.
        on_start: Called with the URL once requests are taken.

    Raises:
        InputError: llm is no LLM, max_waiting cannot be used, or another program listens there.
    """
    with AsyncLLM(
        llm,
        max_waiting=max_waiting,
        tool_format=tool_format,
        max_image_pixels=max_image_pixels,
    ) as served:
        usual = llm.spec.take_recommended() if recommended else {}
        server = Server(served, name=name, api_key=api_key, max_body=max_body, usual=usual)
        listening = _GracefulServer(config_of(server.app()), served, drain_seconds, on_start)
        try:
            asyncio.run(listening.serve([at]))
        finally:
            served.close(drain=False)
