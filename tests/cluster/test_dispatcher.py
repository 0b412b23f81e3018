"""Whoever deals: every part is done once, neighbours stay together, and what breaks is left out."""

import math
import random
from collections import Counter

import pytest
from simulate_workers import Simulation, WorkerSpeed

from treegen.bench.cluster import ClusterJob
from treegen.llm.cluster.dispatcher import Dispatcher, WorkItem


def _items(*sizes: int, weight: float = 10.0) -> list[WorkItem]:
    return [WorkItem(key, tuple(range(size)), weight) for key, size in enumerate(sizes)]


def _parts(items: list[WorkItem]) -> list[tuple[int, int]]:
    return [(item.key, index) for item in items for index in item.indices]


def test_lanes_are_runs_of_whole_problems() -> None:
    dispatcher = Dispatcher(_items(*[4] * 30), range(3))
    assigned = [dispatcher.assign(worker, num_decoded=0, num_rows=1000) for worker in range(3)]
    assert [[item.key for item in lane] for lane in assigned] == [
        list(range(10)),
        list(range(10, 20)),
        list(range(20, 30)),
    ]
    assert not dispatcher.has_waiting and dispatcher.num_open(1) == 40


def test_few_large_problems_are_shared_by_their_samples() -> None:
    dispatcher = Dispatcher(_items(1000, 1000, 1000), range(2))
    first, second = (
        dispatcher.assign(worker, num_decoded=0, num_rows=10_000) for worker in range(2)
    )
    assert [(item.key, item.size) for item in first] == [(0, 1000), (1, 500)]
    assert [(item.key, item.size) for item in second] == [(1, 500), (2, 1000)]
    assert not set(_parts(first)) & set(_parts(second))


def test_eight_problems_on_four_workers_stay_whole() -> None:
    dispatcher = Dispatcher(_items(*[1024] * 8), range(4))
    for worker in range(4):
        assigned = dispatcher.assign(worker, num_decoded=5000, num_rows=8000)
        assert [item.size for item in assigned] == [1024, 1024]


def test_who_is_through_takes_half_of_the_fullest_lane() -> None:
    dispatcher = Dispatcher(_items(*[2] * 20), range(2))
    taken = dispatcher.assign(0, num_decoded=2, num_rows=20)
    for key, index in _parts(taken):
        assert dispatcher.done(0, key, index)
    stolen = dispatcher.assign(0, num_decoded=2, num_rows=20)
    assert [item.key for item in stolen] == [15, 16, 17, 18, 19]
    rest = dispatcher.assign(1, num_decoded=2, num_rows=100)
    assert [item.key for item in rest] == [10, 11, 12, 13, 14]


def test_the_last_piece_of_one_who_is_away_is_taken_too() -> None:
    dispatcher = Dispatcher(_items(2, 1), range(2))
    for key, index in _parts(dispatcher.assign(0, num_decoded=4, num_rows=8)):
        dispatcher.done(0, key, index)
    assert _parts(dispatcher.assign(0, num_decoded=4, num_rows=8)) == [(1, 0)]


def test_greedy_samples_are_one_piece() -> None:
    items = [
        WorkItem(0, tuple(range(9)), 5.0, is_atomic=True),
        WorkItem(1, tuple(range(9)), 5.0, is_atomic=True),
    ]
    dispatcher = Dispatcher(items, range(2))
    assert [item.size for item in dispatcher.assign(0, num_decoded=1, num_rows=1)] == [1]
    assert dispatcher.num_open(0) == 1 and dispatcher.has_waiting
    assert dispatcher.assign(0, num_decoded=1, num_rows=1) == []


