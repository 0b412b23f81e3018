"""AsyncLLM: one LLM for many callers at once, each of whom waits in an event loop.

Three kinds of threads meet here. Callers await in their event loops. One thread encodes prompts, in
the order in which they come. One thread owns the LLM: between two steps it takes what has come, and
after a step it hands out what has ended.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from treegen.closing import Closing
from treegen.errors import BusyError, InputError, StoppedError
from treegen.outputs import Completion, Score, Status, Usage
from treegen.params import SamplingParams, check_int
from treegen.plan.requests import flat_requests
from treegen.prompts.known import KnownPrompts, key_of
from treegen.prompts.token_text import Text
from treegen.prompts.tree import Message, as_list, chat_arguments
from treegen.search.live.run import LiveRun
from treegen.search.live.texts import GrowingTexts

if TYPE_CHECKING:
    from treegen.llm import LLM
    from treegen.plan.plan import Request
    from treegen.prompts.radix import Tokens

Prompt = str | Sequence[int] | Sequence[Message]
_WAITING_PER_ROW: Final = 4
_GATHERED: Final = 0.002  # seconds that the first call of all waits for others
_MOST_GATHERED: Final = 0.05


@dataclass(slots=True, eq=False)
class Call:
    """One call: some prompts with the same parameters, and what comes of them.

    params: how they are sampled; None only scores them.
    streams: whether tokens are handed out as they come.
    first: samples of a seed that are left out.
    rows: what it counts against the samples that may wait.
    due: results that the engine has not handed out.
    requests, prompts: the prompts encoded, and their token ids, once they are.
    numbers: of its requests in the run.
    is_over: whether the engine has done with it.
    """

    params: SamplingParams | None
    streams: bool
    loop: asyncio.AbstractEventLoop
    rows: int
    due: int
    first: int = 0
    prompts: list[Tokens] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    queue: asyncio.Queue[list[tuple[int, Any]] | Exception] = field(default_factory=asyncio.Queue)
    numbers: list[int] = field(default_factory=list)
    is_over: bool = False


class AsyncLLM(Closing):
    """Takes calls from any event loop, at any time, and runs all of them in the same steps.

    The samples of a call are those that `LLM.generate` would draw if the calls came one by one.
    The LLM serves nobody else until `close`.
    """

    def __init__(self, llm: LLM, *, max_waiting: int | None = None) -> None:
        """Start to serve.

        max_waiting: samples that may wait beside those that are decoded; further calls raise
        BusyError. By default four times the LLM's max_rows.

        Raises:
            InputError: max_waiting cannot be used, or another run of the LLM is not finished.
        """
        if max_waiting is not None:
            check_int("max_waiting", max_waiting, least=1)
        self.llm = llm
        self.text = Text(llm.tokenizer)
        self.max_waiting = max_waiting or _WAITING_PER_ROW * llm.max_rows
        # An encoding tokenizer has settings that are not for two threads at once.
        self.tokenizer = copy.deepcopy(llm.tokenizer)
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="treegen-encode")
        self._known = KnownPrompts()
        self._changed = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._calls: dict[int, tuple[Call, int]] = {}  # by request number, with the prompt's place
        self._open_rows = 0  # of all calls that are not over
        self._encoding = 0  # calls that are not in the inbox yet
        self._closing = False
        self._failure: Exception | None = None
        self._past: list[Usage] = []  # of runs that failed
        self._run: LiveRun = llm.open()
        self._status = self._run.status()
        self._thread = threading.Thread(target=self._serve, name="treegen-engine", daemon=True)
        self._thread.start()

    # Calls, in the threads of event loops

    async def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        first: int = 0,
    ) -> tuple[list[Tokens], list[list[Completion]]]:
        """The token ids of each prompt, and its params.n completions; see `LLM.generate`.

        If the caller is cancelled, so are its samples.

        first: with a seed, how many samples of each prompt to leave out first.

        Raises:
            BusyError: too many samples wait.
            TreegenError: as for `LLM.generate`.
        """
        params = params or SamplingParams()
        call = self._call(prompts, params, False, tools, chat_template_kwargs, first)
        found: list[list[Completion]] = []
        async for place, result in self._results(call):
            found = found or [[] for _ in call.prompts]
            found[place].append(result)
        for each in found:
            each.sort(key=lambda completion: completion.sample_index)
        return call.prompts, found

    async def stream(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[tuple[int, Any], None]:
        """As they come: (place of the prompt, its token ids), News of a sample, its Completion.

        The token ids come first. A sample's News are the tokens that it has drawn since the last
        News, and the text that can be told of them: whole characters, and nothing that may yet be a
        stop string. They add up to its Completion, which comes last. Closing the iterator cancels
        the rest.

        Raises what `generate` raises.
        """
        params = params or SamplingParams()
        call = self._call(prompts, params, True, tools, chat_template_kwargs)
        results, texts = self._results(call), GrowingTexts(self.text, params.stops)
        try:
            async for place, item in results:
                for each in texts.read(place, item):
                    yield place, each
        finally:
            await results.aclose()

    async def score(self, prompts: Sequence[Sequence[int]]) -> list[Score]:
        """Log-likelihoods of all tokens but the first of each prompt, given as token ids.

        Raises:
            BusyError: too many samples wait.
            TreegenError: as for `LLM.score`.
        """
        call = self._call(prompts, None, False, None, None)
        scores = {place: score async for place, score in self._results(call)}
        return [scores[place] for place in range(len(scores))]

    async def encode(self, prompts: Iterable[Prompt]) -> list[Tokens]:
        """The token ids of prompts.

        Raises:
            TreegenError: as for `LLM.generate`.
        """
        contents, loop = as_list("prompts", prompts), asyncio.get_running_loop()
        self._check_open()
        requests = await loop.run_in_executor(
            self._encoder, self._requests, contents, SamplingParams(), {}
        )
        return [request.tokens for request in requests]

    @property
    def num_waiting(self) -> int:
        """Samples that wait to be decoded, about."""
        return max(self._open_rows - self._status.rows, 0)

    def status(self) -> Status:
        """What was under way after the last step."""
        return self._status

    def usages(self) -> list[Usage]:
        """What was computed so far; a run that failed has an account of its own."""
        return [*self._past, self._run.usage]

    @property
    def failure(self) -> Exception | None:
        """Why no call can be served any more; None if they can."""
        return self._failure

    def _call(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None,
        streams: bool,
        tools: Sequence[Any] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
        first: int = 0,
    ) -> Call:
        contents = as_list("prompts", prompts)
        template = chat_arguments(tools, chat_template_kwargs)
        each = len(contents) * (1 if params is None or params.temperature == 0 else params.n)
        due = len(contents) * (1 if params is None else params.n)
        call = Call(params, streams, asyncio.get_running_loop(), each, due, first)
        with self._changed:
            self._check_open()
            waiting, most = self.num_waiting, self.max_waiting + self.llm.max_rows
            if due > most:
                raise InputError(f"one call asks for {due:,} samples; ask for {most:,} at most")
            if waiting and waiting + each > self.max_waiting:
                raise BusyError(
                    f"{waiting:,} samples wait, and at most {self.max_waiting:,} may; try again "
                    "later"
                )
            self._open_rows += each
            self._encoding += 1
            self._encoder.submit(self._encode, call, contents, template)
        return call

    async def _results(self, call: Call) -> AsyncGenerator[tuple[int, Any], None]:
        """What the engine hands out for a call, until it is over."""
        due = call.due
        try:
            while due:
                batch = await call.queue.get()
                if isinstance(batch, Exception):
                    raise batch
                for place, item in batch:
                    due -= isinstance(item, Completion | Score)
                    yield place, item
        finally:
            self._cancel(call)

    def _cancel(self, call: Call) -> None:
        """Tell the engine that nobody waits for a call; nothing happens if it is over."""
        if not call.is_over:
            self._post(lambda: self._finish(call))

    def _post(self, task: Callable[[], None]) -> None:
        with self._changed:
            self._inbox.append(task)
            self._changed.notify()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise StoppedError("this AsyncLLM is closed, or about to be; make another")

    # The thread that encodes

    def _requests(
        self, contents: list[Any], params: SamplingParams, template: dict[str, Any]
    ) -> list[Request]:
        each = [params] * len(contents)
        key = key_of(contents[0], template) if len(contents) == 1 else None
        known = self._known.get(key)
        if known is not None:
            contents, template = [known.tolist()], {}
        requests = flat_requests(contents, each, self.tokenizer, self.llm.spec, template)
        if key is not None:
            self._known.put(key, requests[0].tokens)
        return requests

    def _encode(self, call: Call, contents: list[Any], template: dict[str, Any]) -> None:
        try:
            if call.is_over:
                return
            params = call.params or SamplingParams()
            self.llm.stopping_of(params)  # made here, because its table may take a while
            call.requests = self._requests(contents, params, template)
            call.prompts = [request.tokens for request in call.requests]
        except Exception as error:
            failure = error
            self._post(lambda: self._finish(call, failure))
        else:
            self._post(lambda: self._admit(call))
        finally:
            with self._changed:
                self._encoding -= 1

    # The thread that owns the LLM

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._inbox and not self._run.has_work and not self._is_drained:
                    self._changed.wait()
                    self._gather()
                tasks, self._inbox = self._inbox, deque()
                if not tasks and self._is_drained:
                    break
            try:
                while tasks:
                    tasks.popleft()()
                if self._run.has_work:
                    self._step()
            except Exception as error:  # every caller is told, and others can be served
                self._start_again(error)
                with self._changed:
                    self._inbox.extendleft(reversed(tasks))
            self._status = self._run.status()
        self._run.close()

    def _gather(self) -> None:
        """Wait as long as further calls come at once, for the first step shares among them.

        Each pass that computes prompts costs more than the wait for them.
        """
        until = time.monotonic() + _MOST_GATHERED
        while (self._changed.wait(_GATHERED) or self._encoding) and time.monotonic() < until:
            pass

    @property
    def _is_drained(self) -> bool:
        return self._closing and not self._open_rows

    def _admit(self, call: Call) -> None:
        if call.is_over:
            return
        try:
            if call.params is None:
                for tokens in call.prompts:
                    call.numbers.append(self._run.score(tokens))
            else:
                params = [call.params] * len(call.requests)
                call.numbers += self._run.add(call.requests, params, first=call.first)
        except Exception as error:
            self._finish(call, error)
            return
        self._calls.update((number, (call, place)) for place, number in enumerate(call.numbers))
        if call.streams:
            self._hand_out(call, list(enumerate(call.prompts)))

    def _step(self) -> None:
        out: dict[Call, list[tuple[int, Any]]] = {}
        results = self._run.step()
        self._status = self._run.status()
        for number, result in results:
            call, place = self._calls[number]
            out.setdefault(call, []).append((place, result))
            call.due -= 1
        streamed = [number for number, (call, _) in self._calls.items() if call.streams]
        for news in self._run.news(streamed):
            call, place = self._calls[news.number]
            out.setdefault(call, []).append((place, news))
        for call, batch in out.items():
            if not call.due:
                self._finish(call)  # first, so that who gets this answer can ask at once again
            self._hand_out(call, batch)

    def _hand_out(self, call: Call, batch: list[tuple[int, Any]] | Exception) -> None:
        try:
            call.loop.call_soon_threadsafe(call.queue.put_nowait, batch)
        except RuntimeError:  # its event loop is closed, so nobody waits
            self._finish(call)

    def _finish(self, call: Call, failure: Exception | None = None) -> None:
        """End a call: drop what it has not got, and free its pages."""
        if call.is_over:
            return
        call.is_over = True
        with self._changed:
            self._open_rows -= call.rows
        if failure is not None:
            self._hand_out(call, failure)
        for number in call.numbers:
            self._calls.pop(number, None)
        for number in call.numbers:
            self._run.cancel(number)  # it may note a pass under way, and so may fail

    def _start_again(self, error: Exception) -> None:
        """Tell all callers that their calls have failed, and open another run."""
        self._run.close()
        for call in {id(call): call for call, _ in self._calls.values()}.values():
            self._finish(call, error)
        self._past.append(self._run.usage)
        try:
            self._run = self.llm.open()
        except Exception as failure:
            self._failure = failure

    # Its end

    def check(self) -> None:
        """Assert that pages, rows and requests are accounted for.

        Raises:
            InputError: it is closed.
        """
        self._check_open()
        done: Future[None] = Future()

        def check() -> None:
            try:
                self._run.check()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        self._post(check)
        done.result()

    def close(self, *, drain: bool = True) -> None:
        """Take no more calls and wait until those under way are done; the LLM is free then.

        drain: False cancels the calls under way; who waits for them gets an InputError.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._encoder.shutdown(wait=True)
        if not drain:
            self._post(self._finish_all)
        self._thread.join()

    def _finish_all(self) -> None:
        for call in {id(call): call for call, _ in self._calls.values()}.values():
            self._finish(call, StoppedError("the server stops, and this call was not done"))
