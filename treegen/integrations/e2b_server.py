"""Requests to a server with E2B's HTTP interface, and to the sandboxes that it runs."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import os
import random
import re
import time
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from treegen.errors import InputError, TreegenError, WorldError, require_extra

with require_extra("E2B needs httpx2", "client"):
    import httpx2

ENVD_PORT: Final = 49983
"""The port of the process in a sandbox that runs commands and serves files."""
_BUSY_STATUSES: Final = (429, 503)
_ATTEMPTS: Final = 5
_FIRST_WAIT: Final = 0.5  # seconds
_REQUEST_SECONDS: Final = 60.0  # longest pause between two bytes
_ANSWER_SECONDS: Final = 180.0  # time limit for a whole answer
_MAX_ANSWER_BYTES: Final = 1 << 24  # bytes of an answer's JSON
_MAX_ERROR_BYTES: Final = 1 << 16  # bytes of an answer that reports an error
_MAX_FRAME_BYTES: Final = 1 << 24  # bytes of a message of a stream
_MAX_OUTPUT_BYTES: Final = 1 << 20  # bytes of a command's output
_GRACE_SECONDS: Final = 10.0  # time in which the sandbox ends a command that took too long
_END_OF_STREAM: Final = 2
MAX_PAGES: Final = 100
"""Maximum pages of a list. A page of E2B has 100 entries."""
_DEADLINE: Final = "deadline_exceeded"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answers to a request."""

    host: str
    status: int
    body: bytes
    is_truncated: bool
    """Whether the body is longer than the caller expects, and its end was not read."""
    next_page: str = ""
    """Token of the next page of a list; "" on the last page."""

    def json(self) -> Any:
        """Return the JSON of the body.

        Raises:
            WorldError: The body is too long, or no JSON.
        """
        if self.is_truncated:
            raise WorldError(
                f"{self.host} sent more than {len(self.body):,} bytes; check E2B_API_URL"
            )
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise WorldError(
                f"{self.host} sent a response that is not JSON; check E2B_API_URL"
            ) from None


@contextmanager
def check_format() -> Iterator[None]:
    """Raise WorldError if the block finds that an answer lacks a value, or has another type."""
    try:
        yield
    except TreegenError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise WorldError(
            f"the server's response has an unexpected format ({error!r:.100}); check the "
            "server's version"
        ) from None


class MissingError(TreegenError):
    """The server has no such sandbox, template or snapshot."""


