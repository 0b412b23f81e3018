"""The scheduler decides what each forward pass computes: admit, prefill, decode, refill, preempt.

Requests are admitted depth first, so that a shared page is freed as soon as the last sample below
it ends. A step launches one prefill pass (segments, and the tokens of preempted rows) or one decode
pass over all live rows. Rows that end are replaced before the next step. Only the start and the end
of a sample run Python code per sample; all other work of a step is array operations.

On a GPU passes run ahead: each is launched before the results of the previous one are read, so the
GPU has work while the host ends and starts samples. Later passes can read what a pass writes to the
cache at once. Its tokens, and whether its logits were numbers, are known only when it has finished.
Only then do requests proceed with the segments that it has computed.

A sample's life: its request is opened (the segments that it needs get pages), the segments are
computed, its first token is drawn (its row is ready), it gets pages (its row is live), it ends, and
it is reported. If thousands end together, each step reports a few, while other samples run.
When pages run out, a live row returns to ready, and an open request without active rows returns to
waiting. Their generated tokens stay; only keys and values are computed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import torch

from treegen.common.checks import CACHE_MODES, CacheMode
from treegen.common.device import use_device
from treegen.common.outputs import Completion, Status
from treegen.engine.param_set import ParamSet
from treegen.engine.passes.decode import DecodeSteps, DeferredStep, InFlightStep
from treegen.engine.passes.prefill import InFlightPrefill, PrefillPasses, recompute_segments
from treegen.engine.requests.admission import AdmissionController
from treegen.engine.requests.output_processor import GeneratedSegment, OutputProcessor
from treegen.engine.requests.pass_results import (
    PassResultProcessor,
    make_stall_error,
    translate_error,
)
from treegen.engine.resources import EngineResources, new_run
from treegen.engine.rows.queue import RowQueue
from treegen.engine.segments.segment import LiveRequest, LiveSegment
from treegen.engine.speculative.speculation import SpeculationOptions, SpeculativeDecoder
from treegen.errors import CapacityError
from treegen.prompts.plan.plan import Plan, Request

_InFlight = InFlightPrefill | InFlightStep  # a pass whose results are not recorded yet


class Scheduler:
    """Runs a plan, and requests added later, one forward pass at a time.

    Attributes:
        run: The state that the parts of the engine share.
        features: The optional features of the run.
        usage, scores, sample_segments: The attributes of `run` with these names.
        queue: Moves rows between phases.
        flight: The pass whose results are not recorded yet; None if there is none.
        closed: Whether the run has ended and its pages are free for another run.
    """

    def __init__(
        self,
        plan: Plan,
        resources: EngineResources,
        param_sets: Sequence[ParamSet],
        samples: Sequence[Sequence[int]],
        *,
        params_of: Sequence[int] | None = None,
        on_prefilled: Callable[[LiveRequest], None] | None = None,
        on_search_sample: Callable[[LiveRequest, Completion], GeneratedSegment] | None = None,
        speculation: SpeculationOptions | None = None,
    ) -> None:
        """Set up one run.

        Args:
            plan: The requests and their segments.
            resources: The model, the cache and the settings of the run.
            param_sets: Sampling parameters and their stop conditions; at least one set.
            samples: Indices of the samples to draw, for each request of the plan.
            params_of: Index into param_sets for each request of the plan. Default: 0 for all.
            on_prefilled: Called with each request that wants no samples, once its keys are computed
                and before its pages are freed.
            on_search_sample: Called with each finished sample of a search; returns the content of
                its segment.
            speculation: How tokens are drafted, so that one pass draws several tokens of a row;
                None turns drafting off.
        """
        # Later samples may be drawn from any kept segment.
        recomputes_last = on_search_sample is not None or on_prefilled is not None
        run, features = new_run(
            plan, resources, param_sets, samples, recomputes_last=recomputes_last
        )
        self.run, self.features = run, features
        self.usage, self.scores, self.sample_segments = run.usage, run.scores, run.sample_segments
        self._run_ahead = resources.run_ahead
        self.flight: _InFlight | None = None
        self.closed = False
        self._recorded: list[_InFlight] = []  # passes whose results this step has recorded
        self._verifies = False  # whether this step verifies draft tokens, if there are any
        self._update: CacheMode | None = None  # how keys follow an update of the weights
        self._error: Exception | None = None  # raised once all samples that had ended are returned
        self._has_new_scores = False  # whether scores of a step that failed are still to be read
        early_samples = speculation.early_samples if speculation else 0
        self.queue = queue = RowQueue(
            run, features.states, features.row_features, early_samples=early_samples
        )
        self._chunk = resources.prefill_chunk
        self._passes = PrefillPasses(run, queue, features, chunk=resources.prefill_chunk)
        self._steps = DecodeSteps(run, queue, features)
        self._speculation = (
            SpeculativeDecoder(run, queue, features, speculation) if speculation else None
        )
        self._admission = AdmissionController(run, queue, on_prefilled)
        self._outputs = OutputProcessor(run, queue, features, self._admission, on_search_sample)
        self._results = PassResultProcessor(
            run, features, self._admission, self._outputs, self._speculation
        )
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
        """Whether any work is left."""
        return self._admission.has_work or self._outputs.has_more or self._error is not None

    def status(self) -> Status:
        """Return the number of active rows, of used pages and of all pages."""
        pool = self.run.pool
        return Status(self.queue.num_active, pool.num_used, pool.num_pages)

    def add(
        self,
        spec: Request,
        segment: LiveSegment,
        params: int,
        samples: Sequence[int],
        *,
        rank: int | None = None,
        makes_segments: bool = True,
        min_confidence: float | None = None,
    ) -> LiveRequest:
        """Add a request below a segment.

        Args:
            spec: The request. The end of the prompt is enough as `spec.tokens`, which are read only
                to turn tokens into text.
            segment: The segment at the end of its prompt.
            params: Index of its sampling parameters.
            samples: Indices of the samples to draw.
            rank: Sort key of the request, depth first. Default: after all requests added
                so far.
            makes_segments: Whether its samples become segments when they end, in addition to being
                returned.
            min_confidence: A min_confidence that replaces that of its parameters. Default: theirs.
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
            recomputed_segment=scored or segment,
            added=True,
            makes_segments=makes_segments,
            min_confidence=min_confidence,
        )
        self._admission.add([request])
        return request

    def step(self) -> list[Completion]:
        """Run one forward pass; return samples that are known to have ended.

        Samples that had ended before an error are returned first; then the next call raises it. If
        scores are known, the next call raises it, too, so that the caller can read them first.

        Raises:
            NumericsError: the model's logits are not numbers.
            CapacityError: the cache or the GPU's memory is too small.
            InternalError: work is left, but none of it can proceed.
        """
        if self._error is None:
            try:
                with use_device(self.run.model.device), self.run.gate.step(), self._end_draws():
                    if self._update is not None:
                        self._apply_update()
                    self._step()
            except Exception as error:
                self._keep_error(error)
        finished = self._outputs.take_finished()
        has_scores, self._has_new_scores = self._has_new_scores, False
        if self._error is not None and not finished and not has_scores:
            failure, self._error = self._error, None
            try:
                raise failure
            finally:
                del failure  # it would keep the tensors of the pass that failed
        return finished

    @contextmanager
    def _end_draws(self) -> Iterator[None]:
        """If the block fails, make the draws for which the other ranks wait.

        These ranks must be free before the weights can be updated.
        """
        try:
            yield
        except BaseException:
            with suppress(Exception):  # after an error in a draw, the other ranks have ended
                self.run.model_runner.drop_deferred()
            raise

    def _keep_error(self, error: Exception) -> None:
        """Keep an error for `step` to raise, and report the samples that had ended before it."""
        self._error = translate_error(self.run, error)
        with suppress(Exception):
            if isinstance(error, torch.OutOfMemoryError):
                # The previous pass was in flight, and its results are valid.
                self._collect_results()
        with suppress(Exception):
            self._results.end()
        with suppress(Exception):
            self._outputs.report_all()
        self._has_new_scores = bool(self.scores)

    def schedule_update(self, mode: CacheMode) -> None:
        """Make the next step drop or compute again what an update of the weights invalidates.

        Args:
            mode: What is computed again; see `LLM.update`.
        """
        self._update = max(mode, self._update or mode, key=CACHE_MODES.index)

    def _apply_update(self) -> None:
        """Record versions from now on, and drop or compute again what the old weights computed."""
        start, mode = time.perf_counter(), self._update
        self._update = None
        self.run.rows.generated.record_versions()
        self.run.pool.end_all_loans()  # keys and values that the old weights expanded from latents
        if mode == "keep":
            return
        self._collect_results()
        self._admission.drop_keys(of_rows=mode == "all")
        if mode == "shared":
            if not self.queue.states.can_leave_segments(self.queue.active()):
                self._admission.drop_keys(of_rows=True)
            recompute_segments(self.run, self.queue, self.features, self._chunk)
        self._steps.drop_cached_rows()
        self.usage.seconds += time.perf_counter() - start
        self.usage.prefill_seconds += time.perf_counter() - start

    def take_finished(self) -> list[Completion]:
        """Return all samples that are known to have ended and were not returned yet."""
        self._outputs.report_all()
        return self._outputs.take_finished()

    def _step(self) -> None:
        """Launch the next pass, then record the last one while the device computes."""
        start, num_requests = time.perf_counter(), len(self.run.requests)
        self._schedule()
        launched = self._launch()
        last, self.flight = self.flight, None if isinstance(launched, DeferredStep) else launched
        self._process_last(last)
        if isinstance(launched, DeferredStep):  # its masks depend on the tokens of the last pass
            launched = self.flight = self._steps.draw(launched)
        self._end_rows()
        self._report()
        self._record_time(last, launched, start)
        is_same = len(self.run.requests) == num_requests
        has_waiting = self._admission.has_work and not self._outputs.has_more
        if launched is None and not self._recorded and is_same and has_waiting:
            raise make_stall_error(self.run)  # the next step would not continue either

    def _schedule(self) -> None:
        """Decide whether to verify draft tokens, and start rows and requests."""
        self._recorded.clear()
        self._verifies = self._speculation is not None and self._speculation.is_due()
        if isinstance(self.flight, InFlightStep) and (
            self._verifies or self.flight.verify_input is not None
        ):
            # The next draft tokens depend on the tokens of this pass. Finished rows leave
            # later, when the device has work again.
            self._collect_results(end=False)
        self._admission.admit()

    def _launch(self) -> _InFlight | DeferredStep | None:
        """Launch a prefill pass or a decode step; return None if there is nothing to compute."""
        if self._should_prefill:
            return self._passes.launch(self._admission.to_compute)
        return self._decode()

    def _process_last(self, last: _InFlight | None) -> None:
        """Record the results of the pass launched before, if there is one."""
        if self._speculation is not None:
            self._speculation.run_deferred()
        if last is not None:
            self._record(last)

    def _end_rows(self) -> None:
        """Remove finished rows, and start others in their place."""
        if self._results.end() and self._run_ahead:
            # Admit now, because the device will be idle once the next results have arrived.
            self._admission.admit()
            self._steps.look_ahead()
        if not self._run_ahead:
            self._collect_results()

    def _report(self) -> None:
        """Report samples that have ended; only a few if the GPU works meanwhile."""
        if self._run_ahead and self._admission.has_work:
            self._outputs.report_batch()
        else:
            self._outputs.report_all()

    def _record_time(
        self, last: _InFlight | None, launched: _InFlight | None, start: float
    ) -> None:
        """Record the time of a step for the pass that the host waited for.

        That is the previous pass or, without one, the pass that this step has launched.

        Args:
            last: The pass launched by the previous step; None if there was none.
            launched: The pass that this step has launched; None if there is none.
            start: When the step began, by `time.perf_counter`.
        """
        usage, seconds = self.usage, time.perf_counter() - start
        usage.seconds += seconds
        if isinstance(last or launched, InFlightPrefill):
            usage.prefill_seconds += seconds
        elif last is not None or launched is not None:
            usage.decode_seconds += seconds
        usage.peak_pages = self.run.pool.peak_used
        if self._speculation is None or isinstance(launched, InFlightPrefill):
            return
        match self._recorded:
            case [InFlightStep() as step]:  # the step did nothing else
                # A step that the host waited for, but that verified no drafts, took longer than a
                # step launched ahead. Its time is not used.
                if step.verify_input is not None or not (self._verifies and self._run_ahead):
                    self._speculation.measure(step, seconds)

    def cancel(self, index: int, sample: int | None = None) -> None:
        """Drop one sample of a request, or all unfinished ones, and free their pages at once.

        Finished samples are still returned.
        """
        request = self.run.requests.get(index)
        if request is not None and not request.spec.rows and self._error is None:
            # The running pass may compute its segments, which other requests may need too.
            try:
                self._collect_results()
            except Exception as error:  # of the whole run, not of this request
                self._keep_error(error)
            request = self.run.requests.get(index)
        if request is not None:
            greedy = self.run.param_sets[request.params].is_greedy
            self._admission.cancel(request, sample, greedy=greedy)

    def close(self) -> None:
        """Free all pages, whether or not the run is complete."""
        self.flight = self._error = None
        # The cache has one run at a time, so this also frees what an interrupted step allocated.
        self.run.pool.reset(self.run.prefix_cache.tables())
        self.run.store.states.reset(self.run.prefix_cache.states())
        self.run.store.clear()
        self.queue.clear()
        self._admission.clear()
        self.closed = True

    def check(self) -> None:
        """Assert that pages, rows and requests are accounted for and that rows are depth first."""
        run, queue = self.run, self.queue
        self._admission.check()
        run.store.check()
        run.pool.check([*run.store.iter_page_tables(), *queue.tables(), *run.prefix_cache.tables()])
        queue.states.check(queue.active(), [run.store.owned_states(), run.prefix_cache.states()])
        if self._error is None:  # otherwise a pass may have lost rows
            self._check_slots()
        for ids in run.rows.chain[queue.live_slots].T:
            runs = ids[np.flatnonzero(np.diff(ids, prepend=-2))]
            assert len(np.unique(runs[runs >= 0])) == (runs >= 0).sum(), "rows are not depth first"

    def _check_slots(self) -> None:
        """Assert that each row is in the queue of its phase, and in its request until it ends."""
        rows, flight, waiting = self.run.rows, self.flight, self._outputs.waiting
        first = flight.first if isinstance(flight, InFlightPrefill) else []
        draws = [draws.flight for draws in first]
        starting = [draw.slots[rows.serial[draw.slots] == draw.serials] for draw in draws]
        self.queue.check(np.concatenate([np.empty(0, np.int64), *starting]), waiting)
        owned = [slot for request in self.run.requests.values() for slot in request.slots or ()]
        alive = sorted(set(rows.used().tolist()).difference(waiting.tolist()))
        assert sorted(owned) == alive, "a row and its request do not agree"

    def _collect_results(self, *, end: bool = True) -> None:
        """Wait for the running pass, if there is one, and record its results.

        Args:
            end: Whether to remove finished rows.
        """
        flight, self.flight = self.flight, None
        if flight is not None:
            self._record(flight)
        if end:
            self._results.end()

    def _record(self, flight: _InFlight) -> None:
        """Wait for a pass, and record its results."""
        self._recorded.append(flight)
        self._results.record(flight)

    @property
    def _should_prefill(self) -> bool:
        to_compute = self._admission.to_compute.values()
        if not self.queue.resuming and all(s.computed == s.stop for s in to_compute):
            return False
        # Once live rows keep the device busy, prefill passes take turns with decode steps.
        num_live = len(self.queue.live_slots)
        in_turn = self._run_ahead and isinstance(self.flight, InFlightPrefill)
        return not (in_turn and num_live and 2 * num_live >= self.run.max_rows)

    def _decode(self) -> InFlightStep | DeferredStep | None:
        """Launch a decode step, if rows are live."""
        while True:
            before = self.flight if isinstance(self.flight, InFlightStep) else None
            order, counts, source = self._steps.next_rows(before)
            short = self.queue.allocate_step_pages(order, counts)
            if not short:
                break
            if self.flight is not None:
                # A row is preempted only when all its tokens are known.
                self._collect_results()
            elif not self._results.end() and not self._admission.reclaim_pages():
                needed = f"a single sample needs {short} more cache pages than the cache has"
                raise CapacityError(f"{needed}; give the cache more memory")
        if not len(order):
            return None
        if before is None and self._speculation is not None and self._verifies:
            verify_input = self._speculation.propose(order, counts)
            if verify_input is not None:
                return self._steps.verify(order, counts, verify_input)
        return self._steps.launch(order, counts, source, before)
