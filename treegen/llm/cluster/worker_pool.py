"""The workers of a cluster: starts them, restarts them when they die, and stops them."""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from treegen.common.cores import count_cores
from treegen.errors import InputError, ModelWarning, WorkerError
from treegen.llm.cluster.ray_session import RaySession, defer_signals
from treegen.llm.cluster.worker import Worker, WorkerFailure, WorkerInfo

if TYPE_CHECKING:
    from treegen.llm import LLM

PATIENCE: Final = 600.0
"""Seconds that Ray may take to place the first worker, and that a worker may take to answer."""
_MAX_GAP_SECONDS: Final = 5.0  # maximum number of seconds that count between two checks


@dataclass(slots=True)
class WaitTimer:
    """A wait that is checked repeatedly.

    Time without checks, for example while the process was stopped, counts for at most a few
    seconds. Setting the system clock has no effect.
    """

    _seconds: float = 0.0
    _last: float = field(default_factory=time.monotonic)

    def has_timed_out(self, *, goes_on: bool) -> bool:
        """Record whether the wait continues; return whether it has exceeded the time limit."""
        now = time.monotonic()
        self._seconds = self._seconds + min(now - self._last, _MAX_GAP_SECONDS) if goes_on else 0.0
        self._last = now
        return self._seconds > PATIENCE


MAX_FAILURES: Final = 5
"""Number of deaths without any result in between after which a worker is given up."""
NO_ROOM: Final = (
    f"Ray found no room for workers within {PATIENCE / 60:.0f} minutes; check `ray status`"
)
# Maximum seconds of one check of workers, during which signals are deferred.
_CHECK_SECONDS: Final = 0.2
_GPU_CHECK_SECONDS: Final = 5.0  # seconds between checks for GPUs that have joined


@dataclass(eq=False, slots=True)
class WorkerSlot:
    """A place for a worker, which may be filled by several processes in turn."""

    number: int
    """Number of the worker."""
    actor: Any = None
    """Its Ray actor."""
    placed: Any = None
    """Ray reference that is ready once the actor has a process."""
    loading: Any = None
    """Ray reference to the result of loading the model; None once it was read."""
    loaded: WorkerInfo | None = None
    """Facts about the worker, once its model is loaded."""
    num_processes: int = 0
    """Number of processes so far."""
    failures: int = 0
    """Number of deaths since its last result."""
    over: bool = False
    """Whether the worker is given up or stopped."""
    reason: str = ""
    """Why the last process ended or is not used."""

    @property
    def name(self) -> str:
        """Name of the worker for messages."""
        return f"worker {self.number}"


