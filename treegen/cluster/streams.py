"""What an LLM returns of a run under way, for runs that workers do."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from treegen.cluster.cluster_run import ClusterRun
from treegen.cluster.dispatcher import WorkItem
from treegen.cluster.jobs import Result
from treegen.common.outputs import Completion, LevelRows, Score, Status, Usage, WorkerStatus
from treegen.common.synchronization import ExclusiveSection, synchronized
from treegen.engine.stream import Stream
from treegen.errors import InputError, WorkerError
from treegen.prompts.plan.plan import Plan
from treegen.search.run import SearchRun
from treegen.search.tree.problems import SearchProblem
from treegen.search.tree.result import SearchResult


class _WorkerRunView:
    """What is told of a run that workers do."""

    _run: ClusterRun

    @property
    def usage(self) -> Usage:
        """What all workers have computed so far; `seconds` is time on the clock."""
        return self._run.usage

    def status(self) -> Status:
        """What is under way now, on all workers together."""
        return self._run.status()

    def workers(self) -> tuple[WorkerStatus, ...]:
        """What each worker does now."""
        return self._run.workers()


class ClusterStream(_WorkerRunView, Stream):
    """Completions of one run as workers finish them.

    What they come to is what `Stream` gives; their order is another, for workers work side by side.
    """

    def __init__(self, plan: Plan, run: ClusterRun) -> None:
        """Made by `Cluster.stream`."""
        self.plan, self._run = plan, run
        self._closed = False
        self._finished: list[Completion] = []
        self._known: dict[int, Score] = {}

    @property
    def scores(self) -> dict[int, Score]:
        """Scores that are known, by the index of the request."""
        return self._known

    def check_complete(self) -> None:
        """Raise WorkerError if prompts were left out, for they broke workers."""
        if left := self._run.left_out:
            key, told = next(iter(left.items()))
            more = f" and {len(left) - 1:,} more" if len(left) > 1 else ""
            raise WorkerError(f"prompt {self._run.name_of(key)!r}{more} is left out: {told}")

    @synchronized
    def levels(self) -> tuple[LevelRows, ...]:
        """Which levels of the tree the rows being decoded read now."""
        return self._run.levels()

    @property
    def has_work(self) -> bool:
        """Whether anything is left to do."""
        return not self._closed and self._run.has_work

    @synchronized
    def step(self) -> list[Completion]:
        """Wait for what workers send, a fifth of a second at most; returns samples that ended.

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
        """Samples that have ended and were not returned yet, for whoever leaves the run now."""
        rest, self._finished = self._finished[::-1], []
        return rest + self._record_results(self._run.drain())

    def add_work(
        self,
        work: Iterable[tuple[int, list[int]]],
        floors: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        """Add work, which workers do beside what they have."""
        items = []
        for place, samples in work:
            request = self.plan.requests[place]
            whole = request.rows < request.samples
            items.append(WorkItem(place, tuple(samples), request.max_tokens, whole))
        self._run.add_work(items, floors)

    def cancel(self, prompt_id: str, sample_index: int | None = None) -> None:
        """Not known of a cluster."""
        raise InputError("a sample that workers draw cannot be cancelled; close the stream")

    @synchronized
    def close(self) -> None:
        """Stop; samples that have not finished are dropped."""
        if not self._closed:
            self._closed = True
            self._run.close()


class ClusterScores(ClusterStream):
    """Scores of one run, for `ScoreStream`."""

    def __init__(self, plan: Plan, run: ClusterRun, groups: Sequence[Sequence[int]]) -> None:
        """Made by `Cluster.score_stream`. groups: the requests of each key."""
        super().__init__(plan, run)
        self._groups = groups

    def _record_results(self, results: list[Result]) -> list[Completion]:
        for key, index, score in results:
            self._known[self._groups[key][index]] = score
        return []


class ClusterSearchRun(_WorkerRunView, SearchRun):
    """Results of searches as workers finish them."""

    def __init__(self, problems: Sequence[SearchProblem], run: ClusterRun) -> None:
        """Made by `Cluster.search_stream`."""
        self.names = [problem.name for problem in problems]
        self._problems = problems
        self._left_out = 0  # whose results have come out
        self._run = run
        self._results = deque()
        self.closed = False
        self._alone = ExclusiveSection("run")

    @property
    def num_running(self) -> int:
        """Searches that workers have."""
        return self._run.num_open

    @property
    def has_work(self) -> bool:
        """Whether a search is not over, or its result was not returned."""
        return not self.closed and (self._run.has_work or bool(self._results))

    def _step(self) -> None:
        """Wait for what workers send, a fifth of a second at most."""
        try:
            self._results += [result for _, _, result in self._run.step()]
            for key, told in list(self._run.left_out.items())[self._left_out :]:
                self._left_out += 1
                self._results.append(SearchResult.make_skipped(self._problems[key], told))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all searches; those that have not finished have no result."""
        if not self.closed:
            self.closed = True
            self._run.close()
