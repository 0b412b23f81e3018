"""The routes of nodes: parsing, idempotency keys, and streams."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from treegen.integrations.nodes import protocol
from treegen.integrations.server.errors import (
    StatusError,
    cancel_on_disconnect,
    describe_error,
    encode_event,
    encode_json,
    json_response,
    stream_json,
)
from treegen.integrations.server.limits import NodeLimits
from treegen.integrations.server.node_batch import BatchRunner
from treegen.integrations.server.node_calls import NodeCalls
from treegen.integrations.server.nodes import Changes, Client, NodeStore
from treegen.integrations.server.openapi import ROUTES
from treegen.integrations.server.requests import RequestError, parse_model, read_json
from treegen.llm.async_llm import AsyncLLM
from treegen.model.scorers.verifier import Verifier

Handler = Callable[[Request], Awaitable[Response]]
_Body = TypeVar("_Body", bound=BaseModel)
_MAX_KEY_CHARS: Final = 255  # characters of an idempotency key
_ANSWER_OVERHEAD_BYTES: Final = 1_000  # bytes that a stored answer takes in addition to its text


@dataclass(slots=True, eq=False)
class _StoredAnswer:
    request: bytes
    """Hash of the request."""
    call: asyncio.Future[bytes]
    """Computes the answer."""
    size: int = 0
    """Bytes that count towards the limit, once the answer is stored."""
    num_waiting: int = 0
    """Number of requests that wait for the answer."""
    stored: float = 0.0
    """When the answer was stored, on the clock of `time.monotonic`."""


class StoredAnswers:
    """The answers of one client by idempotency key; the oldest ones are dropped first."""

    def __init__(self, max_bytes: int, seconds: float) -> None:
        """Create an empty store.

        Args:
            max_bytes: Maximum size of all answers.
            seconds: Time until an answer is dropped.
        """
        self._max_bytes, self._seconds = max_bytes, seconds
        self._running: dict[str, _StoredAnswer] = {}
        self._stored: OrderedDict[str, _StoredAnswer] = OrderedDict()  # the oldest answer first
        self._num_bytes = 0

    async def get(self, key: str, request: bytes, compute: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the stored answer of a key, or compute and store it.

        If the answer is being computed already, wait for it. It is cancelled once no request waits
        for it any more. An error is raised for all that wait, and is not stored.

        Args:
            key: The idempotency key.
            request: Everything that the answer depends on.
            compute: Computes the answer.

        Raises:
            StatusError: The key is too long, or was used for another request.
        """
        if len(key) > _MAX_KEY_CHARS:
            raise StatusError(
                400,
                f"the idempotency key has more than {_MAX_KEY_CHARS} characters; use a shorter key",
            )
        self._drop_old()
        digest = hashlib.blake2b(request, digest_size=32).digest()
        entry = self._running.get(key) or self._stored.get(key)
        if entry is None:
            entry = self._running[key] = _StoredAnswer(digest, asyncio.ensure_future(compute()))
        elif entry.request != digest:
            raise StatusError(
                409, f"the idempotency key {key!r:.80} was used for another request; use a new key"
            )
        entry.num_waiting += 1
        try:
            answer = await asyncio.shield(entry.call)
        except BaseException:
            if entry.call.done() or entry.num_waiting == 1:
                entry.call.cancel()
                if self._running.get(key) is entry:
                    del self._running[key]
            raise
        finally:
            entry.num_waiting -= 1
        if self._running.get(key) is entry:
            self._stored[key] = self._running.pop(key)
            entry.size, entry.stored = _ANSWER_OVERHEAD_BYTES + len(answer), time.monotonic()
            self._num_bytes += entry.size
            self._drop_old()
        return answer

    def _drop_old(self) -> None:
        oldest = time.monotonic() - self._seconds
        while self._stored:
            entry = next(iter(self._stored.values()))
            if self._num_bytes <= self._max_bytes and entry.stored >= oldest:
                break
            self._stored.popitem(last=False)
            self._num_bytes -= entry.size


