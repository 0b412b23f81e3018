"""A run that accepts flat prompts at any time, and shares their prefixes in any order.

The texts of samples as they grow have whole characters, and no possible start of a stop string.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treegen.common.lifetimes import ClosedWhenCollected, NonCopyable
from treegen.common.outputs import Completion, Score, Status, Usage
from treegen.common.params import SamplingParams
from treegen.common.spec import ModelSpec
from treegen.engine.scheduler import Scheduler
from treegen.engine.segments.segment import LiveRequest, LiveSegment
from treegen.errors import InputError
from treegen.prompts.plan.draws import DrawCounter
from treegen.prompts.plan.plan import Request
from treegen.prompts.plan.requests import check_scored
from treegen.prompts.radix import Tokens
from treegen.prompts.replies.replies import ReplyReader, StreamingReply
from treegen.prompts.replies.types import Part
from treegen.prompts.stops import StopConditions
from treegen.prompts.token_text import MAX_CHARACTER_TOKENS, PARTIAL, TokenText
from treegen.prompts.tokens import TAIL
from treegen.search.live.prompts import PromptIndex, check_fits

if TYPE_CHECKING:
    from treegen.search.live.backend import LiveBackend

_MAX_UNDECODED: Final = 96  # tokens that end with incomplete characters, decoded in each step
_KEPT_UNDECODED: Final = 48  # of these tokens are decoded on
_INVALID_TOKENS: Final = 5  # equal bytes in a row that complete no character
_COMPARED_CHARACTERS: Final = 8  # at the ends of two texts, to see that the texts continue alike
_SCORING = Request("score", np.empty(0, np.int32), 0, 0, 1, score_from=1)


@dataclass(frozen=True, slots=True)
class SampleDelta:
    """New tokens of a sample that is not finished."""

    number: int
    """Number of its request."""
    sample: int
    """Its index."""
    tokens: tuple[int, ...]
    """Token ids."""
    logprobs: tuple[float, ...]
    """Natural-log probability of each token."""
    top: tuple[tuple[tuple[int, float], ...], ...]
    """For each token the most likely (token id, logprob) pairs, if they were requested."""
    text: str = ""
    """The new text that is final, where texts are streamed; see `AsyncLLM.stream`."""
    parts: tuple[Part, ...] = ()
    """The reasoning, text and tool calls in that text, if they were requested."""


@dataclass(slots=True, eq=False)
class _OpenRequest:
    """An unfinished request."""

    request: LiveRequest
    num_remaining: int
    """Results still to come."""
    num_reported: dict[int, int] = field(default_factory=dict)
    """Number of tokens already reported, by sample."""


class LiveRun(ClosedWhenCollected, NonCopyable):
    """Requests of flat prompts over one scheduler; made by `LLM.open_live_run`. One thread uses it.

    Requests added between two steps are admitted with the next step. A prompt is matched against
    all prompts in memory. So what prompts share is computed and stored once.

    Attributes:
        scheduler: Computes the steps.
        backend: Computes the nodes of searches in the same steps; None if there are none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        spec: ModelSpec,
        *,
        make_stop_conditions: Callable[[SamplingParams], StopConditions],
        draw_counter: DrawCounter | None = None,
        backend: LiveBackend | None = None,
    ) -> None:
        """Create a run without requests.

        Args:
            scheduler: Computes the steps.
            spec: The model's sizes and limits.
            make_stop_conditions: Returns the stop conditions of sampling parameters.
            draw_counter: Counts of earlier samples of each prompt.
            backend: The backend of searches that share the scheduler. Default: none.
        """
        self.scheduler, self.backend = scheduler, backend
        self._run, self._spec, self._make_stop_conditions = (
            scheduler.run,
            spec,
            make_stop_conditions,
        )
        self._draw_counter = draw_counter or DrawCounter()
        self._prompts = (
            PromptIndex(self._run.store, rows=self._run.max_rows)
            if backend is None
            else backend.prompts
        )
        self._open_requests: dict[int, _OpenRequest] = {}  # by number
        self._scored: dict[int, int] = {}  # numbers of scored requests, by the scheduler's index
        self._num_added = 0

    def add(
        self, requests: Sequence[Request], params: Sequence[SamplingParams], *, first: int = 0
    ) -> list[int]:
        """Add the flat requests of one call (see `build_flat_requests`); return their numbers.

        Samples are numbered as by `LLM.generate`: without a seed they continue after earlier
        samples of the same prompt, with a seed they start at `first`.

        Args:
            requests: The requests.
            params: Sampling parameters of each request.
            first: Index of the first sample of requests with a seed.

        Raises:
            CacheFullError: A request does not fit the cache even alone; none is added.
            InputError: The params name tokens that the model does not have; none is added.
        """
        self._check_open()
        stoppings = [self._make_stop_conditions(p) for p in params]
        counter = DrawCounter(self._draw_counter)
        numbered = counter.continue_numbering_flat(requests, [p.seed for p in params])
        numbers: list[int] = []
        try:
            for request, request_params, stopping in zip(numbered, params, stoppings, strict=True):
                if first and request_params.seed is not None:
                    request = replace(request, first=request.first + first)
                # Add each request before the next prompt is looked up, which must leave it room.
                numbers.append(self._add(request, request_params, stopping))
        except BaseException:
            for number in numbers:
                self.cancel(number)
            raise
        self._draw_counter.update(counter)
        self._draw_counter.forget()
        return numbers

    def _add(self, request: Request, params: SamplingParams, stopping: StopConditions) -> int:
        store = self._run.store
        if request.score_from is None:
            segment = self._prompts.find(request.tokens)
        else:
            segment = self._add_scored_segment(request.tokens)
        try:
            check_fits("the prompt", segment, request, self._run.cache)
            # A step has at most max_rows rows, and each request has at least one.
            below = itertools.islice(segment.requests, self._run.max_rows)
            store.promote(segment, sum(other.num_rows for other in below) + request.rows)
            spec = replace(request, id=str(self._num_added), tokens=request.tokens[-TAIL:])
            index = self.scheduler.run.add_params(params, stopping)
            live = self.scheduler.add(
                spec, segment, index, range(request.samples), makes_segments=False
            )
            self.usage.prompt_tokens_unshared += len(request.tokens) * max(request.samples, 1)
            return self._register(live, request.samples)
        finally:
            store.release(segment)  # its request holds a reference by now

    def _add_scored_segment(self, tokens: Tokens) -> LiveSegment:
        """Return a new segment for all tokens but the first, with one reference for the caller.

        Segments that are already computed have no logits any more.
        """
        store, first = self._run.store, self._prompts.find(tokens[:1])
        segment = store.add(first, tokens[1:])
        store.release(first)
        return segment

    def score(self, tokens: Tokens, top: int = 0) -> int:
        """Request the log-likelihood of all tokens but the first; return the request's number.

        Args:
            tokens: Token ids of the text.
            top: Number of most likely tokens to report at each position.

        Raises:
            InputError: There are fewer than two tokens.
            CapacityError: They do not fit the context or the cache.
        """
        self._check_open()
        if len(tokens) < 2:
            raise InputError("the first token has no log-probability; pass at least two tokens")
        check_scored("the prompt", len(tokens), self._spec)
        store, segment = self._run.store, self._add_scored_segment(tokens)
        try:
            check_fits("the prompt", segment, _SCORING, self._run.cache)
            spec = replace(_SCORING, id=str(self._num_added), tokens=tokens[-TAIL:], top=top)
            live = self.scheduler.add(spec, segment, 0, (), makes_segments=False)
            self._scored[live.index] = self._num_added
            self.usage.prompt_tokens_unshared += len(tokens)
            return self._register(live, 1)
        finally:
            store.release(segment)

    def _register(self, live: LiveRequest, results: int) -> int:
        self._open_requests[self._num_added] = _OpenRequest(live, results)
        self._num_added += 1
        return self._num_added - 1

    def cancel(self, number: int) -> None:
        """Drop the unfinished samples of a request and free their pages; it yields no more results.

        A request that is over is not affected.
        """
        open_request = self._open_requests.pop(number, None)
        if open_request is not None:
            self._scored.pop(open_request.request.index, None)
            self.scheduler.cancel(open_request.request.index)

    @property
    def has_work(self) -> bool:
        """Whether some request is not finished."""
        # Scores may have arrived outside a step, while something else was cancelled.
        return not self.closed and (self.scheduler.has_work or bool(self._run.scores))

    def step(self) -> list[tuple[int, Completion | Score]]:
        """Run one forward pass; return the new results, each with its request's number.

        Errors of `Scheduler.step` are raised, after which the run is closed.
        """
        try:
            finished = self.scheduler.step() if self.scheduler.has_work else []
        except BaseException:
            self.close()
            raise
        results: list[tuple[int, Completion | Score]] = [
            (int(completion.prompt_id), completion)
            for completion in finished
            if completion.prompt_id.isdecimal()  # the ids of nodes are paths
        ]
        results = [(number, result) for number, result in results if number in self._open_requests]
        scores = self._run.scores
        for index in [index for index in scores if index in self._scored]:
            results.append((self._scored.pop(index), scores.pop(index)))
        if self.backend is not None:
            self.backend.collect()
        scores.clear()
        for number, _ in results:
            self._open_requests[number].num_remaining -= 1
            if not self._open_requests[number].num_remaining:
                del self._open_requests[number]
        return results

    def take_deltas(self, numbers: Iterable[int]) -> Iterator[SampleDelta]:
        """Yield what samples of requests have generated since the previous call.

        A sample's last tokens are not yielded; its completion has them.
        """
        rows, store = self._run.rows, self._run.rows.generated
        arrays = (store.tokens, store.logprobs, store.top_tokens, store.top_logprobs)
        for number, open_request in (
            (n, self._open_requests[n]) for n in numbers if n in self._open_requests
        ):
            request = open_request.request
            param_set = self._run.param_sets[request.params]
            num_top = param_set.params.logprobs
            for slot in sorted(request.slots or ()):
                # A greedy request has one row for all its samples.
                samples = request.samples if param_set.is_greedy else [int(rows.sample[slot])]
                start, stop = open_request.num_reported.get(samples[0], 0), int(rows.count[slot])
                if stop == start:
                    continue
                tokens, logprobs, ids, values = (
                    store.part(array, slot, start, stop).tolist()
                    for array in (arrays if num_top else (*arrays[:2], *arrays[:2]))
                )
                top: tuple[tuple[tuple[int, float], ...], ...] = ()
                if num_top:
                    pairs = zip(ids, values, strict=True)
                    top = tuple(tuple(zip(*pair, strict=True))[:num_top] for pair in pairs)
                for sample in samples:
                    open_request.num_reported[sample] = stop
                    yield SampleDelta(number, sample, tuple(tokens), tuple(logprobs), top)

    def status(self) -> Status:
        """Return the current load."""
        return self.scheduler.status()

    @property
    def usage(self) -> Usage:
        """Usage so far."""
        return self.scheduler.usage

    @property
    def closed(self) -> bool:
        """Whether the run is closed."""
        return self.scheduler.closed

    def check(self) -> None:
        """Assert that pages, rows and requests are accounted for."""
        self.scheduler.check()

    def close(self) -> None:
        """End all requests and free their pages; they yield no more results."""
        if not self.closed:
            (self.scheduler if self.backend is None else self.backend).close()
        self._open_requests.clear()
        self._scored.clear()

    def _check_open(self) -> None:
        if self.closed:
            raise InputError("the run is closed; open a new run")


