"""Runs search functions in an event loop while a server computes what they wait for."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from treegen.common.params import SamplingParams
from treegen.errors import StoppedError
from treegen.integrations.client.backend import NodeBackend, Send
from treegen.integrations.server.node_types import Operation, Result, RootOperation
from treegen.search.budget import Budget
from treegen.search.event_loop import IdleLoop, end_loop
from treegen.search.run import RunningSearch, resume_any
from treegen.search.tree.node import Search, SearchFn
from treegen.search.tree.result import SearchResult

_log = logging.getLogger(__name__)
_END_SECONDS: Final = 1.0
"""Time for a search to end after it was cancelled."""
_CLOSE_SECONDS: Final = 5.0
"""Time for the thread of searches to end."""


class NodeSearches:
    """Searches over the nodes of one server, in an event loop of their own.

    Attributes:
        loop: The event loop, which the caller runs.
        backend: The backend of all searches.
    """

    def __init__(self, send: Send, lease_seconds: float | None = None) -> None:
        """Create the loop; nothing runs yet.

        Args:
            send: Runs operations on the server; called in the loop.
            lease_seconds: Lease of the trees. Default: the server's.
        """
        self.backend = NodeBackend(send, lease_seconds)
        self.loop = IdleLoop(self._on_idle, self._on_idle, self.backend)
        self._running: set[RunningSearch] = set()

    async def run(
        self,
        fn: SearchFn,
        root: RootOperation,
        *,
        name: str,
        params: SamplingParams,
        budget: Budget | None = None,
        text: str = "",
    ) -> SearchResult:
        """Run one search in the loop and return its result.

        If the caller is cancelled, so is the search.

        Args:
            fn: The search function.
            root: The prompt; its name is the origin of the draws.
            name: Name of the search.
            params: Default sampling parameters.
            budget: Budget of the search.
            text: Text of the root in the result.

        Raises:
            TreegenError: the server does not accept the prompt.
        """
        context, node = await self.backend.create_root(root)
        content: str | Sequence[int] = text or [0]
        search = Search(
            self.backend,
            content,
            name=name,
            params=params,
            budget=budget,
            context=context,
            origin=node.origin,
        )
        ended: asyncio.Future[SearchResult] = self.loop.create_future()

        def note(result: SearchResult) -> None:
            if not ended.done():
                ended.set_result(result)

        running = RunningSearch(self.loop, fn, search, note)
        self._running.add(running)
        try:
            return await ended
        finally:
            if not running.task.done():
                running.task.cancel()
                await asyncio.wait({running.task}, timeout=_END_SECONDS)
            self._running.discard(running)

    def _on_idle(self) -> bool:
        """Let a search resume, or send what the searches wait for; return whether that happened."""
        if resume_any(self.loop, self._running, busy=self.backend.has_work):
            return True
        return self.backend.flush()

    def close(self) -> None:
        """End all searches and close the loop."""
        if not self.loop.is_closed():
            end_loop(self.loop)


class SearchThread:
    """A thread that runs searches while another event loop, such as a server's, computes nodes.

    Attributes:
        failure: The error that ended the thread; None while searches can run.
    """

    def __init__(self, run_operations: Send) -> None:
        """Start the thread; call it in the event loop that computes nodes.

        Args:
            run_operations: Runs operations on nodes; called in that event loop.
        """
        computing = asyncio.get_running_loop()

        async def compute(operations: Sequence[Operation]) -> Sequence[Result]:
            return await run_operations(operations)

        async def send(operations: Sequence[Operation]) -> Sequence[Result]:
            call = asyncio.run_coroutine_threadsafe(compute(operations), computing)
            return await asyncio.wrap_future(call)

        self._searches = NodeSearches(send)
        self.failure: BaseException | None = None
        self._computing, self._failed = computing, computing.create_future()
        self._thread = threading.Thread(target=self._run_loop, name="treegen-searches", daemon=True)
        self._thread.start()

    def _run_loop(self) -> None:
        """Run the loop of the searches; if it fails, end the calls that wait for results."""
        try:
            self._searches.loop.run_forever()
        except BaseException as error:
            self.failure = error
            _log.exception("the thread of searches has failed; restart the server")
            with suppress(RuntimeError):  # the other loop is closed
                self._computing.call_soon_threadsafe(self._failed.set_result, None)

    async def run(
        self,
        fn: SearchFn,
        root: RootOperation,
        *,
        name: str,
        params: SamplingParams,
        budget: Budget | None = None,
    ) -> SearchResult:
        """Run one search; see `NodeSearches.run`.

        Args:
            fn: The search function.
            root: The prompt.
            name: Name of the search.
            params: Default sampling parameters of nodes.
            budget: Budget of the search.

        Raises:
            StoppedError: the thread has ended.
        """
        stopped = StoppedError("searches can no longer be run; restart the server")
        if not self._thread.is_alive():
            raise stopped
        run = self._searches.run(fn, root, name=name, params=params, budget=budget)
        call = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run, self._searches.loop))
        try:
            await asyncio.wait({call, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise stopped from self.failure
            return call.result()
        finally:
            call.cancel()

    def close(self) -> None:
        """End all searches, and the thread.

        A thread that computes for long is left to end with the program.
        """
        if self._thread.is_alive():
            self._searches.loop.call_soon_threadsafe(self._searches.loop.stop)
            self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            with suppress(*((Exception, SystemExit) if self.failure else ())):  # it may fail again
                self._searches.close()