class E2BServer:
    """Connections to one server. One event loop uses it.

    Raises:
        InputError: There is no key, or the key or an address is invalid.
    """

    def __init__(self) -> None:
        key = os.environ.get("E2B_API_KEY")
        if not key:
            raise InputError("set the environment variable E2B_API_KEY to the server's API key")
        if not re.fullmatch(r"[!-~]+", key):
            raise InputError(
                "E2B_API_KEY contains spaces, line breaks or non-ASCII characters; copy the "
                "key again"
            )
        self._domain = os.environ.get("E2B_DOMAIN") or "e2b.app"
        self._api_url = os.environ.get("E2B_API_URL") or f"https://api.{self._domain}"
        self._sandbox_url = os.environ.get("E2B_SANDBOX_URL")
        for name, url in (
            ("E2B_DOMAIN", f"https://api.{self._domain}"),
            ("E2B_API_URL", self._api_url),
            ("E2B_SANDBOX_URL", self._sandbox_url),
        ):
            if url and not _is_address(url):
                raise InputError(
                    f"{name} is not a valid address; write "
                    + ("HOST" if name == "E2B_DOMAIN" else "https://HOST or http://HOST:PORT")
                )
        self._key = key
        self._tokens: set[str] = set()
        self._client: httpx2.AsyncClient | None = None

    def sign(self, text: str) -> str:
        """Return a hash of a text that only owners of the key can compute."""
        data = b"treegen\n" + text.encode("utf-8", "surrogatepass")
        return hmac.new(os.fsencode(self._key), data, "sha256").hexdigest()[:32]

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
        GET and DELETE are repeated after any other failure, too.

        Args:
            method: HTTP method.
            path: Path and query.
            body: JSON; None for a request without a body.

        Raises:
            MissingError: The server does not have what the path names.
            WorldError: The server fails, or rejects the request.
        """
        answer = await self._request(method, path, body)
        return answer.json() if answer.body else None

    async def list_all(self, path: str) -> list[Any]:
        """Return the entries of all pages of a list.

        Args:
            path: Path and query of the list.

        Raises:
            WorldError: The server fails, or the list has more than `MAX_PAGES` pages.
        """
        entries: list[Any] = []
        page = ""
        for _ in range(MAX_PAGES):
            answer = await self._request("GET", f"{path}{page}")
            with check_format():
                entries += answer.json()
            if not answer.next_page:
                return entries
            page = f"&nextToken={quote(answer.next_page, safe='')}"
        raise WorldError(
            f"{answer.host} returned a list of more than {MAX_PAGES} pages; check E2B_API_URL"
        )

    async def _request(self, method: str, path: str, body: Any = None) -> Answer:
        """Send a request as `call` does, and return the answer."""
        url = f"{self._api_url.rstrip('/')}{path}"
        content = None if body is None else json.dumps(body).encode()
        headers = {"X-API-KEY": self._key, "Content-Type": "application/json"}
        may_repeat = method in ("GET", "DELETE")
        wait = _FIRST_WAIT
        for attempt in range(_ATTEMPTS):
            is_last = attempt == _ATTEMPTS - 1
            try:
                answer = await self.send(method, url, content=content, headers=headers)
            except WorldError as error:
                if is_last or not (may_repeat or isinstance(error, _UnreachableError)):
                    raise
            else:
                if answer.status == 404:
                    raise MissingError(self.message_of(answer))
                if answer.status < 300:
                    return answer
                is_repeated = answer.status in _BUSY_STATUSES or (
                    may_repeat and answer.status >= 500
                )
                if is_last or not is_repeated:
                    raise self.failure(answer)
            await asyncio.sleep(wait * random.uniform(0.5, 1))
            wait *= 2
        raise AssertionError("the last attempt returns or raises")

    async def delete(self, path: str, what: str) -> bool:
        """Delete something; return whether it is gone. If it cannot be deleted, warn.

        Args:
            path: Its path.
            what: Its kind and id, for the warning.
        """
        try:
            with suppress(MissingError):
                await self.call("DELETE", path)
        except WorldError as error:
            warnings.warn(
                f"{what} still exists, and may cost money: {error}; close the environment again, "
                "or delete it on the server's website",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        return True

    async def send(
        self,
        method: str,
        url: str,
        *,
        content: bytes | None,
        headers: Mapping[str, str],
        max_bytes: int = _MAX_ANSWER_BYTES,
    ) -> Answer:
        """Send one request, and return the answer, whatever its status is.

        Args:
            method: HTTP method.
            url: The address.
            content: The body.
            headers: The headers.
            max_bytes: Maximum bytes of the body to read.

        Raises:
            WorldError: There is no answer in time.
        """
        request = self._connect().stream(method, url, content=content, headers=headers)
        try:
            async with asyncio.timeout(_ANSWER_SECONDS), request as response:
                return await _read(
                    response, max_bytes if response.status_code < 300 else _MAX_ERROR_BYTES
                )
        except TimeoutError:
            raise WorldError(
                f"{self._host(url)} did not finish its response within {_ANSWER_SECONDS:g} s; "
                "run the search again"
            ) from None
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise _UnreachableError(
                f"{self._host(url)} cannot be reached ({type(error).__name__}); check E2B_API_URL, "
                "E2B_SANDBOX_URL and the network"
            ) from None
        except httpx2.HTTPError as error:
            raise WorldError(
                f"{self._host(url)} did not respond ({type(error).__name__}); run the search again"
            ) from None

    async def run_process(
        self, url: str, process: Mapping[str, Any], headers: Mapping[str, str], seconds: float
    ) -> tuple[str, str, int, str]:
        """Run a process in a sandbox.

        Args:
            url: Address of the sandbox.
            process: Command, arguments and working directory.
            headers: Headers of the sandbox.
            seconds: Seconds after which the sandbox ends the process.

        Returns:
            What it printed, and printed to stderr; its exit status, -1 if a signal ended it; and
            the limit that it reached, "" if none.

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
                    with check_format():
                        for name, data in event.get("data", {}).items():
                            output[name] += base64.b64decode(data)
                        end = event.get("end", end)
                    if sum(map(len, output.values())) > _MAX_OUTPUT_BYTES:
                        failure = f"more than {_MAX_OUTPUT_BYTES:,} bytes of output"
                        break
        except TimeoutError:
            failure = f"more than {seconds:g} s"
        if end is None and not failure:
            raise WorldError(
                "the sandbox's response has no exit status; check the server's version"
            )
        status = -1  # killed; JSON leaves out numbers that are 0 and values that are false
        if end is not None:
            with check_format():
                is_killed = not end.get("exited", False)
                status = int(end.get("exitCode", -1 if is_killed else 0))
            if is_killed and not failure and time.monotonic() - started >= seconds:
                failure = f"more than {seconds:g} s"
        stdout, stderr = (bytes(data).decode("utf-8", "replace") for data in output.values())
        return stdout, stderr, status, failure

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
                    raise self.failure(await _read(response, _MAX_ERROR_BYTES))
                async for message in _read_messages(response.aiter_raw()):
                    with check_format():
                        event, error = message.get("event", {}), message.get("error")
                        is_late = error is not None and error.get("code") == _DEADLINE
                        text = error and f"{error.get('code')}: {error.get('message', '')}"
                    if is_late:
                        raise TimeoutError
                    if text:
                        raise WorldError(f"a sandbox failed: {self._redact(text):.300}; try again")
                    yield event
        except httpx2.HTTPError as error:
            raise WorldError(
                f"the connection to a sandbox failed ({type(error).__name__}), so it is not known "
                "whether its command ran; run the search again"
            ) from None

    def failure(self, answer: Answer) -> WorldError:
        """Return the error of an answer."""
        hint = "check E2B_API_KEY" if answer.status in (401, 403) else "try again"
        return WorldError(
            f"{answer.host} returned status {answer.status}: {self.message_of(answer)}; {hint}"
        )

    def message_of(self, answer: Answer) -> str:
        """Return the message of an answer that reports an error, without keys."""
        try:
            text = str(answer.json()["message"])
        except (WorldError, LookupError, TypeError):
            text = answer.body.decode("utf-8", "replace")
        text = self._redact(text)
        if answer.is_truncated:  # perhaps within a key
            text = text[: -max(map(len, (self._key, *self._tokens)))]
        return " ".join(text.split())[:300]

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def _connect(self) -> httpx2.AsyncClient:
        if self._client is None:
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
            self._client = httpx2.AsyncClient(
                timeout=_REQUEST_SECONDS,
                limits=limits,
                headers={"Accept-Encoding": "identity"},  # so that the limits hold
            )
        return self._client

    def _host(self, url: str) -> str:
        """Return the part of an address that a message may show."""
        return str(httpx2.URL(url).host)

    def _redact(self, text: str) -> str:
        for secret in (self._key, *self._tokens):
            text = text.replace(secret, "***")
        return text


