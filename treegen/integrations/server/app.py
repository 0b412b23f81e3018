"""The routes of the server, and its limits.

A page of another site can make a browser send requests to a server on this machine. It cannot send
JSON, because browsers ask the server's permission first, nor a key. But it could point its own name
to this address (DNS rebinding), and the browser would treat the server as the page's own site. So
bodies must have the content type JSON, and a server without a key answers only requests to an IP
address or localhost.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing, suppress
from functools import partial
from ipaddress import ip_address
from itertools import starmap
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Match, Route

from treegen.common.outputs import Completion, Score
from treegen.common.params import SamplingParams
from treegen.errors import InputError, arg
from treegen.integrations.server.errors import (
    cancel_on_disconnect,
    encode_event,
    encode_json,
    error_response,
    json_response,
    make_error_response,
    stream_json,
)
from treegen.integrations.server.limits import NodeLimits, SearchLimits
from treegen.integrations.server.metrics import Metrics
from treegen.integrations.server.node_routes import Handler, NodeRoutes
from treegen.integrations.server.openapi import make_openapi
from treegen.integrations.server.requests import (
    CompletionRequest,
    RequestError,
    check_chat_template,
    check_no_images,
    parse_request,
    read_json,
)
from treegen.integrations.server.responses import CompletionResponse
from treegen.integrations.server.search import SearchMethods, SearchService, SearchStream
from treegen.integrations.server.weights import WeightUpdater
from treegen.llm.async_llm import AsyncLLM
from treegen.model.scorers.verifier import Verifier

_ROUTES: Final = (
    "this server has POST /v1/chat/completions, POST /v1/completions, GET /v1/models, /v1/nodes "
    "(see GET /openapi.json), /v1/search/METHOD/chat/completions, GET /metrics and GET /health"
)
_CHATS: Final = "use chat completions, such as client.chat.completions.create(...); "
_TOKENS: Final = (
    "for the token ids of a text, POST to /v1/completions with echo=true, max_tokens=0 and "
    "return_token_ids=true; "
)
_ONLY_TEXT: Final = "the server generates and scores text; "
# Beginnings of routes of other servers that clients request, and what to use.
_ROUTE_ADVICE: Final = {
    "/v1/responses": _CHATS,
    "/v1/messages": _CHATS,
    "/v1/search": "the base_url of a search is /v1/search/METHOD, for chat completions; ",
    "/v1/weights": "start the server with --weights-dir DIR and an API key to load weights; ",
    "/v1/embeddings": "the server generates text and computes no embeddings; ",
    "/tokenize": _TOKENS,
    "/detokenize": _ONLY_TEXT,
    "/completions": "the base_url ends in /v1; ",
    "/chat/completions": "the base_url ends in /v1; ",
    **dict.fromkeys(
        ("/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank"), _ONLY_TEXT
    ),
}


class Server:
    """The request handlers for one AsyncLLM, which is served under one name."""

    def __init__(  # noqa: PLR0913 -- users name these settings of a server
        self,
        served: AsyncLLM,
        *,
        name: str,
        api_key: str | Sequence[str] | None = None,
        max_body: int = 16 * 2**20,
        body_seconds: float = 30.0,
        default_params: Mapping[str, Any] = MappingProxyType({}),
        nodes: NodeLimits | None = None,
        verifier: Verifier | None = None,
        searches: SearchMethods | None = None,
        search_limits: SearchLimits | None = None,
        weights_dir: Path | None = None,
    ) -> None:
        """Create the handlers for one model.

        Args:
            served: The model.
            name: Name of the model in requests.
            api_key: Keys; each request must have one of them. None requires none. The nodes of each
                key are invisible to the others.
            max_body: Maximum size of a body in bytes.
            body_seconds: Time within which a body must arrive.
            default_params: Sampling parameters of requests that do not give them.
            nodes: Limits on nodes, if `served` computes nodes. Default: there are no nodes.
            verifier: Computes rewards of nodes. Default: there are none.
            searches: Prepares searches of chats, if `served` computes nodes. Default: there are no
                searches.
            search_limits: Limits on searches. Default: those of `SearchLimits`.
            weights_dir: Folder of checkpoints that clients may load in place of the weights.
                Default: they may load none.

        Raises:
            InputError: there is a `weights_dir`, and no key or no such folder.
        """
        self._served, self._name = served, name
        self._api_keys = [api_key] if isinstance(api_key, str) else list(api_key or ())
        self._weights = WeightUpdater(served, weights_dir) if weights_dir is not None else None
        if self._weights is not None and not self._api_keys:
            raise InputError(
                f"{arg('weights_dir=')} requires an API key; set {arg('api_key=')} too"
            )
        self._max_body, self._body_seconds = max_body, body_seconds
        self._default_params = dict(default_params)
        self._created = int(time.time())
        self._nodes = (
            NodeRoutes(
                served,
                nodes,
                verifier=verifier,
                read_body=self._raw_body,
                check_model=self._check_model,
            )
            if nodes is not None
            else None
        )
        self._searches: SearchService | None = None
        if searches is not None:
            self._searches = SearchService(
                served,
                searches,
                name=name,
                max_reply_tokens=self._count_usable_tokens(),
                default_params=self._default_params,
                limits=search_limits or SearchLimits(),
            )
        self._metrics = Metrics(served, self._nodes.store if self._nodes is not None else None)
        if served.llm.images is not None:
            served.llm.images.keeps_all = False  # clients cannot refer to images by token ids

    def app(self) -> Starlette:
        """Return the ASGI application."""
        texts, chats = (partial(self._answer, is_chat=is_chat) for is_chat in (False, True))
        routes: list[tuple[str, str, Handler]] = [
            ("/v1/completions", "POST", texts),
            ("/v1/chat/completions", "POST", chats),
            ("/v1/models", "GET", self._models),
            ("/v1/models/{name:path}", "GET", self._models),
            ("/metrics", "GET", self._metrics.response),
        ]
        if self._nodes is not None:
            routes += self._nodes.handlers()
        if self._searches is not None:  # each method has a base URL
            base = "/v1/search/{method}"
            routes += [
                (f"{base}/chat/completions", "POST", self._search),
                (f"{base}/models", "GET", self._models),
                (f"{base}/models/{{name:path}}", "GET", self._models),
            ]
        if self._weights is not None:
            routes.append(("/v1/weights", "POST", self._update_weights))
        return Starlette(
            routes=[
                *starmap(self._route, routes),
                Route("/health", self._health),
                Route("/openapi.json", self._openapi),
            ],
            exception_handlers={HTTPException: _not_found},
        )

    def _route(self, path: str, method: str, handler: Handler) -> Route:
        """Return a route that checks host and key, and turns errors into OpenAI's JSON."""

        async def handle_request(request: Request) -> Response:
            try:
                self._check_host(request)
                request.state.client = self._check_key(request)
                if method == "POST":
                    _check_json(request)
                response = await handler(request)
            except Exception as error:
                response = make_error_response(error)
            self._metrics.requests.labels(path, str(response.status_code)).inc()
            return response

        return Route(path, handle_request, methods=[method])

    def _check_key(self, request: Request) -> str:
        """Return the name of the client: the number of its API key, from 1, or "0" without keys."""
        if not self._api_keys:
            return "0"
        # Starlette decodes headers as Latin-1.
        scheme, _, sent = request.headers.get("authorization", "").strip().partition(" ")
        key = sent.strip().encode("latin-1")
        numbers = [
            number
            for number, right in enumerate(self._api_keys, 1)
            if hmac.compare_digest(key, right.encode())
        ]
        if scheme.lower() != "bearer" or not numbers:
            message = "the API key is missing or wrong; send the header Authorization: Bearer KEY"
            raise HTTPException(401, message, headers={"WWW-Authenticate": "Bearer"})
        return str(numbers[0])

    def _check_host(self, request: Request) -> None:
        host = request.headers.get("host", "")
        if not self._api_keys and not _is_address(host):
            raise HTTPException(
                403,
                f"the request has the host {host!r:.80}, which may belong to another site; use "
                "the IP address of the server or localhost, or start the server with --api-key",
            )

    async def _body(self, request: Request) -> dict[str, Any]:
        return read_json(await self._raw_body(request))

    async def _raw_body(self, request: Request) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_seconds):
                async for piece in request.stream():
                    body += piece
                    if len(body) > self._max_body:
                        raise HTTPException(
                            413,
                            f"the body has more than {self._max_body:,} bytes; send smaller "
                            "requests",
                        )
        except TimeoutError:
            raise HTTPException(
                408, "the body did not arrive in time; send the request again"
            ) from None
        return bytes(body)

    async def _answer(self, request: Request, *, is_chat: bool) -> Response:
        parsed = parse_request(await self._body(request), is_chat=is_chat)
        self._check_model(parsed.model)
        served = self._served
        if is_chat:
            check_chat_template(served.llm.tokenizer)
        prompts, grammar = parsed.prompts(), self._tool_grammar(parsed)
        params = parsed.params(self._count_usable_tokens(), self._default_params, grammar)
        for prompt in prompts:
            check_no_images(prompt, served.llm.images)
        answer = CompletionResponse(parsed, params.n, self._name, served.text, served.replies)
        how: Any = {
            "tools": parsed.shown_tools,
            "chat_template_kwargs": parsed.chat_template_kwargs,
        }
        if not parsed.stream:
            sampling = params if parsed.is_sampled else None
            encoding = self._encode_answer(answer, prompts, sampling, how)
            return stream_json(await cancel_on_disconnect(request, encoding))
        items = served.stream(prompts, params, **how, parts=parsed.parses_reply, first=parsed.first)
        # Await the first item, so that an error becomes the status and not part of the stream.
        first = await cancel_on_disconnect(request, anext(items))
        return StreamingResponse(_events(answer, first, items), media_type="text/event-stream")

    def _count_usable_tokens(self) -> int:
        """Return how many tokens the model's context and half of the cache have room for."""
        llm = self._served.llm
        cached = llm.cache.pool.num_pages * llm.cache.page_size // 2
        return max(1, min(llm.spec.context_length, cached))

    async def _search(self, request: Request) -> Response:
        searches, method = self._searches, request.path_params["method"]
        assert searches is not None
        searches.check_method(method)
        parsed = searches.parse(method, await self._body(request))
        self._check_model(parsed.chat.model)
        with ExitStack() as stack:
            stack.enter_context(searches.count_running(request.state.client))
            prepared = await cancel_on_disconnect(request, searches.prepare(parsed))
            if parsed.chat.stream:
                return SearchStream(searches.stream(prepared), stack.pop_all())
            answer = await cancel_on_disconnect(request, searches.answer(prepared))
        return stream_json(await asyncio.to_thread(encode_json, answer))

    async def _update_weights(self, request: Request) -> Response:
        assert self._weights is not None
        updating = self._weights.update(await self._body(request))
        return json_response(await cancel_on_disconnect(request, updating))

    def close(self) -> None:
        """End the thread of searches; from now on, the LLM keeps its images."""
        if self._served.llm.images is not None:
            self._served.llm.images.keeps_all = True
        if self._searches is not None:
            self._searches.close()

    def _check_model(self, name: str) -> None:
        if name not in ("", self._name):
            raise HTTPException(
                404,
                f"the model {name!r:.80} is not served; use the model {self._name!r}",
            )

    def _tool_grammar(self, request: CompletionRequest) -> str | None:
        """Return the grammar of the tool call that the model must make; None without one."""
        if not request.must_call or not request.tools:
            return None
        is_single = not request.parallel_tool_calls
        try:
            return self._served.replies.call_grammar(
                request.tools, request.forced_tool, is_single=is_single
            )
        except InputError as error:
            raise RequestError(str(error), "tool_choice") from None

    async def _encode_answer(
        self,
        answer: CompletionResponse,
        prompts: list[Any],
        params: SamplingParams | None,
        how: Any,
    ) -> bytes:
        """Return the JSON of a whole answer.

        Args:
            answer: The response to fill.
            prompts: The prompts.
            params: Sampling parameters; None samples nothing.
            how: Further arguments for the model, such as tools.
        """
        request, completions = answer.request, list[list[Completion]]()
        scores: list[Score | None] = []
        if params is None or request.num_prompt_top is not None:
            prompt_tokens = await self._served.encode(prompts, **how)
            request.check_prompt_logprobs(sum(map(len, prompt_tokens)))
        if params is not None:
            prompt_tokens, completions = await self._served.generate(
                prompts, params, **how, first=request.first
            )
            scores = [samples[0].prompt_logprobs for samples in completions]
        answer.prompts = [tokens.tolist() for tokens in prompt_tokens]
        if params is None and request.num_prompt_top is not None:
            long = [tokens for tokens in answer.prompts if len(tokens) > 1]
            scored = iter(
                await self._served.score(long, top=request.num_prompt_top) if long else ()
            )
            scores = [next(scored) if len(tokens) > 1 else None for tokens in answer.prompts]
        # Encoding many log-probabilities takes a while, so do it without blocking other requests.
        return await asyncio.to_thread(
            lambda: encode_json(answer.build_response(completions, scores))
        )

    async def _models(self, request: Request) -> Response:
        if self._searches is not None and (method := request.path_params.get("method")):
            self._searches.check_method(method)
        card = {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "treegen",
            "max_model_len": self._served.llm.spec.context_length,
        }
        name = request.path_params.get("name")
        if name is None:
            return json_response({"object": "list", "data": [card]})
        if name != self._name:
            raise HTTPException(
                404,
                f"the model {name!r:.80} is not served; use GET /v1/models to list the served "
                "model",
            )
        return json_response(card)

    async def _openapi(self, request: Request) -> Response:
        self._check_host(request)
        return json_response(make_openapi(searches=self._searches is not None))

    async def _health(self, request: Request) -> Response:
        self._check_host(request)
        failure = self._served.failure
        if failure is not None:
            return error_response(503, f"the model can no longer be used: {failure}")
        return json_response({"status": "ok"})


