"""Iterators over the completions, or scores, of one run as they become known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Final

import numpy as np

from treegen.common.checks import as_int
from treegen.common.lifetimes import CloseableRun, ClosedWhenCollected
from treegen.common.outputs import Completion, LevelRows, Score, Status, Usage, WorkerStatus
from treegen.common.progress import show_progress
from treegen.common.spelling import did_you_mean
from treegen.common.synchronization import Synchronized, synchronized
from treegen.engine.compute.levels import Ints
from treegen.engine.scheduler import Scheduler
from treegen.errors import InputError
from treegen.prompts.plan.plan import Plan

_MAX_NAMED: Final = 8  # maximum number of ids that an error lists


class Stream(Iterator[Completion], CloseableRun, ClosedWhenCollected, Synchronized):
    """Completions of one run as they finish; closing it frees its memory. Threads may share it.

    Attributes:
        plan: The plan of the run.
        usage: The usage so far.
    """

    def __init__(self, plan: Plan, scheduler: Scheduler) -> None:
        """Set up the stream for `LLM.stream`; `scheduler` runs the plan."""
        self.plan, self.scheduler = plan, scheduler
        self._closed = False
        self._finished: list[Completion] = []
        self._index_of = {request.id: i for i, request in enumerate(plan.requests)}

    @property
    def usage(self) -> Usage:
        """Tokens, pages and seconds used so far."""
        return self.scheduler.usage

    @property
    def scores(self) -> dict[int, Score]:
        """Scores that are known, by index of the request; a caller may remove them."""
        return self.scheduler.scores

    def status(self) -> Status:
        """Return the number of active rows and the pages in use now."""
        return self.scheduler.status()

    def workers(self) -> tuple[WorkerStatus, ...]:
        """Return the status of each worker of a cluster; empty for a single LLM."""
        return ()

    def check_complete(self) -> None:
        """Raise WorkerError if samples are missing, which never happens with a single LLM."""

    @synchronized
    def levels(self) -> tuple[LevelRows, ...]:
        """Return the levels of the tree that the live rows read now."""
        return self._levels_of(self.scheduler.run.rows.request[self.scheduler.queue.live_slots])

    def _levels_of(self, decoded: Ints) -> tuple[LevelRows, ...]:
        """Return the levels that rows read; `decoded` has the request index of each row."""
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
            level[2] += rows * segment.is_cascaded
        return tuple(LevelRows(depth, *level) for depth, level in sorted(levels.items()))

    @property
    def has_work(self) -> bool:
        """Whether any work is left."""
        return not self._closed and self.scheduler.has_work

    @synchronized
    def step(self) -> list[Completion]:
        """Run one forward pass; return samples that have ended, possibly none.

        Use this method to act between passes. The iterator does not return these samples again.
        On a GPU, samples that end together are returned a few per pass.

        Samples that ended before an error are returned first. Then the error ends the run, and the
        LLM is free for the next run.

        Raises:
            TreegenError: as for `Scheduler.step`.
        """
        try:
            finished = self.scheduler.step()
        except BaseException:
            self.close()
            raise
        runner = self.scheduler.run.model_runner
        if runner.graphs is not None and runner.graphs.eager_because:
            self.usage.eager_because = runner.graphs.eager_because
        self.usage.uncompiled_because = runner.uncompiled_because
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
        """Return ended samples that were not returned yet; call it before abandoning a run."""
        finished, self._finished = self._finished[::-1], []
        return finished + self.scheduler.take_finished()

    def add_work(
        self,
        work: Iterable[tuple[int, list[int]]],
        floors: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        """Add work to a run started by `LLM.open_stream`.

        Args:
            work: (index of the request in the plan, sample indices) pairs.
            floors: By index in the plan, the min_confidence of samples added from now on.

        Raises:
            InputError: the run was started otherwise, and so draws all of its plan.
        """
        raise InputError("work cannot be added to this run; start the run with LLM.open_stream")

    @synchronized
    def cancel(self, prompt_id: str, sample_index: int | None = None) -> None:
        """Drop one sample, or all samples of a prompt; finished samples are still returned.

        Args:
            prompt_id: Id of the prompt.
            sample_index: Index of the sample. Default: all samples of the prompt.

        Raises:
            InputError: there is no such prompt or sample.
        """
        _check_id(prompt_id, self._index_of)
        samples = self.plan.requests[self._index_of[prompt_id]].samples
        if sample_index is not None:
            sample_index = as_int("sample_index", sample_index)
        if sample_index is not None and not 0 <= sample_index < samples:
            raise InputError(
                f"prompt {prompt_id!r} has no sample {sample_index}; use a sample index below "
                f"{samples}"
            )
        for index in self._live_indices(self._index_of[prompt_id]):
            self.scheduler.cancel(index, sample_index)

    def _live_indices(self, plan_index: int) -> list[int]:
        """Return the scheduler's indices of the unfinished requests of a request of the plan."""
        return [plan_index]

    @synchronized
    def close(self) -> None:
        """Stop the run and drop unfinished samples."""
        if not self._closed:
            self._closed = True
            self.scheduler.close()

    @property
    def closed(self) -> bool:
        """Whether the run has ended or was abandoned."""
        return self._closed


