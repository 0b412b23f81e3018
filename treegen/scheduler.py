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

import bisect
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

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
from treegen.segments import SegmentStore
from treegen.stopping import Stopping

_KEY_BITS = 32  # sort keys: segment or rank of the request above, sample index below


class Forward(Protocol):
    """What the scheduler needs of a model."""

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        ...

    def forward(self, batch: Batch) -> Tensor:
        """Float32 logits [S, V] of the query rows named by batch.logits_at_S."""
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
        self.rows = RowTable(params.logprobs)
        self.live = LiveRows(self.rows, self.store)
        self.usage = Usage(
            num_pages=cache.pool.num_pages,
            page_size=cache.page_size,
            impl=impl,
            prompt_tokens_unshared=sum(
                len(request.tokens) * max(len(wanted), 1)
                for request, wanted in zip(plan.requests, samples, strict=True)
            ),
        )
        # Log-probability of each scored token, and whether it is the likeliest, per segment.
        self.logprobs = [np.full(len(s.tokens), np.nan, np.float32) for s in plan.segments]
        self.is_greedy = [np.zeros(len(s.tokens), np.bool_) for s in plan.segments]
        self._params, self._stopping = params, stopping
        self._samples = [list(wanted) for wanted in samples]
        self._max_rows, self._prefill_chunk, self._impl = max_rows, prefill_chunk, impl
        self._on_prefilled = on_prefilled
        self._rank = np.empty(len(plan.requests), dtype=np.int64)
        self._rank[plan.order] = np.arange(len(plan.order))

        self._waiting: deque[int] = deque()
        self._open: dict[int, None] = {}  # requests, in the order they were opened
        self._slots: dict[int, set[int]] = {}  # request -> slots, once its first tokens are drawn
        self._parked: dict[int, list[int]] = {}  # ready slots of requests that had to be closed
        self._to_compute: list[int] = []  # segments, sorted
        self._state: tuple[int, list[Level], SamplingBatch, int] | None = None
        for request in plan.order.tolist():
            if plan.requests[request].rows and not self._samples[request]:
                self.store.close(request, opened=False, finished=True)
            else:
                self._waiting.append(request)

    @property
    def has_work(self) -> bool:
        """Whether anything is left to do."""
        return bool(
            self._waiting or self._to_compute or self.live.ready or self.live.num_active
        )

    def step(self) -> list[Completion]:
        """Run one forward pass; returns the samples that ended with it.

        Raises NumericsError if the model's logits are not numbers.
        """
        start = time.perf_counter()
        self._admit()
        usage = self.usage
        if self._to_compute or self.live.resuming:
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
        usage.peak_pages = max(usage.peak_pages, self.cache.pool.num_used)
        return finished

    def cancel(self, request: int, sample: int | None = None) -> None:
        """Drop one sample of a request, or all that have not ended; frees their pages at once."""
        wanted = self._samples[request]
        gone = wanted.copy() if sample is None else [i for i in wanted if i == sample]
        for index in gone:
            wanted.remove(index)
        if gone and request in self._slots:
            mine = np.array(sorted(self._slots[request]), dtype=np.int64)
            if self._params.temperature > 0:  # greedy samples share one slot
                mine = mine[~np.isin(self.rows.sample[mine], wanted)]
            if len(mine) and (self._params.temperature > 0 or not wanted):
                self._retire(request, mine, ended=False)
        elif gone and not wanted:
            self._leave(request)

    def close(self) -> None:
        """Free all pages, whether or not the work is done."""
        self.cache.pool.free(self.rows.take_pages(self.live.active()))
        self.store.free_all()
        self.live = LiveRows(self.rows, self.store)
        self._waiting.clear()
        self._to_compute.clear()

    def check(self) -> None:
        """Assert that every page reference is accounted for and that rows are depth first."""
        kept = [prefix.pages for prefix in self.kept if prefix.pages is not None]
        self.cache.pool.check([*self.store.owned(), *self.live.tables(), *kept])
        assert (np.diff(self.rows.key[self.live.order]) > 0).all(), "rows are not depth first"

    # Admission

    def _admit(self) -> None:
        """Activate ready rows and open requests until enough rows are on their way."""
        self.live.activate(self._max_rows)
        if self._pipeline() < self._max_rows:
            # Open somewhat more than is needed now, so that refills prefill many at once.
            while self._waiting and self._pipeline() < self._max_rows * 5 // 4 + 1:
                if not self._try_open(self._waiting[0]):
                    break
            self.live.activate(self._max_rows)
        if self.live.ready and not self.live.num_active and not self._to_compute:
            # Nothing runs, yet the first ready row does not fit: others must give way.
            request = int(self.rows.request[self.live.ready[0][1]])
            self._make_room(self.plan.row_pages(request, self.cache.page_size), request)
            self.live.activate(1)

    def _pipeline(self) -> int:
        """Rows that are active, or will be without another request being opened."""
        coming = sum(self._num_rows(r) for r in self._open if r not in self._slots)
        return self.live.num_active + len(self.live.ready) + coming

    def _num_rows(self, request: int) -> int:
        # A request without rows (prefill only, scoring) takes the place of one.
        return max(min(len(self._samples[request]), self.plan.requests[request].rows), 1)

    def _try_open(self, request: int) -> bool:
        """Open a request if its pages fit beside what active rows are expected to need."""
        pages = self.store.pages_to_open(request)
        if self._open:
            room = self.cache.pool.num_free - self.live.expected_growth()
            if pages + self.plan.row_pages(request, self.cache.page_size) > room:
                return False
        elif not self._make_room(pages, request):
            raise CapacityError(
                f"prompt {self.plan.requests[request].id!r} needs {pages} cache pages but only "
                f"{self.cache.pool.num_free} are free; give more memory"
            )
        self._waiting.popleft()
        self._open[request] = None
        to_compute, reused = self.store.open(request)
        self.usage.prompt_tokens_reused += reused
        for index in to_compute:
            if index not in self._to_compute:
                bisect.insort(self._to_compute, index)
        if not self._on_its_way(request):
            self._on_computed(request)
        return True

    def _on_its_way(self, request: int) -> bool:
        return any(s.index in self._to_compute for s in self.plan.path(request))

    def _on_computed(self, request: int) -> None:
        """All keys above a request's rows are in place."""
        for slot in self._parked.pop(request, []):
            self.live.push(slot)
        if not self.plan.requests[request].rows:
            if self._on_prefilled is not None:
                self._on_prefilled(request)
            self._close(request, finished=True)

    def _leave(self, request: int) -> None:
        """A request is over, wherever it is."""
        if request in self._open:
            self._close(request, finished=True)
        else:
            self._waiting.remove(request)
            self.store.close(request, opened=False, finished=True)

    def _close(self, request: int, *, finished: bool) -> None:
        del self._open[request]
        self.store.close(request, opened=True, finished=finished)
        self._to_compute = [s for s in self._to_compute if self.store.is_wanted(s)]

    def _make_room(self, pages: int, request: int) -> bool:
        """Take pages from what matters least until so many are free; False if they cannot be."""
        while self.cache.pool.num_free < pages:
            if self.store.evict_idle() or self.kept.evict_one() or self._close_idle(request):
                continue
            if not self.live.preempt_last():
                return False
            self.usage.preemptions += 1
        return True

    def _close_idle(self, keep: int) -> bool:
        """Send the last open request that has no active rows back to waiting, all but `keep`."""
        active = set(self.rows.request[self.live.active()].tolist())
        idle = [r for r in self._open if r != keep and r not in active]
        if not idle:
            return False
        request = max(idle, key=lambda r: self._rank[r])
        if request in self._slots:
            self._parked[request] = self.live.park(request)
        self._close(request, finished=False)
        self._waiting.appendleft(request)
        return True

    # Prefill

    def _prefill(self) -> list[Completion]:
        spans = self._pick_spans()
        batch = prefill_batch(spans, self.store, self.cache, self.model.device, self._impl)
        self.usage.impl = batch.levels.impl
        logits = self.model.forward(batch)
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
        for index in self._to_compute:
            if room == 0:
                break
            if self.store.is_ready(index, reached):
                span = self._segment_span(index, room)
                spans.append(span)
                reached[index] = span.stop
                room -= len(span.tokens)
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
            self._score(span, logits_SV, lse_S)
        if span.stop < segment.stop:
            return []
        self._to_compute.remove(index)
        finished: list[Completion] = []
        for request in segment.requests:
            if self._samples[request] and request not in self._slots:
                finished += self._draw_first(request, logits_SV[-1:])
            if request in self._open:
                self._on_computed(request)
        return finished

    def _score(self, span: Span, logits_SV: Tensor, lse_S: Tensor) -> None:
        """Log-probabilities of the tokens that follow the wanted positions."""
        at = span.wanted - self.plan.segments[span.segment].start
        inside = at + 1 < len(self.logprobs[span.segment])
        targets = [(span.segment, np.flatnonzero(inside), at[inside] + 1)]
        if not inside.all():  # the segment's last token: each child's first one follows it
            last = np.array([len(at) - 1])
            targets += [(c, last, np.zeros(1, np.int64)) for c in self.store.children[span.segment]]
        best_S = logits_SV.argmax(dim=-1)
        for index, rows, positions in targets:
            tokens = torch.from_numpy(
                self.plan.segments[index].tokens[positions].astype(np.int64)
            ).to(logits_SV.device)
            rows_t = torch.from_numpy(rows).to(logits_SV.device)
            logprobs = logits_SV[rows_t, tokens] - lse_S[rows_t]
            self.logprobs[index][positions] = logprobs.cpu().numpy()
            self.is_greedy[index][positions] = (best_S[rows_t] == tokens).cpu().numpy()

    def _draw_first(self, request: int, logits_1V: Tensor) -> list[Completion]:
        """Draw the first token of every sample of a request at once, from the prompt's logits."""
        wanted = self._samples[request][: self._num_rows(request)]
        rows, spec = self.rows, self.plan.requests[request]
        slots = rows.add(len(wanted))
        rows.request[slots] = request
        rows.sample[slots] = wanted
        rows.key[slots] = (self._rank[request] << _KEY_BITS) + np.array(wanted)
        rows.seed[slots] = [row_seed(self._params.seed, spec.id, index) for index in wanted]
        rows.stop[slots] = len(spec.tokens)
        rows.limit[slots] = spec.max_tokens
        self._slots[request] = set(slots.tolist())
        sampling = SamplingBatch.of([self._params], torch.zeros(1, dtype=torch.int64))
        seeds = torch.from_numpy(rows.seed[slots])[None]
        finished = self._record(slots, draw(logits_1V.cpu(), seeds, seeds * 0, sampling))
        going = sorted(self._slots[request])
        if request in self._open:
            for slot in going:
                self.live.push(slot)
        elif going:
            self._parked[request] = going
        return finished

    # Decode

    def _decode(self) -> list[Completion]:
        while short := self.live.pages_short():
            if not self._make_room(self.cache.pool.num_free + short, -1):
                raise CapacityError(
                    f"the last live row needs {short} more cache pages; give more memory"
                )
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
            self._retire(request, np.array(mine, dtype=np.int64), ended=True)
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
        indices = list(self._samples[request]) if greedy else [int(rows.sample[slot])]
        for index in indices:
            self._samples[request].remove(index)
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

    def _retire(self, request: int, slots: Ints, *, ended: bool) -> None:
        """Rows leave; with the last one their request does."""
        self.live.remove(slots, ended=ended)
        self._slots[request].difference_update(slots.tolist())
        if request in self._parked:
            self._parked[request] = [s for s in self._parked[request] if s in self._slots[request]]
        if self._slots[request]:
            return
        self._parked.pop(request, None)
        self._leave(request)

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
