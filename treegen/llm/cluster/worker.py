"""A worker: a process with its own LLM, which does the work that it is assigned."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from treegen.common.lifetimes import raise_gc_threshold
from treegen.common.outputs import LevelRows, Status, Usage
from treegen.errors import CapacityError, InternalError, ModelWarning, TreegenError, WorkerError
from treegen.llm.cluster.jobs import JobShare, Part, Result, WorkerJob, unpickle_job
from treegen.model.options import EngineOptions

if TYPE_CHECKING:
    from treegen.llm import LLM
    from treegen.model.model_info import ModelInfo


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """A failure in a worker."""

    reason: str
    """Description in one line."""
    error: TreegenError | None = None
    """The error, as one LLM raises it, if the caller can fix it; None if the worker is broken."""

    @staticmethod
    def of(error: BaseException) -> WorkerFailure:
        """Describe an error for the caller; a full GPU or a lost rank counts as a broken worker."""
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        full = isinstance(error, CapacityError) and error.__cause__ is not None
        is_broken = full or isinstance(error, InternalError | WorkerError)
        if is_broken or not isinstance(error, TreegenError):
            return WorkerFailure(reason)
        return WorkerFailure(reason, error)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Facts about a worker whose model is loaded."""

    model_info: ModelInfo
    """Facts about its model, without the tokenizer and the images."""
    fingerprint: str
    """Identifies the weights."""
    device: str
    """Name of its device."""
    where: str
    """Host name of its machine."""
    pid: int
    """Id of its process."""
    num_pages: int
    """Number of pages of its cache."""
    warnings: tuple[str, ...] = ()
    """Warnings of loading the model."""


@dataclass(frozen=True, slots=True)
class TurnResult:
    """The results of a turn."""

    results: list[Result] = field(default_factory=list)
    """The results of finished parts."""
    returned: list[Part] = field(default_factory=list)
    """Parts that the worker returns, so that other workers can do them."""
    usage: Usage = field(default_factory=Usage)
    """The usage of the worker's run after the turn."""
    status: Status = field(default_factory=lambda: Status(0, 0, 0))
    """The status of the worker's run after the turn."""
    levels: tuple[LevelRows, ...] = ()
    """The levels of the worker's run after the turn."""
    failure: WorkerFailure | None = None
    """Why the turn failed; None if it did not."""


class Worker:
    """Runs in its own process, and executes calls one after another.

    Each turn adds work and runs passes for a while, so that results are sent in batches. The next
    turn is already queued here, so that the engine never waits.
    """

    def __init__(self) -> None:
        """Set up a worker without a model."""
        raise_gc_threshold()
        self._llm: LLM | None = None
        self._before: list[Any] = []  # what the functions returned, kept for jobs that need it
        self._share: JobShare | None = None
        self._number = -1  # number of the run; -1 if there is none
        self._failed: WorkerFailure | None = None

    def load(
        self,
        make: Callable[[dict[str, Any]], LLM],
        options: dict[str, Any],
        before: Sequence[Any],
        threads: int,
    ) -> WorkerInfo | WorkerFailure:
        """Load the model; return its properties, or why it failed.

        Args:
            make: Makes the LLM from its options.
            options: Options of the LLM.
            before: Functions to call first, for example to load another model.
            threads: Number of threads that torch uses.
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
        device = llm.model.device
        return WorkerInfo(
            model_info=replace(llm.model_info, tokenizer=None, images=None),
            fingerprint=llm.fingerprint,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            where=socket.gethostname(),
            pid=os.getpid(),
            num_pages=llm.cache.pool.num_pages,
            warnings=tuple(
                str(warning.message)
                for warning in caught
                if issubclass(warning.category, ModelWarning)
            ),
        )

    def begin(self, number: int, packed: bytes) -> None:
        """Start this worker's share of a run, and end that of the previous run.

        Args:
            number: Number of the run.
            packed: The pickled job.
        """
        self.end(self._number)
        self._number, self._failed = number, None
        assert self._llm is not None
        try:
            job: WorkerJob = unpickle_job(packed)
            self._share = job(self._llm)
        except Exception as error:
            self._failed = WorkerFailure.of(error)

    def turn(
        self, number: int, parts: list[Part], recall: int, seconds: float, floors: dict[int, float]
    ) -> TurnResult:
        """Add work, and run passes for some seconds, or until no work is left.

        Args:
            number: Number of the run; a turn of another run returns no results.
            parts: The work to add.
            recall: Maximum number of parts to return, of those that have not started.
            seconds: Time after which the turn ends.
            floors: By key, the min_confidence of the parts.
        """
        if number != self._number:
            return TurnResult()
        share, results = self._share, list[Result]()
        if share is None:
            return TurnResult(failure=self._failed)
        returned: list[Part] = []
        failure: WorkerFailure | None = None
        try:
            share.set_floors(floors)
            share.add_work(parts)
            returned = share.take_back(recall) if recall else []
            end = time.monotonic() + seconds
            while share.run.has_work and time.monotonic() < end:
                results += share.step()
        except Exception as error:
            failure = WorkerFailure.of(error)
        return TurnResult(
            results=results,
            returned=returned,
            usage=replace(share.run.usage),
            status=share.run.status(),
            levels=share.run.levels() if failure is None else (),
            failure=failure,
        )

    def end(self, number: int) -> None:
        """End this worker's share of a run."""
        if number == self._number and self._share is not None:
            self._share.run.close()
            self._share = None
        self._number = -1 if number == self._number else self._number


def from_checkpoint(options: dict[str, Any]) -> LLM:
    """Load the LLM of the checkpoint that the options name."""
    from treegen.llm import LLM

    return LLM(**options)


def make_llm_options(options: EngineOptions, device: str) -> dict[str, Any]:
    """Return the arguments of a worker's LLM."""
    return {**asdict(options), "device": device}
