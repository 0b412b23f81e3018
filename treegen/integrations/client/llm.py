"""RemoteLLM: the calls of an LLM that a server computes, and runs of its searches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Final, TypeVar

from treegen.common.checks import check_int, check_number
from treegen.common.outputs import RequestOutput, Score
from treegen.common.params import Params, SamplingParams, check_params
from treegen.errors import InputError
from treegen.integrations.client.connection import Connection, check_key, check_url
from treegen.integrations.client.conversion import (
    as_text_or_ids,
    check_prompt,
    encode_messages,
    is_chat,
    output_of,
    prompt_tokens_of,
    score_of_choices,
)
from treegen.integrations.nodes.params import sampling_fields
from treegen.integrations.nodes.protocol import RootOperation
from treegen.integrations.nodes.searches import NodeSearches
from treegen.llm.arguments import reject_unknown_arguments
from treegen.prompts.plan.draws import DrawCounter, hash_prompt
from treegen.prompts.tree import as_list, chat_arguments
from treegen.search.budget import Budget
from treegen.search.event_loop import gather, run_outside_loop
from treegen.search.run import SearchResults
from treegen.search.search_calls import SearchCalls
from treegen.search.tree.node import SearchFn
from treegen.search.tree.result import SearchProblem, SearchResult

_END_SECONDS: Final = 10.0
"""Maximum time for dropping the nodes of a run on the server."""


class RemoteSearchRun(SearchResults):
    """Results of searches as they finish; made by `RemoteLLM.search_stream`."""

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[Connection]],
        fn: SearchFn,
        roots: Mapping[str, RootOperation],
        *,
        params: SamplingParams,
        concurrency: int,
        budget: Budget | None,
        rows: int,
        lease_seconds: float | None,
    ) -> None:
        """Create a run whose searches start with the first result that is requested.

        Args:
            connect: Opens connections to the server.
            fn: The search function.
            roots: The root of each problem, by its name.
            params: Default sampling parameters of nodes.
            concurrency: Maximum number of searches at once.
            budget: Budget of each search.
            rows: Ignored.
            lease_seconds: Seconds after its last use until the server drops a tree; None is the
                server's default.
        """
        self.names = list(roots)
        self._connect, self._fn, self._params, self._budget = connect, fn, params, budget
        self._concurrency, self._roots = concurrency, roots
        self._num_remaining = len(roots)
        self._connection: Connection | None = None
        self._searches = NodeSearches(self._send, lease_seconds)
        self._results: asyncio.Queue[SearchResult | BaseException] = asyncio.Queue()
        self._main: asyncio.Task[None] | None = None

    async def _send(self, operations: Sequence[Any]) -> Sequence[Any]:
        assert self._connection is not None
        return await self._connection.run_operations(operations)

    def __next__(self) -> SearchResult:
        if not self._num_remaining:
            self._end()
            raise StopIteration
        loop = self._searches.loop
        if self._main is None:
            self._main = loop.create_task(self._run_all())
        try:
            result = run_outside_loop(lambda: loop.run_until_complete(self._results.get()))
            if isinstance(result, BaseException):
                raise result
        except BaseException:
            self.close()
            raise
        self._num_remaining -= 1
        return result

    async def _run_all(self) -> None:
        """Run all searches, and put their results into the queue."""
        semaphore = asyncio.Semaphore(self._concurrency)

        async def run(name: str, root: RootOperation) -> None:
            async with semaphore:
                text = root.prompt if isinstance(root.prompt, str) else ""
                result = await self._searches.run(
                    self._fn,
                    root,
                    name=name,
                    params=self._params,
                    budget=self._budget,
                    text=text,
                )
            self._results.put_nowait(result)

        try:
            async with self._connect() as self._connection:
                try:
                    await gather(run(*named) for named in self._roots.items())
                finally:
                    await self._searches.backend.finish()
        except Exception as error:
            self._results.put_nowait(error)

    def close(self) -> None:
        """End all searches; unfinished ones get no result."""
        self._num_remaining = 0
        if self._main is not None and not self._searches.loop.is_closed():
            self._main.cancel()
        self._end()

    def _end(self) -> None:
        """Wait until the server has dropped the nodes, and close the loop."""
        loop, main = self._searches.loop, self._main
        if main is not None and not loop.is_closed():
            end = asyncio.wait({main}, timeout=_END_SECONDS)
            run_outside_loop(lambda: loop.run_until_complete(end))
        self._searches.close()

    def __del__(self) -> None:
        if hasattr(self, "_main"):
            self.close()


T = TypeVar("T")
_STRUCTURES: Final = {
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "choice": "choice",
}
"""Parameters that specify a structure, and their names in `structured_outputs` of a request."""


class RemoteLLM(SearchCalls[RemoteSearchRun]):
    """A model that `treegen serve` has on this or another machine.

    A search function that was written for `LLM.search` runs unchanged, and finds the same tree. The
    function itself runs here; the server keeps the nodes and computes them. All calls of one step
    of a search are sent together. The argument `rows` has no effect, because the server plans for
    all its clients.

    Attributes:
        num_requests: Requests that were sent so far.
        num_sent: Bytes of their bodies.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        model: str = "",
        timeout: float = 600.0,
        retries: int = 5,
        lease_seconds: float | None = None,
    ) -> None:
        """Remember the address; nothing is sent yet.

        Args:
            base_url: Address of the server, such as "http://127.0.0.1:8000/v1".
            api_key: The server's key. Default: none.
            model: Name of the model. Default: the one that is served.
            timeout: Seconds to wait for one response, and for a busy server.
            retries: Maximum number of retries if no response arrives or the server fails. If the
                server still has the response to a request of a search, the retry gets this
                response. The server computes a retried `generate` or `score` again. 0 also turns
                off waiting for a busy server.
            lease_seconds: Seconds that a search may pause until the server drops its tree. The
                server limits it. Default: the server's, which is usually 10 minutes.

        Raises:
            InputError: an argument cannot be used.
        """
        check_url(base_url)
        if api_key is not None:
            check_key(api_key)
        check_int("retries", retries, minimum=0)
        check_number("timeout", timeout, above=0)
        if lease_seconds is not None:
            check_number("lease_seconds", lease_seconds, above=0)
        self._lease = lease_seconds
        self._url, self._key, self._model = base_url.rstrip("/"), api_key, model
        self._timeout, self._retries = timeout, retries
        self._draw_counter = DrawCounter()
        self.num_requests = self.num_sent = 0

    def __repr__(self) -> str:
        return f"RemoteLLM({self._url!r})"

    # Searches

    def _read_prompt(self, content: Any, template: Mapping[str, Any]) -> dict[str, Any]:
        prompt = check_prompt(content)
        if not is_chat(prompt):
            return {"prompt": prompt}
        how = dict(template)
        tools = how.pop("tools", None)
        messages = encode_messages(prompt)
        return {"messages": messages, "tools": tools, "chat_template_kwargs": how or None}

    def _start_searches(
        self, fn: SearchFn, problems: Sequence[SearchProblem], *, params: SamplingParams, **how: Any
    ) -> RemoteSearchRun:
        counter = self._draw_counter if params.seed is None else DrawCounter()
        roots: dict[str, RootOperation] = {}
        for problem in problems:
            prompt: Any = problem.content
            name = problem.name if problem.is_named else None
            repeat = 0 if problem.is_named else counter.advance(repr(prompt), 1)
            roots[problem.name] = RootOperation(
                op="root", name=name, repeat=repeat, seed=params.seed or 0, **prompt
            )
        return RemoteSearchRun(
            self.connect, fn, roots, params=params, lease_seconds=self._lease, **how
        )

    # Samples and scores

    @reject_unknown_arguments
    def generate(
        self,
        prompts: Iterable[Any],
        params: Params | None = None,
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Return params.n completions of each prompt, all prompts at once.

        With a seed, the draws are those of `LLM.generate`, also for prompts that appear twice.
        Without a seed, the server numbers the samples of all its clients in order of arrival. The
        completions have no `stop` and no alternatives, because OpenAI's protocol does not report
        them.

        Args:
            prompts: Texts, token ids or chat messages.
            params: Sampling parameters of all prompts. Default: those of `SamplingParams()`.
            tools: Tools that the chat template lists. Default: none.
            chat_template_kwargs: Further arguments of the chat template. Default: none.

        Raises:
            InputError: an argument cannot be used, or the server cannot be reached.
            TreegenError: the server rejects a prompt.
        """
        params = check_params(params)
        if params.logprobs or params.prompt_logprobs is not None:
            raise InputError(
                "RemoteLLM.generate does not return logprobs or prompt_logprobs; remove these "
                "parameters, or use score"
            )
        fields = {**sampling_fields(params), "n": params.n, "max_tokens": params.max_tokens}
        for name, server_name in _STRUCTURES.items():
            if name in fields:
                fields["structured_outputs"] = {server_name: fields.pop(name)}
        contents = [check_prompt(prompt) for prompt in as_list("prompts", prompts)]
        # As a field of the request, tools would make the server take calls out of the text.
        arguments = chat_arguments(tools or None, chat_template_kwargs)
        template = {"chat_template_kwargs": arguments} if arguments else {}

        async def call(connection: Connection) -> list[tuple[Any, int]]:
            request = partial(_complete, connection, fields=fields, template=template)
            return await _complete_all(request, contents, params)

        answers = self._run(call) if contents else []
        return [
            output_of(str(index), content, answer, params, first)
            for index, (content, (answer, first)) in enumerate(zip(contents, answers, strict=True))
        ]

    @reject_unknown_arguments
    def score(self, pairs: Iterable[tuple[Any, Any]], *, top: int = 0) -> list[Score]:
        """Return the log-likelihood of each continuation given its context.

        Args:
            pairs: (context, continuation), both texts or both token ids.
            top: Number of most likely tokens to report at the position of each token, as
                `Score.top`. Default: 0.

        Raises:
            InputError: pairs cannot be used, or the server cannot be reached.
            TreegenError: the server rejects a pair.
        """
        check_int("top", top, minimum=0, maximum=20)
        prompts: list[list[Any]] = []
        for index, pair in enumerate(as_list("pairs", pairs)):
            is_pair = isinstance(pair, Sequence) and len(pair) == 2 and not isinstance(pair, str)
            context, continuation = map(as_text_or_ids, pair if is_pair else ("", ""))
            if type(context) is not type(continuation) or not context:
                raise InputError(
                    f"pair {index} must be a context and a continuation that are not empty, "
                    f"either both text or both token ids, got {pair!r:.80}"
                )
            prompts.append([context, context + continuation])

        async def call(connection: Connection) -> list[Any]:
            fields = {"echo": True, "max_tokens": 0, "return_token_ids": True}
            return await gather(
                connection.post_json(
                    "completions", {**fields, "prompt": prompt, "prompt_logprobs": max(1, top)}
                )
                for prompt in prompts
            )

        answers = self._run(call) if prompts else []
        return [
            score_of_choices(index, answer["choices"], top) for index, answer in enumerate(answers)
        ]

    # Connections

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        """Open a connection pool in the running event loop, and count what it sends."""
        connection = Connection(
            self._url, self._key, model=self._model, timeout=self._timeout, retries=self._retries
        )
        try:
            async with connection:
                yield connection
        finally:
            self.num_requests += connection.num_requests
            self.num_sent += connection.num_sent

    def _run(self, call: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine with a connection, also where an event loop runs, as in a notebook."""

        async def run() -> T:
            async with self.connect() as connection:
                return await call(connection)

        return run_outside_loop(lambda: asyncio.run(run()))


async def _complete_all(
    request: Callable[[Any, int], Coroutine[Any, Any, Any]],
    contents: Sequence[Any],
    params: SamplingParams,
) -> list[tuple[Any, int]]:
    """Return the answer for each prompt, and the index of the prompt's first sample.

    With a seed, a prompt that appears again gets further samples, as in `LLM.generate`. Prompts are
    equal if their tokens are, and only the answers have the tokens. So prompts whose contents are
    equal are numbered before the requests. A prompt is requested again if its tokens turn out to be
    those of an earlier prompt with another content, such as token ids instead of text.

    Args:
        request: Requests completions of a prompt, from the index of a sample.
        contents: The prompts.
        params: Sampling parameters.
    """
    assumed = _first_indices(map(repr, contents), params)
    answers = await gather(map(request, contents, assumed))
    tokens = (prompt_tokens_of(*pair) for pair in zip(contents, answers, strict=True))
    firsts = _first_indices(map(hash_prompt, tokens), params)
    mismatched = [index for index, first in enumerate(firsts) if first != assumed[index]]
    redone = await gather(request(contents[index], firsts[index]) for index in mismatched)
    for index, answer in zip(mismatched, redone, strict=True):
        answers[index] = answer
    return list(zip(answers, firsts, strict=True))


def _first_indices(prompts: Iterable[str], params: SamplingParams) -> list[int]:
    """Return the index of the first sample of each prompt of a call.

    Args:
        prompts: A text for each prompt; those of equal prompts are equal.
        params: Sampling parameters. Without a seed, the server numbers the samples.
    """
    counter = DrawCounter()
    return [0 if params.seed is None else counter.advance(text, params.n) for text in prompts]


async def _complete(
    connection: Connection,
    content: Any,
    first: int,
    *,
    fields: Mapping[str, Any],
    template: Mapping[str, Any],
) -> Any:
    """Return the answer of a request for completions of one prompt.

    Args:
        connection: The connection.
        content: The prompt.
        first: Index of the first sample.
        fields: Sampling parameters.
        template: Arguments of the chat template.
    """
    if first:
        fields = {**fields, "first": first}
    if is_chat(content):
        body = {"messages": encode_messages(content), "logprobs": True, **template}
        path = "chat/completions"
    else:
        body, path = {"prompt": content, "logprobs": 0}, "completions"
    return await connection.post_json(path, {**fields, **body, "return_token_ids": True})
