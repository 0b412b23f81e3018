"""One run on all workers: who has what, what has come, and what is done when one dies."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from treegen.cluster.aggregation import all_levels, all_statuses, sum_usages
from treegen.cluster.dispatcher import MOST_DEATHS, Dispatcher, WorkItem
from treegen.cluster.jobs import Result, WorkerJob
from treegen.cluster.serialization import pickle_job
from treegen.cluster.wait_timer import PATIENCE, WaitTimer
from treegen.cluster.worker import TurnResult
from treegen.cluster.worker_pool import NO_ROOM, WorkerPool, WorkerSlot
from treegen.common.outputs import LevelRows, Status, Usage, WorkerStatus
from treegen.errors import ModelWarning, TreegenError, WorkerError

_TURN: Final = 0.25  # seconds of a turn
# Turns of a worker under way: it works on one while the batch of the last one travels.
_QUEUED: Final = 2
_WAIT: Final = 0.2  # seconds until a step returns even if nothing has come


@dataclass(slots=True)
class _WorkerState:
    """What one life of a worker has of a run.

    turns: those under way. seen: when its last batch came. rate: tokens per second since the one
    before. last: results of the last turn. relieved: whether it was asked for work in vain.
    """

    turns: deque[Any]
    usage: Usage
    status: Status
    seen: float
    levels: tuple[LevelRows, ...] = ()
    rate: float = 0.0
    last: int = 0
    relieved: bool = False
    silence: WaitTimer = field(default_factory=WaitTimer)


class ClusterRun:
    """Work that is dealt to a crew; `step` brings what is done.

    usage: of all workers, one object that each step brings up to date. left_out: keys that
    break workers, and what is known of each.
    """

    _number = 0

    def __init__(
        self,
        crew: WorkerPool,
        job: WorkerJob,
        dealer: Dispatcher,
        name_of: Callable[[int], str],
        *,
        parts: int | None = None,
        most: int | None = None,
    ) -> None:
        """Begin. name_of: what a key of the dealer is called.

        Args:
            parts: How many keep one worker busy; None for as many as it decodes rows at once.
            most: How many of the crew's workers take part; None for all, and those that join.
        """
        ClusterRun._number += 1
        self._id, self._crew, self._dealer, self.name_of = ClusterRun._number, crew, dealer, name_of
        self._job, self._parts = crew.session.ray.put(pickle_job(job)), parts
        self._most = most
        self._shares: dict[WorkerSlot, _WorkerState] = {}
        self._past: list[tuple[WorkerSlot, Usage]] = []  # of workers that are dead
        self._start = time.monotonic()
        self._error: TreegenError | None = None
        self.usage, self.left_out = Usage(), dict[int, str]()
        self._floors: dict[int, float] = {}
        self.closed = False
        for slot in self._slots:
            if slot.loaded is not None:
                self._begin(slot)
            elif not slot.over:
                dealer.remove_worker(slot.number)  # until it has its model

    @property
    def _slots(self) -> list[WorkerSlot]:
        return self._crew.slots[: self._most]

    def _begin(self, slot: WorkerSlot) -> None:
        """A worker that has its model takes part."""
        slot.actor.begin.remote(self._id, self._job)
        status = Status(0, 0, slot.loaded.num_pages if slot.loaded else 0)
        self._shares[slot] = _WorkerState(deque(), Usage(), status, seen=time.monotonic())
        self._dealer.add(slot.number)

    def add_work(self, items: Iterable[WorkItem], floors: Mapping[int, float]) -> None:
        """Add work. floors: by key, the min_confidence of its parts from now on."""
        self._floors.update(floors)
        for item in items:
            self._dealer.put(item)

    @property
    def has_work(self) -> bool:
        """Whether anything is left to do."""
        return not self.closed and (self._dealer.has_work or self._error is not None)

    @property
    def num_open(self) -> int:
        """Parts that workers have."""
        return sum(self._dealer.num_open(slot.number) for slot in self._shares)

    def step(self) -> list[Result]:
        """Return what has come, after a fifth of a second at most, if only nothing.

        Raises what one LLM raises, and WorkerError if no worker is left.
        """
        if self._error is not None:
            raise self._error
        results: list[Result] = []
        if gone := self._crew.session.describe_failure():
            self._give_up(gone)
            return []
        self._look_for_workers()
        for slot in list(self._shares):
            self._assign_turns(slot)
        for slot in self._wait_for_turns():
            results += self._collect(slot)
        self._end_hung_workers()
        if all(slot.over for slot in self._slots) and self._dealer.has_work and self._error is None:
            self._error = make_no_workers_error(self._slots)
        elif not self._shares and self._crew.has_no_room() and self._error is None:
            self._error = WorkerError(f"no worker is left ({NO_ROOM})")
        self._add_up()
        if self._error is not None and not results:
            raise self._error
        return results

    def drain(self) -> list[Result]:
        """Wait for the turns under way; for whoever leaves the run now."""
        results: list[Result] = []
        end = time.monotonic() + 4 * _TURN
        while any(share.turns for share in self._shares.values()) and time.monotonic() < end:
            for slot in self._wait_for_turns():
                results += self._collect(slot)
        self._add_up()
        return results

    def _look_for_workers(self) -> None:
        for slot in [*self._crew.slots, *self._crew.add_joined_gpus()]:
            over, has_part = slot.over, slot in self._slots
            if self._crew.poll_slot(slot):
                if has_part:
                    self._begin(slot)
            elif has_part and slot.over and not over:
                self._dealer.remove_worker(slot.number, for_good=True)

    # Turns

    def _assign_turns(self, slot: WorkerSlot) -> None:
        """Give a worker its next turns, with as much work as keeps it busy until the one after."""
        share, loaded = self._shares[slot], slot.loaded
        assert loaded is not None
        while len(share.turns) < _QUEUED:
            low = (self._parts or loaded.facts.max_rows * 5 // 4) + share.last
            parts = self._dealer.assign(slot.number, low=low, high=2 * low)
            if not parts and not self._dealer.num_open(slot.number):
                if not share.turns:
                    self._rebalance(slot)
                return
            self._turn(slot, [(part.key, list(part.indices)) for part in parts])

    def _turn(self, slot: WorkerSlot, parts: list[tuple[int, list[int]]], recall: int = 0) -> None:
        floors = {key: self._floors[key] for key, _ in parts if key in self._floors}
        turn = slot.actor.turn.remote(self._id, parts, recall, _TURN, floors)
        self._shares[slot].turns.append(turn)

    def _rebalance(self, idle: WorkerSlot) -> None:
        """Ask whoever has most for what it has not begun, since a worker has nothing."""
        found = self._dealer.find_donor(2)
        slot = next((s for s in self._shares if found and s.number == found[0]), None)
        if found is None or slot is None or slot is idle or self._shares[slot].relieved:
            return
        if len(self._shares[slot].turns) <= _QUEUED:
            self._turn(slot, [], recall=found[1])
            self._shares[slot].relieved = True

    def _wait_for_turns(self) -> list[WorkerSlot]:
        """Workers whose turns are over, in whatever way; waits a while for one."""
        slot_of = {turn: slot for slot, share in self._shares.items() for turn in share.turns}
        waiting = [*slot_of, *(s.loading for s in self._crew.slots if s.loading is not None)]
        if not waiting:
            return []
        ray = self._crew.session.ray
        done, _ = ray.wait(waiting, num_returns=1, timeout=_WAIT)
        if done:
            done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        return list(dict.fromkeys(slot_of[turn] for turn in done if turn in slot_of))

    def _collect(self, slot: WorkerSlot) -> list[Result]:
        """Take the batches of a worker's turns that are over."""
        ray, results = self._crew.session.ray, list[Result]()
        share = self._shares[slot]
        while share.turns and ray.wait([share.turns[0]], timeout=0)[0]:
            try:
                batch: TurnResult = ray.get(share.turns.popleft())
            except ray.exceptions.RayError as error:
                self._handle_worker_death(slot, self._crew.session.describe_worker_error(error))
                break
            results += self._note(slot, share, batch)
            if batch.failure is not None:
                if batch.failure.error is None:
                    self._handle_worker_death(slot, batch.failure.told)
                else:
                    self._error = batch.failure.error
                break
        return results

    def _end_hung_workers(self) -> None:
        """Take workers that have not answered for long for dead."""
        for slot, share in list(self._shares.items()):
            if share.silence.has_timed_out(goes_on=bool(share.turns)):
                self._handle_worker_death(
                    slot, f"it did not answer for {PATIENCE / 60:.0f} minutes"
                )

    def _note(self, slot: WorkerSlot, share: _WorkerState, batch: TurnResult) -> list[Result]:
        """Note what a batch says; returns the results that are new."""
        now = time.monotonic()
        share.silence.has_timed_out(goes_on=False)
        done = [r for r in batch.results if self._dealer.done(slot.number, r[0], r[1])]
        if batch.given_back:
            self._dealer.requeue(slot.number, batch.given_back)
        if done or batch.given_back:
            share.relieved = False
        if done:
            slot.failures = 0
        tokens = batch.usage.decoded_tokens - share.usage.decoded_tokens
        share.rate = tokens / max(now - share.seen, 1e-3)
        share.seen, share.last = now, len(done)
        share.usage, share.status, share.levels = batch.usage, batch.status, batch.levels
        return done

    def _handle_worker_death(self, slot: WorkerSlot, told: str) -> None:
        """A worker is dead: others do what it had, and another takes its place."""
        share = self._shares.pop(slot)
        gone = replace(share.usage, peak_rows=0, peak_pages=0, num_pages=0)
        self._past.append((slot, gone))
        before = set(self._dealer.left_out)
        self._crew.replace_worker(slot, told)
        self._dealer.remove_worker(slot.number, for_good=slot.over)
        for key in self._dealer.left_out - before:
            self.left_out[key] = f"it broke workers {MOST_DEATHS} times ({slot.told})"
            name = self.name_of(key)
            warnings.warn(f"{name!r} is left out: {self.left_out[key]}", ModelWarning, stacklevel=2)

    def _give_up(self, told: str) -> None:
        """Leave out all that is not done."""
        keys = self._dealer.cancel_remaining()
        self.left_out |= dict.fromkeys(keys, told)
        warnings.warn(f"{told}; {len(keys):,} prompts are not done", ModelWarning, stacklevel=2)

    # What is told

    def _add_up(self) -> None:
        shares = [(slot, share.usage) for slot, share in self._shares.items()]
        sum_usages([usage for _, usage in [*self._past, *shares]], self.usage)
        self.usage.seconds = time.monotonic() - self._start

    def status(self) -> Status:
        """What is under way now, on all workers together."""
        return all_statuses(share.status for share in self._shares.values())

    def levels(self) -> tuple[LevelRows, ...]:
        """Which levels of the tree rows read now; a segment counts once for each worker."""
        return all_levels(share.levels for share in self._shares.values())

    def workers(self) -> tuple[WorkerStatus, ...]:
        """Each worker with what it has done of this run."""
        tokens: dict[WorkerSlot, int] = {}
        for slot, usage in self._past:
            tokens[slot] = tokens.get(slot, 0) + usage.decoded_tokens
        rows = []
        for slot in self._slots:
            share = self._shares.get(slot)
            rows.append(
                WorkerStatus(
                    name=slot.name,
                    where=slot.loaded.where if slot.loaded else "",
                    tokens=tokens.get(slot, 0) + (share.usage.decoded_tokens if share else 0),
                    tokens_per_second=share.rate if share else 0.0,
                    rows=share.status.rows if share else 0,
                    pages=share.status.pages if share else 0,
                    num_pages=share.status.num_pages if share else 0,
                    deaths=slot.life - 1 + slot.over,
                )
            )
        return tuple(rows)

    def close(self) -> None:
        """Stop; what has not come is dropped."""
        if not self.closed:
            self.closed = True
            for slot in self._shares:
                slot.actor.end.remote(self._id)


def make_no_workers_error(slots: Iterable[WorkerSlot]) -> WorkerError:
    """What to raise if all workers have been given up."""
    told = "; ".join(f"{slot.name}: {slot.told}" for slot in slots if slot.told)
    return WorkerError(f"no worker is left ({told})")
