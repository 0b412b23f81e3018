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
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from treegen.admission import Admission
from treegen.attention import Level
from treegen.batch import Batch
from treegen.cache import PagedCache
from treegen.errors import CapacityError, NumericsError
from treegen.kept import KeptPrefixes
from treegen.layout import Ints
from treegen.live import LiveRows
from treegen.params import SamplingParams
from treegen.passes import Span, decode_batch, decode_levels, prefill_batch
from treegen.plan import Plan
from treegen.results import Completion, Usage
from treegen.rows import RowTable
from treegen.sampling import Draws, SamplingBatch, draw, row_seed
from treegen.scores import TokenScores
from treegen.segments import SegmentStore
from treegen.stopping import Stopping

_LOGITS = 2**27  # numbers in the logits of a prefill pass, about
_KEY_BITS = 32  # sort keys: segment or rank of the request above, sample index below


class Forward(Protocol):
    """What the scheduler needs of a model."""

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        ...

    def forward(self, batch: Batch) -> Tensor:
        """Logits [S, V] of the query rows named by batch.logits_at_S."""
        ...


class Scheduler:
    """Runs one plan to its end, a forward pass at a time."""

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
        on_prefilled: Callable[[int], None] | None = None,
    ) -> None:
        """A scheduler for one run.

        samples: per request, the sample indices wanted. max_rows: live rows at most.
        prefill_chunk: tokens of a prefill pass at most. on_prefilled: called with each request
        that wants no samples once its keys are in place, before its pages are freed.
        """
        self.plan, self.model, self.cache, self.kept = plan, model, cache, kept
        self.store = SegmentStore(plan, cache, kept)
        self.rows = RowTable(min(params.logprobs, len(stopping.may_end)))
        cache.pool.peak_used = cache.pool.num_used
        self.live = LiveRows(self.rows, self.store)
        self.usage = Usage(
            num_pages=cache.pool.num_pages,
            page_size=cache.page_size,
            impl=impl,
            prompt_tokens_unshared=sum(
                len(request.tokens) * (len(wanted) if request.rows else 1)
                for request, wanted in zip(plan.requests, samples, strict=True)
            ),
        )
        self.scores = TokenScores(plan, self.store.children)
        self._params, self._stopping = params, stopping
        self._prefill_chunk, self._impl = prefill_chunk, impl
        self._max_logits = max(_LOGITS // max(len(stopping.may_end), 1), 1)
        self._state: tuple[int, list[Level], SamplingBatch, int] | None = None
        self._requests = Admission(
            self.store, self.live, kept, self.usage, samples, max_rows, on_prefilled
        )

    @property
    def has_work(self) -> bool:
        """Whether anything is left to do."""
        return self._requests.has_work

    def step(self) -> list[Completion]:
        """Run one forward pass; returns the samples that ended with it.

        Raises NumericsError if the model's logits are not numbers.
        """
        start = time.perf_counter()
        self._requests.admit()
        usage = self.usage
        if self._requests.to_compute or self.live.resuming:
            finished = self._prefill()
            usage.prefill_steps += 1
            usage.prefill_seconds += time.perf_counter() - start
        elif self.live.num_active:
            finished = self._decode()
            usage.decode_steps += 1
            usage.decode_seconds += time.perf_counter() - start
        else:
            finished = []
        usage.seconds += time.perf_counter() - start
        usage.peak_pages = self.cache.pool.peak_used
        return finished

    def cancel(self, request: int, sample: int | None = None) -> None:
        """Drop one sample of a request, or all that have not ended; frees their pages at once."""
        self._requests.cancel(request, sample, greedy=self._params.temperature == 0)

    def close(self) -> None:
        """Free all pages, whether or not the work is done."""
        # One run at a time: whatever an interrupted step had taken goes with the rest.
        self.cache.pool.reset(self.kept.tables())
        self.store.clear()
        self.live.clear()
        self._requests.clear()

    def check(self) -> None:
        """Assert that every page reference is accounted for and that rows are depth first."""
        tables = [*self.store.owned(), *self.live.tables(), *self.kept.tables()]
        self.cache.pool.check(tables)
        assert (np.diff(self.rows.key[self.live.order]) > 0).all(), "rows are not depth first"

    # Prefill

    def _prefill(self) -> list[Completion]:
        spans = self._pick_spans()
        batch = prefill_batch(spans, self.store, self.cache, self.model.device, self._impl)
        self.usage.impl = batch.levels.impl
        logits = self.model.forward(batch).float()
        lse = logits.logsumexp(dim=-1)
        self._check_numbers(lse, lambda at: self._span_name(spans, at))
        finished: list[Completion] = []
        offset = 0
        resumed = []
        for span in spans:
            end = offset + len(span.wanted)
            if span.slot >= 0:
                self.usage.recomputed_tokens += len(span.tokens)
                self.live.resuming[span.slot] = span.stop
                if span.stop == self.rows.stop[span.slot] + self.rows.count[span.slot] - 1:
                    del self.live.resuming[span.slot]
                    resumed.append(span.slot)
            else:
                finished += self._on_span(span, logits[offset:end], lse[offset:end])
            offset = end
        if resumed:
            self.live.join(resumed)
        return finished

    def _pick_spans(self) -> list[Span]:
        """What the next prefill pass computes: at most prefill_chunk tokens, depth first."""
        room = self._prefill_chunk
        spans: list[Span] = []
        reached: dict[int, int] = {}
        for slot, start in self.live.resuming.items():
            if room == 0:
                break
            span = self._row_span(slot, start, room)
            spans.append(span)
            room -= len(span.tokens)
        logits = 0
        for index in sorted(self._requests.to_compute):
            if room == 0 or logits >= self._max_logits:
                break
            if self.store.is_ready(index, reached):
                span = self._segment_span(index, room)
                spans.append(span)
                reached[index] = span.stop
                room -= len(span.tokens)
                logits += len(span.wanted)
        return sorted(spans, key=lambda span: span.key)

    def _row_span(self, slot: int, start: int, room: int) -> Span:
        rows = self.rows
        segment = int(self.plan.segment_of[rows.request[slot]])
        first = start - int(rows.stop[slot])
        last = min(int(rows.count[slot]) - 1, first + room)
        return Span(
            key=(segment << _KEY_BITS) + 1 + int(rows.sample[slot]),
            tokens=rows.tokens[slot, first:last],
            start=start,
            table=rows.table[slot, : rows.num_pages[slot]],
            base=int(rows.base[slot]),
            chain=self.store.chains[segment],
            wanted=np.empty(0, dtype=np.int64),
            slot=slot,
        )

    def _segment_span(self, index: int, room: int) -> Span:
        segment, store = self.plan.segments[index], self.store
        store.continue_parent(index)
        start = int(store.computed[index])
        stop = min(segment.stop, start + room)
        table = store.tables[index]
        assert table is not None
        return Span(
            key=index << _KEY_BITS,
            tokens=segment.tokens[start - segment.start : stop - segment.start],
            start=start,
            table=table,
            base=segment.base,
            chain=store.chain_above(index),
            wanted=np.arange(max(start, int(store.first_logit[index])), stop),
            segment=index,
        )

    def _on_span(self, span: Span, logits_SV: Tensor, lse_S: Tensor) -> list[Completion]:
        """Account for a computed piece of a segment; draw first tokens where one is complete."""
        store, index = self.store, span.segment
        segment = self.plan.segments[index]
        again = max(min(span.stop, int(store.was_computed[index])) - span.start, 0)
        self.usage.recomputed_tokens += again
        self.usage.prompt_tokens_computed += len(span.tokens) - again
        store.mark_computed(index, span.stop)
        if store.scored[index] < span.stop:
            self.scores.add(span.segment, span.wanted, logits_SV, lse_S)
        if span.stop < segment.stop:
            return []
        self._requests.to_compute.remove(index)
        finished: list[Completion] = []
        for request in segment.requests:
            if self._requests.samples[request] and request not in self._requests.slots:
                finished += self._draw_first(request, logits_SV[-1:])
            self._requests.on_computed(request)
        return finished

    def _draw_first(self, request: int, logits_1V: Tensor) -> list[Completion]:
        """Draw the first token of every sample of a request at once, from the prompt's logits."""
        wanted = self._requests.samples[request][: self._requests.num_rows(request)]
        rows, spec = self.rows, self.plan.requests[request]
        slots = rows.add(len(wanted))
        rows.request[slots] = request
        rows.sample[slots] = wanted
        rows.key[slots] = (self._requests.rank[request] << _KEY_BITS) + np.array(wanted)
        rows.seed[slots] = [row_seed(self._params.seed, spec.id, index) for index in wanted]
        rows.stop[slots] = len(spec.tokens)
        rows.limit[slots] = spec.max_tokens
        self._requests.slots[request] = set(slots.tolist())
        device = logits_1V.device
        sampling = SamplingBatch.of(
            [self._params], torch.zeros(1, dtype=torch.int64, device=device)
        )
        seeds = torch.from_numpy(rows.seed[slots])[None].to(device)
        finished = self._record(slots, draw(logits_1V, seeds, seeds * 0, sampling))
        self._requests.add_rows(request, sorted(self._requests.slots[request]))
        return finished

    # Decode

    def _decode(self) -> list[Completion]:
        while short := self.live.pages_short():
            if not self._requests.give_way():
                raise CapacityError(f"the last row lacks {short} cache pages; give more memory")
        order, device = self.live.order, self.model.device
        levels, sampling, shared_keys = self._row_state()
        batch = decode_batch(self.rows, order, levels, self.cache, device, self._impl)
        self.usage.impl = batch.levels.impl
        logits = self.model.forward(batch)
        seeds = torch.from_numpy(self.rows.seed[order])[:, None].to(device)
        steps = torch.from_numpy(self.rows.count[order])[:, None].to(device)
        draws = draw(logits, seeds, steps, sampling)
        self._check_numbers(draws.lse_P, lambda at: self._row_name(int(order[at])))
        ends = self.rows.stop[order] + self.rows.count[order]
        self.usage.key_tokens_read += shared_keys + int((ends - self.rows.base[order]).sum())
        self.usage.key_tokens_unshared += int(ends.sum())
        self.usage.peak_rows = max(self.usage.peak_rows, len(order))
        return self._record(order, draws)

    def _row_state(self) -> tuple[list[Level], SamplingBatch, int]:
        """What changes only when rows come or go: shared levels and sampling parameters."""
        if self._state is None or self._state[0] != self.live.version:
            order = self.live.order
            segments = self.plan.segment_of[self.rows.request[order]]
            levels = decode_levels(self.store.chains[segments], self.store, self.model.device)
            index = torch.zeros(len(order), dtype=torch.int64, device=self.model.device)
            keys = sum(int(level.kv_len_G.sum()) for level in levels)
            sampling = SamplingBatch.of([self._params], index)
            self._state = self.live.version, levels, sampling, keys
        return self._state[1:]

    def _record(self, slots: Ints, draws: Draws) -> list[Completion]:
        """Note one drawn token per slot; ends the samples that are over."""
        rows = self.rows
        tokens = draws.tokens_PN.reshape(-1).cpu().numpy()
        top_tokens = top_logprobs = None
        if draws.top_tokens_PK is not None and draws.top_logprobs_PK is not None:
            top_tokens = draws.top_tokens_PK.cpu().numpy()
            top_logprobs = draws.top_logprobs_PK.cpu().numpy()
        logprobs = draws.logprobs_PN.reshape(-1).cpu().numpy()
        rows.append(slots, tokens, logprobs, top_tokens, top_logprobs)
        self.usage.decoded_tokens += len(slots)
        over = self._stopping.may_end[tokens] | (rows.count[slots] >= rows.limit[slots])
        finished: list[Completion] = []
        ended: dict[int, list[int]] = {}
        for slot in slots[over].tolist():
            completions = self._completions(slot)
            if completions:
                finished += completions
                ended.setdefault(int(rows.request[slot]), []).append(slot)
        for request, mine in ended.items():
            self._requests.retire(request, np.array(mine, dtype=np.int64), ended=True)
        return finished

    def _completions(self, slot: int) -> list[Completion]:
        """The finished samples of a slot (all of a request's if greedy); none if it goes on."""
        rows, request = self.rows, int(self.rows.request[slot])
        count, spec = int(rows.count[slot]), self.plan.requests[request]
        tokens = rows.tokens[slot, :count].tolist()
        verdict = self._stopping.verdict(spec.tokens, tokens, int(rows.limit[slot]))
        if verdict is None:
            return []
        reason, stop, text = verdict
        top = tuple(
            tuple(zip(ids, values, strict=True))
            for ids, values in zip(
                rows.top_tokens[slot, :count].tolist(),
                rows.top_logprobs[slot, :count].tolist(),
                strict=True,
            )
        )
        greedy = self._params.temperature == 0
        indices = list(self._requests.samples[request]) if greedy else [int(rows.sample[slot])]
        for index in indices:
            self._requests.samples[request].remove(index)
        return [
            Completion(
                prompt_id=spec.id,
                sample_index=index,
                seed=row_seed(self._params.seed, spec.id, index),
                text=text,
                tokens=tuple(tokens),
                logprobs=tuple(rows.logprobs[slot, :count].tolist()),
                finish_reason=reason,
                stop=stop,
                top_logprobs=top if rows.num_logprobs else (),
            )
            for index in indices
        ]

    def _check_numbers(self, lse_S: Tensor, name: Callable[[int], str]) -> None:
        bad = ~lse_S.isfinite()
        if bool(bad.any()):
            raise NumericsError(
                f"the model's logits are not numbers for {name(int(bad.nonzero()[0]))}; "
                "samples that had finished are kept; check the weights or use dtype float32"
            )

    def _row_name(self, slot: int) -> str:
        rows = self.rows
        request = self.plan.requests[int(rows.request[slot])]
        return f"prompt {request.id!r} sample {rows.sample[slot]} token {rows.count[slot]}"

    def _span_name(self, spans: Sequence[Span], at: int) -> str:
        for span in spans:
            if at < len(span.wanted):
                below = self.plan.segments[span.segment].requests
                who = f"prompt {self.plan.requests[below[0]].id!r}" if below else "a shared prompt"
                return f"{who} at token {int(span.wanted[at])}"
            at -= len(span.wanted)
        raise AssertionError("a row of logits belongs to no span")
