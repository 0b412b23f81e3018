"""The backend interface: computes samples and scores with a local model or by external requests.

Searches wait for PendingResults, whatever computes them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar, runtime_checkable

from treegen.common.outputs import Completion, Score
from treegen.common.params import SamplingParams
from treegen.prompts.tree import Parts
from treegen.search.budget import SearchUsage
from treegen.search.budgeted_search import BudgetedSearch, QueuedCall
from treegen.search.external_calls import running_loop


class Context(Protocol):
    """A backend's handle to the text up to and including a node."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens from the start of the prompt."""
        ...


@runtime_checkable
class MultiModelContext(Context, Protocol):
    """The text up to a node that several LLMs can sample from."""

    def on(self, llm: str) -> Context:
        """Return the context for one of the LLMs; raises InputError for an unknown name."""
        ...


@dataclass(frozen=True, slots=True)
class BackendSample:
    """One sample, and the context up to its end."""

    completion: Completion
    context: Context


class Backend(Protocol):
    """Computes the samples and scores of nodes."""

    def prompt(self, content: str | Sequence[int], usage: SearchUsage) -> Context:
        """Return the context of a prompt, and count its tokens in `usage`."""
        ...

    def extend(self, context: Context, content: str | Parts) -> Context:
        """Return the context with text, or with texts and images, appended."""
        ...

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

        A sample is a function of (search.origin_of(key), index, params).

        Args:
            context: The text that the samples continue.
            key: Key of the node.
            indices: Index of each sample.
            params: Sampling parameters.
            search: The search that asks.
            continues: Whether the samples belong to a call that is already counted.

        Returns:
            The samples; None for each that had not ended when the search was stopped.
        """
        ...

    async def score(
        self, context: Context, texts: Sequence[str], search: BudgetedSearch
    ) -> list[Score]:
        """Return the log-likelihood of each text after a context.

        Args:
            context: The text before the texts.
            texts: The texts to score.
            search: The search that asks.
        """
        ...

    def release(self, context: Context) -> None:
        """Release a context; what other contexts share with it stays."""
        ...

    def cancel(self, search: BudgetedSearch) -> None:
        """End all pending calls of a search; its awaits return the results that have arrived."""
        ...


T = TypeVar("T")


@dataclass(slots=True, eq=False)
class PendingResults(Generic[T]):
    """Results that a search waits for (a "ticket")."""

    search: BudgetedSearch
    """The search that waits."""
    results: list[T | None]
    """Results in the order of the request; None for one that has not arrived."""
    call: QueuedCall | None = None
    """Its entry in the call queue of the search, if it has one."""
    num_kept: int = sys.maxsize
    """How many of its samples the budget has room for."""
    future: asyncio.Future[None] | None = None
    """What an event loop waits for; None without one."""
    is_done: bool = False
    """Whether no more results will arrive."""
    error: Exception | None = None
    """What the code that awaits them gets instead; None for the results."""

    def join(self, num_samples: int = 0, **more: Any) -> None:
        """Join the call queue of the search, if it has one.

        Args:
            num_samples: Number of samples requested; 0 for scores.
            **more: Further fields of `QueuedCall`.
        """
        if self.search.call_queue is not None:
            num_open = len(self.results)
            self.call = QueuedCall(
                num_samples=num_samples, num_open=num_open, return_=self.deliver, **more
            )
            self.search.call_queue.join(self.call)

    def deliver(self, num_kept: int) -> None:
        """Finish; only the first `num_kept` samples are within the budget."""
        self.num_kept = num_kept
        self.finish()

    def finish(self, error: Exception | None = None) -> None:
        """Record that no more results will arrive, and resume the code that awaits them.

        Args:
            error: What this code gets instead of results. Default: nothing.
        """
        if not self.is_done:
            self.is_done, self.error = True, error
        if self.future is not None and not self.future.done():
            self.future.set_result(None)

    def __await__(self) -> Generator[Any, None, list[T | None]]:
        if not self.is_done:
            loop = running_loop()
            if loop is None:  # `Session.step` drives the coroutine.
                yield
            else:
                self.future = loop.create_future()
                yield from self.future
        if self.error is not None:
            raise self.error
        return self.results

    async def wait(
        self, close: Callable[[Self], object], release: Callable[[Context], object]
    ) -> list[T | None]:
        """Return the results once no more will arrive.

        Args:
            close: Called with this object when nobody waits for further results.
            release: Releases the contexts of samples that the caller does not get.
        """
        try:
            results = await self
        except BaseException:
            self._drop(0, release)
            raise
        finally:
            close(self)
        self._drop(self.num_kept, release)
        return results

    def _drop(self, first: int, release: Callable[[Context], object]) -> None:
        for index, result in enumerate(self.results):
            if isinstance(result, BackendSample) and index >= first:
                release(result.context)
                self.results[index] = None

    def leave(self, error: Exception | None = None) -> None:
        """Finish, and leave the queue of the search if more results would have arrived.

        Args:
            error: As for `finish`.
        """
        if self.search.call_queue is not None and self.call is not None and not self.is_done:
            self.search.call_queue.leave(self.call)
            self.num_kept = 0
        self.finish(error)

    def count_sample(self, place: int, completion: Completion, reserved: int) -> None:
        """Count the tokens of a sample that has ended.

        Args:
            place: Index of the sample.
            completion: The sample.
            reserved: Tokens that were reserved for it.
        """
        queue, call = self.search.call_queue, self.call
        if queue is None or call is None:
            self.search.usage.tokens_decoded += completion.num_tokens
        elif call in queue.calls:
            is_cut = reserved < call.max_tokens and completion.finish_reason == "length"
            queue.record_end(call, place, completion.num_tokens, reserved=reserved, is_cut=is_cut)
