"""The thread that owns the LLM: it accepts waiting calls, runs a step, and hands out results."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from treegen.common.outputs import Usage
from treegen.common.params import SamplingParams
from treegen.common.synchronization import set_result_of
from treegen.errors import InternalError, StoppedError
from treegen.llm.encoder import AsyncCall, NodeCall
from treegen.search.live.run import LiveRun
from treegen.search.session import Session

if TYPE_CHECKING:
    from treegen.llm import LLM
    from treegen.search.backend import Context
    from treegen.search.live.backend import LiveBackend
    from treegen.search.session import Started

_BURST_GAP_SECONDS: Final = 0.002  # how long the first step waits for each further call
_MAX_BURST_SECONDS: Final = 0.05  # how long it waits for all further calls


class EngineLoop:
    """Runs the steps of one run that contains all calls, until `end` is called.

    Attributes:
        lock: Held to change `open_rows`, `closing` and the inbox, and by callers that must exclude
            a `close`.
        open_rows: Samples of all calls that are neither complete nor cancelled.
        closing: Whether further calls are rejected.
        failure: The error that ended all service; None while calls can be served.
        status: The run's status after the last step.
    """

    def __init__(self, llm: LLM, *, nodes: bool = False) -> None:
        """Start the thread.

        Args:
            llm: The LLM.
            nodes: Whether calls may use nodes of searches.

        Raises:
            InputError: another run of the LLM is not finished.
        """
        self._llm, self._has_nodes = llm, nodes
        self.lock = threading.Condition()
        self.open_rows = 0
        self.closing = False
        self.failure: Exception | None = None
        self._inbox: deque[Callable[[], None]] = deque()
        # By the number of a request: its call, and the index of its prompt in the call.
        self._calls: dict[int, tuple[AsyncCall, int]] = {}
        self._num_encoding = 0  # calls that are being encoded
        self._failed_usages: list[Usage] = []  # usage of runs that failed
        self._node_calls: dict[Started[Any], NodeCall] = {}
        self._open_run()
        self.status = self._run.status()
        self._thread = threading.Thread(target=self._serve, name="treegen-engine", daemon=True)
        self._thread.start()

    # For other threads

    def usages(self) -> list[Usage]:
        """Return the usage so far: one entry for each run that failed, then the current run's."""
        return [*self._failed_usages, self._run.usage]

    def expect(self, call: AsyncCall) -> None:
        """Count a call that is about to be encoded."""
        with self.lock:
            self.open_rows += call.rows
            self._num_encoding += 1

    def start_call(self, call: AsyncCall, failure: Exception | None) -> None:
        """Start an expected call, or end it if it could not be encoded."""
        with self.lock:
            self._num_encoding -= 1
            self._post(lambda: self._admit(call) if not failure else self._finish(call, failure))

    def cancel(self, call: AsyncCall) -> None:
        """End a call that no caller waits for; a complete call is left alone."""
        if not call.is_over:
            self._release_rows(call)
            self._post(lambda: self._finish(call))

    def start_node_call(self, call: NodeCall) -> None:
        """Start a call that uses nodes of searches; the caller holds `lock`."""
        self.open_rows += call.rows
        self._post(lambda: self._start_node_call(call))

    def cancel_node_call(self, call: NodeCall) -> None:
        """End a call that no caller waits for, and free its result."""
        self._release_rows(call)
        self._post(lambda: self._cancel_node_call(call))

    def release(self, backend: LiveBackend, contexts: Sequence[Context]) -> None:
        """Release contexts of nodes."""

        def release() -> None:
            for context in contexts:
                backend.release(context)

        self._post(release)

    def check(self) -> None:
        """Assert that pages, rows and requests are accounted for."""
        done: Future[None] = Future()
        self._post(lambda: set_result_of(done, self._run.check))
        done.result()

    def end(self) -> None:
        """Accept no more calls."""
        with self.lock:
            self.closing = True
            self.lock.notify()

    def join(self, *, drain: bool) -> None:
        """Wait until all calls are complete; cancel them first unless `drain`."""
        if not drain:
            stopped = StoppedError("the server is stopping and did not finish this call")
            self._post(lambda: self._finish_open_calls(stopped))
        self._thread.join()

    def _release_rows(self, call: AsyncCall | NodeCall) -> None:
        """Stop counting the rows of a complete or cancelled call, so that other calls may wait."""
        with self.lock:
            self.open_rows -= call.rows
            call.rows = 0

    def _post(self, task: Callable[[], None]) -> None:
        with self.lock:
            self._inbox.append(task)
            self.lock.notify()

    # In the thread

    def _serve(self) -> None:
        while True:
            with self.lock:
                while not self._inbox and not self._has_work and not self._is_drained:
                    self.lock.wait()
                    self._wait_for_burst()
                tasks, self._inbox = self._inbox, deque()
                if not tasks and self._is_drained:
                    break
            try:
                while tasks:
                    tasks.popleft()()
                if self._has_work:
                    self._step()
                self._resume_node_calls()
            # All current callers get the error; later calls can be served. Panics of libraries are
            # not Exceptions.
            except BaseException as error:
                self._recover(error)
                with self.lock:
                    self._inbox.extendleft(reversed(tasks))
            if self.failure is None:
                self.status = self._run.status()
        self._run.close()

    @property
    def _has_work(self) -> bool:
        return self.failure is None and self._run.has_work

    def _wait_for_burst(self) -> None:
        """Wait while further calls arrive in quick succession, so that their first step is shared.

        A prefill pass costs more than this wait.
        """
        until = time.monotonic() + _MAX_BURST_SECONDS
        while (
            self.lock.wait(_BURST_GAP_SECONDS) or self._num_encoding
        ) and time.monotonic() < until:
            pass

    @property
    def _is_drained(self) -> bool:
        # Calls of nodes may count no rows.
        return self.closing and not self.open_rows and not self._node_calls

    def _admit(self, call: AsyncCall) -> None:
        if call.is_over:
            return
        if self.failure is not None:
            self._finish(call, self.failure)
            return
        try:
            if call.params is None:
                for tokens in call.prompts:
                    call.numbers.append(self._run.score(tokens, call.top))
            else:
                params = [call.params] * len(call.requests)
                call.numbers += self._run.add(call.requests, params, first=call.first)
        except BaseException as error:
            self._finish(call, _as_exception(error))
            if not isinstance(error, Exception):
                raise
            return
        self._calls.update((number, (call, index)) for index, number in enumerate(call.numbers))
        if call.streams:
            self._hand_out(call, list(enumerate(call.prompts)))

    def _step(self) -> None:
        out: dict[AsyncCall, list[tuple[int, Any]]] = {}
        results = self._run.step()
        self.status = self._run.status()
        for number, result in results:
            call, index = self._calls[number]
            out.setdefault(call, []).append((index, result))
            call.num_pending -= 1
        streamed = [number for number, (call, _) in self._calls.items() if call.streams]
        for delta in self._run.take_deltas(streamed):
            call, index = self._calls[delta.number]
            out.setdefault(call, []).append((index, delta))
        for call, batch in out.items():
            if not call.num_pending:
                # Finish first, so that a caller with this result can call again at once.
                self._finish(call)
            self._hand_out(call, batch)

    def _hand_out(self, call: AsyncCall, batch: list[tuple[int, Any]] | Exception) -> None:
        try:
            call.loop.call_soon_threadsafe(call.queue.put_nowait, batch)
        except RuntimeError:  # its event loop is closed, so no caller waits
            self._finish(call)

    def _finish(self, call: AsyncCall, failure: Exception | None = None) -> None:
        """End a call: drop its results that are still due, and free its pages."""
        if call.is_over:
            return
        call.is_over = True
        self._release_rows(call)
        if failure is not None:
            self._hand_out(call, failure)
        for number in call.numbers:
            self._calls.pop(number, None)
        for number in call.numbers if self.failure is None else ():
            self._run.cancel(number)  # may record the results of a running pass, and so may fail

    def _recover(self, error: BaseException) -> None:
        """Pass an error to all callers, and open another run, or else end all service."""
        if self.failure is not None:
            return
        try:
            self._restart_run(_as_exception(error))
        except BaseException as failure:
            self.failure = _as_exception(failure)
            self._finish_open_calls(self.failure)

    def _restart_run(self, error: Exception) -> None:
        self._run.close()
        self._finish_open_calls(error)
        self._failed_usages.append(self._run.usage)
        self._open_run()

    def _open_run(self) -> None:
        self._run: LiveRun = self._llm.open_live_run(nodes=self._has_nodes, user="AsyncLLM")
        backend = self._run.backend
        self._session = None if backend is None else Session(backend, SamplingParams())

    def _finish_open_calls(self, error: Exception) -> None:
        for call in {id(call): call for call, _ in self._calls.values()}.values():
            self._finish(call, error)
        for started, node_call in list(self._node_calls.items()):
            with suppress(BaseException):  # the error is the caller's, whatever the cleanup raises
                started.fail(error)
            started.error, started.is_done = error, True
            self._finish_node_call(node_call)

    # Calls that use nodes of searches

    def _start_node_call(self, call: NodeCall) -> None:
        if call.is_over:
            return
        session = self._session
        assert session is not None and self._run.backend is not None
        if self.failure is not None:
            self._fail_node_call(call, self.failure)
            return
        try:
            call.started = session.start(call.begin(self._run.backend))
        except BaseException as error:
            self._fail_node_call(call, _as_exception(error))
            raise
        self._node_calls[call.started] = call
        if call.started.is_done:
            self._finish_node_call(call)

    def _resume_node_calls(self) -> None:
        """Continue calls whose samples have ended, and hand out the results of those that end."""
        if self._session is None or self.failure is not None:
            return
        for started in self._session.resume():
            if started in self._node_calls:
                self._finish_node_call(self._node_calls[started])

    def _fail_node_call(self, call: NodeCall, error: Exception) -> None:
        """Hand out the error of a call that has not started."""
        call.is_over = True
        self._release_rows(call)
        if call.future.set_running_or_notify_cancel():
            call.future.set_exception(error)

    def _finish_node_call(self, call: NodeCall) -> None:
        """Hand out the result or the error of a call that is done."""
        assert call.started is not None
        del self._node_calls[call.started]
        call.is_over = True
        self._release_rows(call)
        # In a closed event loop, no caller waits.
        if call.loop.is_closed() or not call.future.set_running_or_notify_cancel():
            self._discard(call)
        elif call.started.error is not None:
            call.future.set_exception(call.started.error)
        else:
            call.future.set_result(call.started.result)

    def _cancel_node_call(self, call: NodeCall) -> None:
        if not call.is_over:
            call.is_over = True
            if call.started is not None:
                del self._node_calls[call.started]
                call.started.fail(StoppedError("nothing waits for this call"))
        elif call.future.done() and not call.future.cancelled():
            self._discard(call)

    @staticmethod
    def _discard(call: NodeCall) -> None:
        if call.started is not None and call.started.error is None:
            call.discard(call.started.result)


def _as_exception(error: BaseException) -> Exception:
    """Return an error as an Exception, which a panic of a library is not."""
    if isinstance(error, Exception):
        return error
    return InternalError(f"the engine has failed: {error!r}")
