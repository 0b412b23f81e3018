"""Runs search functions in an event loop while a server computes what they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from treegen.common.params import SamplingParams
from treegen.integrations.nodes.backend import NodeBackend, Send
from treegen.integrations.nodes.protocol import RootOperation
from treegen.search.budget import Budget
from treegen.search.event_loop import IdleLoop, end_loop
from treegen.search.run import RunningSearch, resume_any
from treegen.search.tree.node import Search, SearchFn
from treegen.search.tree.result import SearchResult

_END_SECONDS: Final = 1.0
"""Time for a search to end after it was cancelled."""


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
