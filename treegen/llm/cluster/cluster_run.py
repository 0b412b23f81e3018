"""One run on all workers: assigns work, collects results, and handles deaths of workers."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from treegen.common.outputs import LevelRows, Status, Usage, WorkerStatus
from treegen.common.synchronization import Synchronized, synchronized
from treegen.errors import ModelWarning, TreegenError, WorkerError
from treegen.llm.cluster.dispatcher import (
    MAX_DEATHS,
    Dispatcher,
    WorkItem,
    num_rows_to_hold,
)
from treegen.llm.cluster.jobs import Result, WorkerJob, pickle_job
from treegen.llm.cluster.worker import TurnResult
from treegen.llm.cluster.worker_pool import (
    NO_ROOM,
    PATIENCE,
    WaitTimer,
    WorkerPool,
    WorkerSlot,
    make_no_workers_error,
)

_NOT_SUMMED: Final = ("seconds", "page_size", "impl", "kernels")  # fields of Usage
TURN_SECONDS: Final = 0.25
"""Maximum time of a turn."""
NUM_QUEUED_TURNS: Final = 2
"""Turns that a worker has: it works on one while the results of the last one are transferred."""
_WAIT_SECONDS: Final = 0.2  # seconds after which a step returns even without results


@dataclass(slots=True)
class _WorkerState:
    """State of one worker process in a run."""

    turns: deque[Any]
    """Queued turns."""
    usage: Usage
    """The usage reported by the last turn."""
    status: Status
    """The status reported by the last turn."""
    updated_at: float
    """When the result of the last turn arrived."""
    levels: tuple[LevelRows, ...] = ()
    """The levels reported by the last turn."""
    rate: float = 0.0
    """Tokens per second between the results of the last two turns."""
    num_last_results: int = 0
    """Number of results of the last turn that had any, because a turn without work has none."""
    is_returning_work: bool = False
    """Whether it was asked to return work and has not returned any since."""
    answer_timer: WaitTimer = field(default_factory=WaitTimer)
    """Timer for its answer."""


class ClusterRun(Synchronized):
    """A run that is assigned to a pool of workers; `step` returns results.

    Attributes:
        usage: Usage of all workers, one object that each step updates.
        left_out: Keys that were left out, with the reason for each.
    """

    _number = 0

    def __init__(
        self,
        pool: WorkerPool,
        job: WorkerJob,
        dispatcher: Dispatcher,
        name_of: Callable[[int], str],
        *,
        parts: int | None = None,
        max_workers: int | None = None,
    ) -> None:
        """Start a run.

        Args:
            pool: The workers.
            job: The job that each worker gets once.
            dispatcher: Assigns the work.
            name_of: Returns the name of a key, for messages.
            parts: How many parts a worker computes at once. Default: the number of rows that it
                decodes at once.
            max_workers: How many of the workers take part. Default: all, and those that join.
        """
        ClusterRun._number += 1
        self._id, self._pool, self._dispatcher, self.name_of = (
            ClusterRun._number,
            pool,
            dispatcher,
            name_of,
        )
        self._job, self._parts = pool.session.ray.put(pickle_job(job)), parts
        self._max_workers = max_workers
        self._states: dict[WorkerSlot, _WorkerState] = {}
        self._dead_usages: list[tuple[WorkerSlot, Usage]] = []  # usage of dead workers
        self._start = time.monotonic()
        self._error: TreegenError | None = None
        self.usage, self.left_out = Usage(), dict[int, str]()
        self._floors: dict[int, float] = {}
        self.closed = False
        for slot in self._slots:
            if slot.loaded is not None:
                self._begin(slot)
            elif not slot.over:
                dispatcher.remove_worker(slot.number)  # until its model is loaded

    @property
    def _slots(self) -> list[WorkerSlot]:
        return self._pool.slots[: self._max_workers]

    def _begin(self, slot: WorkerSlot) -> None:
        """Let a worker with a loaded model take part."""
        slot.actor.begin.remote(self._id, self._job)
        status = Status(0, 0, slot.loaded.num_pages if slot.loaded else 0)
        self._states[slot] = _WorkerState(deque(), Usage(), status, updated_at=time.monotonic())
        self._dispatcher.add(slot.number)

    def add_work(self, items: Iterable[WorkItem], floors: Mapping[int, float]) -> None:
        """Add work; `floors` has, by key, the min_confidence of its parts from now on."""
        self._floors.update(floors)
        for item in items:
            self._dispatcher.put(item)

    @property
    def has_work(self) -> bool:
        """Whether any work is left."""
        return not self.closed and (self._dispatcher.has_work or self._error is not None)

    @property
    def is_cut_off(self) -> bool:
        """Whether the run was closed before all work was done."""
        return self.closed and self._dispatcher.has_work

    @property
    def num_open(self) -> int:
        """Number of parts that workers have."""
        return sum(self._dispatcher.num_open(slot.number) for slot in self._states)

    @synchronized
    def step(self) -> list[Result]:
        """Return new results after at most a fifth of a second, possibly none.

        A closed run has none. Raises what one LLM raises, and WorkerError if no worker is left.
        """
        if self._error is not None:
            raise self._error
        results: list[Result] = []
        if self.closed:
            return results
        if failure := self._pool.session.monitor.describe_failure():
            self._give_up(failure)
            return []
        self._update_workers()
        # Idle workers first, so that no other worker takes the work that was returned for them.
        for slot in sorted(self._states, key=lambda slot: bool(self._states[slot].turns)):
            self._assign_turns(slot)
        for slot in self._wait_for_turns():
            results += self._collect(slot)
        self._end_hung_workers()
        if (
            all(slot.over for slot in self._slots)
            and self._dispatcher.has_work
            and self._error is None
        ):
            self._error = make_no_workers_error(self._slots)
        elif not self._states and self._pool.has_no_room() and self._error is None:
            self._error = WorkerError(f"no worker is left ({NO_ROOM})")
        self._update_usage()
        if self._error is not None and not results:
            raise self._error
        return results

    @synchronized
    def drain(self) -> list[Result]:
        """Wait up to a second for queued turns; return their results. Call it before `close`."""
        results: list[Result] = []
        end = time.monotonic() + 4 * TURN_SECONDS
        while any(state.turns for state in self._states.values()) and time.monotonic() < end:
            for slot in self._wait_for_turns():
                results += self._collect(slot)
        self._update_usage()
        return results

    def _update_workers(self) -> None:
        for slot in [*self._pool.slots, *self._pool.add_joined_gpus()]:
            over, has_part = slot.over, slot in self._slots
            if self._pool.poll_slot(slot):
                if has_part:
                    self._begin(slot)
            elif has_part and slot.over and not over:
                self._dispatcher.remove_worker(slot.number, for_good=True)

    # Turns

    def _assign_turns(self, slot: WorkerSlot) -> None:
        """Queue turns of a worker, with enough work to keep it busy until the turn after."""
        state, loaded = self._states[slot], slot.loaded
        assert loaded is not None
        while len(state.turns) < NUM_QUEUED_TURNS:
            num_decoded = self._parts or loaded.model_info.max_rows
            num_rows = num_rows_to_hold(num_decoded, state.num_last_results)
            parts = self._dispatcher.assign(slot.number, num_decoded=num_decoded, num_rows=num_rows)
            if not parts and not self._dispatcher.num_open(slot.number):
                if not state.turns:
                    self._rebalance(slot)
                return
            self._queue_turn(slot, [(part.key, list(part.indices)) for part in parts])

    def _queue_turn(
        self, slot: WorkerSlot, parts: list[tuple[int, list[int]]], recall: int = 0
    ) -> None:
        floors = {key: self._floors[key] for key, _ in parts if key in self._floors}
        turn = slot.actor.turn.remote(self._id, parts, recall, TURN_SECONDS, floors)
        self._states[slot].turns.append(turn)

    def _rebalance(self, idle: WorkerSlot) -> None:
        """Ask the busiest worker to return work that it has not started, for an idle worker."""
        donor = self._dispatcher.find_donor()
        slot = next((s for s in self._states if donor and s.number == donor[0]), None)
        if donor is None or slot is None or slot is idle or self._states[slot].is_returning_work:
            return
        if len(self._states[slot].turns) <= NUM_QUEUED_TURNS:
            self._queue_turn(slot, [], recall=donor[1])
            self._states[slot].is_returning_work = True

    def _wait_for_turns(self) -> list[WorkerSlot]:
        """Wait a while for a turn to end, also by an error; return the workers with ended turns."""
        slot_of = {turn: slot for slot, state in self._states.items() for turn in state.turns}
        waiting = [*slot_of, *(s.loading for s in self._pool.slots if s.loading is not None)]
        if not waiting:
            return []
        ray = self._pool.session.ray
        done, _ = ray.wait(waiting, num_returns=1, timeout=_WAIT_SECONDS)
        if done:
            done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        return list(dict.fromkeys(slot_of[turn] for turn in done if turn in slot_of))

    def _collect(self, slot: WorkerSlot) -> list[Result]:
        """Return the new results of a worker's ended turns."""
        ray, results = self._pool.session.ray, list[Result]()
        state = self._states[slot]
        while state.turns and ray.wait([state.turns[0]], timeout=0)[0]:
            try:
                result: TurnResult = ray.get(state.turns.popleft())
            except ray.exceptions.RayError as error:
                self._handle_worker_death(slot, self._pool.session.describe_worker_error(error))
                break
            results += self._record_turn(slot, state, result)
            if result.failure is not None:
                if result.failure.error is None:
                    self._handle_worker_death(slot, result.failure.reason)
                else:
                    self._error = result.failure.error
                break
        return results

    def _end_hung_workers(self) -> None:
        """Treat workers that have not answered for a long time as dead."""
        for slot, state in list(self._states.items()):
            if state.answer_timer.has_timed_out(goes_on=bool(state.turns)):
                self._handle_worker_death(
                    slot, f"it did not respond for {PATIENCE / 60:.0f} minutes"
                )

    def _record_turn(
        self, slot: WorkerSlot, state: _WorkerState, result: TurnResult
    ) -> list[Result]:
        """Record the result of a turn; return the results of parts that are new."""
        now = time.monotonic()
        state.answer_timer.has_timed_out(goes_on=False)
        done = [r for r in result.results if self._dispatcher.done(slot.number, r[0], r[1])]
        if result.returned:
            self._dispatcher.requeue(slot.number, result.returned)
        if done or result.returned:
            state.is_returning_work = False
        if done:
            slot.failures, state.num_last_results = 0, len(done)
        tokens = result.usage.decoded_tokens - state.usage.decoded_tokens
        state.rate = tokens / max(now - state.updated_at, 1e-3)
        state.updated_at = now
        state.usage, state.status, state.levels = result.usage, result.status, result.levels
        return done

    def _handle_worker_death(self, slot: WorkerSlot, reason: str) -> None:
        """Handle the death of a worker: reassign its work, and start another in its place."""
        state = self._states.pop(slot)
        usage = replace(state.usage, peak_rows=0, peak_pages=0, num_pages=0)
        self._dead_usages.append((slot, usage))
        before = set(self._dispatcher.left_out)
        self._pool.replace_worker(slot, reason)
        self._dispatcher.remove_worker(slot.number, for_good=slot.over)
        for key in self._dispatcher.left_out - before:
            self.left_out[key] = f"it crashed workers {MAX_DEATHS} times ({slot.reason})"
            name = self.name_of(key)
            warnings.warn(f"{name!r} is left out: {self.left_out[key]}", ModelWarning, stacklevel=2)

    def _give_up(self, reason: str) -> None:
        """Leave out all unfinished work."""
        keys = self._dispatcher.cancel_remaining()
        self.left_out |= dict.fromkeys(keys, reason)
        warnings.warn(f"{reason}; {len(keys):,} prompts are not done", ModelWarning, stacklevel=2)

    # Reporting

    def _update_usage(self) -> None:
        states = [(slot, state.usage) for slot, state in self._states.items()]
        sum_usages([usage for _, usage in [*self._dead_usages, *states]], self.usage)
        self.usage.seconds = time.monotonic() - self._start

    def status(self) -> Status:
        """Return the active rows and used pages of all workers together."""
        statuses = [state.status for state in self._states.values()]
        return Status(
            sum(status.rows for status in statuses),
            sum(status.pages for status in statuses),
            sum(status.num_pages for status in statuses),
        )

    def levels(self) -> tuple[LevelRows, ...]:
        """Return the tree levels that rows read now; a segment counts once for each worker."""
        by_depth: dict[int, LevelRows] = {}
        for level in (level for state in self._states.values() for level in state.levels):
            total = by_depth.get(level.depth, LevelRows(level.depth, 0, 0, 0))
            by_depth[level.depth] = LevelRows(
                level.depth,
                total.segments + level.segments,
                total.rows + level.rows,
                total.kept_rows + level.kept_rows,
            )
        return tuple(by_depth[depth] for depth in sorted(by_depth))

    def workers(self) -> tuple[WorkerStatus, ...]:
        """Return the status of each worker, with its tokens of this run."""
        tokens: dict[WorkerSlot, int] = {}
        for slot, usage in self._dead_usages:
            tokens[slot] = tokens.get(slot, 0) + usage.decoded_tokens
        rows = []
        for slot in self._slots:
            state = self._states.get(slot)
            rows.append(
                WorkerStatus(
                    name=slot.name,
                    where=slot.loaded.where if slot.loaded else "",
                    tokens=tokens.get(slot, 0) + (state.usage.decoded_tokens if state else 0),
                    tokens_per_second=state.rate if state else 0.0,
                    rows=state.status.rows if state else 0,
                    pages=state.status.pages if state else 0,
                    num_pages=state.status.num_pages if state else 0,
                    deaths=slot.num_processes - 1 + slot.over,
                )
            )
        return tuple(rows)

    def close(self) -> None:
        """Stop the run and drop results that have not arrived.

        A step of another thread is finished first, and is the last one.
        """
        if not self.closed:
            self.closed = True
            self._end_turns()

    @synchronized
    def _end_turns(self) -> None:
        for slot, state in self._states.items():
            state.turns.clear()
            slot.actor.end.remote(self._id)


def sum_usages(usages: Sequence[Usage], total: Usage) -> None:
    """Write the sums of workers' usages into `total`; times are averaged."""
    for field_ in fields(Usage):
        name = field_.name
        values = [getattr(usage, name) for usage in usages]
        if name not in _NOT_SUMMED and values and isinstance(values[0], int | float):
            count = len(values) if name.endswith("_seconds") else 1
            setattr(total, name, sum(values) / count if count > 1 else sum(values))
    total.page_size = max((usage.page_size for usage in usages), default=0)
    for name in ("impl", "eager_because", "uncompiled_because"):
        setattr(total, name, next((v for u in usages if (v := getattr(u, name))), ""))
    kernels: dict[str, dict[str, int]] = {}
    for usage in usages:
        for level, steps in usage.kernels.items():
            counts = kernels.setdefault(level, {})
            for kernel, count in steps.items():
                counts[kernel] = counts.get(kernel, 0) + count
    total.kernels = kernels
