"""Jobs of workers: a job as it is sent to each worker, and the worker's share of it.

A job consists of parts, each identified by a key and an index: a prompt and a sample, a group of
pairs and one of them, or a problem to search and 0. Assigned parts go into the worker's scheduler
at once, in addition to running ones. Jobs and results are pickled, including user code that workers
cannot import.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from treegen.common.params import SamplingParams
from treegen.errors import InputError
from treegen.prompts.images.table import PlacedImage
from treegen.prompts.plan.plan import Plan
from treegen.search.tree.node_registry import pickling_for_other_process

if TYPE_CHECKING:
    from treegen.engine.on_demand_stream import OnDemandStream
    from treegen.llm import LLM
    from treegen.search.run import SearchRun
    from treegen.search.tree.node import SearchFn
    from treegen.search.tree.result import SearchProblem, SearchResult

_NO_TOKENS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """A plan to be pickled, and sampling parameters. Only its segments have the prompts' tokens."""

    plan: Plan
    """The plan, whose requests have no tokens."""
    params: tuple[SamplingParams, ...]
    """The distinct sampling parameters."""
    params_of: tuple[int, ...]
    """Index into `params` for each request."""

    @staticmethod
    def of(plan: Plan, params: Sequence[SamplingParams]) -> PackedPlan:
        """Pack a plan and the sampling parameters of each of its requests."""
        sets = {one.sampling_key: one for one in params}
        index_of = {key: index for index, key in enumerate(sets)}
        requests = tuple(
            replace(request, tokens=_NO_TOKENS, images=()) for request in plan.requests
        )
        # Copies, because pickling a view would include the whole prompt.
        segments = tuple(replace(s, tokens=s.tokens.copy()) for s in plan.segments)
        packed = replace(plan, requests=requests, segments=segments)
        return PackedPlan(
            packed, tuple(sets.values()), tuple(index_of[one.sampling_key] for one in params)
        )

    def unpack(self) -> tuple[Plan, list[SamplingParams]]:
        """Return the original plan, and the sampling parameters of each request."""
        plan = self.plan
        requests = []
        for plan_index, request in enumerate(plan.requests):
            parts = [segment.tokens for segment in plan.path(plan_index)]
            requests.append(replace(request, tokens=np.concatenate(parts[::-1])))
        return replace(plan, requests=tuple(requests)), [self.params[i] for i in self.params_of]


Part = tuple[int, list[int]]
"""A key and some of its indices."""
Result = tuple[int, int, Any]
"""A key, an index, and the result of that part."""


class JobShare(ABC):
    """A worker's share of a job."""

    run: OnDemandStream | SearchRun
    """The run that computes it, and reports usage and status."""

    @abstractmethod
    def add_work(self, parts: Iterable[Part]) -> None:
        """Add work."""

    @abstractmethod
    def take_back(self, max_parts: int) -> list[Part]:
        """Drop at most `max_parts` parts that have not started; return them."""

    @abstractmethod
    def step(self) -> list[Result]:
        """Run one forward pass; return finished parts."""

    def set_floors(self, floors: Mapping[int, float]) -> None:
        """Set the min_confidence of parts added from now on, by key."""
        assert not floors, "only samples have a confidence"


WorkerJob = Callable[["LLM"], JobShare]
"""A job, which is sent to every worker once. It starts a worker's share, without any parts yet."""


def begin_sampling(packed: PackedPlan, llm: LLM) -> JobShare:
    """Start to draw samples of a plan: parts are requests and samples."""
    plan, params = packed.unpack()
    return _SamplingShare(llm.open_planned_stream(plan, params))


def begin_scoring(packed: PackedPlan, groups: Sequence[Sequence[int]], llm: LLM) -> JobShare:
    """Start to score the requests of a plan.

    Args:
        packed: The plan.
        groups: Groups of its requests. Parts are groups and indices in a group.
        llm: The worker's LLM.
    """
    plan, params = packed.unpack()
    return _ScoringShare(llm.open_planned_stream(plan, params), groups)


def begin_searching(
    fn: SearchFn, problems: Sequence[SearchProblem], how: Mapping[str, Any], llm: LLM
) -> JobShare:
    """Start to search problems: parts are problems.

    Args:
        fn: The search.
        problems: The problems.
        how: Further arguments of `SearchRun`.
        llm: The worker's LLM.
    """
    return _SearchingShare(llm._start_searches(fn, problems, on_demand=True, **how))