async def _events(
    answer: CompletionResponse, first: tuple[int, Any], items: AsyncGenerator[tuple[int, Any], None]
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream. The samples are cancelled when the client stops reading."""
    async with aclosing(items):
        try:
            for piece in answer.pieces(*first):
                yield encode_event(piece)
            async for index, item in items:
                for piece in answer.pieces(index, item):
                    yield encode_event(piece)
            if answer.request.stream_options.include_usage:
                yield encode_event(answer.usage_piece())
            yield b"data: [DONE]\n\n"
        except Exception as error:
            yield b"data: " + bytes(make_error_response(error).body) + b"\n\n"


def _check_json(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(
            415,
            f"the Content-Type of the body must be application/json, got {kind!r:.80}",
        )


def _is_address(host: str) -> bool:
    """Return whether a Host header is an IP address or localhost, which no other site can have."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    if name.lower() == "localhost":
        return True
    with suppress(ValueError):
        bracketed = name.startswith("[") and name.endswith("]")
        return ip_address(name[1:-1] if bracketed else name).version == (6 if bracketed else 4)
    return False


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    message, headers = f"{request.method} {path}: {error.detail}", dict(error.headers or {})
    if error.status_code == 404:
        advice = next((hint for start, hint in _ROUTE_ADVICE.items() if path.startswith(start)), "")
        message = f"there is no {request.method} {path} here; {advice}{_ROUTES}"
    elif error.status_code == 405:
        routes = (route for route in request.app.routes if isinstance(route, Route))
        methods = {
            method
            for route in routes
            if route.matches(request.scope)[0] is not Match.NONE
            for method in route.methods or ()
        }
        headers["Allow"] = ", ".join(sorted(methods))  # Starlette's has those of one route
        usable = " or ".join(sorted(methods - {"HEAD"}))
        message = f"{path} does not take {request.method} requests; use {usable}"
    return error_response(error.status_code, message, headers)
