"""One run under way: its completions, or scores, as they are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from treegen.common.closeable import Closeable
from treegen.common.outputs import Completion, LevelRows, Score, Status, Usage, WorkerStatus
from treegen.common.synchronization import Synchronized, synchronized
from treegen.engine.compute.decode_graphs import DecodeGraphs
from treegen.engine.compute.levels import Ints
from treegen.engine.scheduler import Scheduler
from treegen.errors import InputError
from treegen.model.model import Model
from treegen.prompts.plan.plan import Plan


class Stream(Iterator[Completion], Closeable, Synchronized):
    """Completions of one run as they finish; closing it frees what it holds. Threads may share it.

    plan: what is run. usage: the account so far.
    """

    def __init__(
        self, plan: Plan, scheduler: Scheduler, model: Model, graphs: DecodeGraphs | None
    ) -> None:
        """Made by `LLM.stream`."""
        self._model = model
        self._graphs = graphs
        self._closed = False
        self.plan = plan
        self.scheduler = scheduler
        self._finished: list[Completion] = []
        self._place = {request.id: i for i, request in enumerate(plan.requests)}

    @property
    def usage(self) -> Usage:
        """What was computed so far."""
        return self.scheduler.usage

    @property
    def scores(self) -> dict[int, Score]:
        """Scores that are known, by the index of the request, for whoever takes them from here."""
        return self.scheduler.scores

    def status(self) -> Status:
        """Return what is under way now."""
        return self.scheduler.status()

    def workers(self) -> tuple[WorkerStatus, ...]:
        """Return what each worker does now; none where one LLM does all."""
        return ()

    def check_complete(self) -> None:
        """Raise WorkerError if something was left out, which one LLM never does."""

    @synchronized
    def levels(self) -> tuple[LevelRows, ...]:
        """Return the levels of the tree that the live rows read now."""
        return self._levels_of(self.scheduler.run.rows.request[self.scheduler.queue.order])

    def _levels_of(self, decoded: Ints) -> tuple[LevelRows, ...]:
        """The levels that rows of some requests read, each request once for each of its rows."""
        requests, counts = np.unique(decoded, return_counts=True)
        below: Counter[int] = Counter()
        for request, rows in zip(requests.tolist(), counts.tolist(), strict=True):
            for segment in self.plan.path(request):
                below[segment.index] += rows
        levels: dict[int, list[int]] = {}
        for index, rows in below.items():
            segment = self.plan.segments[index]
            level = levels.setdefault(segment.depth, [0, 0, 0])
            level[0] += 1
            level[1] += rows
            level[2] += rows * segment.kept
        return tuple(LevelRows(depth, *level) for depth, level in sorted(levels.items()))

    @property
    def has_work(self) -> bool:
        """Whether anything is left to do."""
        return not self._closed and self.scheduler.has_work

    @synchronized
    def step(self) -> list[Completion]:
        """Run one forward pass; returns samples that have ended, which may be none.

        It is for a caller that looks around between passes. Iterating does not give its samples
        again. On a GPU, samples that end together come a few with each pass.

        Samples that ended before an error are returned first. Then the error ends the run, and the
        LLM is free for the next one.

        Raises:
            TreegenError: as for `Scheduler.step`.
        """
        try:
            finished = self.scheduler.step()
        except BaseException:
            self.close()
            raise
        if self._graphs is not None and self._graphs.off:
            self.usage.eager_because = self._graphs.off
        self.usage.uncompiled_because = self._model.uncompiled_because
        return finished

    @synchronized
    def __next__(self) -> Completion:
        while not self._finished:
            if not self.has_work:
                self.close()
                raise StopIteration
            self._finished = self.step()[::-1]
        return self._finished.pop()

    @synchronized
    def take_finished(self) -> list[Completion]:
        """Return samples that have ended and were not returned yet, before you leave a run."""
        rest, self._finished = self._finished[::-1], []
        return rest + self.scheduler.take_finished()

    def add_work(
        self,
        work: Iterable[tuple[int, list[int]]],
        floors: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        """Add work to a run of `LLM.dealt`: places of prompts in the plan, and samples of each.

        Args:
            floors: By place, the min_confidence of what is dealt of a prompt from now on.

        Raises:
            InputError: in other runs, which do all of their plan.
        """
        raise InputError("only a run of LLM.dealt takes work while it goes on")

    @synchronized
    def cancel(self, prompt_id: str, sample_index: int | None = None) -> None:
        """Drop one sample, or all of a prompt; those that have ended still come.

        Raises:
            InputError: there is no such prompt or sample.
        """
        if prompt_id not in self._place:
            raise InputError(f"no prompt is named {prompt_id!r}; name one of the tree")
        samples = self.plan.requests[self._place[prompt_id]].samples
        if sample_index is not None and not 0 <= sample_index < samples:
            raise InputError(
                f"prompt {prompt_id!r} has {samples} samples, none is {sample_index}; "
                "name one of those"
            )
        self.scheduler.cancel(self._place[prompt_id], sample_index)

    @synchronized
    def close(self) -> None:
        """Stop; samples that have not finished are dropped."""
        if not self._closed:
            self._closed = True
            self.scheduler.close()

    @property
    def closed(self) -> bool:
        """Whether the run is over, or was left."""
        return self._closed

    def __del__(self) -> None:
        self.close()


class ScoreStream(Iterator[tuple[int, Score]], Closeable, Synchronized):
    """Scores of one run as they are known: (index of the pair, score) tuples; `close` ends it.

    usage: the account so far.
    """

    def __init__(self, stream: Stream) -> None:
        """Made by `LLM.score_stream`."""
        self._stream = stream
        self._known: list[tuple[int, Score]] = []

    @property
    def usage(self) -> Usage:
        """What was computed so far."""
        return self._stream.usage

    def status(self) -> Status:
        """Return what is under way now."""
        return self._stream.status()

    def workers(self) -> tuple[WorkerStatus, ...]:
        """Return what each worker of a cluster does now."""
        return self._stream.workers()

    def check_complete(self) -> None:
        """Raise WorkerError if pairs were left out."""
        self._stream.check_complete()

    @property
    def has_work(self) -> bool:
        """Whether anything is left to do."""
        return self._stream.has_work

    @synchronized
    def step(self) -> list[tuple[int, Score]]:
        """Run one forward pass; returns the scores that are known now, as `Stream.step` does."""
        self._stream.step()
        known = sorted(self._stream.scores.items())
        self._stream.scores.clear()
        return known

    @synchronized
    def __next__(self) -> tuple[int, Score]:
        while not self._known:
            if not self.has_work:
                self.close()
                raise StopIteration
            self._known = self.step()[::-1]
        return self._known.pop()

    @synchronized
    def close(self) -> None:
        """Stop; the other pairs get no scores."""
        self._known.clear()
        self._stream.close()


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run.

    completions: in the order that the tree declares.
    usage: the account of what was computed.
    plan: what was shared, stored and read.
    """

    completions: tuple[Completion, ...]
    usage: Usage
    plan: Plan

    def of(self, prompt_id: str) -> list[Completion]:
        """Return the completions of one prompt, by sample index."""
        return [c for c in self.completions if c.prompt_id == prompt_id]