@dataclass(slots=True, weakref_slot=True, eq=False)
class WorkerPool:
    """All workers of one Cluster."""

    session: RaySession
    """The Ray session."""
    options: Mapping[str, Any]
    """Options of each worker's LLM."""
    before: Sequence[Any]
    """Functions that each worker calls before it loads its model."""
    make: Callable[[dict[str, Any]], LLM]
    """Makes an LLM from the options."""
    cpus: float
    """Number of Ray CPUs of each worker."""
    gpus: float
    """Number of Ray GPUs of each worker."""
    threads: int
    """Number of threads of each worker."""
    adds_joined_gpus: bool
    """Whether GPUs that join the Ray cluster become workers too."""
    slots: list[WorkerSlot] = field(default_factory=list)
    """The workers."""
    starting: bool = False
    """Whether the first workers are loading their models."""
    devices: set[str] = field(default_factory=set)
    """Names of the workers' devices."""
    _next_gpu_check: float = 0.0
    _placement_timer: WaitTimer = field(default_factory=WaitTimer)

    def start(self, count: int) -> None:
        """Start workers and wait until all have loaded the model; raise the first error.

        As in a run, a worker that dies is restarted, or given up after MAX_FAILURES deaths.
        """
        self.starting = True
        self.slots = [WorkerSlot(number) for number in range(count)]
        with defer_signals():
            for slot in self.slots:
                self.begin(slot)
        while any(slot.loading is not None for slot in self.slots):
            with defer_signals():
                self._poll_loading()
        self.starting = False
        names = Counter(slot.loaded.device for slot in self.slots if slot.loaded)
        if len(names) > 1:
            devices = ", ".join(f"{count} x {name}" for name, count in names.most_common())
            raise InputError(
                "the GPUs must be identical, because different GPUs draw different samples, got "
                f"{devices}; choose identical GPUs"
            )
        for text in dict.fromkeys(w for s in self.slots if s.loaded for w in s.loaded.warnings):
            warnings.warn(text, ModelWarning, stacklevel=2)
        self._next_gpu_check = time.monotonic() + _GPU_CHECK_SECONDS

    def _poll_loading(self) -> None:
        self.session.ray.wait([s.loading for s in self.slots if s.loading], timeout=_CHECK_SECONDS)
        for slot in self.slots:
            failures = slot.failures
            self.poll_slot(slot)
            has_died = slot.failures > failures
            if failure := self.session.monitor.describe_failure(at_once=has_died):
                raise WorkerError(f"{slot.name} cannot be started: {failure}; try again")
            if all(other.over for other in self.slots):
                raise WorkerError(f"{make_no_workers_error(self.slots)}; start the run again")
            if has_died:
                action = "given up" if slot.over else "restarted"
                warnings.warn(f"{slot.name} is {action}: {slot.reason}", ModelWarning, stacklevel=2)
        if self.has_no_room():
            raise WorkerError(NO_ROOM)

    def begin(self, slot: WorkerSlot) -> None:
        """Start a process for a slot, which loads its model in the background."""
        ray = self.session.ray
        slot.num_processes, slot.loaded = slot.num_processes + 1, None
        slot.actor = (
            ray.remote(Worker)
            .options(
                num_cpus=self.cpus,
                num_gpus=self.gpus,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy="SPREAD",
            )
            .remote()
        )
        slot.placed = slot.actor.__ray_ready__.remote()
        slot.loading = slot.actor.load.remote(
            self.make, dict(self.options), list(self.before), self.threads
        )

    def poll_slot(self, slot: WorkerSlot) -> bool:
        """Return whether a slot's worker has become ready since the last call."""
        ray = self.session.ray
        if slot.loading is None or not ray.wait([slot.loading], timeout=0)[0]:
            return False
        answer, slot.loading = slot.loading, None
        has_died = False
        try:
            result: WorkerInfo | WorkerFailure = ray.get(answer)
        except ray.exceptions.RayError as error:
            result = WorkerFailure(self.session.describe_worker_error(error))
            has_died = self.session.is_death(error)
        if has_died and self.session.monitor.describe_failure(at_once=True):
            return False  # the caller reports it; a replacement would wait for Ray
        if isinstance(result, WorkerFailure):
            if self.starting and not has_died:
                raise result.error or WorkerError(
                    f"{slot.name} cannot be started: {result.reason:.300}; start the run again"
                )
            self.replace_worker(slot, result.reason)
            return False
        if not self.starting and result.device not in self.devices:
            devices = ", ".join(sorted(self.devices))
            slot.over = True
            slot.reason = f"its device is {result.device}, but the other workers have {devices}"
            ray.kill(slot.actor)
            return False
        self.devices.add(result.device)
        slot.loaded = result
        return True

    def replace_worker(self, slot: WorkerSlot, reason: str) -> None:
        """End a broken or dead worker, and start another unless it has failed too often."""
        slot.reason = " ".join(reason.split())[:300]
        slot.failures += 1
        slot.loaded = slot.loading = None
        self.session.ray.kill(slot.actor)
        if slot.failures >= MAX_FAILURES:
            slot.over = True
        else:
            self.begin(slot)

    def has_no_room(self) -> bool:
        """Return whether none of the workers has had a process for a long time."""
        wait, placed = self.session.ray.wait, [s.placed for s in self.slots if not s.over]
        none_placed = bool(placed) and not wait(placed, timeout=0)[0]
        return self._placement_timer.has_timed_out(goes_on=none_placed)

    def add_joined_gpus(self) -> list[WorkerSlot]:
        """Start workers on GPUs that have joined the Ray cluster; return their slots."""
        is_due = time.monotonic() >= self._next_gpu_check
        if not self.adds_joined_gpus or not is_due or self.session.monitor.refused_since:
            return []
        self._next_gpu_check = time.monotonic() + _GPU_CHECK_SECONDS
        free = int(self.session.get_free_resources().get("GPU", 0))
        waiting = sum(slot.loading is not None for slot in self.slots)
        have = len(self.slots)
        groups = free // max(int(self.gpus), 1)
        new = [WorkerSlot(number) for number in range(have, have + max(groups - waiting, 0))]
        for slot in new:
            self.begin(slot)
        self.slots += new
        return new

    def close(self) -> None:
        """Stop all workers."""
        for slot in self.slots:
            if slot.actor is not None and not slot.over:
                slot.over = True
                self.session.ray.kill(slot.actor)


def make_no_workers_error(slots: Iterable[WorkerSlot]) -> WorkerError:
    """Return the error to raise when all workers have been given up."""
    reason = "; ".join(f"{slot.name}: {slot.reason}" for slot in slots if slot.reason)
    return WorkerError(f"no worker is left ({reason})")


def max_threads() -> int:
    """Return how many threads a process may use: OMP_NUM_THREADS if set, or its number of cores.

    Threads that wait for each other are extremely slow on cores that other processes use too.
    """
    setting = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(setting) if setting.isdecimal() and int(setting) else count_cores()
