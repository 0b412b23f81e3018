"""Converts errors to OpenAI's JSON, and cancels calls whose client disconnects."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from treegen.errors import BusyError, CapacityError, ContextError, InputError, StoppedError
from treegen.integrations.nodes.protocol import CONTEXT_ERROR
from treegen.integrations.server.requests import RequestError, field_of

_Result = TypeVar("_Result")
_LOG: Final = logging.getLogger("treegen.integrations.server")
_RETRY_AFTER: Final = 1  # seconds
# Bytes of one piece of an answer. A client must read a piece in time before the next is written.
# With smaller pieces a client that reads almost nothing could keep a large answer in memory for
# hours.
_PIECE_BYTES: Final = 2**20
_MAX_MESSAGE_CHARS: Final = 1_000  # characters of an error message, which may quote the request
_ARGUMENT: Final = re.compile(r"\b[a-z_]+=")
_SERVER_OPTIONS: Final = {
    "load the model with chat_template='TEMPLATE'": (
        "start the server with --chat-template TEMPLATE"
    ),
    "(max_waiting)": "(--max-waiting)",
    "(max_waiting plus max_rows)": "(--max-waiting plus --max-rows)",
}
"""Texts in the library's messages that name arguments, and the same with the server's options."""
# Separates remedies, unless it is in brackets.
_REMEDY_SEPARATOR: Final = re.compile(r"(?:, or |, )(?![^(]*\))")
# Status of a request whose client has disconnected, as in nginx.
_CLIENT_CLOSED_REQUEST: Final = 499
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    429: "rate_limit_error",
}


class StatusError(RequestError):
    """A request that cannot be served, with a status of its own.

    Attributes:
        status: The HTTP status.
        more: Further fields of the error.
    """

    def __init__(self, status: int, message: str, field: str | None = None, **more: Any) -> None:
        """Create the error.

        Args:
            status: The HTTP status.
            message: What is wrong, and what to do.
            field: The request's field at fault; None if it is not one field.
            **more: Further fields of the error.
        """
        super().__init__(message, field)
        self.status, self.more = status, more


def describe_error(error: Exception) -> dict[str, Any]:
    """Return what is wrong, in OpenAI's form. Errors that are not the client's fault are logged."""
    if isinstance(error, HTTPException):
        return _make_error(error.status_code, str(error.detail))
    if isinstance(error, StatusError):
        return {**_make_error(error.status, str(error), error.field), **error.more}
    if isinstance(error, BusyError):
        return _make_error(429, _name_options(str(error)))
    if isinstance(error, StoppedError):
        return _make_error(503, str(error))
    if isinstance(error, InputError | CapacityError):
        message = str(error) if isinstance(error, RequestError) else for_client(str(error))
        details = _make_error(400, message, field_of(error))
        is_too_long = isinstance(error, ContextError) or isinstance(error.__cause__, ContextError)
        return {**details, "type": CONTEXT_ERROR} if is_too_long else details
    _LOG.error("a request failed: %r", error)
    return _make_error(500, f"the server failed ({type(error).__name__}); see its log")


def make_error_response(error: Exception) -> Response:
    """Return the response for an error."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    details = describe_error(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, BusyError):
        headers["Retry-After"] = str(_RETRY_AFTER)
    return json_response({"error": details}, details["code"], headers)


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error as a response.

    Args:
        status: The HTTP status.
        message: What is wrong, and what to do.
        headers: Further headers. Default: none.
    """
    return json_response({"error": _make_error(status, message)}, status, headers)


def _make_error(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"message": message[:_MAX_MESSAGE_CHARS], "type": kind, "param": param, "code": status}


def for_client(message: str) -> str:
    """Return a message of the library without remedies that only the server's operator has.

    These remedies name an argument of Python, such as `images=True`. The server takes every chat
    only with a template, so its option for one is named.
    """
    problem, semicolon, advice = _name_options(message).rpartition("; ")
    if not semicolon or not _ARGUMENT.search(advice):
        return f"{problem}{semicolon}{advice}"
    remedies = [part for part in _REMEDY_SEPARATOR.split(advice) if not _ARGUMENT.search(part)]
    return f"{problem}; {', or '.join(remedies) or 'remove it'}"


def _name_options(message: str) -> str:
    for argument, option in _SERVER_OPTIONS.items():
        message = message.replace(argument, option)
    return message


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return JSON as a response.

    Args:
        value: The value.
        status: The HTTP status. Default: 200.
        headers: Further headers. Default: none.
    """
    return Response(encode_json(value), status, headers, media_type="application/json")


def stream_json(body: bytes) -> Response:
    """Stream JSON in pieces, so that the time limit for a slow client applies to each piece."""

    async def pieces() -> AsyncGenerator[bytes, None]:
        for start in range(0, len(body), _PIECE_BYTES):
            yield body[start : start + _PIECE_BYTES]

    headers = {"content-length": str(len(body))}
    return StreamingResponse(pieces(), headers=headers, media_type="application/json")


def encode_event(value: Any) -> bytes:
    """Return a server-sent event whose data is JSON."""
    return b"data: " + encode_json(value) + b"\n\n"


def encode_json(value: Any) -> bytes:
    """Return a value as JSON."""
    # ASCII only, because a text may have lone surrogates, which UTF-8 cannot encode.
    return json.dumps(value, separators=(",", ":")).encode()


async def cancel_on_disconnect(request: Request, call: Awaitable[Any]) -> Any:
    """Return the result of a call, which is cancelled when the client disconnects."""
    work = asyncio.ensure_future(call)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientDisconnect
    finally:
        for task in (work, disconnect):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def run_exclusively(
    lock: asyncio.Lock, call: Callable[[], Coroutine[Any, Any, _Result]]
) -> _Result:
    """Return the result of a call that holds a lock until it ends, also if the caller is cancelled.

    If the caller is cancelled while it waits for the lock, the call does not start.

    Args:
        lock: The lock.
        call: Returns the coroutine to run.
    """
    await lock.acquire()
    try:
        task = asyncio.create_task(call())
    except BaseException:
        lock.release()
        raise

    def end(task: asyncio.Task[_Result]) -> None:
        lock.release()
        if not task.cancelled():
            task.exception()  # so that asyncio does not report the error if the caller is gone

    task.add_done_callback(end)
    return await asyncio.shield(task)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
