"""Search methods behind a base_url: /v1/search/METHOD answers chats with the best reply.

The body is that of a chat, with two further fields: `budget` limits the search, and `search` has
the settings of the method. The searches run in a thread of their own, over nodes of the served
model.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from treegen.common.params import SamplingParams
from treegen.common.spelling import did_you_mean
from treegen.errors import BusyError, InputError
from treegen.integrations.nodes.protocol import BatchRequest, Operation, Result, RootOperation
from treegen.integrations.server.errors import encode_event, make_error_response
from treegen.integrations.server.limits import NodeLimits, SearchLimits
from treegen.integrations.server.node_batch import BatchRunner
from treegen.integrations.server.node_calls import NodeCalls
from treegen.integrations.server.nodes import Changes, NodeStore
from treegen.integrations.server.requests import RequestError, check_chat_template
from treegen.integrations.server.search_requests import SearchRequest, parse_search
from treegen.integrations.server.search_thread import SearchThread
from treegen.search.budget import Budget
from treegen.search.tree.records import SearchTree
from treegen.search.tree.result import SearchResult

if TYPE_CHECKING:
    from treegen.llm.async_llm import AsyncLLM
    from treegen.search.tree.node import SearchNode
    from treegen.search.tree.result import SearchOutcome

_KEEP_ALIVE_SECONDS: Final = 10
_CLIENT: Final = "searches"  # name of the client whose nodes are those of all searches
_MAX_TOKENS: Final = 1_024  # of a reply, if the request does not say


class PreparedSearch(Protocol):
    """The prepared search of one chat."""

    params: SamplingParams
    """Default sampling parameters of nodes."""
    budget: Budget
    """The budget."""

    async def __call__(self, root: SearchNode) -> SearchOutcome:
        """Search below the root."""

    def text(self, tree: SearchTree, node: int) -> str:
        """Return the reply that ends with a node."""

    def answer(self, text: str) -> str | None:
        """Return the answer of a reply; None if it has none."""


class SearchMethods(Protocol):
    """Prepares searches by method; see `treegen.tasks.chat.ChatSearches`."""

    @property
    def methods(self) -> Sequence[str]:
        """Names of the methods."""
        ...

    def prepare(
        self,
        method: str,
        options: Mapping[str, Any],
        *,
        params: SamplingParams,
        budget: Budget,
        question: str,
        instruction: Callable[[str], str],
    ) -> PreparedSearch:
        """Return the search of a chat.

        Args:
            method: One of `methods`.
            options: The settings that the client gives.
            params: Sampling parameters of a reply.
            budget: The budget.
            question: The text that a verifier reads as the question.
            instruction: Returns the text between a reply and the next one for an instruction.

        Raises:
            InputError: an option cannot be used.
        """


@dataclass(frozen=True, slots=True)
class PreparedAnswer:
    """A request whose search can start."""

    request: SearchRequest
    search: PreparedSearch
    root: RootOperation
    num_prompt_tokens: int
    """Number of tokens of the prompt."""


class SearchService:
    """Answers chats by searches."""

    def __init__(
        self,
        served: AsyncLLM,
        searches: SearchMethods,
        *,
        name: str,
        max_reply_tokens: int,
        default_params: Mapping[str, Any],
        limits: SearchLimits,
    ) -> None:
        """Create the service; it starts to run searches with the first one.

        Args:
            served: The model.
            searches: Prepares searches.
            name: Name of the model.
            max_reply_tokens: Maximum number of tokens of a reply.
            default_params: Sampling parameters of requests that do not give them.
            limits: Limits of the searches.
        """
        self._served, self._searches = served, searches
        # The budgets of searches limit their nodes.
        limits_of_nodes = NodeLimits(
            max_nodes=2**31,
            max_node_depth=2**20,
            max_node_operations=2**20,
            max_node_memory=2**60,
        )
        self._store = NodeStore(served, limits_of_nodes)
        self._batch_runner = BatchRunner(NodeCalls(served, self._store, None))
        self._name, self._max_reply_tokens, self._default_params, self._limits = (
            name,
            max_reply_tokens,
            dict(default_params),
            limits,
        )
        self._thread: SearchThread | None = None
        self._num_running: Counter[str] = Counter()  # by client

    def parse(self, method: str, body: Mapping[str, Any]) -> SearchRequest:
        """Return the request in a body.

        Args:
            method: The method, from the path.
            body: The JSON object.

        Raises:
            RequestError: the body cannot be used.
        """
        return parse_search(method, body, self._limits)

    def check_method(self, method: str) -> None:
        """Raise HTTPException if there is no such method."""
        methods = self._searches.methods
        if method not in methods:
            hint = did_you_mean(method[:80], methods) or f"; use one of {', '.join(methods)}"
            raise HTTPException(404, f"there is no search method {method[:80]!r}{hint}")

    @contextmanager
    def count_running(self, client: str) -> Iterator[None]:
        """Count the search of the block towards the limits on searches at once.

        Args:
            client: Name of the client.

        Raises:
            BusyError: too many searches run.
        """
        for name, whose, num in (
            ("max_key_searches", " with your API key", self._num_running[client]),
            ("max_searches", "", self._num_running.total()),
        ):
            limit = getattr(self._limits, name)
            if limit is not None and num >= limit:
                raise BusyError(
                    f"at most {limit} searches{whose} can run at the same time ({name}), and {num} "
                    "are running; try again later"
                )
        self._num_running[client] += 1
        try:
            yield
        finally:
            self._num_running[client] -= 1

    async def prepare(self, request: SearchRequest) -> PreparedAnswer:
        """Check a request, and prepare its search.

        Raises:
            InputError: the request cannot be used.
        """
        check_chat_template(self._served.llm.tokenizer)
        chat, template = request.chat, request.chat.chat_template_kwargs
        (prompt,) = await self._served.encode(chat.prompts(), chat_template_kwargs=template)
        params = chat.params(min(self._max_reply_tokens, _MAX_TOKENS), self._default_params)
        # Without a seed every search draws anew.
        seed = secrets.randbits(62) if params.seed is None else params.seed
        try:
            search = self._searches.prepare(
                request.method,
                request.options,
                params=replace(params, n=1, seed=seed),
                budget=request.budget,
                question=request.question,
                instruction=await self._make_instruction(request),
            )
        except InputError as error:
            raise _name_option(error, request) from None
        root = RootOperation(
            op="root",
            messages=list(request.messages),
            chat_template_kwargs=template or None,
            seed=seed,
        )
        return PreparedAnswer(request, search, root, len(prompt))

    async def answer(self, prepared: PreparedAnswer) -> dict[str, Any]:
        """Search, and return the JSON of the answer.

        If the caller is cancelled, so is the search.

        Raises:
            TreegenError: the search fails.
        """
        search = prepared.search
        result = await self._get_thread().run(
            search,
            prepared.root,
            name=uuid.uuid4().hex,
            params=search.params,
            budget=search.budget,
        )
        if result.exception is not None:
            raise result.exception
        # Encoding a large tree takes a while, so do it without blocking other requests.
        return await asyncio.to_thread(self._build, prepared, result)

    def _get_thread(self) -> SearchThread:
        """Return the thread of the searches, which the first search starts, or after a failure."""
        if self._thread is None or self._thread.failure is not None:
            for tree in list(self._store.client(_CLIENT).trees):  # of searches that have failed
                self._store.drop(tree.root)
            self._thread = SearchThread(self._run_operations)
        return self._thread

    async def _run_operations(self, operations: Sequence[Operation]) -> Sequence[Result]:
        """Run operations of a search on nodes; if it is cancelled, the new nodes are dropped."""
        changes, client = Changes(), self._store.client(_CLIENT)
        try:
            request = BatchRequest.model_construct(operations=list(operations))
            return (await self._batch_runner.run(client, request, changes)).results
        except BaseException:
            changes.undo(self._store)
            raise

    async def _make_instruction(self, request: SearchRequest) -> Callable[[str], str]:
        """Return a function that renders an instruction as the user's turn after a reply."""
        placeholder = secrets.token_hex(16)
        turns = [{"role": "user", "content": placeholder}]
        before: Any = request.chat.prompts()[0]  # a chat has one
        template = request.chat.chat_template_kwargs
        try:
            text, _ = await self._served.encoder.render_turns(
                turns, before=before, template=template
            )
        except InputError as error:  # which matters only to methods that give instructions
            failure = error

            def fail(instruction: str) -> str:
                raise failure

            return fail
        return lambda instruction: text.replace(placeholder, instruction)

    def _build(self, prepared: PreparedAnswer, result: SearchResult) -> dict[str, Any]:
        """Return the JSON of an answer."""
        request, search = prepared.request, prepared.search
        nodes = result.candidates or (() if result.best is None else (result.best,))
        replies: dict[str, tuple[int, str]] = {}  # by answer, the best node and its text
        for node in nodes:
            text = search.text(result.tree, node)
            answer = search.answer(text)
            replies.setdefault(f"answer {answer}" if answer else f"text {text}", (node, text))
        if not replies:
            stopped, name = result.stopped, "budget" if result.stopped else "search"
            advice = "budget" if stopped else "depth or larger steps"
            raise RequestError(
                f"the search ended without a reply ({stopped or 'no path reached an end'}); set "
                f"a larger {advice}",
                name,
            )
        chosen = list(replies.values())[: request.num_answers]
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text},
                "logprobs": None,
                "finish_reason": "stop"
                if result.tree.nodes[node].finish_reason == "stop" and node in result.candidates
                else "length",
            }
            for index, (node, text) in enumerate(chosen)
        ]
        decoded = result.usage.tokens_decoded
        usage = asdict(result.usage)
        del usage["started"]
        return {
            "id": f"chatcmpl-{request.chat.request_id or uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._name,
            "choices": choices,
            "usage": {
                "prompt_tokens": prepared.num_prompt_tokens,
                "completion_tokens": decoded,
                "total_tokens": prepared.num_prompt_tokens + decoded,
            },
            "treegen": {
                "method": request.method,
                "answers": [search.answer(text) for _, text in chosen],
                "nodes": [node for node, _ in chosen],
                "values": [result.tree.nodes[node].score for node, _ in chosen],
                "votes": {answer: _finite(weight) for answer, weight in result.votes.items()},
                "candidates": list(result.candidates),
                "stopped": result.stopped,
                "usage": usage,
                "tree": [
                    {**node.to_json(), "logprob": _finite(node.logprob)}
                    for node in result.tree.nodes
                ]
                if request.shows_tree
                else None,
            },
        }

    async def stream(self, prepared: PreparedAnswer) -> AsyncGenerator[bytes, None]:
        """Yield the events of a streamed answer: comments while it is searched, then its text."""
        work = asyncio.ensure_future(self.answer(prepared))
        try:
            while not (await asyncio.wait({work}, timeout=_KEEP_ALIVE_SECONDS))[0]:
                yield b": searching\n\n"
            answer = work.result()
            choices, extra = answer.pop("choices"), answer.pop("treegen")
            usage = answer.pop("usage")
            frame = {**answer, "object": "chat.completion.chunk"}
            shows_usage = prepared.request.chat.stream_options.include_usage
            for choice in choices:
                for delta, reason in ((choice["message"], None), ({}, choice["finish_reason"])):
                    piece = {"index": choice["index"], "delta": delta, "finish_reason": reason}
                    is_last = choice is choices[-1] and reason is not None
                    more: dict[str, Any] = {"treegen": extra} if is_last else {}
                    more |= {"usage": None} if shows_usage else {}
                    yield encode_event({**frame, "choices": [piece], **more})
            if shows_usage:
                yield encode_event({**frame, "choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
        except Exception as error:
            yield b"data: " + bytes(make_error_response(error).body) + b"\n\n"
        finally:
            work.cancel()

    def close(self) -> None:
        """End all searches."""
        if self._thread is not None:
            self._thread.close()


class SearchStream(StreamingResponse):
    """The streamed answer of a search, which releases what it holds when it ends."""

    def __init__(self, events: AsyncGenerator[bytes, None], stack: ExitStack) -> None:
        """Create the response.

        Args:
            events: The events of the answer.
            stack: Closed at the end, also if the client disconnects before the first event.
        """
        super().__init__(events, media_type="text/event-stream")
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        with self._stack:
            await super().__call__(scope, receive, send)


def _finite(value: float) -> float | None:
    """Return a number that JSON has; None for others."""
    return value if math.isfinite(value) else None


def _name_option(error: InputError, request: SearchRequest) -> InputError:
    """Return an error about an option with the field's name in the request."""

    def spell(reference: str) -> str:
        name, _, value = reference.partition("=")
        field = f"search.{name}" if name in request.options else name
        return f"{field}={value}" if value else field

    name = error.parameter
    if name is None or name not in request.options:
        named = [option for option in request.options if repr(option[:80]) in str(error)]
        name = named[0] if named else None
    if name is None:
        return error
    return RequestError(error.message.rename(spell), f"search.{name[:80]}")
