"""Assigns problems, and parts of their samples, to workers, with work stealing.

Each worker has a lane: a run of consecutive problems, so that one worker computes those below one
node of the tree. A worker with an empty lane and too few rows steals from the longest lane until
both have the same cost, and splits problems by samples if needed. So no worker is idle while work
waits.

The open work of a worker that dies returns to its lane. Problems that were open at two deaths are
suspects: they are assigned separately from all other work, and in halves as long as workers die,
until one problem is found that crashes workers alone. That problem is left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from treegen.prompts.plan.plan import Plan

MAX_DEATHS: Final = 3
"""How often a problem may crash a worker that does nothing else before it is left out."""
_SUSPECT: Final = 2  # number of deaths from which on a problem is assigned separately
# A lane ends at the end of a problem if that changes its cost by at most this part of its share.
_LANE_TOLERANCE: Final = 0.05


@dataclass(frozen=True, slots=True)
class WorkItem:
    """Parts of one key, such as samples of a problem, which are assigned together."""

    key: int
    """Number of the problem, the request or the group of requests."""
    indices: tuple[int, ...]
    """Indices of the parts, such as samples."""
    weight: float = 1.0
    """Cost of each part, in tokens."""
    is_atomic: bool = False
    """Whether its parts are one piece of work, such as greedy samples."""

    @property
    def size(self) -> int:
        """Number of rows that it takes."""
        return 1 if self.is_atomic else len(self.indices)

    @property
    def cost(self) -> float:
        """Its total cost, in tokens."""
        return self.weight * self.size

    def cut(self, first: int) -> tuple[WorkItem, WorkItem]:
        """Split it in two, with `first` rows in the first part."""
        return (
            replace(self, indices=self.indices[:first]),
            replace(self, indices=self.indices[first:]),
        )


class Dispatcher:
    """Assigns items to workers, which are identified by numbers and may join and leave.

    Attributes:
        left_out: Keys that are not assigned any more, because they crash workers.
    """

    def __init__(self, items: Sequence[WorkItem], workers: Iterable[int]) -> None:
        """Fill the lanes of workers.

        Args:
            items: The work, in the best order: neighbours should be done by one worker.
            workers: Numbers of the workers.
        """
        self._items = {item.key: item for item in items}
        self._lanes: dict[int, deque[WorkItem]] = {worker: deque() for worker in workers}
        self._open: dict[int, dict[int, set[int]]] = defaultdict(dict)  # worker, key, indices
        # Lists of items that were open when a worker crashed, with the number of the worker.
        self._suspects: deque[tuple[list[WorkItem], int]] = deque()
        self._suspect_workers: set[int] = set()  # workers that have suspects
        self._lost_workers: set[int] = set()  # workers that are lost, and may return
        self._crash_counts: Counter[int] = Counter()
        self._solo_crash_counts: Counter[int] = Counter()
        self._last: dict[int, int] = {}  # by key, the worker that last finished a part of it
        self.left_out: set[int] = set()
        self._fill_lanes(items)

    def _fill_lanes(self, items: Sequence[WorkItem]) -> None:
        """Cut the items into one run of equal cost per worker."""
        lanes, queue = list(self._lanes.values()), deque(items)
        cost_left = sum(item.cost for item in items)
        for number, lane in enumerate(lanes):
            share = cost_left / (len(lanes) - number)
            filled = 0.0
            while queue and (number == len(lanes) - 1 or filled < share):
                item = queue.popleft()
                # How far the lane would end before and after its share, if it has whole problems.
                before, after = share - filled, filled + item.cost - share
                if number < len(lanes) - 1 and after > 0:
                    taken = round(before / item.weight)
                    is_far = min(before, after) > share * _LANE_TOLERANCE
                    if is_far and not item.is_atomic and 0 < taken < item.size:
                        item, remainder = item.cut(taken)
                        queue.appendleft(remainder)
                    elif filled and before < after:
                        queue.appendleft(item)
                        break
                lane.append(item)
                filled += item.cost
            cost_left -= filled

    # Workers

    def add(self, worker: int) -> None:
        """Add a new worker, or a lost one that has returned; it steals work from the others."""
        self._lanes.setdefault(worker, deque())
        self._lost_workers.discard(worker)

    def remove_worker(self, worker: int, *, for_good: bool = False) -> None:
        """Take back the open work of a dead worker.

        Args:
            worker: Number of the worker.
            for_good: Whether it never returns, so that its lane goes to another worker.
        """
        open_items = self._open.pop(worker, {})
        self._lost_workers.add(worker)
        self._suspect_workers.discard(worker)
        self._crash_counts.update(open_items.keys())
        returned = [
            replace(self._items[key], indices=tuple(sorted(indices)))
            for key, indices in open_items.items()
            if key not in self.left_out
        ]
        if len(returned) == 1:
            (only,) = returned
            self._solo_crash_counts[only.key] += 1
            if self._solo_crash_counts[only.key] >= MAX_DEATHS:
                self._leave_out(only.key)
                returned = []
        suspects = [item for item in returned if self._crash_counts[item.key] >= _SUSPECT]
        half = -(-len(suspects) // 2)
        self._suspects += ((part, worker) for part in (suspects[:half], suspects[half:]) if part)
        unsuspected = [item for item in returned if self._crash_counts[item.key] < _SUSPECT]
        self._lanes.setdefault(worker, deque()).extendleft(reversed(unsuspected))
        if for_good:
            lane = self._lanes.pop(worker)
            if self._lanes:
                min(self._lanes.values(), key=_cost).extend(lane)
            else:
                self._lanes[worker] = lane

    def cancel_remaining(self) -> list[int]:
        """Stop assigning work and take back open work; return the keys that are not done."""
        items = [item for lane in self._lanes.values() for item in lane]
        items += [item for part, _ in self._suspects for item in part]
        keys = {item.key for item in items} | {k for parts in self._open.values() for k in parts}
        self.left_out |= keys
        for lane in self._lanes.values():
            lane.clear()
        self._suspects.clear()
        self._open.clear()
        return sorted(keys)

    def _leave_out(self, key: int) -> None:
        """Assign no more work of a key."""
        self.left_out.add(key)
        for lane in self._lanes.values():
            remaining = [item for item in lane if item.key != key]
            lane.clear()
            lane.extend(remaining)
        suspects = [
            ([i for i in items if i.key != key], number) for items, number in self._suspects
        ]
        self._suspects = deque((items, number) for items, number in suspects if items)

    # Work

    def put(self, item: WorkItem) -> None:
        """Add work of a key that has no open work, for the worker that did its last part.

        That worker has computed the prompt. Other workers steal the work if they have nothing else.
        """
        if item.key in self.left_out:
            return
        self._items[item.key] = item
        worker = self._last.get(item.key)
        if worker not in self._lanes or worker in self._lost_workers:
            worker = min(self._lanes, key=self._load)
        self._lanes[worker].append(item)

    @property
    def has_work(self) -> bool:
        """Whether any work is open or waiting."""
        return self.has_waiting or any(self._open.values())

    @property
    def has_waiting(self) -> bool:
        """Whether any work waits to be assigned."""
        return bool(self._suspects) or any(self._lanes.values())

    def num_open(self, worker: int) -> int:
        """Return the number of rows that a worker was assigned and has not finished."""
        open_of = self._open.get(worker, {})
        return sum(
            1 if self._items[key].is_atomic else len(indices) for key, indices in open_of.items()
        )

    def assign(self, worker: int, *, num_decoded: int, num_rows: int) -> list[WorkItem]:
        """Assign further work to a worker, and return it.

        Args:
            worker: Number of the worker.
            num_decoded: Number of rows that it decodes at once. With fewer rows, it steals from the
                lanes of other workers; an earlier steal may be unnecessary, and computes prompts
                again.
            num_rows: Maximum number of rows that it then has.
        """
        if worker in self._suspect_workers:
            if self._open.get(worker):
                return []
            self._suspect_workers.discard(worker)
        budget = num_rows - self.num_open(worker)
        lane, assigned = self._lanes.setdefault(worker, deque()), []
        while budget > 0:
            if not lane and num_rows - budget < num_decoded:
                self._steal(worker)
            if not lane:
                break
            item = lane.popleft()
            if item.size > budget and not item.is_atomic:
                item, remainder = item.cut(budget)
                lane.appendleft(remainder)
            budget -= item.size
            assigned.append(self._assign_item(worker, item))
        if not assigned and not self._open.get(worker):
            assigned = [self._assign_item(worker, item) for item in self._choose_suspects(worker)]
        return assigned

    def _assign_item(self, worker: int, item: WorkItem) -> WorkItem:
        self._open[worker].setdefault(item.key, set()).update(item.indices)
        return item

    def _choose_suspects(self, worker: int) -> list[WorkItem]:
        """Return suspects for a worker, preferably not ones that have crashed it before."""
        candidates = self._lanes.keys() - self._lost_workers - {worker}
        for _ in range(len(self._suspects)):
            items, crashed = self._suspects.popleft()
            if crashed == worker and candidates:
                self._suspects.append((items, crashed))
                continue
            self._suspect_workers.add(worker)
            return items
        return []

    def _steal(self, worker: int) -> None:
        """Steal items from the end of the longest lane until both workers have the same cost.

        Steal the whole lane of a worker that is gone.
        """
        lanes = {other: lane for other, lane in self._lanes.items() if lane and other != worker}
        if not lanes:
            return
        busiest, own_lane = max(lanes, key=self._load), self._lanes[worker]
        lane, gap = lanes[busiest], self._load(busiest) - self._load(worker)
        if busiest in self._lost_workers:
            gap = 2 * _cost(lane)
        while lane and gap > 0:
            item = lane.pop()
            num = max(round(gap / 2 / item.weight), 1)
            if not item.is_atomic and num < item.size:
                first_part, item = item.cut(item.size - num)
                lane.append(first_part)
            if item.cost > gap:
                lane.append(item)
                return
            own_lane.appendleft(item)
            gap -= 2 * item.cost

    def _load(self, worker: int) -> float:
        """Return the cost of a worker's open work and of its lane."""
        items, open_of = self._items, self._open.get(worker, {})
        open_cost = sum(
            items[key].weight * (1 if items[key].is_atomic else len(parts))
            for key, parts in open_of.items()
        )
        return _cost(self._lanes[worker]) + open_cost

    def done(self, worker: int, key: int, index: int) -> bool:
        """Record that a part is done.

        Args:
            worker: Number of the worker.
            key: Key of the work.
            index: Index of the part.

        Returns:
            False if the worker does not have this part, so that the result must be ignored.
        """
        open_parts = self._open.get(worker, {}).get(key, set())
        if index not in open_parts:
            return False
        open_parts.discard(index)
        self._last[key] = worker
        if not open_parts:
            del self._open[worker][key]
        self._crash_counts.pop(key, None)
        self._solo_crash_counts.pop(key, None)
        return True

    def requeue(self, worker: int, parts: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Take back parts that a worker has returned, so that other workers can do them."""
        open_items = self._open.get(worker, {})
        for key, indices in parts:
            returned = open_items.get(key, set()) & set(indices)
            if not returned:
                continue
            open_items[key] -= returned
            if not open_items[key]:
                del open_items[key]
            if key not in self.left_out:
                item = replace(self._items[key], indices=tuple(sorted(returned)))
                self._lanes[worker].append(item)

    def find_donor(self) -> tuple[int, int] | None:
        """Return the worker from which an idle worker can take rows, and how many rows.

        Returns:
            None if no worker has two rows, or the worker with the most rows has suspects.
        """
        counts = {worker: self.num_open(worker) for worker in self._lanes}
        worker = max(counts, key=lambda number: counts[number], default=None)
        if worker is None or worker in self._suspect_workers or counts[worker] < 2:
            return None
        return worker, counts[worker] // 2


def num_rows_to_hold(num_decoded: int, num_finished: int) -> int:
    """Return how many rows a worker should hold, so that it rarely waits for more.

    Rows that a worker holds in reserve cannot go to another worker, so a larger reserve makes
    workers end at different times.

    Args:
        num_decoded: Number of rows that it decodes at once.
        num_finished: Number of rows that it finished in its last turn with any. The next assignment
            reaches it after two more turns, and turns differ.
    """
    return -(-num_decoded * 5 // 4) + 3 * num_finished


def _cost(lane: Iterable[WorkItem]) -> float:
    return sum(item.cost for item in lane)


def sort_depth_first(plan: Plan) -> list[int]:
    """Return the requests of a plan depth first, with the longest of sibling subtrees first."""
    longest = [segment.stop for segment in plan.segments]
    children: dict[int, list[int]] = {}
    for segment in reversed(plan.segments):  # children come after their parents
        children.setdefault(segment.parent, []).append(segment.index)
        if segment.parent >= 0:
            longest[segment.parent] = max(longest[segment.parent], longest[segment.index])
    requests: list[int] = []
    stack = [-1]
    while stack:
        index = stack.pop()
        if index >= 0:
            requests += plan.segments[index].requests
        below = reversed(children.get(index, ()))  # equally long siblings stay in the plan's order
        stack += sorted(below, key=lambda child: -longest[child])[::-1]
    return requests


def sample_items(plan: Plan, samples: Sequence[Sequence[int]]) -> list[WorkItem]:
    """Return the work items for drawing some samples of each request."""
    items = []
    for plan_index in sort_depth_first(plan):
        request, indices = plan.requests[plan_index], tuple(samples[plan_index])
        if not indices:
            continue
        is_atomic = request.rows < request.samples
        last_segment = plan.segments[int(plan.segment_of[plan_index])]
        prompt = (last_segment.stop - last_segment.start) / (1 if is_atomic else len(indices))
        items.append(WorkItem(plan_index, indices, request.max_tokens + prompt, is_atomic))
    return items


def score_groups(plan: Plan) -> list[list[int]]:
    """Return the requests to score, grouped by context."""
    groups: dict[int, list[int]] = {}
    for plan_index in sort_depth_first(plan):
        first = (plan.requests[plan_index].score_from or 1) - 1
        segment = next(s for s in plan.path(plan_index) if s.start <= first)
        groups.setdefault(segment.index, []).append(plan_index)
    return list(groups.values())


def score_items(plan: Plan, groups: Sequence[Sequence[int]]) -> list[WorkItem]:
    """Return the work items for scoring groups of requests."""
    items = []
    for number, group in enumerate(groups):
        segments = {
            segment.index: segment for plan_index in group for segment in plan.path(plan_index)
        }
        tokens = sum(s.stop - s.start for s in segments.values() if s.rows <= len(group))
        items.append(WorkItem(number, tuple(range(len(group))), max(tokens, 1) / len(group)))
    return items
