"""The thread in which a server runs searches, apart from the event loop that computes nodes."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final

from treegen.errors import StoppedError
from treegen.integrations.nodes.protocol import Operation, Result, RootOperation
from treegen.integrations.nodes.searches import NodeSearches
from treegen.search.tree.node import SearchFn
from treegen.search.tree.result import SearchResult

_log = logging.getLogger(__name__)
_CLOSE_SECONDS: Final = 5.0
"""Time for the thread to end."""


class SearchThread:
    """A thread that runs searches while another event loop, such as a server's, computes nodes.

    Attributes:
        failure: The error that ended the thread; None while searches can run.
    """

    def __init__(
        self, run_operations: Callable[[Sequence[Operation]], Coroutine[Any, Any, Sequence[Result]]]
    ) -> None:
        """Start the thread; call it in the event loop that computes nodes.

        Args:
            run_operations: Runs operations on nodes; called in that event loop.
        """
        computing = asyncio.get_running_loop()

        async def send(operations: Sequence[Operation]) -> Sequence[Result]:
            call = asyncio.run_coroutine_threadsafe(run_operations(operations), computing)
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
            _log.exception("the thread of searches has failed; the next search starts another one")
            with suppress(RuntimeError):  # the other loop is closed
                self._computing.call_soon_threadsafe(self._failed.set_result, None)
            with suppress(Exception, SystemExit):  # it may fail again
                self._searches.close()

    async def run(self, fn: SearchFn, root: RootOperation, **how: Any) -> SearchResult:
        """Run one search; see `NodeSearches.run`.

        Args:
            fn: The search function.
            root: The prompt.
            **how: Further arguments of `NodeSearches.run`.

        Raises:
            StoppedError: the thread fails, or was closed.
        """
        stopped = StoppedError("the search has failed; send the request again")
        run = self._searches.run(fn, root, **how)
        try:
            call = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run, self._searches.loop))
        except RuntimeError:  # the loop of the searches is closed
            run.close()
            raise stopped from self.failure
        try:
            await asyncio.wait({call, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done() and (not call.done() or call.cancelled()):
                raise stopped from self.failure
            return call.result()
        finally:
            call.cancel()

    def close(self) -> None:
        """End all searches, and the thread.

        A thread that computes for long is left to end with the program.
        """
        with suppress(RuntimeError):  # the loop is closed
            self._searches.loop.call_soon_threadsafe(self._searches.loop.stop)
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._searches.close()
