"""A run of searches over a server's nodes, many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from treegen.common.params import SamplingParams
from treegen.integrations.client.connection import Connection
from treegen.integrations.client.searches import NodeSearches
from treegen.integrations.server.node_types import RootOperation
from treegen.search.budget import Budget
from treegen.search.event_loop import gather, run_apart
from treegen.search.run import SearchResults
from treegen.search.tree.node import SearchFn
from treegen.search.tree.result import SearchResult

_END_SECONDS: Final = 10.0
"""Time for dropping the nodes of a run on the server."""


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
        self._num_left = len(roots)
        self._connection: Connection | None = None
        self._searches = NodeSearches(self._send, lease_seconds)
        self._results: asyncio.Queue[SearchResult | BaseException] = asyncio.Queue()
        self._main: asyncio.Task[None] | None = None

    async def _send(self, operations: Sequence[Any]) -> Sequence[Any]:
        assert self._connection is not None
        return await self._connection.run_operations(operations)

    def __next__(self) -> SearchResult:
        if not self._num_left:
            self._end()
            raise StopIteration
        loop, results = self._searches.loop, list[SearchResult | BaseException]()
        if self._main is None:
            self._main = loop.create_task(self._run_all())

        async def wait() -> None:
            results.append(await self._results.get())

        try:
            run_apart(lambda: loop.run_until_complete(wait()))
        except BaseException:
            self.close()
            raise
        (result,) = results
        if isinstance(result, BaseException):
            self.close()
            raise result
        self._num_left -= 1
        return result

    async def _run_all(self) -> None:
        """Run all searches, and put their results into the queue."""
        places = asyncio.Semaphore(self._concurrency)

        async def run(name: str, root: RootOperation) -> None:
            async with places:
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
        self._num_left = 0
        if self._main is not None and not self._searches.loop.is_closed():
            self._main.cancel()
        self._end()

    def _end(self) -> None:
        """Wait until the server has dropped the nodes, and close the loop."""
        loop, main = self._searches.loop, self._main
        if main is not None and not loop.is_closed():

            async def wait() -> None:
                await asyncio.wait({main}, timeout=_END_SECONDS)

            run_apart(lambda: loop.run_until_complete(wait()))
        self._searches.close()

    def __del__(self) -> None:
        if hasattr(self, "_main"):
            self.close()
