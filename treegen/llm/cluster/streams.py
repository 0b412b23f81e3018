"""Iterators over the results of runs on workers, with the interface of an LLM's."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from treegen.common.outputs import Completion, LevelRows, Score, Status, Usage, WorkerStatus
from treegen.common.synchronization import ExclusiveSection, synchronized
from treegen.engine.stream import Stream
from treegen.errors import InputError, StoppedError, WorkerError
from treegen.llm.cluster.cluster_run import ClusterRun
from treegen.llm.cluster.dispatcher import WorkItem
from treegen.llm.cluster.jobs import Result
from treegen.prompts.plan.plan import Plan
from treegen.search.run import SearchRun
from treegen.search.tree.result import SearchProblem, SearchResult


class _WorkerRunView:
    """Reports usage and status of a run on workers."""

    _run: ClusterRun

    @property
    def usage(self) -> Usage:
        """Usage of all workers so far; `seconds` is wall-clock time."""
        return self._run.usage

    def status(self) -> Status:
        """Return the active rows and used pages of all workers together."""
        return self._run.status()

    def workers(self) -> tuple[WorkerStatus, ...]:
        """Return the status of each worker."""
        return self._run.workers()


class ClusterStream(_WorkerRunView, Stream):
    """Completions of one run as workers finish them.

    They are the completions of `Stream`, in a different order, because workers run in parallel.
    """

    def __init__(self, plan: Plan, run: ClusterRun) -> None:
        """Set up the stream for `Cluster.stream`."""
        self.plan, self._run = plan, run
        self._closed = False
        self._finished: list[Completion] = []
        self._scores: dict[int, Score] = {}

    @property
    def scores(self) -> dict[int, Score]:
        """Scores that are known, by index of the request."""
        return self._scores

    def check_complete(self) -> None:
        """Check that no results are missing.

        Raises:
            WorkerError: prompts were left out because they crashed workers or Ray failed.
            StoppedError: the Cluster was closed before the end of the run.
        """
        if left_out := self._run.left_out:
            key, reason = next(iter(left_out.items()))
            name = self._run.name_of(key)
            what = f"{len(left_out):,} prompts are" if len(left_out) > 1 else f"prompt {name!r} is"
            raise WorkerError(f"{what} left out, because {name!r} failed: {reason}")
        if self._run.is_cut_off:
            raise StoppedError(
                "the Cluster was closed during the run, so results are missing; create a new one"
            )

    @synchronized
    def levels(self) -> tuple[LevelRows, ...]:
        """Return the tree levels that the rows being decoded read now."""
        return self._run.levels()

    @property
    def has_work(self) -> bool:
        """Whether any work is left."""
        return not self._closed and self._run.has_work

    @synchronized
    def step(self) -> list[Completion]:
        """Wait at most a fifth of a second for results of workers; return samples that ended.

        Raises what workers raise, and WorkerError if none is left.
        """
        try:
            return self._record_results(self._run.step())
        except BaseException:
            self.close()
            raise

    def _record_results(self, results: list[Result]) -> list[Completion]:
        return [completion for _, _, completion in results]

    @synchronized
    def take_finished(self) -> list[Completion]:
        """Return ended samples that were not returned yet; call it before abandoning a run."""
        finished, self._finished = self._finished[::-1], []
        return finished + self._record_results(self._run.drain())

    @synchronized
    def add_work(
        self,
        work: Iterable[tuple[int, list[int]]],
        floors: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        """Add work, which workers batch with their running work.

        Args:
            work: (index of the request in the plan, sample indices) pairs.
            floors: By index in the plan, the min_confidence of samples added from now on.
        """
        items = []
        for plan_index, samples in work:
            request = self.plan.requests[plan_index]
            is_atomic = request.rows < request.samples
            items.append(WorkItem(plan_index, tuple(samples), request.max_tokens, is_atomic))
        self._run.add_work(items, floors)

    def cancel(self, prompt_id: str, sample_index: int | None = None) -> None:
        """Raise InputError: a cluster cannot cancel samples."""
        raise InputError("a Cluster cannot cancel a single sample; close the stream")

    @synchronized
    def close(self) -> None:
        """Stop the run and drop unfinished samples."""
        if not self._closed:
            self._closed = True
            self._run.close()


class ClusterScores(ClusterStream):
    """Scores of one run, for `ScoreStream`."""

    def __init__(self, plan: Plan, run: ClusterRun, groups: Sequence[Sequence[int]]) -> None:
        """Set up the stream for `Cluster.score_stream`.

        Args:
            plan: The plan of the run.
            run: The run on workers.
            groups: The requests of each key.
        """
        super().__init__(plan, run)
        self._groups = groups

    def _record_results(self, results: list[Result]) -> list[Completion]:
        for key, index, score in results:
            self._scores[self._groups[key][index]] = score
        return []


class ClusterSearchRun(_WorkerRunView, SearchRun):
    """Results of searches as workers finish them."""

    def __init__(self, problems: Sequence[SearchProblem], run: ClusterRun) -> None:
        """Set up the run for `Cluster.search_stream`."""
        self.names = [problem.name for problem in problems]
        self._problems = problems
        self._left_out = 0  # number of left-out problems whose results were returned
        self._run = run
        self._results = deque()
        self.closed = False
        self._exclusive = ExclusiveSection("run")

    @property
    def num_running(self) -> int:
        """Number of searches that workers have."""
        return self._run.num_open

    @property
    def has_work(self) -> bool:
        """Whether any search is not over, or any result was not returned."""
        return not self.closed and (self._run.has_work or bool(self._results))

    def _step(self) -> None:
        """Wait at most a fifth of a second for results of workers."""
        try:
            self._results += [result for _, _, result in self._run.step()]
            for key, reason in list(self._run.left_out.items())[self._left_out :]:
                self._left_out += 1
                self._results.append(SearchResult.make_skipped(self._problems[key], reason))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all searches; unfinished ones have no result."""
        if not self.closed:
            self.closed = True
            self._run.close()
