"""Decide what each forward pass computes: admit, prefill, decode, refill, preempt.

Requests are taken depth first, so that a shared page is dropped as soon as the last sample under
it ends. A step launches one prefill pass (segments, and the tokens of preempted rows) or one decode
pass over all live rows. Rows that end are replaced before the next step. Only the start and the end
of a sample run Python of their own; everything per step is an array operation.

On a GPU passes run ahead: each is launched before the results of the last one are read. So the GPU
has work while the host ends samples and starts others. What a pass writes to the cache is in place
for all passes after it. Its tokens, and whether its logits were numbers, are known only when it is
over. Only then do requests go on with the segments that it has computed.

A sample's life: its request is opened (the segments that it needs get pages), the segments are
computed, its first token is drawn (its row is ready), it gets pages (its row is live), it ends, and
it is reported. Of thousands that end together a few are reported in each step, while others run.
When pages run out, a live row goes back to ready, and an open request without active rows back to
waiting. What they have generated stays; only keys and values are computed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from treegen.cache.kept import KeptPrefixes
from treegen.cache.pool import PagedCache
from treegen.device import current
from treegen.engine.admission import Admission
from treegen.engine.decode import DecodeSteps, Flight
from treegen.engine.execute import Executor
from treegen.engine.finish import Endings, Grown
from treegen.engine.guesses import Guesses
from treegen.engine.param_table import ParamTable
from treegen.engine.prefill import PrefillFlight, PrefillPasses
from treegen.engine.row_queue import LiveRows
from treegen.engine.rows import RowState, RowTable
from treegen.engine.run_state import RunState
from treegen.engine.segment import LiveRequest, LiveSegment
from treegen.engine.speculation import Speculation, SpeculationOptions
from treegen.engine.store import SegmentStore
from treegen.errors import (
    CapacityError,
    InternalError,
    NumericsError,
    TreegenError,
    WorkerError,
)
from treegen.model.batch import Forward
from treegen.outputs import Completion, Usage
from treegen.params import SamplingParams
from treegen.plan.plan import Plan, Request
from treegen.prompts.stops import Stopping
from treegen.sampling.param_set import ParamSet

if TYPE_CHECKING:
    from treegen.engine.graphs import DecodeGraphs

_MOST_NAMED: Final = 5  # prompts in a message


class Scheduler:
    """Runs a plan, and what is added to it, a forward pass at a time.

    run: what the parts of the engine share. usage, scores, grown: the same objects as in `run`.
    live: moves the rows.
    flight: the pass whose results are not noted yet; None if there is none.
    closed: whether the run is over and its pages are free for another.
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
        graphs: DecodeGraphs | None = None,
        on_prefilled: Callable[[LiveRequest], None] | None = None,
        on_grown: Callable[[LiveRequest, Completion], Grown] | None = None,
        further: Sequence[ParamSet] = (),
        params_of: Sequence[int] | None = None,
        executor: Executor | None = None,
        speculation: SpeculationOptions | None = None,
    ) -> None:
        """A scheduler for one run.

        params, stopping: the first sampling parameters, and what ends their samples.
        further: more sampling parameters.
        params_of: for each request of the plan, the index of its parameters; by default 0, which is
        `params`. `further` follow from 1 on.
        samples: for each request of the plan, the sample indices that are wanted.
        max_rows: most rows to decode at once.
        prefill_chunk: most tokens of a prefill pass.
        impl: the attention implementation.
        run_ahead: launch each pass before the results of the last one are known, so that a GPU does
        not wait for the host. A row that turns out to have ended is computed once more, in vain.
        graphs: replays the decode steps; None to compute them eagerly.
        on_prefilled: called with each request that wants no samples, once its keys are in place and
        before its pages are freed.
        on_grown: called with each sample of a search; says what its segment holds.
        executor: computes the passes, if other ranks do so too.
        speculation: how tokens are guessed, so that one pass draws several of a row; None for not.
        """
        num_logprobs = max(params.logprobs, *(each.params.logprobs for each in further), 0)
        cache.pool.peak_used = cache.pool.num_used
        usage = Usage(
            num_pages=cache.pool.num_pages,
            page_size=cache.page_size,
            impl=impl,
            prompt_tokens_unshared=sum(
                len(request.tokens) * (len(wanted) if request.rows else 1)
                for request, wanted in zip(plan.requests, samples, strict=True)
            ),
        )
        self.run = run = RunState(
            model=model,
            executor=executor or Executor(model, cache, graphs, impl),
            cache=cache,
            kept=kept,
            # Whatever is kept may be drawn from again.
            store=SegmentStore(
                plan, cache, kept, rewinds=on_grown is not None or on_prefilled is not None
            ),
            rows=RowTable(min(num_logprobs, len(stopping.may_end))),
            usage=usage,
            param_sets=ParamTable(ParamSet(params, stopping)),
            impl=impl,
            max_rows=max_rows,
        )
        self.usage, self.scores, self.grown = run.usage, run.scores, run.grown
        if any(each.params.tells for each in (ParamSet(params, stopping), *further)):
            run.rows.record_signals()
        for each in further:
            run.param_sets.add(each, lambda: range(len(run.param_sets)))
        self._run_ahead = run_ahead
        self.flight: PrefillFlight | Flight | None = None
        self.closed = False
        self._landed: list[PrefillFlight | Flight] = []  # passes noted in this step
        self._guesses = False  # whether this step verifies guesses, if there are any
        self._num_noted = 0  # passes whose results are noted
        self._error: Exception | None = None  # raised once all samples that had ended are returned
        self.live = LiveRows(run)
        self._passes = PrefillPasses(run, self.live, chunk=prefill_chunk)
        self._steps = DecodeSteps(run, self.live, graphs)
        self._speculation = Speculation(run, self.live, speculation) if speculation else None
        self._admission = Admission(run, self.live, on_prefilled)
        self._endings = Endings(run, self.live, self._admission, on_grown)
        self._num_requests = len(plan.requests)
        self._admission.add(
            [
                LiveRequest(
                    index=index,
                    rank=rank,
                    spec=plan.requests[index],
                    segment=run.store.segments[int(plan.segment_of[index])],
                    params=params_of[index] if params_of is not None else 0,
                    samples=list(samples[index]),
                )
                for rank, index in enumerate(plan.order.tolist())
            ]
        )

    @property
    def has_work(self) -> bool:
        """Whether anything is left to do."""
        return self._admission.has_work or self._endings.has_more or self._error is not None

    def add_params(self, params: SamplingParams, stopping: Stopping) -> int:
        """The index of sampling parameters, for an `add` that follows at once.

        Parameters that no request uses any more may lose their index when others are added.
        """
        self.run.rows.record(min(params.logprobs, len(stopping.may_end)))
        if params.tells:
            self.run.rows.record_signals()
        return self.run.param_sets.add(ParamSet(params, stopping), self._params_in_use)

    def _params_in_use(self) -> set[int]:
        rows = self.run.rows
        of_rows = np.unique(rows.params[rows.used()]).tolist()
        return {request.params for request in self.run.requests.values()}.union(of_rows)

    def add(
        self,
        spec: Request,
        segment: LiveSegment,
        params: int,
        samples: Sequence[int],
        *,
        rank: int | None = None,
        grows: bool = True,
        floor: float | None = None,
    ) -> LiveRequest:
        """Add a request below a segment.

        spec.tokens: the end of the prompt is enough. It is only read to make text of tokens.
        params: the index of the sampling parameters.
        samples: the sample indices that are wanted.
        rank: its place among all requests, depth first; by default after those that are there.
        grows: whether its samples become segments when they end; else they are only returned.
        floor: its own min_confidence, in place of that of its parameters.
        """
        index = self._num_requests
        self._num_requests += 1
        scored = segment.parent if spec.score_from is not None else None
        request = LiveRequest(
            index=index,
            rank=index if rank is None else rank,
            spec=spec,
            segment=segment,
            params=params,
            samples=list(samples),
            rewinds=scored or segment,
            added=True,
            grows=grows,
            floor=floor,
        )
        self._admission.add([request])
        return request

    def step(self) -> list[Completion]:
        """Run one forward pass; returns samples that are known to have ended.

        Raises NumericsError if the model's logits are not numbers, CapacityError if the cache or
        the GPU's memory is too small, InternalError if nothing that is left can be done. Samples
        that had ended before are returned first; then the next call raises.
        """
        if self._error is None:
            try:
                with current(self.run.model.device):
                    self._step()
            except Exception as error:
                self._error = self._explained(error)
                with suppress(Exception):
                    if isinstance(error, torch.OutOfMemoryError):
                        self._land()  # the pass before was under way; its results are good
                with suppress(Exception):
                    self._endings.report_all()
        finished = self._endings.take()
        if self._error is not None and not finished:
            failure, self._error = self._error, None
            try:
                raise failure
            finally:
                del failure  # it would keep the tensors of the pass that failed
        return finished

    def ended(self) -> list[Completion]:
        """All samples that are known to have ended and were not returned."""
        self._endings.report_all()
        return self._endings.take()

    def _explained(self, error: Exception) -> Exception:
        if not isinstance(error, TreegenError | torch.OutOfMemoryError):
            try:
                self.run.executor.check()
            except WorkerError as lost:
                return lost  # which is why this process failed too
        if not isinstance(error, torch.OutOfMemoryError):
            return error
        explained = CapacityError(
            f"{self.run.model.device} has no memory left for a pass; leave it more beside the "
            f"cache (memory=, --memory), or run fewer rows at a time (max_rows=, --max-rows)"
        )
        explained.__cause__ = error
        return explained

    def _step(self) -> None:
        start = time.perf_counter()
        done_before = self._num_noted, len(self.run.requests)
        self._landed.clear()
        self._guesses = self._speculation is not None and self._speculation.is_due()
        if isinstance(self.flight, Flight) and (self._guesses or self.flight.guesses is not None):
            self._land()  # what is guessed next depends on its tokens
        self._admission.admit()
        launched: PrefillFlight | Flight | None
        if self._prefills_next:
            launched = self._passes.launch(self._admission.to_compute)
        else:
            launched = self._decode()
        before, self.flight = self.flight, launched
        if self._speculation is not None:
            self._speculation.work()
        if before is not None:
            self._note(before)
        if not self._run_ahead:
            self._land()
        if self._run_ahead and self._admission.has_work:  # then the GPU works meanwhile
            self._endings.report_some()
        else:
            self._endings.report_all()
        seconds = time.perf_counter() - start
        self._count_seconds(before or launched, seconds)
        if self._speculation is not None and not isinstance(launched, PrefillFlight):
            self._measure(self._speculation, seconds)
        if launched is None and (self._num_noted, len(self.run.requests)) == done_before:
            self._check_goes_on()

    def _measure(self, speculation: Speculation, seconds: float) -> None:
        """Note what a decode step took, if nothing else was done meanwhile."""
        match self._landed:
            case [Flight() as flight]:
                # One that was waited for in vain took longer than one of those that run ahead.
                if flight.guesses is not None or not (self._guesses and self._run_ahead):
                    speculation.measure(flight, seconds)

    def _check_goes_on(self) -> None:
        """Raise InternalError if work is left: the next step would do as little as this one."""
        if not self._admission.has_work or self._endings.has_more:
            return
        names = [repr(request.spec.id) for request in self.run.requests.values()]
        more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
        raise InternalError(
            f"the scheduler cannot go on with prompts {', '.join(names[:_MOST_NAMED])}{more}; "
            "samples that had finished are kept; please report this with the command or program"
        )

    def _count_seconds(self, waited_for: PrefillFlight | Flight | None, seconds: float) -> None:
        usage = self.usage
        usage.seconds += seconds
        if isinstance(waited_for, PrefillFlight):
            usage.prefill_seconds += seconds
        elif waited_for is not None:
            usage.decode_seconds += seconds
        usage.peak_pages = self.run.pool.peak_used

    def cancel(self, index: int, sample: int | None = None) -> None:
        """Drop one sample of a request, or all that have not ended, and free their pages at once.

        Samples that have ended are still returned.
        """
        request = self.run.requests.get(index)
        if request is not None and not request.spec.rows:
            # The pass under way may compute its segments, which other requests may need too.
            self._land()
            request = self.run.requests.get(index)
        if request is not None:
            greedy = self.run.param_sets[request.params].is_greedy
            self._admission.cancel(request, sample, greedy=greedy)

    def close(self) -> None:
        """Free all pages, whether or not the work is done."""
        self.flight = self._error = None
        # The cache has one run at a time, so this frees even what an interrupted step had taken.
        self.run.pool.reset(self.run.kept.tables())
        if self.run.cache.states is not None:
            self.run.cache.states.reset(self.run.kept.states())
        self.run.store.clear()
        self.live.clear()
        self._admission.clear()
        self.closed = True

    def check(self) -> None:
        """Assert that pages, rows and requests are accounted for and that rows are depth first."""
        tables = [*self.run.store.owned(), *self.live.tables(), *self.run.kept.tables()]
        self.run.pool.check(tables)
        if self.live.states is not None:
            assert self.run.cache.states is not None
            mine, pages, windows = self.live.states.held(self.live.active())
            owned = [self.run.store.owned_states(), mine, self.run.kept.states()]
            self.run.cache.states.check(owned, pages, windows)
        self._admission.check()
        if self._error is None:  # a pass that failed may have lost rows
            self._check_slots()
        for ids in self.run.rows.chain[self.live.order].T:
            runs = ids[np.flatnonzero(np.diff(ids, prepend=-2))]
            assert len(np.unique(runs[runs >= 0])) == (runs >= 0).sum(), "rows are not depth first"

    def _check_slots(self) -> None:
        """Assert that each row is where its state says, and in its request until it ends."""
        flight, rows = self.flight, self.run.rows
        draws = [drawn for drawn, _ in flight.first] if isinstance(flight, PrefillFlight) else []
        first = [drawn.slots[rows.serial[drawn.slots] == drawn.serials] for drawn in draws]
        self.live.check(np.concatenate([np.empty(0, np.int64), *first]), self._endings.waiting)
        owned = [slot for request in self.run.requests.values() for slot in request.slots or ()]
        alive = np.setdiff1d(rows.used(), self._endings.waiting)
        assert sorted(owned) == alive.tolist(), "a row and its request do not agree"

    def _land(self) -> None:
        """Wait for the pass under way, if there is one, and note its results."""
        flight, self.flight = self.flight, None
        if flight is not None:
            self._note(flight)

    def _note(self, flight: PrefillFlight | Flight) -> None:
        self._num_noted += 1
        self._landed.append(flight)
        if isinstance(flight, PrefillFlight):
            self._note_prefill(flight)
        else:
            self._note_draws(flight)

    # Prefill

    @property
    def _prefills_next(self) -> bool:
        to_compute = self._admission.to_compute.values()
        if not self.live.resuming and all(s.computed == s.stop for s in to_compute):
            return False
        # Once live rows keep the device busy, prefill passes take turns with decode steps.
        num_live = len(self.live.order)
        in_turn = self._run_ahead and isinstance(self.flight, PrefillFlight)
        return not (in_turn and num_live and 2 * num_live >= self.run.max_rows)

    def _note_prefill(self, flight: PrefillFlight) -> None:
        """Note the results of a prefill pass, and the first tokens that were drawn after it."""
        (lse,) = flight.lse.wait()
        self.run.executor.check()
        self._check_numbers(lse, flight.name)
        for scored in flight.scored:
            scored.add()
        self._admission.on_computed(flight.ended())
        for drawn, requests in flight.first:
            self._note_draws(drawn)
            self._admission.add_rows(requests)

    # Decode

    def _decode(self) -> Flight | None:
        """Launch a decode step, if rows are live."""
        while True:
            before = self.flight if isinstance(self.flight, Flight) else None
            order, counts, source = self._steps.next_rows(before)
            short = self.live.pages_short(order, counts)
            if not short:
                break
            if self.flight is not None:
                # A row gives way only when all its tokens are known.
                self._land()
            elif not self._admission.give_way():
                raise CapacityError(f"the last row lacks {short} cache pages; give more memory")
        if not len(order):
            return None
        if before is None and self._speculation is not None and self._guesses:
            guesses = self._speculation.guesses(order, counts)
            if guesses is not None:
                return self._steps.verify(order, counts, guesses)
        return self._steps.launch(order, counts, source, before)

    def _note_draws(self, flight: Flight) -> None:
        """Note the drawn tokens of rows that are still there; end the samples that are over."""
        rows, num = self.run.rows, len(flight.slots)
        tokens, logprobs, *more = flight.fetch.wait()
        self.run.executor.check()
        # Several draws may come from one distribution.
        more = [np.repeat(array, num // len(array), axis=0) for array in more]
        columns = [tokens.ravel(), logprobs.ravel(), *more]
        alive = rows.serial[flight.slots] == flight.serials
        if self._speculation is not None:
            self._speculation.note(flight, columns[0], alive)
        if flight.guesses is None:
            self._note_tokens(flight, columns, np.flatnonzero(alive))
            return
        self._note_rows(flight, flight.guesses, columns, alive)

    def _note_rows(
        self,
        flight: Flight,
        guesses: Guesses,
        columns: Sequence[NDArray[Any]],
        alive: NDArray[np.bool_],
    ) -> None:
        """Note all tokens that rows have drawn where the guess before each was accepted."""
        rows, tokens, slots = self.run.rows, columns[0], flight.slots
        draws, is_last = guesses.counted(tokens)
        is_last, draws = is_last[alive[draws]], draws[alive[draws]]
        may_end = self.run.param_sets.may_end(rows.params[slots[draws]], tokens[draws])
        # A row that may end at a token before its last one is asked about after each token.
        slow = np.zeros(len(rows.state), dtype=np.bool_)
        slow[slots[draws[may_end & ~is_last]]] = True
        if rows.watches:
            slow[slots[draws]] = True
        in_turn = slow[slots[draws]]
        self._note_tokens(flight, columns, draws[~in_turn], is_last[~in_turn])
        self.usage.accepted_tokens += int((~in_turn & ~is_last).sum())
        rest = draws[in_turn]
        place = guesses.place_T[rest]
        for turn in range(int(place.max(initial=-1)) + 1):
            now = rest[place == turn]
            # Rows may be over after one of the tokens before.
            stays = rows.serial[slots[now]] == flight.serials[now]
            stays &= rows.state[slots[now]] == RowState.LIVE
            self._note_tokens(flight, columns, now[stays])
            self.usage.accepted_tokens += int(stays.sum()) if turn else 0

    def _note_tokens(
        self,
        flight: Flight,
        columns: Sequence[NDArray[Any]],
        draws: NDArray[np.int64],
        is_last: NDArray[np.bool_] | None = None,
    ) -> None:
        """Note tokens of some rows, and end the rows that are over. columns: of a flight's draws.

        draws: which of them these are, row by row.
        is_last: which of these is the last of its row; None if each row has one.
        """
        rows, slots = self.run.rows, flight.slots[draws]
        tokens, logprobs, lse, *more = (column[draws] for column in columns)
        self._check_numbers(lse, lambda at: self._row_name(slots[at]))
        signals = more.pop() if flight.draws.signals_P2 is not None else None
        top_tokens, top_logprobs = more or (None, None)
        self.usage.decoded_tokens += len(slots)
        if is_last is None:
            rows.append(slots, tokens, logprobs, top_tokens, top_logprobs, signals)
        else:
            place = flight.guesses.place_T[draws] if flight.guesses is not None else None
            rows.append(slots, tokens, logprobs, top_tokens, top_logprobs, signals, place)
            slots, tokens = slots[is_last], tokens[is_last]
        may_end = self.run.param_sets.may_end(rows.params[slots], tokens)
        over = may_end | (rows.count[slots] >= rows.limit[slots])
        if rows.watches:
            over |= rows.unsure(slots)
        if over.any():
            self._endings.end(slots[over])

    def _check_numbers(self, lse_S: NDArray[Any], name: Callable[[int], str]) -> None:
        bad = ~np.isfinite(lse_S)
        if bad.any():
            raise NumericsError(
                f"the model's logits are not numbers for {name(int(bad.argmax()))}; "
                "samples that had finished are kept; check the weights or use dtype float32"
            )

    def _row_name(self, slot: int) -> str:
        rows = self.run.rows
        request = self.run.requests[int(rows.request[slot])].spec
        return f"prompt {request.id!r} sample {rows.sample[slot]} token {rows.count[slot]}"
