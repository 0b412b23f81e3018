"""Which requests are open, waiting or over, and who gives way when pages run out.

A request is opened (the segments above it get pages), its segments are computed, its samples run,
and it leaves. Under memory pressure an open request without active rows goes back to waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from treegen.errors import CapacityError
from treegen.kept import KeptPrefixes
from treegen.layout import Ints
from treegen.live import LiveRows
from treegen.results import Usage
from treegen.segments import SegmentStore


class Admission:
    """Requests of one run on their way through memory.

    samples: per request, the sample indices that have not ended. slots: request -> its rows that
    have not ended, once its first tokens are drawn. to_compute: segments of open requests whose
    keys are not all in place, sorted.
    """

    def __init__(
        self,
        store: SegmentStore,
        live: LiveRows,
        kept: KeptPrefixes,
        usage: Usage,
        samples: Sequence[Sequence[int]],
        max_rows: int,
        on_prefilled: Callable[[int], None] | None,
    ) -> None:
        """All requests that want something are waiting, depth first."""
        self.plan, self.store, self.live = store.plan, store, live
        self.samples = [list(wanted) for wanted in samples]
        self.slots: dict[int, set[int]] = {}
        self.to_compute: set[int] = set()
        self.rank = np.empty(len(self.plan.requests), dtype=np.int64)
        self.rank[self.plan.order] = np.arange(len(self.plan.order))
        self._pool, self._page_size = store.cache.pool, store.cache.page_size
        self._kept, self._usage, self._max_rows = kept, usage, max_rows
        self._on_prefilled = on_prefilled
        self._waiting: deque[int] = deque()
        self._open: dict[int, None] = {}  # in the order they were opened
        self._undrawn: set[int] = set()  # of the open ones
        self._parked: dict[int, list[int]] = {}  # ready slots of requests that are not open
        for request in self.plan.order.tolist():
            if self.plan.requests[request].rows and not self.samples[request]:
                store.close(request, opened=False, finished=True)
            else:
                self._waiting.append(request)

    @property
    def has_work(self) -> bool:
        """Whether some request is not over."""
        return bool(self._waiting or self._open)

    def admit(self) -> None:
        """Activate ready rows and open requests until enough rows are on their way.

        Raises CapacityError if nothing runs and nothing can be started.
        """
        self.live.activate(self._max_rows)
        coming = sum(map(self.num_rows, self._undrawn))
        coming += self.live.num_active + len(self.live.ready)
        if coming < self._max_rows and self._waiting:
            growth = self.live.expected_growth()
            # Open somewhat more than is needed now, so that refills prefill many at once.
            while self._waiting and coming < self._max_rows * 5 // 4 + 1:
                request = self._waiting[0]
                if not self._try_open(request, growth):
                    break
                coming += self.num_rows(request) if request in self._undrawn else 0
            self.live.activate(self._max_rows)
        if self.live.ready and not self.live.num_active and not self.to_compute:
            # Nothing runs, yet the first ready row does not fit: others must give way.
            request = int(self.live.rows.request[self.live.ready[0][1]])
            self._make_room(request, lambda: self.plan.row_pages(request, self._page_size))
            self.live.activate(1)

    def num_rows(self, request: int) -> int:
        """Rows that the samples of a request take."""
        # A request without rows (prefill only, scoring) takes the place of one.
        return max(min(len(self.samples[request]), self.plan.requests[request].rows), 1)

    def _try_open(self, request: int, growth: int) -> bool:
        """Open a request if its pages fit beside what active rows are expected to need."""
        if self._open:
            pages = self.store.pages_to_open(request) + self.plan.row_pages(
                request, self._page_size
            )
            if pages > self._pool.num_free - growth:
                return False
        else:
            self._make_room(request, lambda: self.store.pages_to_open(request))
        self._waiting.popleft()
        self._open[request] = None
        if request not in self.slots:
            self._undrawn.add(request)
        to_compute, reused = self.store.open(request)
        self._usage.prompt_tokens_reused += reused
        self.to_compute.update(to_compute)
        if not self._on_its_way(request):
            self.on_computed(request)
        return True

    def _on_its_way(self, request: int) -> bool:
        return any(s.index in self.to_compute for s in self.plan.path(request))

    def on_computed(self, request: int) -> None:
        """All keys above a request's rows are in place; its parked rows are ready again."""
        if request not in self._open:
            return
        for slot in self._parked.pop(request, []):
            self.live.push(slot)
        if not self.plan.requests[request].rows:
            if self._on_prefilled is not None:
                self._on_prefilled(request)
            self._close(request, finished=True)

    def leave(self, request: int) -> None:
        """A request is over, whether it is open or waiting."""
        if request in self._open:
            self._close(request, finished=True)
        else:
            self._waiting.remove(request)
            self.store.close(request, opened=False, finished=True)

    def _close(self, request: int, *, finished: bool) -> None:
        del self._open[request]
        self._undrawn.discard(request)
        self.store.close(request, opened=True, finished=finished)
        for segment in self.plan.path(request):
            if not self.store.is_wanted(segment.index):
                self.to_compute.discard(segment.index)

    def _make_room(self, request: int, needed: Callable[[], int]) -> None:
        """Free pages for a request until it has what it needs, which may grow meanwhile."""
        while self._pool.num_free < needed():
            if not self.give_way(request):
                raise CapacityError(
                    f"prompt {self.plan.requests[request].id!r} needs {needed()} cache pages but "
                    f"only {self._pool.num_free} can be had; give more memory"
                )

    def give_way(self, keep: int = -1) -> bool:
        """Take pages back from what matters least, not from request `keep`; False if none can."""
        if self.store.evict_idle() or self._kept.evict_one() or self._close_idle(keep):
            return True
        preempted = self.live.preempt_last()
        self._usage.preemptions += preempted
        return preempted

    def _close_idle(self, keep: int) -> bool:
        """Send the last open request that has no active rows back to waiting, all but `keep`."""
        active = set(self.live.rows.request[self.live.active()].tolist())
        idle = [r for r in self._open if r != keep and r not in active]
        if not idle:
            return False
        request = max(idle, key=lambda r: self.rank[r])
        if request in self.slots:
            self._parked[request] = self.live.park(request)
        self._close(request, finished=False)
        self._waiting.appendleft(request)
        return True

    def add_rows(self, request: int, slots: Sequence[int]) -> None:
        """Rows of a request, their first tokens drawn, wait for pages."""
        self._undrawn.discard(request)
        if request in self._open:
            for slot in slots:
                self.live.push(slot)
        elif slots:
            self._parked[request] = list(slots)

    def retire(self, request: int, slots: Ints, *, ended: bool) -> None:
        """Rows leave; with the last one their request does."""
        self.live.remove(slots, ended=ended)
        self.slots[request].difference_update(slots.tolist())
        if request in self._parked:
            self._parked[request] = [s for s in self._parked[request] if s in self.slots[request]]
        if not self.slots[request]:
            self._parked.pop(request, None)
            self.leave(request)

    def cancel(self, request: int, sample: int | None, *, greedy: bool) -> None:
        """Drop one sample of a request, or all that have not ended; frees their pages at once."""
        wanted = self.samples[request]
        gone = wanted.copy() if sample is None else [i for i in wanted if i == sample]
        for index in gone:
            wanted.remove(index)
        if gone and request in self.slots:
            mine = np.array(sorted(self.slots[request]), dtype=np.int64)
            if not greedy:  # greedy samples share one slot
                mine = mine[~np.isin(self.live.rows.sample[mine], wanted)]
            if len(mine) and not (greedy and wanted):
                self.retire(request, mine, ended=False)
        elif gone and not wanted:
            self.leave(request)

    def clear(self) -> None:
        """Forget all requests, as when a run is abandoned."""
        self._waiting.clear()
        self._open.clear()
        self._undrawn.clear()
        self._parked.clear()
        self.to_compute.clear()
        self.slots.clear()
        for wanted in self.samples:
            wanted.clear()
