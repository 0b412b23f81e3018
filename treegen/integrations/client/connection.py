"""HTTP requests to a server, with retries.

Every request has an idempotency key. If the response to a request for nodes is lost, a retry gets
the stored response. A retried request for completions is computed again, with equal draws if it has
a seed.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import ssl
import time
import uuid
from collections.abc import Sequence
from typing import Any, Final

from pydantic import ValidationError

from treegen.errors import BusyError, InputError, TreegenError, require_extra
from treegen.integrations.nodes import protocol
from treegen.integrations.nodes.conversion import error_of

with require_extra("the client needs httpx2", "client"):
    import httpx2

_FIRST_WAIT: Final = 0.25  # seconds
_LONGEST_WAIT: Final = 8.0  # seconds
_RETRIED_STATUSES: Final = (408, 429, 500, 502, 503, 504)
_LONGEST_RETRY_AFTER: Final = 60.0  # seconds, also if the server requests more
_CONNECT_SECONDS: Final = 10.0
_MAX_CONNECTIONS: Final = 512  # a process may often have only 1,024 open files, also on the server


class Connection:
    """A connection pool to one server, for one event loop; use it in an `async with` statement.

    Attributes:
        num_sent: Bytes of the bodies that were sent.
        num_requests: Requests that were sent, retries included.
    """

    def __init__(
        self, base_url: str, api_key: str | None, *, model: str, timeout: float, retries: int
    ) -> None:
        """Create the connection pool.

        Args:
            base_url: Address of the server, such as http://127.0.0.1:8000/v1.
            api_key: The server's key; None for a server without one.
            model: Name of the model; empty for the served one.
            timeout: Seconds to wait for one response, or for a busy server.
            retries: Maximum number of retries of a request, apart from those of a busy server; 0
                turns both off.
        """
        self.num_sent = self.num_requests = 0
        self._model, self._retries, self._timeout = model, retries, timeout
        headers = {b"Content-Type": b"application/json"}
        if api_key is not None:
            headers[b"Authorization"] = f"Bearer {api_key}".encode()
        self._url = base_url
        self._client = httpx2.AsyncClient(
            headers=headers,
            verify=_make_tls_context(),
            timeout=httpx2.Timeout(timeout, connect=_CONNECT_SECONDS, pool=None),
            limits=httpx2.Limits(max_connections=_MAX_CONNECTIONS),
        )

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.aclose()

    async def run_operations(
        self, operations: Sequence[protocol.Operation]
    ) -> Sequence[protocol.Result]:
        """Run operations on nodes, and return their results in order.

        Raises:
            TreegenError: the server cannot be reached, or rejects the request.
        """
        batch = protocol.BatchRequest(model=self._model, operations=list(operations))
        body = batch.model_dump_json(exclude_defaults=True, exclude_none=True)
        content = await self.post("nodes/batch", body)
        try:
            return protocol.BatchAnswer.model_validate_json(content).results
        except ValidationError as error:
            raise InputError(
                f"{self._url} sent a response that this version of treegen cannot parse: "
                f"{error.errors(include_input=False)[0]['msg']}; install the same version of "
                "treegen as the server"
            ) from None

    async def post_json(self, path: str, body: dict[str, Any]) -> Any:
        """Send a JSON object, and return the JSON of the answer.

        Args:
            path: Path below the address of the server.
            body: The object; the name of the model is added.

        Raises:
            TreegenError: as for `run_operations`.
        """
        named = {"model": self._model, **body} if self._model else body
        content = await self.post(path, json.dumps(named))
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise InputError(
                f"{self._url} sent a response that is not JSON; check the address"
            ) from None

    async def post(self, path: str, body: str) -> bytes:
        """Send a body, and return the body of the response.

        If no response arrives, or the server fails, the request is retried after growing waits. If
        the server is busy, perhaps with other requests of this client, waits go on for the timeout.

        Args:
            path: Path below the address of the server.
            body: JSON.

        Raises:
            TreegenError: as for `run_operations`.
        """
        key = uuid.uuid4().hex
        wait, num_retries, end = _FIRST_WAIT, 0, time.monotonic() + self._timeout
        while True:
            retry_after = 0.0
            try:
                response = await self._send(path, body, key)
                if response.status_code == 200:
                    return response.content
                failure = self._failure(response)
                if response.status_code not in _RETRIED_STATUSES:
                    raise failure
                retry_after = _seconds(response.headers.get("retry-after", ""))
            except httpx2.RequestError as error:
                failure = InputError(
                    f"{self._url} cannot be reached ({type(error).__name__}: {error}); check "
                    "the address, and that the server is running"
                )
            pause = max(retry_after, wait * random.uniform(0.5, 1))
            if isinstance(failure, BusyError) and self._retries:
                pause = min(pause, end - time.monotonic())
                has_ended = pause <= 0
            else:
                has_ended = num_retries >= self._retries
                num_retries += 1
            if has_ended:
                raise failure
            await asyncio.sleep(pause)
            wait = min(2 * wait, _LONGEST_WAIT)

    async def _send(self, path: str, body: str, key: str) -> httpx2.Response:
        content = body.encode()
        self.num_requests += 1
        self.num_sent += len(content)
        return await self._client.post(
            f"{self._url}/{path}", content=content, headers={protocol.IDEMPOTENCY_HEADER: key}
        )

    def _failure(self, response: httpx2.Response) -> TreegenError:
        try:
            details = protocol.ErrorAnswer.model_validate_json(response.content).error
        except ValidationError:
            text = " ".join(response.text.split())
            details = protocol.ErrorDetails(
                message=f"{self._url} returned status {response.status_code}: {text:.200}; "
                "check the address",
                type="",
                param=None,
                code=response.status_code,
            )
        return error_of(details)


@functools.cache
def _make_tls_context() -> ssl.SSLContext:
    """Return the TLS settings of all connections; reading the certificates takes 50 ms."""
    return httpx2.create_ssl_context()


def _seconds(text: str) -> float:
    """Return the seconds of a Retry-After header, at most a minute; 0 if it has a date."""
    return min(float(text), _LONGEST_RETRY_AFTER) if text.isdecimal() else 0.0


def check_key(key: Any) -> None:
    """Raise InputError unless a value can be an API key; the message does not show the value."""
    if not isinstance(key, str) or not key or key != key.strip() or not key.isprintable():
        raise InputError(
            "api_key must be a text without line breaks and without spaces at its ends; copy the "
            "key again, or leave api_key out for a server without keys"
        )


def check_url(url: Any) -> None:
    """Raise InputError unless a value is the address of a server."""
    try:
        parsed = httpx2.URL(url)
        is_address = parsed.scheme in ("http", "https") and bool(parsed.host)
    except (httpx2.InvalidURL, TypeError):
        is_address = False
    if not is_address:
        raise InputError(
            f"base_url must be an address such as http://127.0.0.1:8000/v1, got {url!r:.80}"
        )
