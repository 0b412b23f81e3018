"""A worker: a process with an LLM of its own, which does what it is dealt."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from treegen.cluster.jobs import JobShare, Part, Result, WorkerJob
from treegen.cluster.serialization import unpickle_job
from treegen.common.outputs import LevelRows, Status, Usage
from treegen.errors import (
    CapacityError,
    InternalError,
    ModelWarning,
    TreegenError,
    WorkerError,
)
from treegen.model.options import EngineOptions

if TYPE_CHECKING:
    from treegen.llm import LLM
    from treegen.model.model_info import ModelInfo


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """What went wrong in a worker.

    told: in one line. error: what the caller can mend, as one LLM raises it. If there is none, it
    is the worker that is broken.
    """

    told: str
    error: TreegenError | None = None

    @staticmethod
    def of(error: BaseException) -> WorkerFailure:
        """Return what is sent of an error; a GPU that is full, or a rank lost, is the worker's."""
        told = " ".join(f"{type(error).__name__}: {error}".split())
        full = isinstance(error, CapacityError) and error.__cause__ is not None
        own = full or isinstance(error, InternalError | WorkerError)
        if own or not isinstance(error, TreegenError):
            return WorkerFailure(told)
        return WorkerFailure(told, error)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker is like once its model is loaded.

    facts: of its model, without the tokenizer. where: its machine. device: its name.
    """

    facts: ModelInfo
    fingerprint: str
    device: str
    where: str
    pid: int
    num_pages: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What a turn came to. given_back: work that others are to do."""

    results: list[Result] = field(default_factory=list)
    given_back: list[Part] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    status: Status = field(default_factory=lambda: Status(0, 0, 0))
    levels: tuple[LevelRows, ...] = ()
    failure: WorkerFailure | None = None


class Worker:
    """Runs in a process of its own; calls come one after another.

    Each turn takes further work and runs passes for a while, so that results come in batches. The
    next turn waits here already, so that the engine does not.
    """

    def __init__(self) -> None:
        """Nothing is loaded yet."""
        self._llm: LLM | None = None
        self._before: list[Any] = []  # kept for jobs that need it
        self._task: JobShare | None = None
        self._number = -1  # of the job
        self._failed: WorkerFailure | None = None

    def load(
        self,
        make: Callable[[dict[str, Any]], LLM],
        options: dict[str, Any],
        before: Sequence[Any],
        threads: int,
    ) -> WorkerInfo | WorkerFailure:
        """Load the model. before: called first, such as what loads another model.

        Args:
            make: Makes the LLM of its options.
        """
        import torch

        try:
            torch.set_num_threads(threads)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self._before = [call() for call in before]
                self._llm = llm = make(options)
        except Exception as error:
            return WorkerFailure.of(error)
        return WorkerInfo(
            facts=replace(llm.facts, tokenizer=None),
            fingerprint=llm.fingerprint,
            device=_device_name(llm),
            where=socket.gethostname(),
            pid=os.getpid(),
            num_pages=llm.cache.pool.num_pages,
            warnings=tuple(
                str(each.message) for each in caught if issubclass(each.category, ModelWarning)
            ),
        )

    def begin(self, number: int, packed: bytes) -> None:
        """Begin a share of a job; what there was before ends."""
        self.end(self._number)
        self._number, self._failed = number, None
        assert self._llm is not None
        try:
            job: WorkerJob = unpickle_job(packed)
            self._task = job.begin(self._llm)
        except Exception as error:
            self._failed = WorkerFailure.of(error)

    def turn(
        self, number: int, parts: list[Part], recall: int, seconds: float, floors: dict[int, float]
    ) -> TurnResult:
        """Take work, and do what there is for so many seconds, or until nothing is left.

        Args:
            recall: Parts that the worker is to give back, if it has not begun them.
            floors: By key, the min_confidence of the parts.
        """
        if number != self._number:
            return TurnResult()
        task, results = self._task, list[Result]()
        if task is None:
            return TurnResult(failure=self._failed)
        given_back: list[Part] = []
        failure: WorkerFailure | None = None
        try:
            task.set_floors(floors)
            task.add_work(parts)
            given_back = task.take_back(recall) if recall else []
            end = time.monotonic() + seconds
            while task.run.has_work and time.monotonic() < end:
                results += task.step()
        except Exception as error:
            failure = WorkerFailure.of(error)
        return TurnResult(
            results=results,
            given_back=given_back,
            usage=replace(task.run.usage),
            status=task.run.status(),
            levels=task.run.levels() if failure is None else (),
            failure=failure,
        )

    def end(self, number: int) -> None:
        """Leave a job."""
        if number == self._number and self._task is not None:
            self._task.run.close()
            self._task = None
        self._number = -1 if number == self._number else self._number


def from_checkpoint(options: dict[str, Any]) -> LLM:
    """An LLM of the checkpoint that its options name."""
    from treegen.llm import LLM

    return LLM(**options)


def _device_name(llm: LLM) -> str:
    import torch

    device = llm.model.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def make_llm_options(options: EngineOptions, device: str) -> dict[str, Any]:
    """Return what a worker's LLM is made with."""
    return {**asdict(options), "device": device}