class ScoreStream(Iterator[tuple[int, Score]], CloseableRun, Synchronized):
    """Scores of one run as they become known: (index of the pair, score) tuples; `close` ends it.

    Attributes:
        usage: The usage so far.
    """

    def __init__(self, stream: Stream) -> None:
        """Set up the stream for `LLM.score_stream`."""
        self._stream = stream
        self._scores: list[tuple[int, Score]] = []

    @property
    def usage(self) -> Usage:
        """Tokens, pages and seconds used so far."""
        return self._stream.usage

    def status(self) -> Status:
        """Return the number of active rows and the pages in use now."""
        return self._stream.status()

    def workers(self) -> tuple[WorkerStatus, ...]:
        """Return the status of each worker of a cluster; empty for a single LLM."""
        return self._stream.workers()

    def check_complete(self) -> None:
        """Raise WorkerError if scores of pairs are missing."""
        self._stream.check_complete()

    @property
    def has_work(self) -> bool:
        """Whether any work is left."""
        return self._stream.has_work

    @synchronized
    def step(self) -> list[tuple[int, Score]]:
        """Run one forward pass, as `Stream.step` does; return the scores that became known."""
        self._stream.step()
        scores = sorted(self._stream.scores.items())
        self._stream.scores.clear()
        return scores

    @synchronized
    def __next__(self) -> tuple[int, Score]:
        while not self._scores:
            if not self.has_work:
                self.close()
                raise StopIteration
            self._scores = self.step()[::-1]
        return self._scores.pop()

    @synchronized
    def close(self) -> None:
        """Stop the run; the remaining pairs get no scores."""
        self._scores.clear()
        self._stream.close()


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run."""

    completions: tuple[Completion, ...]
    """The completions, in the order that the tree declares."""
    usage: Usage
    """Tokens, pages and seconds used."""
    plan: Plan
    """The plan of the run: which prompt tokens samples share, and how they are stored and read."""

    def __repr__(self) -> str:
        return f"RunResult({len(self.completions):,} completions, {self.plan!r})"

    def of(self, prompt_id: str) -> list[Completion]:
        """Return the completions of one prompt, by sample index.

        Args:
            prompt_id: The `id` of the node. The default id joins the child indices on the path from
                the root, such as "0/3/1"; the root's is "0".

        Raises:
            InputError: no sampled node has this id.
        """
        completions = [c for c in self.completions if c.prompt_id == prompt_id]
        if not completions:
            _check_id(prompt_id, [request.id for request in self.plan.requests])
        return completions


def _check_id(prompt_id: object, ids: Collection[str]) -> None:
    """Raise InputError if an id is not one of the ids of a tree's sampled nodes.

    Args:
        prompt_id: The id.
        ids: The ids of the sampled nodes.
    """
    if isinstance(prompt_id, str) and prompt_id in ids:
        return
    listed = ", ".join(map(repr, islice(ids, _MAX_NAMED))) or "none"
    more = f" and {len(ids) - _MAX_NAMED:,} more" if len(ids) > _MAX_NAMED else ""
    near = did_you_mean(str(prompt_id), ids) or "; use one of the ids"
    raise InputError(
        f"no sampled node has the id {prompt_id!r:.60}; the ids are {listed}{more}{near}"
    )


def run_to_end(stream: Stream, progress: bool | None) -> RunResult:
    """Run a stream to its end; return the completions in the order of its prompts.

    Args:
        stream: The stream, which is closed afterwards.
        progress: Whether to show a progress bar of finished samples; None: only in a notebook.
    """
    with stream:
        total = sum(request.samples for request in stream.plan.requests)
        completions = list(show_progress(stream, total, progress))
        stream.check_complete()
    index_of = {request.id: i for i, request in enumerate(stream.plan.requests)}
    completions.sort(key=lambda c: (index_of[c.prompt_id], c.sample_index))
    return RunResult(tuple(completions), stream.usage, stream.plan)
