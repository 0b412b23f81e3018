"""The backend of searches over a server's nodes.

It collects the calls that a search makes in one step, and sends them together. The server creates a
prompt or an extension with the first call that needs it, so neither costs a round trip of its own.
Dropped nodes travel with the next request too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from pydantic import ValidationError

from treegen.common.outputs import Score
from treegen.common.params import SamplingParams
from treegen.errors import InputError
from treegen.integrations.nodes import protocol
from treegen.integrations.nodes.conversion import completion_of, encode_parts, error_of, score_of
from treegen.integrations.nodes.params import Sampling, sampling_fields
from treegen.integrations.nodes.step_requests import NodeContext, StepCall, StepRequest, Ticket
from treegen.prompts.tree import Parts
from treegen.search.backend import BackendSample, Context
from treegen.search.budget import SearchUsage
from treegen.search.budgeted_search import BudgetedSearch

_MAX_REFUSALS: Final = 60  # times that a call is sent to a busy server
_FIRST_WAIT_SECONDS: Final = 0.1
_LONGEST_WAIT_SECONDS: Final = 5.0

Send = Callable[[Sequence[protocol.Operation]], Awaitable[Sequence[protocol.Result]]]
"""A function that runs operations on a server, and returns their results in order."""


@dataclass(slots=True)
class _Outbox:
    """The calls of one search."""

    calls: list[StepCall] = field(default_factory=list)
    """Those that are not sent yet."""
    requests: set[StepRequest] = field(default_factory=set)
    """Requests in progress."""


class NodeBackend:
    """The Backend of searches whose nodes a server keeps."""

    def __init__(self, send: Send, lease_seconds: float | None = None) -> None:
        """Create a backend without nodes.

        Args:
            send: Runs operations on the server.
            lease_seconds: Seconds after its last use until the server drops a tree. Default: the
                server's.
        """
        self._send, self._lease = send, lease_seconds
        # The server reports its limits with each root.
        self._max_samples = self._max_operations = 1
        self._outboxes: dict[BudgetedSearch, _Outbox] = {}
        self._tickets: dict[Ticket, None] = {}
        self._dropped: list[NodeContext] = []  # those that the server still has
        self._tasks: set[asyncio.Task[None]] = set()

    # Contexts

    async def create_root(
        self, root: protocol.RootOperation
    ) -> tuple[NodeContext, protocol.NodeAnswer]:
        """Create a root on the server.

        Args:
            root: The root's prompt, name and seed.

        Raises:
            TreegenError: the server does not accept it.
        """
        (result,) = await self._send([root.model_copy(update={"lease_seconds": self._lease})])
        if isinstance(result, protocol.FailedOperation):
            raise error_of(result.error)
        assert isinstance(result, protocol.NodeResult)
        node, memory = result.node, result.memory
        self._max_samples, self._max_operations = memory.max_samples, memory.max_operations
        return NodeContext(None, root, "", node.id, node.num_context_tokens), node

    def prompt(self, content: str | Sequence[int], usage: SearchUsage) -> NodeContext:
        """Return the context of a prompt, which the first call that needs it creates."""
        return NodeContext(None, content if isinstance(content, str) else list(content), "")

    def extend(self, context: Context, content: str | Parts) -> NodeContext:
        """Return the context with text, or with texts and images, appended."""
        assert isinstance(context, NodeContext)
        path = f"{context.path}+{context.num_extended}/"
        encoded = content if isinstance(content, str) else encode_parts(content)
        context.num_extended += 1
        return NodeContext(context, encoded, path, num_tokens=context.num_tokens)

    def release(self, context: Context) -> None:
        """Release a context; the server drops its node with the next request."""
        assert isinstance(context, NodeContext)
        if not context.is_released:
            context.is_released = True
            if context.id is not None:
                self._dropped.append(context)

    # Calls

    async def sample(
        self,
        context: Context,
        key: str,
        indices: range,
        params: SamplingParams,
        search: BudgetedSearch,
        *,
        continues: bool = False,
    ) -> Sequence[BackendSample | None]:
        """Draw one sample per index, in that order.

        Args:
            context: The text that the samples continue.
            key: Key of the node.
            indices: Index of each sample.
            params: Sampling parameters.
            search: The search that asks.
            continues: Whether the samples belong to a call that is already counted.

        Returns:
            The samples; None for each that had not ended when the search was stopped, or that the
            budget cut off.
        """
        assert isinstance(context, NodeContext)
        name = _root_name(search.origin_of(key), context)
        fields = {**sampling_fields(params), "seed": params.seed or 0}
        try:
            sampling = Sampling.model_validate(fields)
        except ValidationError as error:
            raise _convert_error(error) from None
        ticket = Ticket(search, [None] * len(indices))

        def begin(first: int, num: int, max_tokens: int) -> None:
            """Start some of the samples.

            Args:
                first: Index of the first sample in the call.
                num: Number of samples.
                max_tokens: Maximum number of tokens of each.
            """
            limited = sampling.model_copy(update={"max_tokens": max_tokens})
            for start in range(first, first + num, self._max_samples):
                result_indices = range(start, min(start + self._max_samples, first + num))
                make = partial(
                    protocol.SampleOperation,
                    op="sample",
                    n=len(result_indices),
                    first=indices[start],
                    params=limited,
                )
                num_counted_tokens = None if start or continues else context.num_tokens
                self._post(
                    StepCall(
                        ticket, context, name, make, result_indices, max_tokens, num_counted_tokens
                    )
                )

        if search.call_queue is None:
            begin(0, len(indices), params.max_tokens)
        return await self._wait_for(
            ticket, num_samples=len(indices), max_tokens=params.max_tokens, begin=begin
        )

    async def score(
        self, context: Context, texts: Sequence[str], search: BudgetedSearch
    ) -> list[Score]:
        """Return the log-likelihood of each text after a context.

        Args:
            context: The text before the texts.
            texts: The texts to score.
            search: The search that asks.
        """
        assert isinstance(context, NodeContext)
        ticket = Ticket(search, [None] * len(texts))
        make = partial(protocol.ScoreOperation, op="score", texts=list(texts))
        self._post(StepCall(ticket, context, None, make, range(len(texts)), 0, context.num_tokens))
        return [score for score in await self._wait_for(ticket) if score is not None]

    def cancel(self, search: BudgetedSearch) -> None:
        """End all pending calls of a search, and cancel its requests."""
        outbox = self._outboxes.get(search)
        for request in outbox.requests if outbox is not None else ():
            if request.task is not None:
                request.task.cancel()
        for ticket in [ticket for ticket in self._tickets if ticket.search is search]:
            self._close(ticket)

    async def _wait_for(self, ticket: Ticket, **how: Any) -> list[Any]:
        """Return the results of a ticket; `how` has arguments of `PendingResults.join`."""
        self._tickets[ticket] = None
        try:
            ticket.join(**how)
        except BaseException:
            self._close(ticket)
            raise
        return await ticket.wait(self._close, self.release)

    def _post(self, call: StepCall) -> None:
        self._outboxes.setdefault(call.ticket.search, _Outbox()).calls.append(call)

    def _close(self, ticket: Ticket) -> None:
        """Forget a ticket; its further results are dropped."""
        self._tickets.pop(ticket, None)
        ticket.leave()

    # Requests

    @property
    def has_work(self) -> bool:
        """Whether a request is in progress."""
        return bool(self._tasks)

    def flush(self) -> bool:
        """Send the pending calls, a request for each search; return whether any was sent or failed.

        Call it when nothing of the searches can run, so that all calls of a step are sent together.
        """
        requests, has_failed = [], False
        for search, outbox in list(self._outboxes.items()):
            calls = [call for call in outbox.calls if not call.context.is_pending]
            outbox.calls = [call for call in outbox.calls if call.context.is_pending]
            calls = [call for call in calls if call.ticket in self._tickets]
            if calls:
                request = StepRequest(self._max_operations, self._lease)
                for call in calls:
                    try:
                        if not request.add(call):
                            outbox.calls.append(call)
                    except Exception as error:  # of this search; others go on
                        self._fail(call.ticket, _convert_error(error))
                        has_failed = True
                if request.operations:
                    outbox.requests.add(request)
                    requests.append((request, outbox))
            elif not outbox.calls and not outbox.requests:
                del self._outboxes[search]
        # A root is dropped at the end of its search, which may make no further request.
        if not requests and any(context.parent is None for context in self._dropped):
            requests.append((StepRequest(self._max_operations, self._lease), _Outbox()))
        for request, outbox in requests:
            for context in self._take_dropped(self._max_operations - len(request.operations)):
                request.drop(context)
            request.task = asyncio.get_running_loop().create_task(self._run(request, outbox))
            self._tasks.add(request.task)
            request.task.add_done_callback(self._tasks.discard)
        return bool(requests) or has_failed

    def _take_dropped(self, max_nodes: int) -> list[NodeContext]:
        """Return dropped nodes whose parents are not dropped, and forget them.

        Args:
            max_nodes: Maximum number of nodes.
        """
        dropped = [node for node in self._dropped if not (node.parent and node.parent.is_released)]
        self._dropped = dropped[max_nodes:]
        return dropped[:max_nodes]

    async def finish(self) -> None:
        """Drop the nodes that are left, and wait for all requests."""
        while self.flush() or self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self, request: StepRequest, outbox: _Outbox) -> None:
        """Send a request, and pass its results to the calls that wait for them."""
        try:
            results = await self._send(request.operations)
            for index, context in request.created:
                self._note_created(context, results[index])
            for index, context in request.temporary:
                if isinstance(result := results[index], protocol.NodeResult):
                    context.num_tokens = result.node.num_context_tokens
            for index, call in request.calls:
                self._receive(call, request.find_failure(call, results) or results[index])
            for call in request.postponed:
                failure = request.find_failure(call, results)
                if failure is not None:
                    self._receive(call, failure)
                else:
                    self._post(call)
        except Exception as error:
            for call in (*(call for _, call in request.calls), *request.postponed):
                self._fail(call.ticket, error)
        finally:
            outbox.requests.discard(request)
            for _, context in request.created:
                context.creator = None

    def _note_created(self, context: NodeContext, result: protocol.Result) -> None:
        if isinstance(result, protocol.NodeResult):
            context.id, context.num_tokens = result.node.id, result.node.num_context_tokens
            if context.is_released:  # while the request was in progress
                self._dropped.append(context)

    def _receive(self, call: StepCall, result: protocol.Result) -> None:
        """Store the results of a call in its ticket, and count what they cost."""
        ticket, usage = call.ticket, call.ticket.search.usage
        if isinstance(result, protocol.FailedOperation):
            # Too many samples wait, or the client is at a limit that its other requests may free.
            is_busy = result.error.code == 429 and (
                result.error.free is None or len(self._tasks) > 1
            )
            if is_busy and call.num_refusals < _MAX_REFUSALS:
                wait = min(_FIRST_WAIT_SECONDS * 2**call.num_refusals, _LONGEST_WAIT_SECONDS)
                call.num_refusals += 1
                wait *= random.uniform(0.5, 1)
                asyncio.get_running_loop().call_later(wait, self._post, call)
            else:
                self._fail(ticket, error_of(result.error))
            return
        if call.num_counted_tokens is not None:
            usage.tokens_reprompted += call.context.num_tokens - call.num_counted_tokens
        if isinstance(result, protocol.SampleResult):
            usage.tokens_prefilled += result.usage.prefilled_tokens
            for index, node in zip(call.result_indices, result.nodes, strict=True):
                self._store_sample(call, index, node)
        elif isinstance(result, protocol.ScoreResult):
            usage.tokens_prefilled += result.usage.prefilled_tokens
            for index, score in zip(call.result_indices, result.scores, strict=True):
                ticket.results[index] = score_of(score)
                if ticket.call is not None:
                    ticket.call.num_open -= 1
        ticket.num_open -= len(call.result_indices)
        if not ticket.num_open and ticket.call is None:
            ticket.finish()

    def _store_sample(self, call: StepCall, index: int, node: protocol.NodeAnswer) -> None:
        ticket, parent = call.ticket, call.context
        path = f"{parent.path}{node.index}/"
        context = NodeContext(parent, None, path, node.id, node.num_context_tokens)
        completion = completion_of(node, f"{ticket.search.name}/{parent.path}")
        if ticket not in self._tickets:  # its search was stopped, or the caller has gone
            self.release(context)
            return
        ticket.results[index] = BackendSample(completion, context)
        ticket.count_sample(index, completion, call.max_tokens)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        if ticket in self._tickets and not ticket.is_done:
            ticket.leave(error)


def _convert_error(error: Exception) -> Exception:
    """Return an InputError for fields that the protocol of nodes rejects; return other errors."""
    if not isinstance(error, ValidationError):
        return error
    last = error.errors(include_input=False)[-1]  # a union's last kind is the most general one
    field = next((part for part in last["loc"] if isinstance(part, str)), "this")
    return InputError(f"the server does not accept {field}: {last['msg']}")


def _root_name(origin: str, context: NodeContext) -> str:
    """Return the name of a node's root, from the origin of the draws at the node."""
    return origin.removesuffix(context.path).removesuffix("/")