@pytest.mark.parametrize("seed", range(30))
def test_every_part_is_done_once_whatever_happens(seed: int) -> None:
    """Random jobs with workers that die, come, go for good, and give work back."""
    rng = random.Random(seed)
    items = [
        WorkItem(key, tuple(range(rng.randint(1, 9))), rng.uniform(1, 50), rng.random() < 0.2)
        for key in range(rng.randint(1, 40))
    ]
    alive = set(range(rng.randint(1, 4)))
    dispatcher, done = Dispatcher(items, alive), Counter[tuple[int, int]]()
    open_of: dict[int, list[tuple[int, int]]] = {worker: [] for worker in alive}
    for turn in range(100_000):
        if not dispatcher.has_work:
            break
        worker, what = rng.choice(sorted(alive)), rng.random()
        open_of[worker] += _parts(
            dispatcher.assign(worker, num_decoded=rng.randint(0, 9), num_rows=rng.randint(1, 20))
        )
        if what < 0.02 and turn < 2000:
            gone = len(alive) > 1 and rng.random() < 0.3
            dispatcher.remove_worker(worker, for_good=gone)
            open_of[worker] = []
            alive -= {worker} if gone else set()
        elif what < 0.04:
            new = max(open_of) + 1
            dispatcher.add(new)
            alive.add(new)
            open_of[new] = []
        elif what < 0.2 and open_of[worker]:
            wholes = {item.key for item in items if item.is_atomic}
            back = [part for part in open_of[worker] if part[0] not in wholes][-3:]
            dispatcher.requeue(worker, [(key, [index]) for key, index in back])
            open_of[worker] = [part for part in open_of[worker] if part not in back]
        elif open_of[worker]:
            key, index = open_of[worker].pop(0)
            assert dispatcher.done(worker, key, index)
            assert not dispatcher.done(worker, key, index)
            done[key, index] += 1
    assert not dispatcher.has_work and not dispatcher.left_out
    assert done == Counter(_parts(items))


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("culprit", [0, 17, 63])
def test_what_breaks_workers_is_found_and_left_out(workers: int, culprit: int) -> None:
    """A worker that gets the culprit dies with all that it has; nobody else's work is lost."""
    dispatcher, done, deaths = Dispatcher(_items(*[3] * 64), range(workers)), set(), 0
    for _ in range(10_000):
        if not dispatcher.has_work:
            break
        for worker in range(workers):
            assigned = dispatcher.assign(worker, num_decoded=8, num_rows=16)
            if any(item.key == culprit for item in assigned):
                dispatcher.remove_worker(worker)
                deaths += 1
                continue
            for key, index in _parts(assigned):
                dispatcher.done(worker, key, index)
                done.add((key, index))
    assert dispatcher.left_out == {culprit}
    assert done == {(key, index) for key in range(64) for index in range(3) if key != culprit}
    assert deaths <= 12


def test_suspects_are_not_kept_for_workers_that_are_away() -> None:
    dispatcher = Dispatcher(_items(1, 1), range(2))
    dispatcher.remove_worker(1)
    for _ in range(2):
        assert dispatcher.assign(0, num_decoded=4, num_rows=8)
        dispatcher.remove_worker(0)
        dispatcher.add(0)
    assert dispatcher.assign(0, num_decoded=4, num_rows=8)


def test_what_is_left_out_is_not_dealt_again_when_others_give_it_back() -> None:
    dispatcher = Dispatcher(_items(12), range(4))
    for worker in (1, 2):
        assert dispatcher.assign(worker, num_decoded=4, num_rows=4)
    while not dispatcher.left_out:
        worker = next(each for each in (0, 3) if dispatcher.assign(each, num_decoded=4, num_rows=4))
        dispatcher.remove_worker(worker)
        dispatcher.add(worker)
    dispatcher.remove_worker(2)
    dispatcher.requeue(1, [(0, range(12))])
    assert not dispatcher.has_work


def test_an_idle_worker_relieves_one_that_has_much() -> None:
    dispatcher = Dispatcher(_items(100), range(2))
    dispatcher.requeue(1, [])
    dispatcher.assign(0, num_decoded=0, num_rows=100)
    dispatcher.assign(1, num_decoded=0, num_rows=10)
    assert dispatcher.find_donor() == (0, 25)
    for worker, indices in ((0, range(49)), (1, range(50, 59))):
        assert all(dispatcher.done(worker, 0, index) for index in indices)
    assert dispatcher.find_donor() is None


@pytest.mark.parametrize(
    "sizes", [[8] * 100, [1000, 1000, 1000], [7] * 101, [3, 500, 2, 9, 500] * 3]
)
@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_lanes_have_equal_costs(sizes: list[int], workers: int) -> None:
    dispatcher = Dispatcher(_items(*sizes), range(workers))
    costs = [dispatcher._load(worker) / 10 for worker in range(workers)]
    assert sum(costs) == sum(sizes)
    # A lane ends with a problem, if one ends within 5% of the lane's share.
    slack = max(1, min(max(sizes) / 2, 0.05 * sum(sizes) / workers))
    assert max(costs) - min(costs) <= 2 * slack, costs


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize(
    ("problems", "samples", "mean", "limit"),
    [(3000, 8, 3, 12), (800, 20, 40, 160), (9, 900, 40, 160)],
)
def test_workers_of_a_long_job_do_the_same_work(
    workers: int, problems: int, samples: int, mean: int, limit: int
) -> None:
    # If each token takes the same time, only unequal work makes several workers less efficient.
    speed = WorkerSpeed(64, (0, 64), (0, 64), math.inf, latency=0.01)
    job = ClusterJob(problems, samples, mean_tokens=mean, max_tokens=limit)
    time = Simulation(job, workers, speed).run()
    assert time.workers == workers and time.tokens > problems * samples
    assert 0.99 * time.tokens < 1000 * time.seconds * workers < 1.05 * time.tokens


def test_long_prompts_are_not_computed_again_for_workers_that_have_enough() -> None:
    speed = WorkerSpeed(64, (1, 64), (5, 6), 28_000, latency=0.01)
    job = ClusterJob(64, 16, problem_tokens=30_000, mean_tokens=100, max_tokens=256)
    one, eight = (Simulation(job, workers, speed).run() for workers in (1, 8))
    assert one.seconds / eight.seconds > 7
