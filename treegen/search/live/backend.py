"""The backend of live searches: nodes become requests and segments of one scheduler.

The context of a node is a segment of the scheduler, and sampling adds a request below that segment.
What a row generates becomes a segment that takes over the row's pages. So branching there takes a
reference and computes one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from treegen.common.outputs import Completion, Score, Status
from treegen.common.params import SamplingParams
from treegen.common.spec import ModelSpec
from treegen.engine.features.grammar_state import check_start
from treegen.engine.param_set import ParamSet
from treegen.engine.requests.output_processor import GeneratedSegment
from treegen.engine.scheduler import Scheduler
from treegen.engine.segments.segment import LiveRequest, LiveSegment
from treegen.errors import ContextError, InputError
from treegen.prompts.images.table import ImageTable, PlacedImage
from treegen.prompts.plan.draws import DrawCounter, hash_prompt
from treegen.prompts.plan.plan import Plan, Request
from treegen.prompts.plan.requests import as_token_ids, check_vocabulary
from treegen.prompts.radix import Tokens
from treegen.prompts.stops import StopConditions
from treegen.prompts.token_text import Detokenizer
from treegen.prompts.tokens import TAIL, AppendablePrompt, append_text, encode_texts
from treegen.prompts.tree import Parts
from treegen.search.backend import BackendSample, Context, PendingResults, T
from treegen.search.budget import SearchUsage, StopReason
from treegen.search.budgeted_search import BudgetedSearch
from treegen.search.live.pending import AppendedText, AppendedTextEncoder, LiveContext, LiveResults
from treegen.search.live.prompts import PromptIndex, check_fits


class LiveBackend:
    """The Backend of searches that share the steps of one scheduler.

    Nodes and their searches refer to each other and to the backend, so a closed backend refers to
    the scheduler no more: its memory is freed without a garbage collection.

    Attributes:
        scheduler: Computes the steps; only until the backend is closed.
        prompts: Finds the segments of prompts; only until the backend is closed.
        usage: Usage so far, over all searches.
        new: Results that were requested since it was last cleared.
        closed: Whether the searches have ended and their pages are free.
    """

    def __init__(
        self,
        *,
        tokenizer: Any,
        spec: ModelSpec,
        params: SamplingParams,
        max_rows: int,
        make_stop_conditions: Callable[[SamplingParams], StopConditions],
        make_scheduler: Callable[
            [StopConditions, Callable[[LiveRequest, Completion], GeneratedSegment]], Scheduler
        ],
        make_plan: Callable[[Sequence[Request]], Plan],
        draw_counter: DrawCounter | None = None,
        images: ImageTable | None = None,
    ) -> None:
        """Create a backend without any tree.

        Args:
            tokenizer: The model's tokenizer.
            spec: The model's sizes and limits.
            params: Default sampling parameters.
            max_rows: Maximum number of rows that decode at once.
            make_stop_conditions: Returns the stop conditions of sampling parameters.
            make_scheduler: Makes the scheduler, from the default stop conditions and the function
                to call with every finished sample.
            make_plan: Finds what prompts share.
            draw_counter: Counts of earlier samples of unnamed prompts, so that new samples differ.
            images: The model's images; None if it takes none.
        """
        self.tokenizer, self.spec, self.images = tokenizer, spec, images
        self._make_plan, self._make_stop_conditions = make_plan, make_stop_conditions
        self._draw_counter, self._own_draw_counter = draw_counter or DrawCounter(), DrawCounter()
        self.scheduler = make_scheduler(make_stop_conditions(params), self._on_search_sample)
        self.usage, self._last_status = self.scheduler.usage, self.scheduler.status()
        self.prompts = PromptIndex(self.scheduler.run.store, rows=max_rows)
        self._detokenizer = Detokenizer(tokenizer)
        self._appended = AppendedTextEncoder(tokenizer, spec, images)
        self._tickets: dict[int, tuple[LiveResults[Any], LiveRequest]] = {}  # by request
        self._ended: dict[tuple[int, int], Completion] = {}  # by request and sample, during a step
        self._open: dict[LiveResults[Any], None] = {}  # awaited tickets, in order
        self.new: list[PendingResults[Any]] = []
        self.closed = False

    # Contexts

    def new_origin(self, context: Context, seed: int | None) -> str:
        """Return the origin of the seeds of a new unnamed search of a prompt."""
        assert isinstance(context, LiveContext)
        counter = self._draw_counter if seed is None else self._own_draw_counter
        return counter.origin_of_search(hash_prompt(context.segment.path_tokens()))

    def add_prompts(self, contents: Sequence[str | Sequence[int]], *, rows: int) -> list[Context]:
        """Return contexts of prompts known in advance, with `rows` rows expected below each."""
        requests = [
            Request(str(index), tokens, samples=rows, rows=rows, max_tokens=1)
            for index, tokens in enumerate(self._encode(contents))
        ]
        ends = self.prompts.add_plan(self._make_plan(requests))
        return [
            LiveContext(segment, prompt=AppendablePrompt.of(content))
            for segment, content in zip(ends, contents, strict=True)
        ]

    def _encode(self, contents: Sequence[str | Sequence[int]]) -> list[Tokens]:
        texts = [content for content in contents if isinstance(content, str)]
        encoded = iter(encode_texts(texts, self.tokenizer))
        tokens: list[Tokens] = [
            next(encoded) if isinstance(content, str) else as_token_ids(f"prompt {index}", content)
            for index, content in enumerate(contents)
        ]
        for index, ids in enumerate(tokens):
            if not len(ids):
                raise InputError(f"prompt {index} has no tokens; pass text or token ids")
            check_vocabulary(str(index), ids, self.spec, self.images)
        return tokens

    def prompt(
        self, content: str | Sequence[int], usage: SearchUsage, tokens: Tokens | None = None
    ) -> LiveContext:
        """Return the context of a prompt.

        Args:
            content: Text or token ids.
            usage: Usage of the search; it counts the prompt's tokens only when they are computed.
            tokens: The token ids of the prompt, if it is encoded already.
        """
        self._check_open()
        ids = self._encode([content])[0] if tokens is None else tokens
        return LiveContext(self.prompts.find(ids), prompt=AppendablePrompt.of(content), _ids=ids)

    def extend(
        self,
        context: Context,
        content: str | Parts | AppendedText,
        images: Sequence[PlacedImage] = (),
    ) -> LiveContext:
        """Return the context with text, or with texts and images, appended.

        Args:
            context: The context.
            content: Text, parts with images, or encoded text.
            images: The images whose placeholders are in the text. Default: none.
        """
        self._check_open()
        assert isinstance(context, LiveContext)
        if not isinstance(content, AppendedText):
            content = self._appended.encode_extension(context, content, images)
        store, segment, ids = self.scheduler.run.store, context.segment, content.tokens
        if content.prompt is not None:
            return LiveContext(self.prompts.find(ids), prompt=content.prompt, _ids=ids)
        below = store.add(segment, ids) if len(ids) else store.retain(segment)
        return LiveContext(below, prompt=None)

    def release(self, context: Context) -> None:
        """Release a context; what other contexts share with it stays."""
        assert isinstance(context, LiveContext)
        if not context.released and not self.closed:
            context.released = True
            self.scheduler.run.store.release(context.segment)

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

        Raises:
            ContextError: The context is full.
            CacheFullError: The cache has no room for a sample.
        """
        self._check_open()
        assert isinstance(context, LiveContext)
        room = self.spec.context_length - context.num_tokens
        if room < 1:
            raise ContextError(
                f"node {key!r} has {context.num_tokens:,} tokens, which fill the model's context; "
                "sample from an earlier node"
            )
        rows = 1 if params.temperature == 0 else len(indices)
        spec = Request(
            key,
            context.tail(),
            len(indices),
            rows,
            min(params.max_tokens, room),
            origin=search.origin_of(key),
        )
        check_fits(f"node {spec.id!r}", context.segment, spec, self.scheduler.run.cache)
        self.scheduler.run.store.promote(context.segment, rows)
        stopping = self._make_stop_conditions(params)
        if stopping.grammar is not None:
            param_set = ParamSet(params, stopping)
            check_start(context.segment, spec.tokens, param_set, stopping.grammar)
        ticket: LiveResults[BackendSample] = LiveResults(search, [None] * len(indices))
        segment = self.scheduler.run.store.retain(context.segment)

        def begin(first: int, num: int, max_tokens: int) -> None:
            """Start some of the samples.

            Args:
                first: Index of the first sample in the call.
                num: Number of samples.
                max_tokens: Maximum number of tokens of each.
            """
            part = spec
            if (num, max_tokens) != (spec.samples, spec.max_tokens):
                part = replace(spec, samples=num, rows=min(rows, num), max_tokens=max_tokens)
            index = self.scheduler.run.add_params(params, stopping)
            self._submit(ticket, part, segment, index, indices[first : first + num], indices)

        try:
            max_tokens = spec.max_tokens
            if search.call_queue is None:
                begin(0, len(indices), max_tokens)
            return await self._wait_for(
                ticket, num_samples=len(indices), max_tokens=max_tokens, begin=begin
            )
        finally:
            if not self.closed:
                self.scheduler.run.store.release(segment)

    async def score(
        self,
        context: Context,
        texts: Sequence[str] | Sequence[Tokens],
        search: BudgetedSearch,
        *,
        top: int = 0,
    ) -> list[Score]:
        """Return the log-likelihood of each text after a context.

        Args:
            context: The text before the texts.
            texts: The texts to score, or their token ids.
            search: The search that asks.
            top: Number of most likely tokens to report at the position of each token. Default: 0.

        Raises:
            InputError: A text has no tokens.
            CapacityError: A text is too long.
        """
        self._check_open()
        assert isinstance(context, LiveContext)
        store, tail = self.scheduler.run.store, context.tail()
        ticket: LiveResults[Score] = LiveResults(search, [None] * len(texts))
        strings = [text for text in texts if isinstance(text, str)]
        encoded = [ids for ids in texts if not isinstance(ids, str)]
        encoded += self._appended.encode_scored(context, strings)
        spec = Request("score", tail, 0, 0, 1, score_from=context.num_tokens, top=top)
        if context.prompt is not None:
            store.cascade_new(context.segment)
        segments = [store.add(context.segment, ids) for ids in encoded]
        try:
            for segment in segments:
                check_fits(f"node {spec.id!r}", segment, spec, self.scheduler.run.cache)
            for index, segment in enumerate(segments):
                none = range(index, index)
                self._submit(ticket, spec, segment, 0, none, none)
        finally:
            for segment in segments:
                store.release(segment)  # its request, if any, holds a reference by now
        return [score for score in await self._wait_for(ticket) if score is not None]

    def cancel(self, search: BudgetedSearch) -> None:
        """End all pending calls of a search; its awaits return the results that have arrived.

        Under a budget they return nothing, because what has arrived depends on timing.
        """
        for ticket in [ticket for ticket in self._open if ticket.search is search]:
            self._cancel(ticket)

    async def _wait_for(
        self, ticket: LiveResults[T], num_samples: int = 0, **more: Any
    ) -> list[T | None]:
        """Register a ticket with the queue of its search, and return the results.

        Args:
            ticket: The ticket.
            num_samples: Number of samples requested; 0 for scores.
            **more: As for `PendingResults.join`.
        """
        self._open[ticket] = None
        self.new.append(ticket)
        ticket.join(num_samples, **more)
        return await ticket.wait(self._cancel, self.release)

    def _submit(
        self,
        ticket: LiveResults[Any],
        spec: Request,
        segment: LiveSegment,
        params: int,
        indices: range,
        all_indices: range,
    ) -> None:
        request = self.scheduler.add(spec, segment, params, indices)
        ticket.requests[request] = all_indices.start
        self._tickets[request.index] = ticket, request

    def _cancel(self, ticket: LiveResults[Any]) -> None:
        for request in list(ticket.requests):
            if ticket.search.budget.tokens is None:
                counts = self.scheduler.run.rows.count
                decoded = int(counts[list(request.slots or ())].sum())
                ticket.search.usage.tokens_decoded += decoded
            self.scheduler.cancel(request.index)
            self._finish_request(ticket, request)
        ticket.leave()
        self._open.pop(ticket, None)

    def _finish_request(self, ticket: LiveResults[Any], request: LiveRequest) -> None:
        """Record that a request is over, and finish its ticket if nothing else is pending."""
        del self._tickets[request.index], ticket.requests[request]
        ticket.search.usage.tokens_prefilled += request.num_prefilled
        if not ticket.requests and ticket.call is None:
            ticket.finish()

    # Steps

    @property
    def has_work(self) -> bool:
        """Whether a requested result has not been computed."""
        # Scores may have arrived outside a step, while something else was cancelled.
        return not self.closed and (self.scheduler.has_work or bool(self.scheduler.scores))

    def status(self) -> Status:
        """Return the current load, or the load at the end if the backend is closed."""
        return self._last_status if self.closed else self.scheduler.status()

    def step(self) -> None:
        """Run one forward pass over what all searches wait for."""
        self.new.clear()
        try:
            self.scheduler.step()
            self.collect()
        except BaseException:
            self.close()
            raise
        self._check_time()

    def collect(self) -> None:
        """Put finished samples and scores into the tickets that wait for them; drop all others."""
        ended: list[tuple[LiveResults[Any], int, Completion, int]] = []
        for (index, sample), segment in self.scheduler.sample_segments.items():
            completion = self._ended.pop((index, sample))
            if index not in self._tickets:  # its search was stopped just after the sample ended
                self.scheduler.run.store.release(segment)
                continue
            ticket, request = self._tickets[index]
            position = sample - ticket.requests[request]
            ticket.results[position] = BackendSample(completion, LiveContext(segment, prompt=None))
            ended.append((ticket, position, completion, request.spec.max_tokens))
        for index in {index for index, _ in self.scheduler.sample_segments} & self._tickets.keys():
            ticket, request = self._tickets[index]
            if not request.samples:
                self._finish_request(ticket, request)
        self.scheduler.sample_segments.clear()
        for index, score in self.scheduler.scores.items():
            if index in self._tickets:
                ticket, request = self._tickets[index]
                ticket.results[ticket.requests[request]] = score
                if ticket.call is not None:
                    ticket.call.num_open -= 1
                self._finish_request(ticket, request)
        self.scheduler.scores.clear()
        for ticket, position, completion, max_tokens in ended:
            ticket.count_sample(position, completion, max_tokens)

    def _on_search_sample(self, request: LiveRequest, completion: Completion) -> GeneratedSegment:
        """Return the segment of a sample: the tokens of its text, which is cut at the stop."""
        self._ended[request.index, completion.sample_index] = completion
        tail, tokens, text = request.spec.tokens, completion.tokens, completion.text
        stopping = self.scheduler.run.param_sets[request.params].stopping
        if tokens and tokens[-1] in stopping.ids:
            without_stop = np.array(stopping.strip_stop_token(tokens), dtype=np.int32)
            return GeneratedSegment(without_stop, num_generated=len(without_stop))
        if completion.stop is None:  # the text is that of all tokens
            return GeneratedSegment(np.array(tokens, dtype=np.int32), num_generated=len(tokens))
        for count in range(len(tokens), -1, -1):
            before = self._detokenizer.text(tail, tokens[:count])
            if text.startswith(before):
                break
        generated = np.array(tokens[:count], dtype=np.int32)
        tail = np.concatenate([tail, generated])[-TAIL:]
        appended = append_text(self.tokenizer, tail, text[len(before) :])
        return GeneratedSegment(np.concatenate([generated, appended]), num_generated=count)

    def _check_time(self) -> None:
        """Stop searches that have used up their time."""
        timed = {ticket.search: None for ticket in self._open if ticket.search.budget.seconds}
        for search in timed:
            if search.budget.is_over(search.usage):
                search.stop(search.budget.describe_limit("seconds"), StopReason.BUDGET)

    def close(self) -> None:
        """End all searches and free their pages; searches that wait are stopped."""
        if self.closed:
            return
        self.closed = True
        try:
            self.scheduler.close()
            self.scheduler.scores.clear()
            for search in {ticket.search: None for ticket in self._open}:
                search.stop("the session was closed", StopReason.CLOSED)
        finally:
            self._last_status = self.scheduler.status()
            # The functions are methods of the LLM.
            del self.scheduler, self.prompts, self._make_plan, self._make_stop_conditions

    def _check_open(self) -> None:
        if self.closed:
            raise InputError("the session is closed; open a new session")
