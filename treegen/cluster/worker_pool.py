"""The workers of a cluster: started, started again when they die, and stopped."""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from treegen.cluster.ray_session import RaySession
from treegen.cluster.signal_deferral import defer_signals
from treegen.cluster.wait_timer import PATIENCE, WaitTimer
from treegen.cluster.worker import Worker, WorkerFailure, WorkerInfo
from treegen.common.cores import count_cores
from treegen.errors import InputError, ModelWarning, WorkerError

if TYPE_CHECKING:
    from treegen.llm import LLM

MOST_FAILURES: Final = 5
"""How often a worker may die without any result in between before it is given up."""
NO_ROOM: Final = (
    f"Ray has found no room for workers in {PATIENCE / 60:.0f} minutes; see `ray status`"
)
_TURN: Final = 0.2  # seconds that one look at workers takes, in which a signal waits
_LOOK: Final = 5.0  # seconds between looks for GPUs that have joined


@dataclass(eq=False, slots=True)
class WorkerSlot:
    """A place for a worker, whichever process has it now.

    actor: of Ray. placed: the answer that it has a process. loading: the answer to its loading,
    while that is awaited. loaded: what it is like, once it can work. life: how many it has had.
    failures: deaths since its last result.
    """

    number: int
    actor: Any = None
    placed: Any = None
    loading: Any = None
    loaded: WorkerInfo | None = None
    life: int = 0
    failures: int = 0
    over: bool = False
    told: str = ""

    @property
    def name(self) -> str:
        """How people are told of it."""
        return f"worker {self.number}"


@dataclass(slots=True)
class WorkerPool:
    """All workers of one Cluster.

    before: what each calls before it loads its model. make: makes an LLM of the options.
    cpus, gpus: what each takes of Ray's.
    threads: of each.
    grows: whether GPUs that join the Ray cluster become workers too.
    starting: whether the first workers load their models. devices: what they run on, by name.
    """

    session: RaySession
    options: Mapping[str, Any]
    before: Sequence[Any]
    make: Callable[[dict[str, Any]], LLM]
    cpus: float
    gpus: float
    threads: int
    grows: bool
    slots: list[WorkerSlot] = field(default_factory=list)
    starting: bool = False
    devices: set[str] = field(default_factory=set)
    _look_due: float = 0.0
    _roomless: WaitTimer = field(default_factory=WaitTimer)

    def start(self, count: int) -> None:
        """Start workers and wait until all have loaded the model; raise what one cannot do."""
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
            told = ", ".join(f"{count} x {name}" for name, count in names.most_common())
            raise InputError(f"the GPUs differ ({told}), so samples would too; choose equal ones")
        for told in dict.fromkeys(w for s in self.slots if s.loaded for w in s.loaded.warnings):
            warnings.warn(told, ModelWarning, stacklevel=2)
        self._look_due = time.monotonic() + _LOOK

    def _poll_loading(self) -> None:
        self.session.ray.wait([s.loading for s in self.slots if s.loading], timeout=_TURN)
        for slot in self.slots:
            self.poll_slot(slot)
            if gone := self.session.describe_failure():
                raise WorkerError(f"{slot.name} cannot be started: {gone}; try again")
            if slot.over or (slot.failures and slot.loaded is None):
                raise WorkerError(
                    f"{slot.name} cannot be started: {slot.told}; start the run again"
                )
        if self.has_no_room():
            raise WorkerError(NO_ROOM)

    def begin(self, slot: WorkerSlot) -> None:
        """Start a process for a slot; its model is loaded meanwhile."""
        ray = self.session.ray
        slot.life, slot.loaded = slot.life + 1, None
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
        """Whether a slot's worker has become ready to work just now."""
        ray = self.session.ray
        if slot.loading is None or not ray.wait([slot.loading], timeout=0)[0]:
            return False
        answer, slot.loading = slot.loading, None
        try:
            found: WorkerInfo | WorkerFailure = ray.get(answer)
        except ray.exceptions.RayError as error:
            self.replace_worker(slot, self.session.describe_worker_error(error))
            return False
        if isinstance(found, WorkerFailure):
            if found.error is not None and self.starting:
                raise found.error
            self.replace_worker(slot, found.told)
            return False
        if not self.starting and found.device not in self.devices:
            slot.over, slot.told = True, f"{found.device} is not what the others have"
            ray.kill(slot.actor)
            return False
        self.devices.add(found.device)
        slot.loaded = found
        return True

    def replace_worker(self, slot: WorkerSlot, told: str) -> None:
        """End a worker that is broken or dead, and start another in its place, a few times."""
        slot.told = " ".join(told.split())[:300]
        slot.failures += 1
        slot.loaded = slot.loading = None
        self.session.ray.kill(slot.actor)
        if slot.failures >= MOST_FAILURES:
            slot.over = True
        else:
            self.begin(slot)

    def has_no_room(self) -> bool:
        """Whether no worker has had a process for long, though some are to have one."""
        wait, placed = self.session.ray.wait, [s.placed for s in self.slots if not s.over]
        nobody = bool(placed) and not wait(placed, timeout=0)[0]
        return self._roomless.has_timed_out(goes_on=nobody)

    def add_joined_gpus(self) -> list[WorkerSlot]:
        """Slots for GPUs that have joined the Ray cluster since the last look."""
        if not self.grows or time.monotonic() < self._look_due:
            return []
        self._look_due = time.monotonic() + _LOOK
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


def most_threads() -> int:
    """Threads that a process may compute with: OMP_NUM_THREADS where it is set, else its cores.

    Threads that wait for each other are slow beyond measure on cores that others use too.
    """
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(told) if told.isdecimal() and int(told) else count_cores()