def begin_with_images(images: Sequence[PlacedImage], job: WorkerJob, llm: LLM) -> JobShare:
    """Start a job whose prompts have images, which are encoded when this worker needs them.

    Args:
        images: The images with their files.
        job: The job.
        llm: The worker's LLM.
    """
    assert llm.images is not None
    llm.images.import_images(images)
    return job(llm)


class _SamplingShare(JobShare):
    def __init__(self, stream: OnDemandStream) -> None:
        self.run = self._stream = stream
        self._key_of = {
            request.id: plan_index for plan_index, request in enumerate(stream.plan.requests)
        }

    def set_floors(self, floors: Mapping[int, float]) -> None:
        self._stream.add_work([], floors)

    def add_work(self, parts: Iterable[Part]) -> None:
        self._stream.add_work(parts)

    def take_back(self, max_parts: int) -> list[Part]:
        return self._stream.withdraw(max_parts)

    def step(self) -> list[Result]:
        return [(self._key_of[c.prompt_id], c.sample_index, c) for c in self._stream.step()]


class _ScoringShare(JobShare):
    def __init__(self, stream: OnDemandStream, groups: Sequence[Sequence[int]]) -> None:
        self.run = self._stream = stream
        self._groups = groups
        self._part_of = {
            plan_index: (key, index)
            for key, group in enumerate(groups)
            for index, plan_index in enumerate(group)
        }

    def add_work(self, parts: Iterable[Part]) -> None:
        self._stream.add_work((self._groups[key][i], []) for key, indices in parts for i in indices)

    def take_back(self, max_parts: int) -> list[Part]:
        parts = (self._part_of[plan_index] for plan_index, _ in self._stream.withdraw(max_parts))
        return [(key, [index]) for key, index in parts]

    def step(self) -> list[Result]:
        self._stream.step()
        scores = self._stream.scores
        finished = [
            (*self._part_of[plan_index], score) for plan_index, score in sorted(scores.items())
        ]
        scores.clear()
        return finished


class _SearchingShare(JobShare):
    def __init__(self, run: SearchRun) -> None:
        self.run = self._searches = run
        self._key_of = {name: key for key, name in enumerate(run.names)}

    def add_work(self, parts: Iterable[Part]) -> None:
        self._searches.enqueue(self._searches.names[key] for key, _ in parts)

    def take_back(self, max_parts: int) -> list[Part]:
        return [(self._key_of[name], [0]) for name in self._searches.take_back(max_parts)]

    def step(self) -> list[Result]:
        self._searches.step()
        return [
            (self._key_of[r.name], 0, sendable_result(r)) for r in self._searches.take_results()
        ]


def pickle_job(job: object) -> bytes:
    """Pickle a job; raise InputError if it holds objects that cannot be pickled."""
    from ray import cloudpickle

    pickle: Any = cloudpickle  # partly without types
    _register_modules_loaded_by_path(pickle.register_pickle_by_value)
    try:
        with pickling_for_other_process():
            data: bytes = pickle.dumps(job)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(
            f"cannot pickle the function that workers run ({reason:.200}); create clients and "
            "locks inside it"
        ) from error
    return data


def unpickle_job(data: bytes) -> Any:
    """Return the pickled job."""
    from ray import cloudpickle

    return cloudpickle.loads(data)


def sendable_result(result: SearchResult) -> SearchResult:
    """Return a result that can be pickled; a value that cannot is replaced by an error."""
    from ray import cloudpickle

    pickle: Any = cloudpickle
    try:
        # A value that unpickles here also unpickles in the caller. The tree has only plain records.
        pickle.loads(pickle.dumps((result.value, result.answers, result.votes)))
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        reason = f"the returned value cannot be pickled ({reason:.200}); return text or numbers"
        return replace(result, value=None, answers=(), votes={}, error=result.error or reason)
    return result


def _register_modules_loaded_by_path(register: Callable[[ModuleType], None]) -> None:
    """Register modules that workers cannot import, such as tasks, to be pickled by value.

    Functions of the main program are always pickled by value.
    """
    is_installed: dict[str, bool] = {}
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        if not getattr(module, "__file__", None) or getattr(module, "__name__", "") != name:
            continue
        if top not in is_installed:
            is_installed[top] = _is_importable(top)
        if not is_installed[top]:
            register(module)


def _is_importable(name: str) -> bool:
    """Return whether a module can be imported by its name here, and therefore in a worker."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if find is not None and find(name, None) is not None:
            return True
    return False
