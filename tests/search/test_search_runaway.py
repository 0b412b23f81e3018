"""Search functions that would never end, let nothing else go on, or break what records them."""

import asyncio
import gc
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fakes import HistoryModel
from live_search import PARAMS, backend_of, pool_of, run_of

from treegen.errors import InputError
from treegen.search import (
    AskTell,
    Budget,
    SearchNode,
    SearchResult,
    StopReason,
    budgeted_search,
    event_loop,
    gather,
)
from treegen.search.budget import BudgetIgnored, BudgetReached
from treegen.search.session import Session

_MAX_ROUNDS = 200_000  # rounds of a loop after which a test gives up
_MAX_BUDGET_REACHED = budgeted_search._MAX_BUDGET_REACHED  # before `hasty` patches it


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give searches up after fewer calls and less time than usual."""
    monkeypatch.setattr(budgeted_search, "_MAX_BUDGET_REACHED", 10_000)
    monkeypatch.setattr(budgeted_search, "_MAX_FURTHER_BUDGET_REACHED", 100)
    monkeypatch.setattr(event_loop, "_STUCK_SECONDS", 0.1)


async def polls(root: SearchNode) -> int:
    """Waits for its sample by asking again and again whether it is there."""
    future = asyncio.ensure_future(root.sample(2))
    for _ in range(_MAX_ROUNDS):
        if future.done():
            return len(future.result())
        await asyncio.sleep(0)
    return -1


async def spins(root: SearchNode) -> str:
    for _ in range(_MAX_ROUNDS):
        await asyncio.sleep(0)
    return "never ended"


async def two_spin(root: SearchNode) -> str:
    await gather([spins(root), spins(root)])
    return "never ended"


async def tries_again(root: SearchNode) -> str:
    """Takes a reached budget for a failure that may pass."""
    for _ in range(_MAX_ROUNDS):
        try:
            await root.sample(1)
        except Exception:
            continue
    return "never ended"


async def extends_again(root: SearchNode) -> str:
    for _ in range(_MAX_ROUNDS):
        try:
            root.extend("a")
        except Exception:
            continue
    return "never ended"


def test_a_search_may_poll_for_what_it_has_asked() -> None:
    backend = backend_of(HistoryModel())
    results = list(run_of(backend, polls, 3))
    assert [result.value for result in results] == [2, 2, 2]


def test_a_search_that_polls_does_not_hold_up_others() -> None:
    async def fn(root: SearchNode) -> object:
        if root.search.name == "0":
            return await spins(root)
        await root.run(len, "tool")
        return len(await root.sample(2))

    run = run_of(backend_of(HistoryModel()), fn, 3, budget=Budget(seconds=60))
    results: dict[str, SearchResult] = {}
    while len(results) < 2:
        run.step()
        results |= {result.name: result for result in run.take_results()}
    assert {name: result.value for name, result in results.items()} == {"1": 2, "2": 2}
    run.close()


def test_one_may_look_around_while_a_search_spins() -> None:
    run = run_of(backend_of(HistoryModel()), spins, 1)
    for _ in range(5):
        run.step()  # returns, so that Ctrl-C is noticed
        assert not run.take_results()
    run.close()


@pytest.mark.parametrize("fn", [spins, two_spin])
def test_seconds_end_a_search_that_spins(fn) -> None:  # type: ignore[no-untyped-def]
    for result in run_of(backend_of(HistoryModel()), fn, 2, budget=Budget(seconds=0.05)):
        assert result.error is None and result.stopped == "budget of 0.05 seconds reached"
    searches = AskTell(fn, ["a"], budget=Budget(seconds=0.05))
    assert searches.ask() == [] and searches.done
    (ended,) = searches.results
    assert ended is not None and ended.stopped == "budget of 0.05 seconds reached"


@pytest.mark.parametrize("fn", [tries_again, extends_again])
def test_who_asks_on_and_on_after_the_budget_is_ended(fn) -> None:  # type: ignore[no-untyped-def]
    (result,) = run_of(backend_of(HistoryModel()), fn, 1, budget=Budget(nodes=3))
    assert result.usage.nodes == 3 and len(result.tree.nodes) == 4
    assert result.stopped == "budget of 3 nodes reached" and result.error is None


def test_a_search_is_given_up_after_many_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgeted_search, "_MAX_BUDGET_REACHED", _MAX_BUDGET_REACHED)
    search = budgeted_search.BudgetedSearch("", None, None)
    search.stop("enough")
    num_reached = 0
    with pytest.raises(BudgetIgnored):
        for _ in range(_MAX_ROUNDS):
            try:
                search.check()
            except BudgetReached:
                num_reached += 1
    assert num_reached == 100_000


async def holds_itself(root: SearchNode) -> None:
    (child,) = await root.sample(1)
    child.data = {}
    child.data["again"] = child.data


async def too_deep(root: SearchNode) -> None:
    (child,) = await root.sample(1)
    for _ in range(10**5):
        child.data = [child.data]


class Mute:
    def __repr__(self) -> str:
        raise ValueError("nothing to say")


async def mute(root: SearchNode) -> object:
    (child,) = await root.sample(1)
    child.data = Mute()
    return Mute()


@pytest.mark.parametrize(
    ("fn", "data"),
    [
        (holds_itself, "{'again': {...}}"),
        (too_deep, "<list without a repr>"),
        (mute, "<Mute without a repr>"),
    ],
)
def test_data_that_nothing_can_hold_is_told_of(fn: Any, data: str) -> None:
    (result,) = run_of(backend_of(HistoryModel()), fn, 1)
    assert result.error is None and result.tree.nodes[1].data == data
    assert json.dumps(result.to_json())


async def no_number(root: SearchNode) -> None:
    for child in await root.sample(3):
        child.value = "good"  # type: ignore[assignment]


async def leaves_early(root: SearchNode) -> None:
    raise GeneratorExit


@pytest.mark.parametrize(("fn", "num"), [(no_number, 4), (leaves_early, 1)])
def test_every_search_has_a_result(fn: Any, num: int) -> None:
    results = list(run_of(backend_of(HistoryModel()), fn, 3))
    assert len(results) == 3
    for result in results:
        assert result.error is not None and len(result.tree.nodes) == num


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_what_ends_the_program_ends_all_searches(kind: type[BaseException]) -> None:
    async def leaves(root: SearchNode) -> None:
        try:
            await root.sample(2)
        finally:
            raise kind(3)

    run = run_of(backend_of(HistoryModel()), leaves, 3)
    with pytest.raises(kind) as caught:
        next(run)
    assert caught.value.args == (3,) and run.closed
    assert pool_of(run.backend).num_used == 0


def test_a_node_is_awaited_in_the_loop_of_its_search_alone() -> None:
    async def fn(root: SearchNode) -> object:
        return await root.run(lambda: asyncio.run(root.sample(1)))

    for result in run_of(backend_of(HistoryModel()), fn, 2):
        assert (
            result.error is not None and "outside of the event loop of its search" in result.error
        )


def test_tasks_that_a_search_leaves_behind_end_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    async def fn(root: SearchNode) -> int:
        for _ in range(3):
            asyncio.ensure_future(root.sample(2))  # noqa: RUF006
        await asyncio.sleep(0)
        return 1

    backend = backend_of(HistoryModel())
    assert [result.value for result in run_of(backend, fn, 2)] == [1, 1]
    gc.collect()
    assert caplog.records == [] and pool_of(backend).num_used == 0


def test_a_stream_that_is_left_shows_what_it_has_yielded_alone() -> None:
    async def fn(root: SearchNode) -> str:
        async for child in root.stream(6):
            return child.text  # without aclosing, so that the stream is closed some time later
        return ""

    backend = backend_of(HistoryModel())
    for result in run_of(backend, fn, 5):
        assert result.error is None
        assert [node.text for node in result.tree.nodes[1:]] == [result.value]
    assert pool_of(backend).num_used == 0


async def cannot_be_stopped(root: SearchNode) -> str:
    """Catches whatever is raised, and asks on."""
    while True:
        with suppress(BaseException):
            await root.sample(1)


async def has_one(root: SearchNode) -> str:
    return (await root.sample(1))[0].text


async def has_a_part_that_cannot_be_stopped(root: SearchNode) -> str:
    await gather([cannot_be_stopped(root), has_one(root)])
    return "never ended"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("fn", [cannot_be_stopped, has_a_part_that_cannot_be_stopped])
def test_a_search_that_nothing_ends_is_given_up(fn: Any) -> None:
    async def most_end(root: SearchNode) -> object:
        return await (fn(root) if root.search.name == "1" else polls(root))

    results = {
        each.name: each
        for each in run_of(backend_of(HistoryModel()), most_end, 3, budget=Budget(calls=3))
    }
    assert results["1"].stopped == "budget of 3 calls reached" and results["1"].error is None
    assert results["1"].stopped_by is StopReason.BUDGET
    assert len(results["1"].tree.nodes) == 4 and results["1"].value is None
    assert results["0"].value == results["2"].value == 2

    searches = AskTell(most_end, [("1", "a")], budget=Budget(calls=3))
    while requests := searches.ask():
        for request in requests:
            searches.tell(request, ["b"] * 1)
    (result,) = searches.results
    assert result is not None and result.stopped == "budget of 3 calls reached"


def test_a_call_of_a_session_that_nothing_ends_is_given_up() -> None:
    with Session(backend_of(HistoryModel()), PARAMS) as session:
        call = session.start(cannot_be_stopped(session.root("acde", budget=Budget(calls=3))))
        while not call.is_done:
            session.step()
        with pytest.raises(InputError, match="waiting for something other than this session"):
            _ = call.result


def test_an_interpreter_with_abandoned_searches_exits() -> None:
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import test_search_runaway as tests
tests.budgeted_search._MAX_BUDGET_REACHED = 10_000
tests.test_a_search_that_nothing_ends_is_given_up(tests.cannot_be_stopped)
tests.test_a_call_of_a_session_that_nothing_ends_is_given_up()
"""
    folder = Path(__file__).parent
    command = [sys.executable, "-c", program, str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_search_calls_its_end_says_nothing_of_the_run() -> None:
    async def stops(root: SearchNode) -> None:
        await root.sample(1)
        root.search.stop({"0": "interrupted", "1": "left out", "2": "solved"}[root.search.name])
        await root.sample(1)

    results = list(run_of(backend_of(HistoryModel()), stops, 3))
    assert all(result.stopped_by is StopReason.STOPPED for result in results)
    assert {result.stopped for result in results} == {"interrupted", "left out", "solved"}


def test_a_failed_search_says_that_it_failed() -> None:
    async def fails(root: SearchNode) -> object:
        (first,) = await root.sample(1)
        if root.search.name == "1":
            root.search.stop("enough")
        if root.search.name == "2":
            return [first, "no node"]
        raise ValueError("no such move")

    results = list(run_of(backend_of(HistoryModel()), fails, 3))
    assert [result.stopped_by for result in results] == [StopReason.FAILED] * 3
    assert all(result.error for result in results)


def test_dropped_nodes_are_recorded_and_freed_ones_are_not() -> None:
    async def drops(root: SearchNode) -> SearchNode:
        first, second = await root.sample(2)
        await first.sample(1)
        first.drop()
        return second

    (result,) = run_of(backend_of(HistoryModel()), drops, 1)
    assert [node.dropped for node in result.tree.nodes] == [False, True, True, False]
