"""The server process: serves until a signal, then finishes the open requests."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
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
from treegen.integrations.server.limits import NodeLimits, SearchLimits
from treegen.integrations.server.search import SearchMethods
from treegen.integrations.server.sockets import prepare_to_listen, url_of
from treegen.llm import LLM
from treegen.llm.async_llm import AsyncLLM
from treegen.llm.base import BaseLLM
from treegen.model.scorers.verifier import Verifier

# Longer than clients keep a connection idle. The server must not close it first, because the next
# request may be on its way.
_IDLE_SECONDS: Final = 75
_HEAD_SECONDS: Final = 30  # for a request's headers; the application itself waits for the body
_READ_SECONDS: Final = 60  # for a client to read buffered output, a few dozen kilobytes
_ERROR_SECONDS: Final = 10  # for sending errors to clients whose requests were dropped
_WAITING_PER_ROW: Final = 4  # samples

MAX_IMAGE_PIXELS: Final = 2**25
"""Default limit on the total number of pixels of the images of one request."""


class _Protocol(H11Protocol):
    """Disconnects clients that send no request, do not read, or send malformed requests."""

    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit for the first request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Process data, and start the time limit for the rest of a request."""
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # a response is open
            if self._head_timer is not None:
                self._head_timer.cancel()
            self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

    def pause_writing(self) -> None:
        """Start the time limit for the client to read, because samples wait for it too."""
        super().pause_writing()
        self._read_timer = self.loop.call_later(_READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Resume writing, and end the time limit."""
        if self._read_timer is not None:
            self._read_timer.cancel()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Reply 400 to a malformed request once the previous response is complete, then disconnect.

        uvicorn's own method would try to send both responses, and fail with a traceback in the log.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        with suppress(LocalProtocolError):  # a response was sent already, so no other can be
            super().send_400_response(msg)
        self.transport.close()


def config_of(app: Starlette) -> uvicorn.Config:
    """Return uvicorn's configuration for the server's application; see `serve`."""
    return uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        log_level="warning",
        lifespan="off",
        timeout_keep_alive=_IDLE_SECONDS,
    )


class _GracefulServer(uvicorn.Server):
    """A server that stops gracefully at the first signal, and at once at the second.

    At the first signal it stops when open requests are answered, or after `drain_seconds`.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        served: AsyncLLM,
        drain_seconds: int,
        on_start: Callable[[str], None],
        on_stop: Callable[[int], None] = lambda num_requests: None,
    ) -> None:
        super().__init__(config)
        self._served, self._drain_seconds = served, drain_seconds
        self._on_start, self._on_stop = on_start, on_stop
        config.timeout_graceful_shutdown = drain_seconds + _ERROR_SECONDS

    async def startup(self, sockets: list[socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        for listener in sockets or ():
            prepare_to_listen(listener)
        try:
            await super().startup(sockets)
        except OSError as error:  # two servers may bind one address before either listens
            raise InputError(f"cannot listen: {error}; choose another port") from error
        if self.started and sockets:
            self._on_start(url_of(sockets[0]))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Catch SIGHUP too, which arrives when a terminal is closed, unless it is ignored."""
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
        if self.should_exit and sig != signal.SIGHUP:  # a closed terminal sends SIGHUP twice
            self._loop.call_soon_threadsafe(self._drop)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        self._on_stop(len(self.server_state.tasks))
        timer = self._loop.call_later(self._drain_seconds, self._drop)
        await super().shutdown(sockets)
        timer.cancel()

    def _drop(self) -> None:
        """Drop the open requests; their clients get an error."""
        self._loop.run_in_executor(None, partial(self._served.close, drain=False))


def serve(  # noqa: PLR0913 -- users name these settings of a server
    llm: BaseLLM,
    at: socket,
    *,
    name: str,
    api_key: str | Sequence[str] | None = None,
    max_waiting: int | None = None,
    max_body: int = 16 * 2**20,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    drain_seconds: int = 60,
    recommended: bool = True,
    nodes: NodeLimits | None = None,
    verifier: Verifier | None = None,
    searches: SearchMethods | None = None,
    search_limits: SearchLimits | None = None,
    weights_dir: Path | None = None,
    on_start: Callable[[str], None] = lambda url: None,
    on_stop: Callable[[int], None] = lambda num_requests: None,
    tool_format: str | None = None,
) -> None:
    """Serve a model until SIGTERM, SIGINT or SIGHUP, then answer the open requests and return.

    Args:
        llm: The model.
        at: Socket to listen on.
        name: Name of the model in requests.
        api_key: Keys; each request must have one of them. None requires none.
        max_waiting: Maximum number of waiting samples, as for `AsyncLLM`; requests above it get
            status 429. Default: four times the LLM's max_rows.
        max_body: Maximum size of a request body in bytes.
        max_image_pixels: Maximum total number of pixels of the images of one request.
        drain_seconds: Time for answering open requests after the signal; the rest is dropped.
        recommended: Whether sampling parameters that a request omits come from the checkpoint's
            generation_config.json.
        nodes: Limits on nodes. Default: those of `NodeLimits`.
        verifier: Computes rewards of nodes. Default: none.
        searches: Prepares searches of chats. Default: there are no searches.
        search_limits: Limits on searches. Default: those of `SearchLimits`.
        weights_dir: Folder of checkpoints that clients may load in place of the weights, which
            needs a key. Default: they may load none.
        on_start: Called with the URL once requests are accepted.
        on_stop: Called after the signal with the number of open requests.
        tool_format: As for `AsyncLLM`.

    Raises:
        InputError: `llm` is not an LLM, `max_waiting` cannot be used, or another program listens
            there.
    """
    limits = nodes or NodeLimits()
    has_nodes = limits.max_nodes > 0
    if max_waiting is None and isinstance(llm, LLM):
        max_waiting = _WAITING_PER_ROW * llm.max_rows
    with AsyncLLM(
        llm,
        max_waiting=max_waiting,
        tool_format=tool_format,
        max_image_pixels=max_image_pixels,
        nodes=has_nodes or searches is not None,
    ) as served:
        default_params = llm.spec.take_recommended() if recommended else {}
        server = Server(
            served,
            name=name,
            api_key=api_key,
            max_body=max_body,
            default_params=default_params,
            nodes=limits if has_nodes else None,
            verifier=verifier,
            searches=searches,
            search_limits=search_limits,
            weights_dir=weights_dir,
        )
        config = config_of(server.app())
        listening = _GracefulServer(config, served, drain_seconds, on_start, on_stop)
        try:
            asyncio.run(listening.serve([at]))
        finally:
            served.close(drain=False)
            server.close()
