"""A run that computes only the work that is added to it; cluster workers use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from treegen.common.outputs import LevelRows, Score
from treegen.common.synchronization import synchronized
from treegen.engine.scheduler import Scheduler
from treegen.engine.segments.segment import LiveSegment
from treegen.engine.stream import Stream
from treegen.prompts.plan.plan import Plan

Work = tuple[int, list[int]]
"""Index of a request in the plan, and indices of samples to draw; none if the request is scored."""


class OnDemandStream(Stream):
    """Draws samples of a plan as they are added, in any order.

    A segment of the plan is in the scheduler's tree while added work needs it. A segment with
    segments below it stays there, unless it was added for a scored request: scores need logits,
    which exist only while the segment is computed.
    """

    def __init__(self, plan: Plan, scheduler: Scheduler, params_of: Sequence[int]) -> None:
        """Set up the stream for `LLM.open_planned_stream`.

        Args:
            plan: Plan of all requests.
            scheduler: Scheduler of an empty run.
            params_of: Index of each request's sampling parameters.
        """
        super().__init__(plan, scheduler)
        self._params_of = params_of
        self._rank = np.argsort(plan.order).tolist()
        self._live: dict[int, LiveSegment] = {}  # by index in the plan
        self._plan_index_of: dict[int, int] = {}  # index in the plan, by the scheduler's index
        self._scores: dict[int, Score] = {}
        # Indices of segments with segments below them.
        self._parents = {segment.parent for segment in plan.segments}
        self._floors: dict[int, float] = {}

    @synchronized
    def add_work(
        self, work: Iterable[Work], floors: Mapping[int, float] = MappingProxyType({})
    ) -> None:
        """Add work, which the next steps batch with the running work.

        Args:
            work: (index of the request in the plan, sample indices) pairs.
            floors: By index in the plan, the min_confidence of samples added from now on.
        """
        self._floors.update(floors)
        for plan_index, samples in work:
            spec = self.plan.requests[plan_index]
            request = self.scheduler.add(
                spec,
                self._segment_of(plan_index),
                self._params_of[plan_index],
                samples,
                rank=self._rank[plan_index],
                makes_segments=False,
                min_confidence=self._floors.get(plan_index),
            )
            self._plan_index_of[request.index] = plan_index
            self.usage.prompt_tokens_unshared += len(spec.tokens) * max(len(samples), 1)

    @synchronized
    def withdraw(self, max_count: int) -> list[Work]:
        """Drop work that has not started, or that waits for pages, last requests first.

        Args:
            max_count: Maximum number of samples, or of requests without samples, to drop.

        Returns:
            The dropped work.
        """
        run, ready = self.scheduler.run, self.scheduler.queue.ready
        waiting: dict[int, list[int]] = {}
        for slot in ready.tolist():
            waiting.setdefault(int(run.rows.request[slot]), []).append(int(run.rows.sample[slot]))
        withdrawn: list[Work] = []
        for index, request in sorted(run.requests.items(), reverse=True):
            spec = request.spec
            if max_count <= 0:
                break
            if request.slots is None:
                samples = request.samples.copy()
            elif index in waiting and spec.rows == spec.samples:
                samples = waiting[index]
            else:  # Greedy samples of one prompt are one row.
                continue
            if spec.rows == spec.samples:
                samples = samples[-max_count:]
            for sample in samples:
                self.scheduler.cancel(index, sample)
            if not samples:
                self.scheduler.cancel(index)
                if index in self.scheduler.scores:  # the running pass has computed it
                    continue
            self.usage.prompt_tokens_unshared -= len(spec.tokens) * max(len(samples), 1)
            max_count -= max(len(samples), 1)
            withdrawn.append((self._plan_index_of[index], samples))
        return withdrawn

    @property
    @synchronized
    def scores(self) -> dict[int, Score]:
        """Scores that are known, by index of the request in the plan."""
        scores = self.scheduler.scores
        self._scores.update((self._plan_index_of[index], score) for index, score in scores.items())
        scores.clear()
        return self._scores

    @synchronized
    def levels(self) -> tuple[LevelRows, ...]:
        """Return the tree levels that the rows being decoded read now."""
        live = self.scheduler.run.rows.request[self.scheduler.queue.live_slots].tolist()
        return self._levels_of(
            np.array([self._plan_index_of[index] for index in live], dtype=np.int64)
        )

    def _live_indices(self, plan_index: int) -> list[int]:
        requests = self.scheduler.run.requests
        return [index for index in requests if self._plan_index_of[index] == plan_index]

    def _segment_of(self, plan_index: int) -> LiveSegment:
        """Return the live segment at the end of a request's prompt; add missing segments above."""
        store, score_from = self.scheduler.run.store, self.plan.requests[plan_index].score_from
        parent: LiveSegment | None = None
        for segment in reversed(list(self.plan.path(plan_index))):
            live = self._live.get(segment.index)
            if live is None or not self._can_use(live, parent, score_from):
                live = self._live[segment.index] = store.new(
                    parent, segment.tokens, is_cascaded=segment.is_cascaded
                )
                if score_from is None and segment.index in self._parents:
                    store.retain(live)
            parent = live
        assert parent is not None
        return parent

    def _can_use(
        self, live: LiveSegment, parent: LiveSegment | None, score_from: int | None
    ) -> bool:
        """Return whether a segment still exists below a parent, with all logits to be scored."""
        exists = self.scheduler.run.store.segments.get(live.index) is live
        if not exists or live.parent is not parent:
            return False
        # Logits exist only while a segment is being computed.
        needs_logits = score_from is not None and live.stop >= score_from
        return not needs_logits or live.was_computed <= max(live.start, (score_from or 1) - 1)
