"""Searches in a loop of your own: they ask for samples and scores, and you tell them the answers.

The searches are the same async functions that `LLM.search` runs. `ask` returns their requests as
plain values, which can go to a remote model, a queue or a person. `tell` takes the answers, in any
order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from treegen.common.checks import check_argument_types
from treegen.common.lifetimes import Closeable
from treegen.common.outputs import Completion, FinishReason, Score
from treegen.common.params import Params, SamplingParams, check_tree_params
from treegen.errors import InputError
from treegen.prompts.plan.draws import DrawCounter, hash_prompt, row_seed
from treegen.prompts.tree import Parts
from treegen.search.backend import BackendSample, Context, PendingResults, T
from treegen.search.budget import Budget, SearchUsage
from treegen.search.budgeted_search import BudgetedSearch
from treegen.search.event_loop import IdleLoop, end_loop, run_outside_loop
from treegen.search.run import RunningSearch, resume_any
from treegen.search.tree.node import Search, SearchFn
from treegen.search.tree.result import SearchResult, name_problems, warn_if_all_failed

MODEL_END: Final = -1
"""A value of `Completion.stop`: the model itself ended the text, by an unknown token."""


@dataclass(frozen=True, slots=True)
class TextContext:
    """The text up to a node."""

    tokens: tuple[int, ...]
    """The prompt, if it was given as token ids; otherwise empty."""
    text: str
    """The text after these tokens."""
    num_tokens: int
    """Number of tokens of both."""

    def append_text(self, text: str, num_tokens: int) -> TextContext:
        """Return the context with `text` appended, which has `num_tokens` tokens."""
        return TextContext(self.tokens, self.text + text, self.num_tokens + num_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class SampleRequest:
    """Samples that a search waits for, one per seed."""

    id: str
    """The same in every run of the same search, so answers can be stored under it."""
    search: str
    """Name of the search."""
    context: TextContext
    """The text that the samples continue."""
    key: str
    """Key of the node; the seeds follow from it."""
    indices: range
    """Index of each sample."""
    seeds: tuple[int, ...]
    """Seed of each sample."""
    params: SamplingParams
    """Sampling parameters."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRequest:
    """Log-likelihoods that a search waits for: of each text after a context."""

    id: str
    """The same in every run of the same search, so answers can be stored under it."""
    search: str
    """Name of the search."""
    context: TextContext
    """The text before the texts."""
    texts: tuple[str, ...]
    """The texts to score."""


SearchRequest = SampleRequest | ScoreRequest