def _is_address(url: str) -> bool:
    """Return whether requests can be sent to an address."""
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError):
        return False
    return parsed.scheme in ("http", "https") and bool(re.fullmatch(r"[^\s/@%]+", parsed.host))


class _UnreachableError(WorldError):
    """A request was not sent, so it can be repeated."""


async def _read(response: httpx2.Response, max_bytes: int) -> Answer:
    """Return an answer with at most `max_bytes` bytes of its body."""
    if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
        raise WorldError(
            f"{response.url.host} sent a response with the content encoding {encoding:.20}; "
            "turn compression off on the server"
        )
    body = bytearray()
    async with aclosing(response.aiter_raw()) as chunks:
        async for chunk in chunks:
            body += chunk
            if len(body) > max_bytes:
                break
    return Answer(
        response.url.host,
        response.status_code,
        bytes(body[:max_bytes]),
        len(body) > max_bytes,
        response.headers.get("X-Next-Token", ""),
    )


async def _read_messages(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yield the messages of a stream, the last of which ends it.

    Raises:
        WorldError: The stream has another form, or breaks off.
    """
    buffer = bytearray()
    async for chunk in chunks:
        buffer += chunk
        while len(buffer) >= 5:
            flags, size = buffer[0], int.from_bytes(buffer[1:5], "big")
            if size > _MAX_FRAME_BYTES or flags & ~_END_OF_STREAM:
                raise WorldError(
                    "a sandbox's response has an unexpected format; check the server's version"
                )
            if len(buffer) < 5 + size:
                break
            try:
                message: dict[str, Any] = json.loads(buffer[5 : 5 + size])
            except (ValueError, RecursionError):
                raise WorldError(
                    "a sandbox sent a response that is not JSON; check the server's version"
                ) from None
            del buffer[: 5 + size]
            yield message
            if flags & _END_OF_STREAM:
                return
    raise WorldError(
        "the connection to a sandbox closed before its command finished; run the search again"
    )
