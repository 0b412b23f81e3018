"""Decide what each forward pass computes: admit, prefill, decode, refill, preempt.

Requests are taken depth first, so that a shared page is dropped as soon as the last sample under
it ends. A step is either one prefill pass (segments, and the tokens of preempted rows) or one
decode pass over all live rows; rows that end are replaced before the next step. Only the start
and the end of a sample run Python of their own; everything per step is an array operation.

A sample's life: its request is opened (pages for the segments above it), the segments are
computed, its first token is drawn (it is ready), it gets pages (it is live), it ends. When pages
run out a live row goes back to ready, and an open request without live rows back to waiting; what
they have generated stays, only keys and values are computed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treegen.admission import Admission
from treegen.batch import Forward
from treegen.cache import PagedCache
from treegen.decoding import DecodeSteps, Flight
from treegen.errors import CapacityError, NumericsError
from treegen.kept import KeptPrefixes
from treegen.layout import Ints
from treegen.live import LiveRows
from treegen.live_tree import LiveRequest, LiveSegment
from treegen.params import SamplingParams
from treegen.passes import Span, prefill_batch
from treegen.plan import Plan, Request
from treegen.radix import Tokens
from treegen.results import Completion, Score, Usage
from treegen.rows import RowTable
from treegen.sampling import SamplingBatch, draw, row_seed
from treegen.scores import add_scores, score_of
from treegen.segments import SegmentStore
from treegen.spans import pick_spans
from treegen.stopping import ParamSet, Stopping
from treegen.transfer import to_device

_LOGITS = 2**27  # numbers in the logits of a prefill pass, about
_KEY_BITS = 32  # sort keys: rank of the request, sample index below


@dataclass(frozen=True, slots=True)
class Grown:
    """What the segment of a finished sample holds.

    tokens: its token ids; the first num_generated of them are the first that were generated.
    """

    tokens: Tokens
    num_generated: int


class Scheduler:
    """Runs a plan, and what is added to it, a forward pass at a time.

    scores: of requests that asked for them and are over, by index. grown: segments of samples that
    have ended, by request and sample, each with a reference for whoever takes them from here.
    """

    def __init__(
        self,
        plan: Plan,
        model: Forward,
        cache: PagedCache,
        kept: KeptPrefixes,
        *,
        params: SamplingParams,
        stopping: Stopping,
        samples: Sequence[Sequence[int]],
        max_rows: int,
        prefill_chunk: int,
        impl: str = "auto",
        run_ahead: bool = False,
        on_prefilled: Callable[[LiveRequest], None] | None = None,
        on_grown: Callable[[LiveRequest, Completion], Grown] | None = None,
    ) -> None:
        """A scheduler for one run.

        samples: per request of the plan, the sample indices wanted. max_rows: live rows at most.
        prefill_chunk: tokens of a prefill pass at most. run_ahead: launch each decode step before
        the tokens of the last one are known, so that a GPU does not wait for the host; rows that
        turn out to have ended are computed once more, in vain.
        on_prefilled: called with each request that wants no samples once its keys are in place,
        before its pages are freed.
        on_grown: called with each sample of a request that grows; says what its segment holds.
        """
        self.plan, self.model, self.cache, self.kept = plan, model, cache, kept
        self.store = SegmentStore(plan, cache, kept)
        self.param_sets = [ParamSet(params, stopping)]
        self.rows = RowTable(min(params.logprobs, len(stopping.may_end)))
        self.requests: dict[int, LiveRequest] = {}
        cache.pool.peak_used = cache.pool.num_used
        self.live = LiveRows(self.rows, self.store, self.requests)
        self.usage = Usage(
            num_pages=cache.pool.num_pages,
            page_size=cache.page_size,
            impl=impl,
            prompt_tokens_unshared=sum(
                len(request.tokens) * (len(wanted) if request.rows else 1)
                for request, wanted in zip(plan.requests, samples, strict=True)
            ),
        )
        self.scores: dict[int, Score] = {}
        self.grown: dict[tuple[int, int], LiveSegment] = {}
        self._may_end = stopping.may_end[None]
        self._prefill_chunk, self._impl = prefill_chunk, impl
        self._max_logits = max(_LOGITS // max(len(stopping.may_end), 1), 1)
        self._run_ahead = run_ahead
        self._steps = DecodeSteps(
            model, cache, self.store, self.live, self.usage, self.param_sets, impl
        )
        self._on_prefilled, self._on_grown = on_prefilled, on_grown
        self._admission = Admission(
            self.store, self.live, kept, self.usage, max_rows, self._note_prefilled
        )
        self._num_requests = len(plan.requests)
        self._admission.add(
            [
                LiveRequest(
                    index=index,
                    rank=rank,
                    spec=plan.requests[index],
                    segment=self.store.segments[int(plan.segment_of[index])],
                    params=0,
                    samples=list(samples[index]),
                )
                for rank, index in enumerate(plan.order.tolist())
            ]
        )

    @property
    def has_work(self) -> bool:
        """Whether anything is left to do."""
        return self._admission.has_work

    def add_params(self, params: SamplingParams, stopping: Stopping) -> int:
        """Further sampling parameters; returns their index for `add`."""
        self.param_sets.append(ParamSet(params, stopping))
        self._may_end = np.concatenate([self._may_end, stopping.may_end[None]])
        return len(self.param_sets) - 1

    def add(
        self, spec: Request, segment: LiveSegment, params: int, samples: Sequence[int]
    ) -> LiveRequest:
        """A further request below a segment; its samples become segments when they end.

        spec.tokens: the end of the prompt is enough, for it is only read to make text of tokens.
        """
        index = self._num_requests
        self._num_requests += 1
        scored = segment.parent if spec.score_from is not None else None
        request = LiveRequest(
            index=index,
            rank=index,
            spec=spec,
            segment=segment,
            params=params,
            samples=list(samples),
            rewinds=scored or segment,
            grows=True,
        )
        self._admission.add([request])
        return request

    def step(self) -> list[Completion]:
        """Run one forward pass; returns the samples that are known to have ended.

        Raises NumericsError if the model's logits are not numbers.
        """
        start = time.perf_counter()
        self._admission.admit()
        usage = self.usage
        finished: list[Completion] = []
        if self._wants_prefill:
            finished += self._land()
        if self._wants_prefill:
            finished += self._prefill()
            usage.prefill_steps += 1
            usage.prefill_seconds += time.perf_counter() - start
        elif self.live.num_active:
            finished += self._decode()
            usage.decode_seconds += time.perf_counter() - start
        usage.seconds += time.perf_counter() - start
        usage.peak_pages = self.cache.pool.peak_used
        return finished

    def cancel(self, index: int, sample: int | None = None) -> None:
        """Drop one sample of a request, or all that have not ended; frees their pages at once."""
        request = self.requests.get(index)
        if request is not None:
            greedy = self.param_sets[request.params].is_greedy
            self._admission.cancel(request, sample, greedy=greedy)

    def close(self) -> None:
        """Free all pages, whether or not the work is done."""
        self._steps.flight = None
        # One run at a time: whatever an interrupted step had taken goes with the rest.
        self.cache.pool.reset(self.kept.tables())
        self.store.clear()
        self.live.clear()
        self._admission.clear()

    def check(self) -> None:
        """Assert that every page reference is accounted for and that rows are depth first."""
        tables = [*self.store.owned(), *self.live.tables(), *self.kept.tables()]
        self.cache.pool.check(tables)
        for ids in self.rows.chain[self.live.order].T:
            runs = ids[np.flatnonzero(np.diff(ids, prepend=-2))]
            assert len(np.unique(runs[runs >= 0])) == (runs >= 0).sum(), "rows are not depth first"

    @property
    def _wants_prefill(self) -> bool:
        return bool(self._admission.to_compute or self.live.resuming)

    # Prefill

    def _prefill(self) -> list[Completion]:
        spans = pick_spans(
            self._admission.to_compute, self.live, self._prefill_chunk, self._max_logits
        )
        batch = prefill_batch(spans, self.store, self.cache, self.model.device, self._impl)
        self.usage.impl = batch.levels.impl
        logits = self.model.forward(batch).float()
        lse = logits.logsumexp(dim=-1)
        self._check_numbers(lse.cpu().numpy(), lambda at: self._span_name(spans, at))
        prompts: list[tuple[LiveRequest, int]] = []
        offset = 0
        resumed = []
        for span in spans:
            end = offset + len(span.wanted)
            if span.slot >= 0:
                self.usage.recomputed_tokens += len(span.tokens)
                request = self.requests[int(self.rows.request[span.slot])]
                request.num_prefilled += len(span.tokens)
                self.live.resuming[span.slot] = span.stop
                if span.stop == self.rows.stop[span.slot] + self.rows.count[span.slot] - 1:
                    del self.live.resuming[span.slot]
                    resumed.append(span.slot)
            else:
                wanting = self._on_span(span, logits[offset:end], lse[offset:end])
                prompts += [(request, end - 1) for request in wanting]
            offset = end
        if resumed:
            self.live.join(resumed)
        return self._draw_first(prompts, logits)

    def _on_span(self, span: Span, logits_SV: Tensor, lse_S: Tensor) -> list[LiveRequest]:
        """Account for a computed piece of a segment; returns requests to draw first tokens of."""
        segment = span.segment
        assert segment is not None
        again = max(min(span.stop, segment.was_computed) - span.start, 0)
        self.usage.recomputed_tokens += again
        self.usage.prompt_tokens_computed += len(span.tokens) - again
        self.store.mark_computed(segment, span.stop)
        next(iter(segment.openers)).num_prefilled += len(span.tokens)
        if segment.scored < span.stop:
            add_scores(segment, span.wanted, logits_SV, lse_S)
        if span.stop < segment.stop:
            return []
        del self._admission.to_compute[segment.index]
        for request in list(segment.openers):
            self._admission.on_computed(request)
        return [r for r in segment.requests if r.samples and r.slots is None]

    def _draw_first(
        self, prompts: Sequence[tuple[LiveRequest, int]], logits_SV: Tensor
    ) -> list[Completion]:
        """Draw the first tokens of all samples of requests from their prompts' last logits.

        prompts: requests and the row of logits of each.
        """
        by_rows: dict[int, list[tuple[LiveRequest, int]]] = {}
        for request, at in prompts:
            by_rows.setdefault(request.num_rows, []).append((request, at))
        finished: list[Completion] = []
        for num_rows, group in by_rows.items():
            requests = [request for request, _ in group]
            slots_PN = self._add_rows(requests, num_rows)
            device = logits_SV.device
            at_P = to_device(np.array([at for _, at in group]), device)
            params = [self.param_sets[request.params].params for request in requests]
            sampling = SamplingBatch.of(params, torch.arange(len(params), device=device))
            seeds_PN = to_device(self.rows.seed[slots_PN], device)
            draws = draw(logits_SV[at_P], seeds_PN, seeds_PN * 0, sampling)
            slots = slots_PN.ravel()
            finished += self._note(Flight(slots, self.rows.serial[slots], draws))
            for request in requests:
                self._admission.add_rows(request, sorted(request.slots or ()))
        return finished

    def _add_rows(self, requests: Sequence[LiveRequest], num_rows: int) -> Ints:
        """New rows of requests, so many each: slots [requests, num_rows]."""
        rows = self.rows
        slots_PN = rows.add(len(requests) * num_rows).reshape(len(requests), num_rows)
        for request, slots in zip(requests, slots_PN, strict=True):
            wanted, spec = request.samples[:num_rows], request.spec
            seed = self.param_sets[request.params].params.seed
            rows.request[slots] = request.index
            rows.sample[slots] = wanted
            rows.params[slots] = request.params
            rows.key[slots] = (request.rank << _KEY_BITS) + np.array(wanted)
            rows.seed[slots] = [row_seed(seed, spec.id, index) for index in wanted]
            rows.stop[slots] = request.segment.stop
            rows.limit[slots] = spec.max_tokens
            request.slots = set(slots.tolist())
            request.rewinds = None
        return slots_PN

    # Decode

    def _decode(self) -> list[Completion]:
        """Launch a decode step, and note the tokens of the one before, or of this one at once."""
        finished: list[Completion] = []
        steps = self._steps
        while True:
            order, counts, source = steps.next_rows()
            short = self.live.pages_short(order, counts)
            if not short:
                break
            if steps.flight is not None:
                finished += self._land()
            elif not self._admission.give_way():
                raise CapacityError(f"the last row lacks {short} cache pages; give more memory")
        before = steps.launch(order, counts, source)
        if before is not None:
            return finished + self._note(before)
        return finished if self._run_ahead else finished + self._land()

    def _land(self) -> list[Completion]:
        """Wait for the step under way, if there is one, and note its tokens."""
        flight, self._steps.flight = self._steps.flight, None
        return self._note(flight) if flight is not None else []

    def _note(self, flight: Flight) -> list[Completion]:
        """Note the drawn tokens of rows that are still there; ends the samples that are over."""
        rows, num = self.rows, len(flight.slots)
        tokens, logprobs, lse, *top = flight.fetch.wait()
        alive = rows.serial[flight.slots] == flight.serials
        slots, tokens, logprobs = (
            flight.slots[alive],
            tokens.ravel()[alive],
            logprobs.ravel()[alive],
        )
        # Several draws may come from one distribution.
        lse, *top = (np.repeat(array, num // len(array), axis=0)[alive] for array in (lse, *top))
        self._check_numbers(lse, lambda at: self._row_name(slots[at]))
        rows.append(slots, tokens, logprobs, *top)
        self.usage.decoded_tokens += len(slots)
        over = self._may_end[rows.params[slots], tokens] | (rows.count[slots] >= rows.limit[slots])
        finished: list[Completion] = []
        ended: dict[LiveRequest, list[int]] = {}
        for slot in slots[over].tolist():
            request = self.requests[int(rows.request[slot])]
            completions = self._completions(request, slot)
            if completions:
                finished += completions
                ended.setdefault(request, []).append(slot)
                if request.grows:
                    self._grow(request, slot, completions[0])
        for request, mine in ended.items():
            self._admission.retire(request, np.array(mine, dtype=np.int64), ended=True)
        return finished

    def _grow(self, request: LiveRequest, slot: int, completion: Completion) -> None:
        """Make a segment of what a row has generated, from the pages that it has."""
        assert self._on_grown is not None
        grown = self._on_grown(request, completion)
        key = request.index, completion.sample_index
        if not len(grown.tokens):
            request.segment.refs += 1
            self.grown[key] = request.segment
            return
        rows = self.rows
        at = np.array([slot])
        in_place = rows.num_pages[slot] > 0 and slot not in self.live.resuming
        chain = rows.chain[slot]
        self.grown[key] = self.store.adopt(
            request.segment,
            grown.tokens,
            num_computed=min(grown.num_generated, int(rows.count[slot]) - 1),
            table=rows.take_pages(at) if in_place else np.empty(0, dtype=np.int32),
            base=int(rows.base[slot]),
            above=tuple(chain[chain >= 0].tolist()),
        )

    def _completions(self, request: LiveRequest, slot: int) -> list[Completion]:
        """The finished samples of a slot (all of a request's if greedy); none if it goes on."""
        rows, spec = self.rows, request.spec
        count = int(rows.count[slot])
        param_set = self.param_sets[request.params]
        params = param_set.params
        tokens = rows.tokens[slot, :count].tolist()
        verdict = param_set.stopping.verdict(spec.tokens, tokens, int(rows.limit[slot]))
        if verdict is None:
            return []
        reason, stop, text = verdict
        num_top = min(params.logprobs, rows.num_logprobs)
        top = tuple(
            tuple(zip(ids, values, strict=True))
            for ids, values in zip(
                rows.top_tokens[slot, :count, :num_top].tolist(),
                rows.top_logprobs[slot, :count, :num_top].tolist(),
                strict=True,
            )
        )
        indices = list(request.samples) if param_set.is_greedy else [int(rows.sample[slot])]
        for index in indices:
            request.samples.remove(index)
        return [
            Completion(
                prompt_id=spec.id,
                sample_index=index,
                seed=row_seed(params.seed, spec.id, index),
                text=text,
                tokens=tuple(tokens),
                logprobs=tuple(rows.logprobs[slot, :count].tolist()),
                finish_reason=reason,
                stop=stop,
                top_logprobs=top if num_top else (),
            )
            for index in indices
        ]

    def _check_numbers(self, lse_S: NDArray[Any], name: Callable[[int], str]) -> None:
        bad = ~np.isfinite(lse_S)
        if bad.any():
            raise NumericsError(
                f"the model's logits are not numbers for {name(int(bad.argmax()))}; "
                "samples that had finished are kept; check the weights or use dtype float32"
            )

    def _note_prefilled(self, request: LiveRequest) -> None:
        if request.spec.score_from is not None:
            self.scores[request.index] = score_of(request)
        if self._on_prefilled is not None:
            self._on_prefilled(request)

    def _row_name(self, slot: int) -> str:
        rows = self.rows
        request = self.requests[int(rows.request[slot])].spec
        return f"prompt {request.id!r} sample {rows.sample[slot]} token {rows.count[slot]}"

    def _span_name(self, spans: Sequence[Span], at: int) -> str:
        for span in spans:
            if at < len(span.wanted):
                below = span.segment.requests if span.segment else []
                who = f"prompt {below[0].spec.id!r}" if below else "a shared prompt"
                return f"{who} at token {int(span.wanted[at])}"
            at -= len(span.wanted)
        raise AssertionError("a row of logits belongs to no span")
