"""Admission: opens, closes and preempts requests.

Opening a request gives pages to the segments that it needs. Then its segments are computed, its
samples run, and it leaves. When pages run out, an open request without active rows returns to
waiting.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from treegen.engine.rows.engine_run import EngineRun
from treegen.engine.rows.queue import RowQueue
from treegen.engine.rows.table import RowPhase
from treegen.engine.segments.scores import collect_score
from treegen.engine.segments.segment import LiveRequest, LiveSegment
from treegen.errors import CapacityError


class AdmissionController:
    """Opens and closes the requests of one run.

    Attributes:
        to_compute: By index, the segments of open requests that are not known to be computed. The
            last tokens of a segment may be in the running pass.
    """

    def __init__(
        self, run: EngineRun, queue: RowQueue, on_prefilled: Callable[[LiveRequest], None] | None
    ) -> None:
        """Set up a run without requests.

        Args:
            run: Shared state of the run.
            queue: Moves rows between phases.
            on_prefilled: Called with each request that wants no samples, once its keys are computed
                and before its pages are freed; None for no call.
        """
        self._run, self._queue = run, queue
        self.to_compute: dict[int, LiveSegment] = {}
        self._pool, self._page_size = run.pool, run.cache.page_size
        self._on_prefilled = on_prefilled
        self._waiting: OrderedDict[LiveRequest, None] = OrderedDict()  # the next one first
        self._open: dict[LiveRequest, None] = {}  # in the order they were opened
        self._num_undrawn = 0  # rows of open requests whose first tokens are to be drawn

    @property
    def has_work(self) -> bool:
        """Whether some request is unfinished."""
        return bool(self._waiting or self._open)

    def add(self, requests: Sequence[LiveRequest]) -> None:
        """Queue requests in depth-first order; a request without samples to draw ends at once."""
        for request in requests:
            self._run.requests[request.index] = request
            self._run.store.attach(request)
        for request in requests:
            if request.spec.rows and not request.samples:
                self._end(request)
            else:
                self._waiting[request] = None

    def admit(self) -> None:
        """Activate ready rows and open requests until enough rows are started.

        Raises:
            CapacityError: no row runs, and none can be started.
        """
        self._queue.activate(self._run.max_rows)
        started = self._queue.num_active + len(self._queue.ready)
        if started + self._num_undrawn < self._run.max_rows and self._waiting:
            growth = self._queue.page_demand.estimate_pages(self._queue.active())
            # Open somewhat more than needed now, so that later prefill passes have many requests.
            max_open_rows = self._run.max_rows * 5 // 4 + 1
            while self._waiting and started + self._num_undrawn < max_open_rows:
                if not self._try_open(next(iter(self._waiting)), growth):
                    break
            self._queue.activate(self._run.max_rows)
        if len(self._queue.ready) and not self._queue.num_active and not self.to_compute:
            # No row runs, yet the first ready row does not fit: something must be evicted.
            request = self._run.requests[int(self._run.rows.request[self._queue.ready[0]])]
            self._make_room(request)
            self._queue.activate(1)

    def _try_open(self, request: LiveRequest, growth: int) -> bool:
        """Open a request if its pages fit in addition to the expected growth of active rows."""
        if self._open:
            # A run that accepts requests keeps idle segments, which are evicted before a request
            # has to wait.
            while not self._fits(request, growth):
                if not request.added or not self._run.store.evict_idle(request):
                    return False
        else:
            self._make_room(request)
        del self._waiting[request]
        self._open[request] = None
        self._count_undrawn(request, request.num_rows if request.slots is None else 0)
        to_compute, reused = self._run.store.open(request)
        self._run.usage.prompt_tokens_reused += reused
        self.to_compute.update((segment.index, segment) for segment in to_compute)
        self._activate_requests([request])
        return True

    def _fits(self, request: LiveRequest, growth: int) -> bool:
        """Return whether a request fits in addition to the expected growth of active rows."""
        store = self._run.store
        pages = store.pages_to_open(request)
        pages += self._queue.page_demand.estimate_new_row_pages(request)
        if pages > self._pool.num_free - growth:
            return False
        return not self._queue.count_missing_slots(request, store.slots_to_open(request))

    def on_computed(self, segments: Iterable[LiveSegment]) -> None:
        """Record that segments are computed, unless they were evicted or dropped since."""
        openers: dict[LiveRequest, None] = {}
        for segment in segments:
            if segment.index in self.to_compute and segment.computed == segment.stop:
                del self.to_compute[segment.index]
                openers.update(segment.openers)
        self._activate_requests(openers)

    def _activate_requests(self, requests: Iterable[LiveRequest]) -> None:
        """Continue requests whose segments are all computed: parked rows become ready."""
        computed = [request for request in requests if not self._needs_prefill(request)]
        for request in computed:
            if not request.spec.rows and request.is_open:
                self._finish_prefilled(request)
            elif request.spec.score_from is not None and request.score is None:
                request.score = collect_score(request)
        parked = self._queue.select(computed, RowPhase.PARKED)
        if len(parked):
            self._queue.enqueue(parked)

    def _finish_prefilled(self, request: LiveRequest) -> None:
        """End a request that wants no samples, once all its keys are computed."""
        if request.spec.score_from is not None:
            self._run.scores[request.index] = collect_score(request)
        if self._on_prefilled is not None:
            self._on_prefilled(request)
        self.finish(request)

    def _needs_prefill(self, request: LiveRequest) -> bool:
        """Return whether an open request needs a segment that is not computed."""
        return any(segment.index in self.to_compute for segment in request.opened or ())

    def finish(self, request: LiveRequest) -> None:
        """End a request, whether it is open or waiting."""
        if request.is_open:
            self._close(request)
        else:
            del self._waiting[request]
        self._end(request)

    def _close(self, request: LiveRequest) -> None:
        """Release the segments that an open request keeps in memory."""
        del self._open[request]
        self._count_undrawn(request, 0)
        done = self._run.store.close(request)
        for segment in done:
            self.to_compute.pop(segment.index, None)
        # Segments that only this request had to compute again are complete for other requests.
        waiting = {opener: None for segment in done for opener in segment.openers}
        if waiting:
            self._activate_requests(waiting)

    def _count_undrawn(self, request: LiveRequest, num_rows: int) -> None:
        """Record for how many rows of an open request the first token is still to be drawn."""
        self._num_undrawn += num_rows - request.num_undrawn
        request.num_undrawn = num_rows

    def _end(self, request: LiveRequest) -> None:
        del self._run.requests[request.index]
        del request.segment.requests[request]
        self._run.store.release(request.segment)

    def _make_room(self, request: LiveRequest) -> None:
        """Free pages until a request can be opened or, if it is open, until a row of it fits.

        Freeing pages may raise the number that the request needs.
        """
        store = self._run.store
        while True:
            pages = request.row_pages(self._page_size)
            segment_slots = 0
            if not request.is_open:
                pages, segment_slots = store.pages_to_open(request), store.slots_to_open(request)
            slots_short = self._queue.count_missing_slots(request, segment_slots)
            if pages <= self._pool.num_free and not slots_short:
                return
            if self.reclaim_pages(request):
                continue
            if slots_short:
                raise CapacityError(
                    f"prompt {request.spec.id!r} needs {slots_short} more slots for recurrent "
                    "states; give the cache more memory"
                )
            raise CapacityError(
                f"prompt {request.spec.id!r} needs {pages} cache pages, but only "
                f"{self._pool.num_free} are free; give the cache more memory"
            )

    def reclaim_pages(self, keep: LiveRequest | None = None) -> bool:
        """Free some pages, but none of request `keep`. Return False if nothing can be freed.

        The candidates, in this order: an idle segment, a cached prefix, an open request without
        active rows, the last active row.
        """
        if (
            self._run.store.evict_idle(keep)
            or self._run.prefix_cache.evict_one()
            or self._close_idle(keep)
        ):
            return True
        preempted = self._queue.preempt_last()
        self._run.usage.preemptions += preempted
        return preempted

    def _close_idle(self, keep: LiveRequest | None) -> bool:
        """Return the last open request without active rows to waiting, but never `keep`."""
        active = set(self._run.rows.request[self._queue.active()].tolist())
        idle = [r for r in self._open if r is not keep and r.index not in active]
        if not idle:
            return False
        self._return_to_waiting(max(idle, key=lambda r: r.rank))
        return True

    def _return_to_waiting(self, request: LiveRequest) -> None:
        if request.slots is not None:
            self._queue.park(self._queue.select([request], RowPhase.READY))
        self._close(request)
        self._waiting[request] = None
        self._waiting.move_to_end(request, last=False)

    def drop_keys(self, *, of_rows: bool) -> None:
        """Drop all keys and states except those of active rows and of the segments above them.

        Args:
            of_rows: Whether to drop those too.
        """
        if of_rows:
            self._queue.preempt_all()
        active = set(self._run.rows.request[self._queue.active()].tolist())
        idle = [request for request in self._open if request.index not in active]
        for request in sorted(idle, key=lambda r: r.rank, reverse=True):
            self._return_to_waiting(request)
        self._run.prefix_cache.clear()
        self._run.store.free_idle()

    def add_rows(self, requests: Iterable[LiveRequest]) -> None:
        """Record that the first tokens of requests are drawn; their rows wait for pages."""
        with_rows = [request for request in requests if request.slots]
        for request in with_rows:
            self._count_undrawn(request, 0)
        self._queue.park(self._queue.select(with_rows, RowPhase.DRAWN))
        self._activate_requests(request for request in with_rows if request.is_open)

    def remove_rows(self, gone: Mapping[LiveRequest, Sequence[int]], *, ended: bool) -> None:
        """End or cancel rows of requests; a request leaves with its last row."""
        slots = np.array(
            [slot for row_slots in gone.values() for slot in row_slots], dtype=np.int64
        )
        (self._queue.end if ended else self._queue.cancel)(slots)
        for request, row_slots in gone.items():
            assert request.slots is not None
            request.slots.difference_update(row_slots)
            if not request.slots:
                self.finish(request)

    def cancel(self, request: LiveRequest, sample: int | None, *, greedy: bool) -> None:
        """Drop one sample of a request, or all unfinished ones, and free their pages.

        Args:
            request: The request.
            sample: Index of the sample; None for all unfinished samples.
            greedy: Whether sampling is greedy, so that all samples share one row.
        """
        if not request.spec.rows:
            self.finish(request)
            return
        unfinished = [] if sample is None else [i for i in request.samples if i != sample]
        is_changed = len(unfinished) < len(request.samples)
        request.samples[:] = unfinished
        if request.num_undrawn:
            self._count_undrawn(request, request.num_rows)
        if is_changed and request.slots is not None:
            slots = np.array(sorted(request.slots), dtype=np.int64)
            if not greedy:  # greedy samples share one slot
                slots = slots[~np.isin(self._run.rows.sample[slots], unfinished)]
            if len(slots) and not (greedy and unfinished):
                self.remove_rows({request: slots.tolist()}, ended=False)
        elif is_changed and not unfinished:
            self.finish(request)

    def check(self) -> None:
        """Assert that each request is in the right queue and agrees with its rows."""
        queued = [*self._waiting, *self._open]
        assert len(set(queued)) == len(queued), "a request is in two queues"
        assert set(queued) == set(self._run.requests.values()), "a request is in no queue"
        assert all(request.is_open == (request in self._open) for request in queued), (
            "a request is open, but not in the queue of open ones, or the reverse"
        )
        undrawn = [request for request in self._open if request.num_undrawn]
        num_undrawn = sum(request.num_rows for request in undrawn)
        assert self._num_undrawn == num_undrawn, "rows that are to be drawn are miscounted"
        rows, requests = self._run.rows, self._run.requests
        started = np.concatenate([self._queue.active(), self._queue.ready])
        owners = np.unique(rows.request[started]).tolist()
        assert all(requests[i].is_open for i in owners), "a row's request is not open"
        for request in self._open:
            phases = rows.phase[list(request.slots or ())]
            if request.num_undrawn:
                assert (phases == RowPhase.DRAWN).all(), "a request is drawn already"
            else:
                assert request.slots is not None, "a request is never drawn"
            can_continue = request.slots and (phases != RowPhase.PARKED).all()
            assert can_continue or self._needs_prefill(request), "an open request waits for nothing"

    def clear(self) -> None:
        """Drop all requests, for example when a run is abandoned."""
        self._waiting.clear()
        self._open.clear()
        self._num_undrawn = 0
        self.to_compute.clear()
        self._run.requests.clear()
