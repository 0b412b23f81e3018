"""A run of which only the work that is dealt out to it is done, while it goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from treegen.common.outputs import LevelRows, Score
from treegen.engine.compute.decode_graphs import DecodeGraphs
from treegen.engine.scheduler import Scheduler
from treegen.engine.segments.segment import LiveSegment
from treegen.engine.stream import Stream
from treegen.model.model import Model
from treegen.prompts.plan.plan import Plan

Dealt = tuple[int, list[int]]
"""A request of the plan, and some of its samples; none of a request that is scored."""


class OnDemandStream(Stream):
    """Draws samples of a plan as they are dealt out, in any order and any parts.

    A segment of the plan is in the scheduler's tree while something that was dealt needs it, and
    one that several prompts share stays there.
    """

    def __init__(
        self,
        plan: Plan,
        scheduler: Scheduler,
        model: Model,
        graphs: DecodeGraphs | None,
        params_of: Sequence[int],
    ) -> None:
        """Made by `LLM.follow`. params_of: the index of each request's sampling parameters."""
        super().__init__(plan, scheduler, model, graphs)
        self._params_of = params_of
        self._rank = np.argsort(plan.order).tolist()
        self._live: dict[int, LiveSegment] = {}  # by the index in the plan
        self._place_of: dict[int, int] = {}  # of the scheduler's requests in the plan
        self._known: dict[int, Score] = {}
        # Segments with others below them. They stay when nothing that was dealt needs them for a
        # while, idle, so that they are not computed once more for what is dealt next.
        self._trunks = {segment.parent for segment in plan.segments}
        self._floors: dict[int, float] = {}

    def add_work(
        self, work: Iterable[Dealt], floors: Mapping[int, float] = MappingProxyType({})
    ) -> None:
        """Add work, which the next steps do beside what is under way."""
        self._floors.update(floors)
        for place, samples in work:
            spec = self.plan.requests[place]
            request = self.scheduler.add(
                spec,
                self._segment_of(place),
                self._params_of[place],
                samples,
                rank=self._rank[place],
                grows=False,
                floor=self._floors.get(place),
            )
            self._place_of[request.index] = place
            self.usage.prompt_tokens_unshared += len(spec.tokens) * max(len(samples), 1)

    def withdraw(self, most: int) -> list[Dealt]:
        """Drop work that has not been begun, or waits for pages, the last of it first.

        Args:
            most: Samples, or requests without samples. Returns what was dropped.
        """
        run, ready = self.scheduler.run, self.scheduler.queue.ready
        waiting: dict[int, list[int]] = {}
        for slot in ready.tolist():
            waiting.setdefault(int(run.rows.request[slot]), []).append(int(run.rows.sample[slot]))
        taken: list[Dealt] = []
        for index, request in sorted(run.requests.items(), reverse=True):
            spec = request.spec
            if most <= 0:
                break
            if request.slots is None:
                samples = request.samples.copy()
            elif index in waiting and spec.rows == spec.samples:
                samples = waiting[index]
            else:  # Greedy samples of one prompt are one row.
                continue
            if spec.rows == spec.samples:
                samples = samples[-most:]
            for sample in samples:
                self.scheduler.cancel(index, sample)
            if not samples:
                self.scheduler.cancel(index)
            self.usage.prompt_tokens_unshared -= len(spec.tokens) * max(len(samples), 1)
            most -= max(len(samples), 1)
            taken.append((self._place_of[index], samples))
        return taken

    @property
    def scores(self) -> dict[int, Score]:
        """Scores that are known, by the index in the plan."""
        found = self.scheduler.scores
        self._known.update((self._place_of[index], score) for index, score in found.items())
        found.clear()
        return self._known

    def levels(self) -> tuple[LevelRows, ...]:
        """Which levels of the tree the rows being decoded read now."""
        live = self.scheduler.run.rows.request[self.scheduler.queue.order].tolist()
        return self._levels_of(np.array([self._place_of[index] for index in live], dtype=np.int64))

    def _segment_of(self, place: int) -> LiveSegment:
        """The live segment that ends a request's prompt; what is missing of its path is added."""
        store, score_from = self.scheduler.run.store, self.plan.requests[place].score_from
        parent: LiveSegment | None = None
        for segment in reversed(list(self.plan.path(place))):
            live = self._live.get(segment.index)
            if live is None or not self._can_use(live, parent, score_from):
                live = self._live[segment.index] = store.new(
                    parent, segment.tokens, kept=segment.kept
                )
                if score_from is None and segment.index in self._trunks:
                    store.retain(live)
            parent = live
        assert parent is not None
        return parent

    def _can_use(
        self, live: LiveSegment, parent: LiveSegment | None, score_from: int | None
    ) -> bool:
        """Whether a segment is still there below a parent, with all logits that are wanted."""
        there = self.scheduler.run.store.segments.get(live.index) is live
        if not there or live.parent is not parent:
            return False
        # Its logits are there only while it is computed.
        wanted = score_from is not None and live.stop >= score_from
        return not wanted or live.was_computed <= max(live.start, (score_from or 1) - 1)