class NodeRoutes:
    """The handlers of /v1/nodes.

    Attributes:
        store: The nodes.
    """

    def __init__(
        self,
        served: AsyncLLM,
        limits: NodeLimits,
        *,
        verifier: Verifier | None,
        read_body: Callable[[Request], Awaitable[bytes]],
        check_model: Callable[[str], None],
    ) -> None:
        """Create the handlers.

        Args:
            served: The model.
            limits: Limits on the nodes of each client.
            verifier: Computes rewards; None for none.
            read_body: Returns the body of a request.
            check_model: Raises an error for the name of another model.
        """
        self.store = NodeStore(served, limits)
        self._calls = NodeCalls(served, self.store, verifier)
        self._batch_runner = BatchRunner(self._calls)
        self._read_body, self._check_model = read_body, check_model
        self._answers: dict[str, StoredAnswers] = {}

    def handlers(self) -> list[tuple[str, str, Handler]]:
        """Return path, method and handler of each route."""
        calls = self._calls
        handlers: dict[str, Handler] = {
            "list_trees": self._list,
            "read_node": self._read,
            "drop_node": self._drop,
            "sample_children": self._sample,
        }
        runs: dict[str, Callable[..., Awaitable[BaseModel]]] = {
            "create_root": calls.root,
            "run_batch": self._batch_runner.run,
            "extend_node": calls.extend,
            "score_texts": lambda client, node, parsed, _: calls.score(client, node, parsed),
        }
        for route in ROUTES:
            if route.body is not None and route.name in runs:
                run = runs[route.name]
                handlers[route.name] = partial(self._post, kind=route.body, run=run)
        return [(route.path, route.method.upper(), handlers[route.name]) for route in ROUTES]

    async def _sample(self, request: Request) -> Response:
        body = await self._read_body(request)
        parsed = self._parse(protocol.NodeSampleRequest, body)
        if not parsed.stream:
            return await self._post(request, protocol.NodeSampleRequest, self._calls.sample, body)
        if protocol.IDEMPOTENCY_HEADER in request.headers:
            raise StatusError(
                400,
                f"{protocol.IDEMPOTENCY_HEADER} cannot be used together with stream, because "
                "streamed responses are not stored; remove one of the two",
                "stream",
            )
        client = self._client(request)
        node = self.store.find(client, request.path_params["id"])
        items = self._calls.stream(client, node, parsed)
        # Await the first item, so that an error becomes the status and not part of the stream.
        first = await cancel_on_disconnect(request, anext(items))
        return StreamingResponse(self._events(client, first, items), media_type="text/event-stream")

    async def _events(
        self,
        client: Client,
        first: protocol.NodeAnswer | protocol.NodeUsage,
        items: AsyncGenerator[protocol.NodeAnswer | protocol.NodeUsage, None],
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream. The samples are cancelled when the client stops reading."""
        async with aclosing(items):
            try:
                yield self._event(client, first)
                async for item in items:
                    yield self._event(client, item)
            except Exception as error:
                yield encode_event({"type": "error", "error": describe_error(error)})
            yield b"data: [DONE]\n\n"

    def _event(self, client: Client, item: protocol.NodeAnswer | protocol.NodeUsage) -> bytes:
        if isinstance(item, protocol.NodeAnswer):
            return encode_event({"type": "node", "node": item.model_dump(mode="json")})
        memory = self.store.memory(client).model_dump()
        return encode_event({"type": "done", "usage": item.model_dump(), "memory": memory})

    async def _read(self, request: Request) -> Response:
        client = self._client(request)
        node = self.store.find(client, request.path_params["id"])
        result = await cancel_on_disconnect(request, self._calls.read(client, node))
        return stream_json(_encode(result))

    async def _drop(self, request: Request) -> Response:
        client = self._client(request)
        node = self.store.find(client, request.path_params["id"])
        return json_response(self._calls.drop(client, node).model_dump())

    async def _list(self, request: Request) -> Response:
        client = self._client(request)
        answer = protocol.TreeList(data=self.store.trees(client), memory=self.store.memory(client))
        return stream_json(_encode(answer))

    def _client(self, request: Request) -> Client:
        return self.store.client(request.state.client)

    async def _post(
        self,
        request: Request,
        kind: type[_Body],
        run: Callable[..., Awaitable[BaseModel]],
        body: bytes | None = None,
    ) -> Response:
        """Return the answer to a request, or the stored answer of its idempotency key.

        Args:
            request: The request.
            kind: Model of its body.
            run: Computes the answer from the client, the node in the path if there is one, the
                parsed body, and the record of changes.
            body: Its body, if it was read already.
        """
        body = await self._read_body(request) if body is None else body
        parsed, client, changes = self._parse(kind, body), self._client(request), Changes()

        async def compute() -> bytes:
            try:
                if isinstance(parsed, protocol.RootRequest | protocol.BatchRequest):
                    self._check_model(parsed.model)
                ids = request.path_params.values()
                nodes = [self.store.find(client, name) for name in ids]
                answer = await run(client, *nodes, parsed, changes)
                # Encoding many log-probabilities takes a while.
                return await asyncio.to_thread(_encode, answer)
            except BaseException:  # the client gets no answer, so it could not use the nodes
                changes.undo(self.store)
                raise

        key = request.headers.get(protocol.IDEMPOTENCY_HEADER)
        if key is None:
            return stream_json(await cancel_on_disconnect(request, compute()))
        answers = self._answers.setdefault(
            client.name,
            StoredAnswers(self.store.limits.max_stored_answers, self.store.limits.max_node_lease),
        )
        content = request.url.path.encode() + b"\n" + body
        return stream_json(await cancel_on_disconnect(request, answers.get(key, content, compute)))

    def _parse(self, kind: type[_Body], body: bytes) -> _Body:
        """Return the body of a request as its model; refuse too many operations or tokens first."""
        fields = read_json(body)
        operations = fields.get("operations")
        max_operations = self.store.limits.max_node_operations
        if isinstance(operations, list) and len(operations) > max_operations:
            raise RequestError(
                f"a batch can have at most {max_operations:,} operations; send several batches",
                "operations",
            )
        for part in operations if isinstance(operations, list) else [fields]:
            prompt = part.get("prompt") if isinstance(part, dict) else None
            if isinstance(prompt, list):
                self._calls.texts.check_context(len(prompt))
        return parse_model(kind, fields)


def _encode(answer: BaseModel) -> bytes:
    return encode_json(answer.model_dump(mode="json"))
