"""A run on workers without processes: each wait is one turn of every worker."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from treegen.common.outputs import Usage
from treegen.errors import StoppedError
from treegen.llm.cluster import cluster_run
from treegen.llm.cluster.cluster_run import ClusterRun
from treegen.llm.cluster.dispatcher import Dispatcher, WorkItem
from treegen.llm.cluster.streams import ClusterSearchRun, ClusterStream
from treegen.llm.cluster.worker import TurnResult
from treegen.llm.cluster.worker_pool import WorkerSlot
from treegen.search.tree.result import SearchProblem


@dataclass(eq=False)
class Turn:
    result: TurnResult | None = None


class Worker:
    """Does one part at a time; lengths: turns that each part takes, 0 for hardly any time."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._left = list(lengths)
        self._waiting, self._turns = deque[int](), deque[Any]()
        self.begin = SimpleNamespace(remote=lambda *_: None)
        self.turn = SimpleNamespace(remote=self._queue)
        self.end = SimpleNamespace(remote=lambda *_: None)
        self.done: list[int] = []

    def _queue(self, _: int, parts: list[Any], recall: int, *__: Any) -> Turn:
        self._turns.append((turn := Turn(), parts, recall))
        return turn

    def run_turn(self) -> None:
        """Run the next turn, and those behind it if no work is left."""
        while self._turns:
            turn, parts, recall = self._turns.popleft()
            self._waiting += [key for key, _ in parts]
            back = [self._waiting.pop() for _ in range(min(recall, len(self._waiting) - 1))]
            first = len(self.done)
            while self._waiting and self._left[self._waiting[0]] == 0:
                self.done.append(self._waiting.popleft())
            results = [(key, 0, None) for key in self.done[first:]]
            turn.result = TurnResult(results, [(key, [0]) for key in back], Usage())
            if self._waiting:
                self._left[self._waiting[0]] -= 1
                return


def _start(
    monkeypatch: pytest.MonkeyPatch,
    workers: Sequence[Worker],
    num_parts: int,
    on_wait: Callable[[], None],
) -> ClusterRun:
    """Start a run that calls a function whenever it waits for the workers."""

    def wait(refs: list[Any], num_returns: int = 1, timeout: float = 0) -> tuple[list[Any], Any]:
        if timeout:
            on_wait()
            for worker in workers:
                worker.run_turn()
        return [ref for ref in refs if ref.result is not None], None

    ignore: Callable[..., None] = lambda *_: None  # noqa: E731
    ray = SimpleNamespace(
        wait=wait, get=lambda ref: ref.result, put=ignore, exceptions=SimpleNamespace(RayError=())
    )
    slots = [WorkerSlot(number, actor) for number, actor in enumerate(workers)]
    for slot in slots:
        slot.loaded = SimpleNamespace(num_pages=0)  # type: ignore[assignment]
    pool: Any = SimpleNamespace(
        session=SimpleNamespace(ray=ray, monitor=SimpleNamespace(describe_failure=ignore)),
        slots=slots,
        add_joined_gpus=list,
        poll_slot=ignore,
        has_no_room=ignore,
    )
    monkeypatch.setattr(cluster_run, "pickle_job", ignore)
    items = [WorkItem(key, (0,)) for key in range(num_parts)]
    return ClusterRun(pool, ignore, Dispatcher(items, range(len(workers))), str, parts=1)  # type: ignore[arg-type]


def _run(monkeypatch: pytest.MonkeyPatch, workers: Sequence[Worker], num_parts: int) -> int:
    """Run a job; return the number of turns."""
    num_turns = 0

    def count() -> None:
        nonlocal num_turns
        num_turns += 1

    run = _start(monkeypatch, workers, num_parts, count)
    while run.has_work:
        run.step()
        assert num_turns < 1000
    assert sorted(key for worker in workers for key in worker.done) == list(range(num_parts))
    return num_turns


@pytest.mark.parametrize("first", [0, 1])
def test_returned_work_goes_to_the_idle_worker(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # One of the workers has two long parts, the other one two short parts.
    lengths = [1, 1, 1, 1]
    lengths[2 * first : 2 * first + 2] = 60, 20
    workers = [Worker(lengths), Worker(lengths)]
    assert _run(monkeypatch, workers, 4) < 70
    assert workers[first].done == [2 * first]


def test_a_worker_holds_more_parts_that_take_hardly_any_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _run(monkeypatch, [Worker([0] * 1000)], 1000) < 20


def test_a_cluster_that_is_closed_during_a_step_ends_its_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its workers end only after the step, which would report that no worker is left."""

    def close_cluster() -> None:
        run.close()
        for slot in run._pool.slots:
            slot.over = True

    closer, is_waiting = threading.Thread(target=close_cluster), threading.Event()

    def close() -> None:
        if not is_waiting.is_set():
            is_waiting.set()
            closer.start()
            closer.join(0.2)

    run = _start(monkeypatch, [Worker([5, 5])], 2, close)
    stream = ClusterStream(SimpleNamespace(requests=[]), run)  # type: ignore[arg-type]
    assert not list(stream)
    closer.join()
    with pytest.raises(StoppedError, match="closed during the run"):
        stream.check_complete()


def test_searches_whose_run_is_closed_have_no_list_of_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def close() -> None:
        run.close()

    run = _start(monkeypatch, [Worker([5, 5])], 2, close)
    problems = [SearchProblem(name, "a", True) for name in "ab"]
    with pytest.raises(StoppedError, match="closed before their ends"):
        ClusterSearchRun(problems, run).in_order()
