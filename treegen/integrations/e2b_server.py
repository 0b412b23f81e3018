"""Requests to a server with E2B's HTTP interface, and to the sandboxes that it runs."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from treegen.errors import InputError, TreegenError, WorldError, require_extra

with require_extra("E2B needs httpx2", "client"):
    import httpx2

ENVD_PORT: Final = 49983
"""The port of the process in a sandbox that runs commands and serves files."""
_BUSY: Final = (429, 503)
_ATTEMPTS: Final = 5
_FIRST_WAIT: Final = 0.5  # seconds
_REQUEST_SECONDS: Final = 60.0
_MAX_FRAME: Final = 1 << 24
_MAX_OUTPUT: Final = 1 << 20  # bytes of a command's output
_GRACE_SECONDS: Final = 10.0  # for the sandbox to end a command whose time is over
_END_OF_STREAM: Final = 2
_DEADLINE: Final = "deadline_exceeded"


@dataclass(frozen=True, slots=True)
class EndedProcess:
    """What a process in a sandbox printed, and how it ended."""

    stdout: str
    stderr: str
    status: int
    """Its exit status; -1 if a signal ended it."""
    failure: str
    """The limit that it reached; "" if none."""


class MissingError(TreegenError):
    """The server has no such sandbox, template or snapshot."""


class E2BServer:
    """Connections to one server. One event loop uses it.

    Raises:
        InputError: There is no key.
    """

    def __init__(self) -> None:
        key = os.environ.get("E2B_API_KEY")
        if not key:
            raise InputError("set the environment variable E2B_API_KEY to the key of the server")
        self._domain = os.environ.get("E2B_DOMAIN") or "e2b.app"
        self._api_url = os.environ.get("E2B_API_URL") or f"https://api.{self._domain}"
        self._sandbox_url = os.environ.get("E2B_SANDBOX_URL")
        self._key = key
        self._tokens: set[str] = set()
        self._client: httpx2.AsyncClient | None = None

    def url_of(self, sandbox: Mapping[str, Any]) -> str:
        """Return the address of a sandbox, as the server has answered it."""
        if self._sandbox_url:
            return self._sandbox_url.rstrip("/")
        return f"https://{ENVD_PORT}-{sandbox['sandboxID']}.{sandbox.get('domain') or self._domain}"

    def headers_of(self, sandbox: Mapping[str, Any]) -> dict[str, str]:
        """Return the headers that requests to a sandbox need."""
        headers = {"E2b-Sandbox-Id": sandbox["sandboxID"], "E2b-Sandbox-Port": str(ENVD_PORT)}
        if token := sandbox.get("envdAccessToken"):
            headers["X-Access-Token"] = token
            self._tokens.add(token)
        return headers

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request to the server, and return the JSON of its answer.

        If the server is busy or cannot be reached, the request is repeated after growing times.

        Args:
            method: HTTP method.
            path: Path and query.
            body: JSON; None for a request without a body.

        Raises:
            MissingError: The server does not have what the path names.
            WorldError: The server fails, or rejects the request.
        """
        url = f"{self._api_url.rstrip('/')}{path}"
        content = None if body is None else json.dumps(body).encode()
        headers = {"X-API-KEY": self._key, "Content-Type": "application/json"}
        wait = _FIRST_WAIT
        for attempt in range(_ATTEMPTS):
            is_last = attempt == _ATTEMPTS - 1
            try:
                response = await self.send(method, url, content=content, headers=headers)
            except _UnreachableError:
                if is_last:
                    raise
            else:
                if response.status_code == 404:
                    raise MissingError(self.message_of(response))
                if response.status_code < 300:
                    return _json(response) if response.content else None
                if response.status_code not in _BUSY or is_last:
                    raise self.failure(response)
            await asyncio.sleep(wait * random.uniform(0.5, 1))
            wait *= 2

    async def send(
        self, method: str, url: str, *, content: bytes | None, headers: Mapping[str, str]
    ) -> httpx2.Response:
        """Send one request, and return the answer, whatever its status is.

        Args:
            method: HTTP method.
            url: The address.
            content: The body.
            headers: The headers.

        Raises:
            WorldError: There is no answer.
        """
        try:
            return await self._connect().request(method, url, content=content, headers=headers)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise _UnreachableError(
                f"{self._name(url)} cannot be reached ({type(error).__name__}); check E2B_API_URL, "
                "E2B_SANDBOX_URL and the network"
            ) from None
        except httpx2.HTTPError as error:
            raise WorldError(
                f"{self._name(url)} does not answer ({type(error).__name__}); run the search again"
            ) from None

    async def run_process(
        self, url: str, process: Mapping[str, Any], headers: Mapping[str, str], seconds: float
    ) -> EndedProcess:
        """Run a process in a sandbox.

        Args:
            url: Address of the sandbox.
            process: Command, arguments and working directory.
            headers: Headers of the sandbox.
            seconds: Seconds after which the sandbox ends the process.

        Raises:
            WorldError: The sandbox fails.
        """
        output = {"stdout": bytearray(), "stderr": bytearray()}
        end: dict[str, Any] | None = None
        failure = ""
        started = time.monotonic()
        try:
            async with (
                asyncio.timeout(seconds + _GRACE_SECONDS),
                aclosing(self._start_process(url, process, headers, seconds)) as events,
            ):
                async for event in events:
                    for name, data in event.get("data", {}).items():
                        output[name] += base64.b64decode(data)
                    end = event.get("end", end)
                    if sum(map(len, output.values())) > _MAX_OUTPUT:
                        failure = f"more than {_MAX_OUTPUT:,} bytes of output"
                        break
        except TimeoutError:
            failure = f"more than {seconds:g} s"
        if end is None and not failure:
            raise WorldError("a sandbox does not say how its command ended; check its version")
        status = -1  # killed; JSON leaves out numbers that are 0 and values that are false
        if end is not None:
            is_killed = not end.get("exited", False)
            status = end.get("exitCode", -1 if is_killed else 0)
            if is_killed and not failure and time.monotonic() - started >= seconds:
                failure = f"more than {seconds:g} s"
        stdout, stderr = (bytes(data).decode("utf-8", "replace") for data in output.values())
        return EndedProcess(stdout, stderr, status, failure)

    async def _start_process(
        self, url: str, process: Mapping[str, Any], headers: Mapping[str, str], seconds: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Start a process, and yield its events: start, data and end; see `run_process`.

        The answer is a stream of the Connect protocol: envelopes of one byte of flags, four bytes
        of length, and JSON.
        """
        body = json.dumps({"process": process, "stdin": False}).encode()
        headers = {
            **headers,
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Connect-Timeout-Ms": str(int(1000 * seconds)),
        }
        request = self._connect().stream(
            "POST",
            f"{url}/process.Process/Start",
            content=b"\0" + len(body).to_bytes(4, "big") + body,
            headers=headers,
            timeout=httpx2.Timeout(_REQUEST_SECONDS, read=None),
        )
        try:
            async with request as response:
                if response.status_code != 200:
                    await response.aread()
                    raise self.failure(response)
                async for message in _read_messages(response.aiter_bytes()):
                    if error := message.get("error"):
                        if error.get("code") == _DEADLINE:
                            raise TimeoutError
                        text = f"{error.get('code')}: {error.get('message', '')}"
                        raise WorldError(self._redact(f"a sandbox failed: {text:.300}; try again"))
                    yield message.get("event", {})
        except httpx2.HTTPError as error:
            raise WorldError(
                f"the connection to a sandbox failed ({type(error).__name__}), so it is not known "
                "whether its command ran; run the search again"
            ) from None

    def failure(self, response: httpx2.Response) -> WorldError:
        """Return the error of an answer."""
        name = self._name(str(response.url))
        hint = "check E2B_API_KEY" if response.status_code in (401, 403) else "try again"
        return WorldError(
            f"{name} answers with status {response.status_code}: {self.message_of(response)}; "
            f"{hint}"
        )

    def message_of(self, response: httpx2.Response) -> str:
        """Return the message of an answer that reports an error, without keys."""
        try:
            text = str(response.json()["message"])
        except (ValueError, KeyError, TypeError):
            text = response.text
        return self._redact(" ".join(text.split()))[:300]

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def _connect(self) -> httpx2.AsyncClient:
        if self._client is None:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
            self._client = httpx2.AsyncClient(timeout=_REQUEST_SECONDS, limits=limits)
        return self._client

    def _name(self, url: str) -> str:
        """Return the part of an address that a message may show."""
        return str(httpx2.URL(url).host)

    def _redact(self, text: str) -> str:
        for secret in (self._key, *self._tokens):
            text = text.replace(secret, "***")
        return text


class _UnreachableError(WorldError):
    """A request was not sent, so it can be repeated."""


def _json(response: httpx2.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        raise WorldError(
            f"{response.url.host} answers with text that is no JSON; check E2B_API_URL"
        ) from None


async def _read_messages(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yield the messages of a stream, the last of which ends it.

    Raises:
        WorldError: The stream has another form, or breaks off.
    """
    buffer = b""
    async for chunk in chunks:
        buffer += chunk
        while len(buffer) >= 5:
            flags, size = buffer[0], int.from_bytes(buffer[1:5], "big")
            if size > _MAX_FRAME or flags & ~_END_OF_STREAM:
                raise WorldError("a sandbox answers in an unknown form; check its version")
            if len(buffer) < 5 + size:
                break
            try:
                message: dict[str, Any] = json.loads(buffer[5 : 5 + size])
            except ValueError:
                raise WorldError("a sandbox answers with text that is no JSON") from None
            buffer = buffer[5 + size :]
            yield message
            if flags & _END_OF_STREAM:
                return
    raise WorldError("the connection to a sandbox ended before its command; run the search again")