@dataclass(slots=True)
class _RequestBackend:
    """The backend of the searches: it lists requests and waits for their answers."""

    count_tokens: Callable[[str], int] | None
    """Counts the tokens of a text; None if they are not counted."""
    new: list[SearchRequest] = field(default_factory=list)
    """Requests that `ask` has not returned yet."""
    waiting: dict[SearchRequest, PendingResults[Any]] = field(default_factory=dict)
    """Requests that have no answers yet, or whose answers the search has not received."""

    def prompt(self, content: str | Sequence[int], usage: SearchUsage) -> Context:
        """Return the context of a prompt, and count its tokens."""
        if isinstance(content, str):
            context = TextContext((), content, self._count(content))
        else:
            context = TextContext(tuple(content), "", len(content))
        usage.tokens_prefilled += context.num_tokens
        return context

    def extend(self, context: Context, content: str | Parts) -> Context:
        """Return the context with text appended; images raise InputError."""
        assert isinstance(context, TextContext)
        if not isinstance(content, str):
            if any(part.get("type") != "text" for part in content):
                raise InputError(
                    "this search supports only text; for images, use LLM.search or a session"
                )
            content = "".join(part["text"] for part in content)
        return context.append_text(content, self._count(content))

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
        """Request one sample per index, and wait for the answers.

        Args:
            context: The text that the samples continue.
            key: Key of the node; the seeds follow from it.
            indices: Index of each sample.
            params: Sampling parameters.
            search: The search that asks.
            continues: Whether the samples belong to a call that is already counted.
        """
        assert isinstance(context, TextContext)
        origin = search.origin_of(key)
        seeds = tuple(row_seed(params.seed, origin, index) for index in indices)
        name = f"{key}{indices.start}:{indices.stop}"
        request = SampleRequest(name, search.name, context, key, indices, seeds, params)
        ticket: PendingResults[BackendSample] = PendingResults(search, [None] * len(indices))
        num_samples, max_tokens = len(indices), params.max_tokens
        return await self._wait_for(request, ticket, num_samples=num_samples, max_tokens=max_tokens)

    async def score(
        self, context: Context, texts: Sequence[str], search: BudgetedSearch
    ) -> list[Score]:
        """Request the log-likelihood of each text after a context, and wait for the answers.

        Args:
            context: The text before the texts.
            texts: The texts to score.
            search: The search that asks.
        """
        assert isinstance(context, TextContext)
        content = repr((context.tokens, context.text, list(texts))).encode()
        name = f"{search.name}/score {hashlib.blake2b(content, digest_size=8).hexdigest()}"
        request = ScoreRequest(name, search.name, context, tuple(texts))
        ticket: PendingResults[Score] = PendingResults(search, [None] * len(texts))
        results = await self._wait_for(request, ticket)
        scores = [score for score in results if score is not None]
        search.usage.tokens_prefilled += sum(len(score.tokens) for score in scores)
        return scores

    def release(self, context: Context) -> None:
        """Do nothing, because a context holds no memory."""

    def cancel(self, search: BudgetedSearch) -> None:
        """Answer all open requests of a search with nothing."""
        for ticket in list(self.waiting.values()):
            if ticket.search is search:
                ticket.leave()

    def is_open(self, request: SearchRequest) -> bool:
        """Return whether a request waits for answers."""
        ticket = self.waiting.get(request)
        return ticket is not None and not ticket.is_done and None in ticket.results

    def completion(self, request: SampleRequest, position: int, text: str) -> Completion:
        """Return the Completion for an answer that is plain text.

        Args:
            request: The request that was answered.
            position: The sample's position in the request.
            text: Text of the sample.
        """
        params, stops = request.params, request.params.stops
        count = None if self.count_tokens is None else self.count_tokens(text)
        reason: FinishReason = "stop"
        stop: str | int | None = MODEL_END
        if params.include_stop and (ending := [end for end in stops if text.endswith(end)]):
            stop = max(ending, key=len)
        elif count is not None and count >= params.max_tokens:
            reason, stop = "length", None
        elif stops and not params.include_stop:
            stop = None  # the text does not show which stop string, or the model, ended it
        seed, index = request.seeds[position], request.indices[position]
        return Completion(request.key, index, seed, text, (), (), reason, stop)

    def num_tokens(self, completion: Completion) -> int:
        """Return the number of generated tokens; of the text's tokens if there are no token ids."""
        return completion.num_tokens or self._count(completion.text)

    def _count(self, text: str) -> int:
        return 0 if self.count_tokens is None else self.count_tokens(text)

    async def _wait_for(
        self, request: SearchRequest, ticket: PendingResults[T], **how: Any
    ) -> list[T | None]:
        """Return the answers of a request.

        Args:
            request: The request.
            ticket: The results that the search waits for.
            **how: As for `PendingResults.join`.
        """

        def close(ticket: PendingResults[T]) -> None:
            del self.waiting[request]
            ticket.leave()

        self.waiting[request] = ticket
        self.new.append(request)
        ticket.join(**how)
        return await ticket.wait(close, self.release)