@dataclass(slots=True)
class StreamedText:
    """The text of a sample as it grows.

    A possible start of a stop string is held back, and so is an incomplete character. If many
    tokens in a row end with incomplete characters, only the last characters are held back.
    """

    text: TokenText
    """Decodes tokens."""
    stops: Sequence[str]
    """The stop strings."""
    tokens: list[int]
    """The last tokens of the prompt, and the tokens of the sample that show text."""
    num_decoded: int
    """How many of them are decoded."""
    num_added: int = 0
    """How many tokens of the sample were added."""
    sent: str = ""
    """Text that was returned."""
    pending: str = ""
    """Decoded text that is held back."""
    _prefix: list[int] = field(default_factory=list)
    """Invalid bytes that stand for all earlier tokens, while bytes complete no character."""
    _num_shown: int = 0
    """How many characters of the tokens that are not decoded, after `_prefix`, are in `pending`."""

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text to send after further tokens."""
        self.num_added += len(tokens)
        self.tokens += self.text.keep_visible(tokens)
        new = self._decode_new()
        if not new.endswith(PARTIAL):
            self.pending += new[self._num_shown :]
            self.num_decoded, self._num_shown, self._prefix = len(self.tokens), 0, []
        elif len(self.tokens) - self.num_decoded <= _MAX_UNDECODED or not self._shorten(new):
            return ""  # possibly an incomplete character
        return self._send(len(self.pending) - self._count_stop_prefix())

    def _decode_new(self) -> str:
        """Return the text of `_prefix` and all tokens that are not decoded."""
        before = self.tokens[max(self.num_decoded - TAIL, 0) : self.num_decoded]
        new = self.tokens[self.num_decoded :]
        return self.text.of([] if self._prefix else before, [*self._prefix, *new])

    def _shorten(self, new: str) -> bool:
        """Add all but the last characters to `pending`; return whether this was possible.

        Some decoders show a row of bytes as invalid if any of them is. So one of the invalid bytes
        stays, several times, in place of the tokens that will not be decoded again. If there is no
        such token, each has several bytes, and the decoder shows every whole character.

        Args:
            new: Text of the tokens that are not decoded; it ends with invalid bytes.
        """
        before = self.num_decoded, self._prefix
        undecoded = [*self._prefix[:1], *self.tokens[self.num_decoded :]]
        invalid = next((id for id in undecoded if self.text.of([], [id]) == PARTIAL), None)
        self.num_decoded = len(self.tokens) - _KEPT_UNDECODED
        self._prefix = [] if invalid is None else [invalid] * _INVALID_TOKENS
        shorter, settled = self._decode_new(), len(new) - MAX_CHARACTER_TOKENS + 1
        # The tokens that are kept must have the characters that are compared.
        has_compared = len(shorter) >= len(self._prefix) + _COMPARED_CHARACTERS
        if not has_compared or not shorter.endswith(new[-_COMPARED_CHARACTERS:]):
            self.num_decoded, self._prefix = before
            return False
        self.pending += new[self._num_shown : settled]
        self._num_shown = len(shorter) - (len(new) - settled)
        return True

    def end(self, full_text: str) -> str:
        """Return the rest of the text, now that the whole text is known."""
        self.pending = full_text[len(self.sent) :]
        return self._send(len(self.pending))

    def _send(self, num: int) -> str:
        piece, self.pending = self.pending[:num], self.pending[num:]
        self.sent += piece
        return piece

    def _count_stop_prefix(self) -> int:
        """Return the length of the longest end of the text that a stop string may begin with."""
        max_length = max((len(stop) for stop in self.stops), default=0)
        for num in range(min(max_length, len(self.pending)), 0, -1):
            if any(stop.startswith(self.pending[-num:]) for stop in self.stops):
                return num
        return 0


class StreamedTexts:
    """Adds text to the SampleDeltas of one call, and yields remaining text when a sample ends."""

    def __init__(
        self,
        text: TokenText,
        stops: Sequence[str],
        replies: ReplyReader | None = None,
        tools: Sequence[Any] | None = None,
        *,
        is_structured: bool = False,
    ) -> None:
        """Start without samples.

        Args:
            text: Decodes tokens.
            stops: The stop strings of the call.
            replies: Splits texts into the parts of a SampleDelta; None for no parts.
            tools: Tools of the call.
            is_structured: Whether the samples have a grammar. Default: False.
        """
        self._text, self._stops, self._replies, self._tools = text, stops, replies, tools
        self._is_structured = is_structured
        self._prompts: dict[int, list[int]] = {}
        self._growing: dict[tuple[int, int], StreamedText] = {}
        self._replying: dict[tuple[int, int], tuple[StreamedText, StreamingReply]] = {}

    def read(self, prompt_index: int, item: Any) -> Iterator[Any]:
        """Yield what to report for an item of a prompt: token ids, a SampleDelta, or a Completion.

        Before a Completion comes a SampleDelta with what no delta has reported yet, if there is
        any.
        """
        if isinstance(item, SampleDelta):
            text = self._of(prompt_index, item.sample).add(item.tokens)
            parts: tuple[Part, ...] = ()
            if replying := self._reply_of(prompt_index, item.sample):
                growing, reply = replying
                parts = tuple(reply.add(growing.add(item.tokens)))
            yield replace(item, text=text, parts=parts)
            return
        if isinstance(item, Completion):
            growing = self._of(prompt_index, item.sample_index)
            unsent, text, parts = slice(growing.num_added, None), growing.end(item.text), ()
            if replying := self._reply_of(prompt_index, item.sample_index):
                growing, reply = replying
                parts = tuple(reply.end(growing.end(reply.decode_completion(item)), item))
            if text or parts or item.tokens[unsent]:
                yield SampleDelta(
                    int(item.prompt_id),
                    item.sample_index,
                    item.tokens[unsent],
                    item.logprobs[unsent],
                    item.top_logprobs[unsent],
                    text,
                    parts,
                )
        else:
            prompt = item if self._replies is not None else item[-TAIL:]
            self._prompts[prompt_index] = prompt.tolist()
        yield item

    def _of(self, prompt_index: int, sample: int) -> StreamedText:
        if (prompt_index, sample) not in self._growing:
            self._growing[prompt_index, sample] = self._start_text(self._text, prompt_index)
        return self._growing[prompt_index, sample]

    def _reply_of(
        self, prompt_index: int, sample: int
    ) -> tuple[StreamedText, StreamingReply] | None:
        if self._replies is None:
            return None
        if (prompt_index, sample) not in self._replying:
            reply = self._replies.start_stream(
                self._prompts[prompt_index], self._tools, is_structured=self._is_structured
            )
            growing = self._start_text(self._replies.text, prompt_index)
            self._replying[prompt_index, sample] = growing, reply
        return self._replying[prompt_index, sample]

    def _start_text(self, text: TokenText, prompt_index: int) -> StreamedText:
        tail = self._prompts[prompt_index][-TAIL:]
        return StreamedText(text, self._stops, tail, len(tail))
