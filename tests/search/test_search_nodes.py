"""Nodes in other hands: copied, pickled, of another session, and what a search may return."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import re
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from fakes import HistoryModel
from live_search import PARAMS, backend_of, pool_of, run_of
from toy_search import hashed, run, run_all, start

from treegen.errors import InputError, TreeError
from treegen.search.ask_tell import AskTell
from treegen.search.session import Session
from treegen.search.tree.node import SearchNode
from treegen.search.tree.node_registry import pickling_for_other_process
from treegen.search.tree.result import SearchOutcome, SearchResult, detach, warn_if_all_failed

pytestmark = pytest.mark.usefixtures("frozen_objects")


def session_of(model: HistoryModel | None = None) -> Session:
    return Session(backend_of(model or HistoryModel(eos_bias=-9.0)), PARAMS)


# Copies


@dataclass
class State:
    """What a controller of another library keeps and copies at each step."""

    nodes: dict[str, list[SearchNode]] = field(default_factory=dict)
    session: Session | None = None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copied_state_has_the_very_same_nodes(copied: Callable[[State], State]) -> None:
    session = session_of()
    root = session.root("acde")
    state = State({"all": [root]}, session)
    for _ in range(3):
        state = copied(state)
        node = state.nodes["all"][-1]
        state.nodes["all"] += session.sample({node: 2})[node]
    assert copied(root) is root and copied(root.search) is root.search  # type: ignore[arg-type,comparison-overlap]
    assert state.session is session and state.nodes["all"][0] is root
    assert len(root.search.nodes()) == 7 and session.backend.scheduler.usage.decoded_tokens == 36


def test_pickling_says_why_not() -> None:
    session = session_of()
    root = session.root("acde")
    for live in (root.search, session, {"searches": [root.search]}):
        with pytest.raises(
            InputError, match="cannot be pickled, because it belongs to a model in memory"
        ):
            pickle.dumps(live)


def test_a_pickled_node_is_found_again() -> None:
    session = session_of()
    root, other = session.root("acde"), session.root("acd", name="a/b")
    (child, _) = session.sample({root: 2})[root]
    tool = session.sample({child.extend("ef"): 1}).popitem()[1][0]
    prompt = root.search.prompt("acd", key="what/is it")
    (answer,) = session.sample({prompt: 1})[prompt]
    nodes = [root, other, child, tool, answer]
    state = pickle.loads(pickle.dumps(State({"all": nodes})))
    assert all(before is found for before, found in zip(nodes, state.nodes["all"], strict=True))
    session.sample({state.nodes["all"][3]: 2})  # it is as live as before
    assert [session.find(node.key) for node in nodes] == nodes
    child.drop()
    assert session.find(tool.key) is tool and not tool.is_live
    for key in ("", "0", "0/7/", "0/0/+1/", "a/", "nobody/", tool.key + "0/9/", tool.key[:-1]):
        with pytest.raises(InputError, match="the session has no node"):
            session.find(key)
    same = [session.root("acd", name="twice") for _ in range(2)]
    with pytest.raises(InputError, match="2 nodes with the key"):
        session.find(same[0].key)


def test_nodes_are_not_sent_to_other_processes() -> None:
    root = session_of().root("acde")
    with (
        pickling_for_other_process(),
        pytest.raises(InputError, match="cannot be sent to another process"),
    ):
        pickle.dumps([root])
    assert pickle.loads(pickle.dumps(root)) is root


def test_keys_alone_are_enough_while_the_session_is_there() -> None:
    session = session_of()
    keys = [node.key for root in [session.root("acde")] for node in session.sample({root: 3})[root]]
    gc.collect()
    assert [session.find(key).key for key in keys] == keys
    data = pickle.dumps(session.find(keys[0]))
    code = "import pickle, sys\npickle.loads(sys.stdin.buffer.read())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=data, capture_output=True, check=False)
    assert done.returncode and b"its search is not in this process" in done.stderr


def test_results_are_pickled_without_their_exceptions() -> None:
    class Peculiar(Exception):
        def __init__(self, *, node: SearchNode) -> None:
            super().__init__("peculiar")

    async def fn(root: SearchNode) -> None:
        raise Peculiar(node=root)

    (result,) = run_all([start(hashed("abc"))[0]], fn)
    again = pickle.loads(pickle.dumps(result))
    assert again == result and again.exception is None and isinstance(result.exception, Peculiar)


# Nodes of another session


def test_a_session_refuses_nodes_of_another() -> None:
    session, other = session_of(), session_of()
    node, foreign = session.root("acde"), other.root("acde")
    for use in (
        lambda: session.sample({node: 1, foreign: 2}),
        lambda: session.score({foreign: ["a"]}),
    ):
        with pytest.raises(InputError, match="node '0/' belongs to another session"):
            use()
    with pytest.raises(InputError, match="expected nodes of the session, got 'acde'"):
        session.sample({"acde": 1})  # type: ignore[dict-item]
    assert not session.backend.has_work and not other.backend.has_work


def test_a_call_of_another_session_is_refused_and_leaves_nothing_behind() -> None:
    session, other = session_of(), session_of()
    foreign = other.root("acde")
    calls: list[Coroutine[Any, Any, Any]] = [foreign.sample(2), foreign.score(["a"])]
    for call in calls:
        started = session.start(call)
        assert started in session.step()
        with pytest.raises(InputError, match="waiting for something other than this session"):
            _ = started.result
    assert not other.backend.has_work
    assert len(other.sample({foreign: 2})[foreign]) == 2
    other.close()
    assert pool_of(other.backend).num_used == 0


def test_a_search_cannot_await_what_nobody_computes() -> None:
    session = session_of()
    judge = session.root("acde")

    async def fn(root: SearchNode) -> int:
        with pytest.raises(InputError, match="another session or run"):
            await judge.sample(1)
        with pytest.raises(InputError, match="another session or run"):
            await judge.score(["a"])
        return len(session.sample({judge: 1})[judge])  # which does compute

    assert [r.value for r in run_of(backend_of(HistoryModel()), fn, 2)] == [1, 1]
    searches = AskTell(fn, ["a"])
    assert searches.ask() == [] and searches.results[0] is not None
    assert searches.results[0].value == 1


def test_a_session_says_how_it_is_called() -> None:
    session = session_of()
    root = session.root("acde")
    with pytest.raises(InputError, match="a node of a session cannot be awaited"):
        asyncio.run(root.sample(1))
    with pytest.raises(InputError, match="cannot be awaited, because the session"):
        asyncio.run(root.score(["a"]))
    for wrong in (root, [root]):
        with pytest.raises(InputError, match="counts must be a mapping of nodes, such as"):
            session.sample(cast(Any, wrong))
        with pytest.raises(InputError, match="texts must be a mapping of nodes, such as"):
            session.score(cast(Any, wrong))
        with pytest.raises(InputError, match="call must be a call such as"):
            session.start(cast(Any, wrong))
    assert len(session.sample({root: 2})[root]) == 2


def test_a_session_can_be_stepped_in_an_event_loop() -> None:
    async def solve(root: SearchNode) -> list[SearchNode]:
        return [*await root.sample(2), *await root.sample(1)]

    async def step() -> int:
        call = session.start(solve(session.root("acde")))
        while not call.is_done:
            session.step()
            await asyncio.sleep(0)
        return len(call.result)

    session = session_of()
    with pytest.raises(InputError, match=r"session\.start and call session\.step until"):
        asyncio.run(solve(session.root("acde")))
    assert asyncio.run(step()) == 3


# What a search returns


def returning(what: Callable[[SearchNode], Any]) -> SearchResult:
    async def fn(root: SearchNode) -> Any:
        await root.sample(2, max_tokens=1)
        return what(root)

    (result,) = run_all([start(hashed("abc"))[0]], fn)
    assert len(result.tree.nodes) == 3 and result.best is None and result.candidates == ()
    return result


def other_root() -> SearchNode:
    return start(hashed("abc"), name="other")[0].root


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            lambda root: (root.children[0], 0.5),
            "a search returned a tuple of SearchNode, float; return only nodes",
        ),
        (lambda root: [root.children[0], None], "a search returned a list of SearchNode, NoneType"),
        (lambda root: other_root(), "a search returned node 'other/', which is not in its tree"),
        (
            lambda root: [root.children[0], other_root()],
            "a search returned node 'other/', which is not in its tree",
        ),
        (
            lambda root: SearchOutcome(other_root()),
            "a search returned node 'other/', which is not in its tree",
        ),
        (
            lambda root: SearchOutcome(None, (other_root(),)),
            "a search returned node 'other/', which is not in its tree",
        ),
        (
            lambda root: SearchOutcome(cast(Any, "text")),
            "a SearchOutcome must contain only nodes of the search, got 'text'",
        ),
        (
            lambda root: root.search.prompt("b"),
            "a search returned node 'toy/@1/', which is not in its tree",
        ),
        (
            lambda root: root.sample(1),
            "a search returned a call without its result (coroutine); use `return await ...`",
        ),
    ],
)
def test_what_is_no_node_of_the_search_is_told(
    what: Callable[[SearchNode], Any], message: str
) -> None:
    result = returning(what)
    assert result.error is not None and result.error.startswith(f"InputError: {message}")
    assert isinstance(result.exception, InputError)


@pytest.mark.parametrize("value", [(0.5, "x"), [], "text", {"a": 1}])
def test_what_has_no_nodes_is_a_value(value: Any) -> None:
    result = returning(lambda root: value)
    assert result.error is None and result.value == value


def test_an_object_that_can_be_awaited_is_a_value() -> None:
    """As references to objects of Ray, which whoever gets the results may await."""

    class Reference:
        def __await__(self) -> Generator[Any, None, int]:
            yield
            return 3

    reference = Reference()
    result = returning(lambda root: reference)
    assert result.error is None and result.value is reference


# Failures


async def broken(root: SearchNode) -> None:
    (node,) = await root.sample(1)
    await helper(node)


async def helper(node: SearchNode) -> None:
    secret = node
    try:
        int(secret.path_text + "x")
    except ValueError as error:
        raise RuntimeError("no number") from error


def test_a_failure_keeps_its_exception_and_traceback_but_not_the_model() -> None:
    backend = backend_of(HistoryModel(eos_bias=-9.0))
    results = list(run_of(backend, broken, 2))
    alive = weakref.ref(backend)
    for result in results:
        assert re.fullmatch(
            r"RuntimeError: no number \(test_search_nodes\.py:\d+, in \w+\)", result.error or ""
        )
        assert isinstance(result.exception, RuntimeError)
        text = "".join(traceback.format_exception(result.exception))
        for line in ("await helper(node)", "int(secret.path_text", 'RuntimeError("no number")'):
            assert line in text
        names = [frame.name for frame in traceback.extract_tb(result.exception.__traceback__)]
        assert names == ["broken", "helper"]
        assert "exception" not in result.to_json() and "exception" not in repr(result)
    del backend
    gc.collect()
    assert alive() is None


async def drawn(root: SearchNode) -> list[SearchNode]:
    children = await root.sample(2)
    await children[0].score(["ac"])
    return children


async def left(root: SearchNode) -> None:
    """Leave a task behind that waits for samples."""
    tasks.append(asyncio.ensure_future(root.sample(2)))
    await root.sample(1, max_tokens=1)


async def forever(root: SearchNode) -> None:
    while True:
        await root.sample(2)


tasks: list[asyncio.Future[list[SearchNode]]] = []


@pytest.mark.parametrize("fn", [drawn, broken, left])
def test_a_closed_run_frees_its_model_without_a_garbage_collection(
    fn: Callable[[SearchNode], Coroutine[Any, Any, Any]],
) -> None:
    gc.disable()
    try:
        model = HistoryModel(eos_bias=-9.0)
        run = run_of(backend_of(model), fn, 3)
        alive = weakref.ref(model)
        del model
        assert len(list(run)) == 3 and run.closed
        assert alive() is None
        assert run.usage.decoded_tokens > 0 and run.status().pages == 0
    finally:
        gc.enable()
        tasks.clear()


@pytest.mark.parametrize("fn", [drawn, broken, left, forever])
@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_a_dropped_run_frees_its_model_without_a_garbage_collection(
    fn: Callable[[SearchNode], Coroutine[Any, Any, Any]], num_steps: int
) -> None:
    gc.collect()
    gc.disable()
    try:
        model = HistoryModel(eos_bias=-9.0)
        run = run_of(backend_of(model), fn, 3)
        alive = weakref.ref(model)
        del model
        for _ in range(num_steps):
            run.step()
        del run
        assert alive() is None
    finally:
        gc.enable()
        tasks.clear()


def test_a_backend_that_fails_to_close_does_not_hold_its_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gc.disable()
    try:
        model = HistoryModel()
        backend, alive = backend_of(model), weakref.ref(model)
        del model
        with monkeypatch.context() as patch:
            patch.setattr(backend.scheduler, "close", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                backend.close()
        backend.close()
        assert alive() is None and backend.closed and backend.status().pages == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("closes", [True, False])
def test_nodes_of_a_session_can_be_read_but_do_not_hold_its_model(closes: bool) -> None:
    gc.disable()
    try:
        model = HistoryModel(eos_bias=-9.0)
        session = session_of(model)
        root = session.root("acde")
        (child,) = session.sample({root: 1})[root]
        alive = weakref.ref(model)
        del model
        if closes:
            session.close()
            assert session.closed and session.step() == [] and session.usage.decoded_tokens == 6
        del session
        assert alive() is None
    finally:
        gc.enable()
    assert child.path_text == child.text and child.num_context_tokens == 10
    with pytest.raises(InputError, match="the session is closed; open a new session"):
        child.extend("a")
    child.drop()
    assert not child.is_live


def failing() -> None:
    def divided(x: int) -> float:
        return (x + 1) / (x * 0)

    try:
        [divided(i) for i in range(3)]
    except ZeroDivisionError as error:
        raise ExceptionGroup("all", [ValueError("a"), error]) from error


def endless(depth: int) -> int:
    return endless(depth + 1)


@pytest.mark.parametrize("fail", [failing, lambda: int("x"), lambda: endless(0)])
def test_a_detached_error_is_told_as_before_and_holds_no_frame_that_ran(
    fail: Callable[[], object],
) -> None:
    with pytest.raises(Exception) as caught:
        fail()
    error = caught.value
    formatted = traceback.format_exception(error)
    assert traceback.format_exception(detach(error)) == formatted
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    assert frames and all(frame.f_back is None and not frame.f_locals for frame in frames)
    assert traceback.format_exception(detach(error)) == formatted  # once more


def test_what_is_no_coroutine_function_is_told() -> None:
    def plain(root: SearchNode) -> int:
        return 3

    (result,) = run_of(backend_of(HistoryModel()), plain, 1)  # type: ignore[arg-type]
    assert isinstance(result.exception, InputError) and "can be awaited" in str(result.exception)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("value", "high", "value of a node must be a number, got 'high'"),
        ("prior", [0.5], "prior of a node must be a number, got [0.5]"),
        ("scores", {"style": "x"}, "scores['style'] of a node must be a number, got 'x'"),
    ],
)
def test_a_value_that_is_no_number_is_named(name: str, value: Any, message: str) -> None:
    async def fn(root: SearchNode) -> SearchNode:
        setattr(root, name, value)
        return root

    (result,) = run_of(backend_of(HistoryModel()), fn, 1)
    assert isinstance(result.exception, InputError) and str(result.exception) == message


def test_only_text_and_parts_can_be_appended() -> None:
    async def fn(root: SearchNode) -> SearchNode:
        return root.extend(cast(Any, 3))

    with pytest.raises(TreeError, match="content must be text or a list of parts, got 3"):
        run(start(hashed("abc"))[0], fn)


def test_it_is_warned_if_all_fail() -> None:
    async def some(root: SearchNode) -> None:
        if root.search.name != "1":
            await broken(root)

    results = list(run_of(backend_of(HistoryModel(eos_bias=-9.0)), some, 3))
    warn_if_all_failed(results)
    warn_if_all_failed([])
    failed = [result for result in results if result.error]
    with pytest.warns(
        RuntimeWarning, match="all 2 searches failed; the first error: RuntimeError: no n"
    ):
        warn_if_all_failed(failed)
    assert run(start(hashed("abc"))[0], lambda root: asyncio.sleep(0)).exception is None