class AskTell(Closeable):
    """Searches whose samples and scores you compute yourself.

        searches = AskTell(fn, problems, params)
        while requests := searches.ask():
            for request in requests:
                searches.tell(request, answers_to(request))
        searches.results

    One `ask` returns the requests of all searches. Requests have the same ids in every run. So a
    loop that was killed can return to its state: store answers by id, and tell them again. Close
    it, or use `with`, if you leave before the end.
    """

    @check_argument_types
    def __init__(
        self,
        fn: SearchFn,
        problems: Iterable[Any],
        params: Params | None = None,
        *,
        budget: Budget | None = None,
        count_tokens: Callable[[str], int] | None = None,
    ) -> None:
        """Prepare the searches; they start with the first `ask`.

        Args:
            fn: The search: an async function of the root node of a problem.
            problems: Prompts (text or token ids), or (name, prompt) pairs. The name of an unnamed
                prompt is its number.
            params: Default sampling parameters of the searches.
            budget: Budget of each search.
            count_tokens: Counts the tokens of a text, for usage and budget. Without it only the
                tokens of Completions count.

        Raises:
            InputError: An argument cannot be used, or two problems have the same name.
        """
        params = check_tree_params(params)
        self._backend = _RequestBackend(count_tokens)
        counter = DrawCounter()
        self._searches = [
            Search(
                self._backend,
                problem.content,
                name=problem.name,
                params=params,
                budget=budget,
                origin=None
                if problem.is_named
                else counter.origin_of_search(hash_prompt(problem.content)),
            )
            for problem in name_problems(problems, _flatten_content)
        ]
        self.results: list[SearchResult | None] = [None] * len(self._searches)
        """Results in the order of the problems; None for a search that has not ended."""
        self._closing = False
        self._loop = IdleLoop(self._on_idle, self._on_idle, self._backend)
        self._running = {
            RunningSearch(self._loop, fn, search, partial(self._note, index))
            for index, search in enumerate(self._searches)
        }

    @property
    def done(self) -> bool:
        """Whether all searches have ended."""
        return all(result is not None for result in self.results)

    def ask(self) -> list[SearchRequest]:
        """Run the searches until all of them wait, and return their new requests.

        The list is empty if all searches are done, or wait only for requests that were returned
        before. If they wait for something else, such as a tool, this call waits too.
        """
        if not self._loop.is_closed():
            run_outside_loop(self._loop.run_forever)
            if self.done:
                self.close()
                warn_if_all_failed([result for result in self.results if result is not None])
        new, self._backend.new = self._backend.new, []
        return [request for request in new if self.is_wanted(request)]

    def is_wanted(self, request: SearchRequest) -> bool:
        """Return whether a request is unanswered and its search still waits for it."""
        return self._backend.is_open(request)

    def tell(self, request: SearchRequest, answers: Sequence[Completion | Score | str]) -> bool:
        """Answer a request; the next `ask` continues its search.

        How a plain text ended is derived from the text. It ended with a stop string if the request
        includes stop strings and the text ends with one; by length if it has max_tokens tokens (by
        count_tokens); otherwise the model ended it. If stop strings are not included, the text does
        not show whether a stop string or the model ended it, so it counts as not ended by the
        model. Give a Completion with stop=MODEL_END if the model ended it.

        Args:
            request: A request that `ask` returned.
            answers: For samples, a Completion for each index, or just the text of the new node. For
                scores, a Score for each text.

        Returns:
            Whether the answers were used. False if the search no longer waits for them.

        Raises:
            InputError: The answers have the wrong number or kind, or texts have no token counts
                under a budget of tokens, which they would never use up. Give `count_tokens` for
                such a budget.
        """
        if not self.is_wanted(request):
            return False
        backend, ticket = self._backend, self._backend.waiting[request]
        search, queue, call = ticket.search, ticket.search.call_queue, ticket.call
        kind: type[Completion | Score] = Score
        if isinstance(request, SampleRequest):
            expected, kind = len(request.indices), Completion
            # The characters of one text are not answers.
            if len(answers) == expected and not isinstance(answers, str):
                answers = [
                    backend.completion(request, position, answer)
                    if isinstance(answer, str)
                    else answer
                    for position, answer in enumerate(answers)
                ]
        else:
            expected = len(request.texts)
        if len(answers) != expected or not all(isinstance(answer, kind) for answer in answers):
            raise InputError(
                f"the answers of request {request.id!r} must be a list of {expected} "
                f"{kind.__name__} objects"
            )
        completions = [answer for answer in answers if isinstance(answer, Completion)]
        uncounted = any(completion.text and not completion.tokens for completion in completions)
        if uncounted and search.budget.tokens and backend.count_tokens is None:
            raise InputError(
                "a token budget requires the token count of each answer; pass count_tokens to "
                "AskTell, or answer with Completions that include tokens"
            )
        counts = [backend.num_tokens(completion) for completion in completions]
        samples = [
            BackendSample(completion, request.context.append_text(completion.text, count))
            for completion, count in zip(completions, counts, strict=True)
        ]
        ticket.results[:] = samples or answers
        if queue is None or call is None:
            search.usage.tokens_decoded += sum(counts)
            ticket.finish()
            return True
        call.num_open = len(counts)  # 0 for scores
        for position, count in enumerate(counts):
            queue.record_end(call, position, count)
        return True

    def stop(self, reason: str = "stopped") -> None:
        """End all searches. After the next `ask`, their results have what they found so far."""
        for search, result in zip(self._searches, self.results, strict=True):
            if result is None:
                search.stop(reason)

    def close(self) -> None:
        """End unfinished searches; they get no result."""
        if self._loop.is_closed():
            return
        self._closing = True
        end_loop(self._loop)

    def _note(self, index: int, result: SearchResult) -> None:
        if not self._closing:
            self.results[index] = result

    def _on_idle(self) -> bool:
        if self._closing:
            return False
        if resume_any(self._loop, self._running, busy=False):
            return True
        unanswered = any(map(self._backend.is_open, self._backend.waiting))
        if unanswered or self.done:
            self._loop.stop()
            return True
        return False


def _flatten_content(content: Any) -> str | Sequence[int]:
    if isinstance(content, str):
        return content
    is_list = isinstance(content, Iterable) and not isinstance(content, bytes)
    if not is_list or not all(type(token) is int for token in content):
        raise InputError(
            "a prompt must be text or token ids; render chat messages first, with the "
            "tokenizer's chat template"
        )
    return tuple(content)
