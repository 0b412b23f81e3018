"""Sessions against a model whose logits are a hash of what its pages hold."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import HistoryModel, LetterTokenizer, make_stop_conditions
from hypothesis import given, settings
from hypothesis import strategies as st
from live_search import PARAMS, backend_of, pool_of, run_of

from treegen.common.params import SamplingParams
from treegen.engine.passes import prefill as prefilling
from treegen.errors import CapacityError, InputError
from treegen.model.batch import Batch
from treegen.ops.sampling.batch import SamplingBatch
from treegen.ops.sampling.draw import draw
from treegen.prompts.plan.cost_model import Sharing
from treegen.prompts.plan.draws import row_seed
from treegen.search.budget import Budget, BudgetReached
from treegen.search.live.backend import LiveBackend
from treegen.search.propose import sample_steps
from treegen.search.run import SearchRun
from treegen.search.session import Session, Started
from treegen.search.strategies.beam import beam
from treegen.search.tree.node import SearchFn, SearchNode
from treegen.search.tree.result import SearchOutcome, name_problems


def text_ids(text: str) -> list[int]:
    return [ord(letter) - 97 for letter in text]


def expected_sample(
    model: HistoryModel, context: list[int], key: str, index: int, params: SamplingParams
) -> tuple[int, ...]:
    """Tokens of one sample, drawn without any cache."""
    stopping = make_stop_conditions(params, model.vocab_size)
    one = SamplingBatch.of([params], torch.zeros(1, dtype=torch.int64))
    seed = torch.tensor([[row_seed(params.seed, key, index)]])
    tokens: list[int] = []
    while not tokens or stopping.endings([context], [tokens], [params.max_tokens]) == [None]:
        logits = model.logits([*context, *tokens])[None]
        tokens.append(int(draw(logits, seed, torch.tensor([[len(tokens)]]), one).tokens_PN))
    return tuple(tokens)


def context_of(node: SearchNode) -> list[int]:
    return text_ids(node.path[0].text + node.path_text)


def check_children(
    model: HistoryModel, node: SearchNode, children: list[SearchNode], params: SamplingParams
) -> None:
    for child in children:
        origin = node.search.origin_of(node.key)
        expected = expected_sample(model, context_of(node), origin, child.order[1], params)
        assert child.tokens == expected
        assert child.text == LetterTokenizer().decode(expected[: len(child.text)])


letters = st.text("acdefgh", min_size=1, max_size=9)


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    num_pages=st.integers(40, 120),
    page_size=st.sampled_from([1, 2, 4, 16]),
    max_rows=st.integers(1, 12),
    sharing=st.sampled_from(["auto", "all", "one", "off"]),
    prefill_chunk=st.sampled_from([5, 64]),
    run_ahead=st.booleans(),
)
def test_any_tree_gives_the_samples_of_its_texts(
    data: st.DataObject,
    num_pages: int,
    page_size: int,
    max_rows: int,
    sharing: Sharing,
    prefill_chunk: int,
    run_ahead: bool,
) -> None:
    model = HistoryModel(eos_bias=1.0)
    backend = backend_of(
        model,
        num_pages=num_pages * 4 // page_size + 20,
        page_size=page_size,
        max_rows=max_rows,
        sharing=sharing,
        prefill_chunk=prefill_chunk,
        run_ahead=run_ahead,
    )
    session = Session(backend, PARAMS)
    shared = data.draw(letters) * 3
    nodes = [session.root(shared + data.draw(letters))]
    for _ in range(data.draw(st.integers(1, 8))):
        action = data.draw(st.sampled_from(["root", "sample", "extend", "drop", "score"]))
        live = [node for node in nodes if node.is_live]
        if action == "root" or not live:
            nodes.append(session.root(shared + data.draw(st.text("acde", max_size=6))))
        elif action == "extend":
            nodes.append(data.draw(st.sampled_from(live)).extend(data.draw(st.text("ac"))))
        elif action == "drop":
            data.draw(st.sampled_from(live)).drop()
        elif action == "score":
            node = data.draw(st.sampled_from(live))
            texts = data.draw(st.lists(st.text("acd", min_size=1, max_size=5), min_size=1))
            for text, score in zip(texts, session.score({node: texts})[node], strict=True):
                context = context_of(node)
                for token, logprob in zip(text_ids(text), score.logprobs, strict=True):
                    expected = model.logits(context).log_softmax(-1)[token]
                    assert logprob == pytest.approx(float(expected), abs=1e-4)
                    context.append(token)
        else:
            chosen = data.draw(st.lists(st.sampled_from(live), min_size=1, unique=True))
            params: dict[str, Any] = data.draw(
                st.sampled_from([{}, {"stop": "c", "max_tokens": 9}, {"temperature": 0.5}])
            )
            counts = {node: data.draw(st.integers(1, 4)) for node in chosen}
            for node, children in session.sample(counts, **params).items():
                assert len(children) == counts[node]
                check_children(model, node, children, replace(PARAMS, **params))
                nodes += children
        backend.scheduler.check()
        assert not backend.has_work
    for node in nodes:
        node.drop()
    backend.scheduler.check()
    session.close()
    assert pool_of(backend).num_used == 0


def test_branching_computes_one_token() -> None:
    model = HistoryModel(eos_bias=-9.0)
    backend = backend_of(model, page_size=16)
    session = Session(backend, PARAMS)
    node = session.root("acdefgha" * 5)
    (node,) = session.sample({node: 1}, max_tokens=1)[node]
    for depth in range(8):
        before = model.tokens_computed
        children = session.sample({node: 5}, max_tokens=20)[node]
        # The last token of the node, whose key was never needed, and 19 steps of 5 rows.
        assert model.tokens_computed - before == 1 + 19 * 5, depth
        before = model.tokens_computed
        again = session.sample({node: 2}, max_tokens=1)[node]
        assert model.tokens_computed - before == 1
        assert children[0].num_context_tokens == node.num_context_tokens + 20
        assert [child.order[1] for child in (*children, *again)] == list(range(7))
        node = children[depth % 5]


def test_dropping_a_node_frees_its_pages_at_once() -> None:
    model = HistoryModel(eos_bias=-9.0)
    backend = backend_of(model, page_size=4)
    session = Session(backend, PARAMS)
    root = session.root("acdefgha")
    children = session.sample({root: 4}, max_tokens=40)[root]
    pool = pool_of(backend)
    before = pool.num_used
    children[0].drop()
    assert pool.num_used <= before - 9
    with pytest.raises(InputError, match="dropped"):
        session.sample({children[0]: 1})
    grandchildren = session.sample({children[1]: 2})[children[1]]
    children[1].drop()
    assert not grandchildren[0].is_live
    backend.scheduler.check()


def test_memory_pressure_evicts_and_recomputes() -> None:
    model = HistoryModel(eos_bias=-9.0)
    backend = backend_of(model, num_pages=30, page_size=4)
    session = Session(backend, PARAMS)
    root = session.root("acdefgha")
    nodes = [root]
    for _ in range(3):
        before = session.sample(dict.fromkeys(nodes[-6:], 6), max_tokens=8)
        for node, children in before.items():
            check_children(model, node, children, replace(PARAMS, max_tokens=8))
            nodes += children
        backend.scheduler.check()
    first = session.sample({nodes[1]: 2})[nodes[1]]
    check_children(model, nodes[1], first, PARAMS)
    assert session.usage.recomputed_tokens > 0


def test_a_text_cut_at_a_stop_goes_on_from_the_cut() -> None:
    model = HistoryModel(eos_bias=-9.0)
    session = Session(backend_of(model), PARAMS)
    root = session.root("acde")
    for child in session.sample({root: 12}, stop=["c", "fg"], max_tokens=30)[root]:
        assert "c" not in child.text
        after = child.extend("hh")
        for node in (child, after):
            (below,) = session.sample({node: 1})[node]
            check_children(model, node, [below], PARAMS)


def test_what_cannot_fit_is_refused_alone() -> None:
    model = HistoryModel(eos_bias=-9.0)
    session = Session(backend_of(model, num_pages=14, page_size=4, context_length=60), PARAMS)
    long = session.root("acde" * 15)
    with pytest.raises(CapacityError, match="the model's context"):
        session.sample({long: 1})
    with pytest.raises(CapacityError, match="the cache holds only"):
        session.sample({session.root("acde" * 13): 1})
    assert len(session.sample({session.root("acde"): 3}, max_tokens=2)) == 1


def test_ask_and_tell_for_a_loop_of_ones_own() -> None:
    model = HistoryModel()
    session = Session(backend_of(model), PARAMS)
    root = session.root("acde")
    started = [session.start(root.sample(2)), session.start(root.sample(3))]
    with pytest.raises(InputError, match="not available yet"):
        _ = started[0].result
    done: list[Started[Any]] = []
    while len(done) < 2:
        done += session.step()
    assert [len(each.result) for each in started] == [2, 3]
    assert [child.order[1] for child in root.children] == [0, 1, 2, 3, 4]
    failing = session.start(root.sample(-1))
    assert session.step() == [failing]
    with pytest.raises(InputError, match="n must be at least 0"):
        _ = failing.result


# Many searches at once


async def two_levels(root: SearchNode) -> list[SearchNode]:
    first = await root.sample(3)
    second = await asyncio.gather(*(node.sample(2, max_tokens=4) for node in first))
    third = await second[0][0].sample(1)
    first[2].drop()
    return third


def trees(results: Sequence[object]) -> dict[str, list[object]]:
    return {r.name: [n.to_json() for n in r.tree.nodes] for r in results}  # type: ignore[attr-defined]


@pytest.mark.parametrize("concurrency", [1, 3, 20])
def test_a_search_is_the_same_whatever_runs_beside_it(concurrency: int) -> None:
    model = HistoryModel(eos_bias=0.5)
    together = trees(list(run_of(backend_of(model), two_levels, 12, concurrency=concurrency)))
    tight = backend_of(model, num_pages=60, max_rows=5, run_ahead=True)
    assert trees(list(run_of(tight, two_levels, 12, concurrency=4))) == together
    assert len(together) == 12
    assert all(len(nodes) == 1 + 3 + 6 + 1 for nodes in together.values())


def test_searches_share_their_steps() -> None:
    model = HistoryModel(eos_bias=-9.0)
    backend = backend_of(model, max_rows=200)
    results = list(run_of(backend, two_levels, 12, concurrency=12))
    usage = backend.usage
    assert usage.decode_steps <= 5 + 3 + 5
    assert usage.prefill_steps <= 4
    # Each level of a search prefills the last token of its nodes; the shared prompt once.
    assert sum(r.usage.tokens_prefilled for r in results) == usage.prompt_tokens_computed + (
        usage.recomputed_tokens
    )
    assert usage.prompt_tokens_computed < 12 * 24
    assert pool_of(backend).num_used == 0


def test_one_failing_search_fails_alone_and_keeps_its_tree() -> None:
    async def fragile(root: SearchNode) -> None:
        await root.sample(2)
        if root.search.name == "3":
            raise ValueError("no such tool\nat all")
        await root.sample(1)

    results = {r.name: r for r in run_of(backend_of(HistoryModel()), fragile, 6)}
    error = results["3"].error or ""
    assert re.fullmatch(
        r"ValueError: no such tool at all \(test_search_session\.py:\d+, in \w+\)", error
    )
    assert len(results["3"].tree.nodes) == 3
    assert all(len(r.tree.nodes) == 4 for name, r in results.items() if name != "3")


@pytest.mark.parametrize("tokens", [1, 7, 30])
def test_a_token_budget_ends_samples_under_way(tokens: int) -> None:
    async def greedy(root: SearchNode) -> None:
        while True:
            await root.sample(3, max_tokens=8)

    backend = backend_of(HistoryModel(eos_bias=-9.0))
    results = list(run_of(backend, greedy, 5, budget=Budget(tokens=tokens)))
    for result in results:
        assert result.error is None
        assert result.stopped == f"budget of {tokens} tokens reached"
        assert tokens <= result.usage.tokens_decoded < tokens + 3
    assert backend.usage.decoded_tokens == sum(r.usage.tokens_decoded for r in results)
    assert pool_of(backend).num_used == 0


def test_a_stream_can_be_left_and_does_not_show_chance() -> None:
    async def first_two(root: SearchNode) -> list[SearchNode]:
        kept = []
        stream = root.stream(6, max_tokens=30)
        async for child in stream:
            kept.append(child)
            if len(kept) == 2:
                break
        await stream.aclose()
        return kept

    model = HistoryModel(eos_bias=0.5)
    results = list(run_of(backend_of(model), first_two, 4))
    assert all(len(r.tree.nodes) == 3 for r in results)
    alone = list(run_of(backend_of(model, max_rows=1), first_two, 4, concurrency=1))
    assert trees(results) == trees(alone)


def test_a_search_may_wait_for_something_else() -> None:
    async def with_tool(root: SearchNode) -> str:
        (child,) = await root.sample(1)
        await asyncio.sleep(0.02)
        after = child.extend("cc")
        await after.sample(1)
        other = root.search.prompt("hhhh")
        scores = await other.score(["a", "cd"])
        other.drop()
        return f"{len(scores)}"

    results = list(run_of(backend_of(HistoryModel()), with_tool, 5, concurrency=2))
    assert [r.value for r in results] == ["2"] * 5
    assert all(r.error is None for r in results)


def test_works_inside_a_running_loop_and_can_be_left_early() -> None:
    async def notebook() -> list[str]:
        run = run_of(backend_of(HistoryModel()), two_levels, 6)
        name = next(run).name
        run.close()
        assert run.closed
        return [name]

    assert len(asyncio.run(notebook())) == 1


def test_a_stopped_search_refuses_to_go_on() -> None:
    session = Session(backend_of(HistoryModel()), PARAMS)
    root = session.root("acde", budget=Budget(calls=1))
    session.sample({root: 1})
    with pytest.raises(BudgetReached, match="1 calls"):
        session.sample({root: 1})
    assert np.isclose(root.search.usage.calls, 1)


# Ends of all kinds


async def long_sample(root: SearchNode) -> None:
    await root.sample(3, max_tokens=50)


def test_what_is_closed_neither_waits_nor_goes_on() -> None:
    backend = backend_of(HistoryModel(eos_bias=-9.0))
    session = Session(backend, PARAMS)
    root = session.root("acde")
    other = session.root("acdc")
    (child,) = session.sample({root: 1})[root]
    started = session.start(child.sample(2, max_tokens=20))
    for _ in range(4):
        assert session.step() == []
    session.close()
    assert session.step() == [started]
    with pytest.raises(BudgetReached, match="session was closed"):
        _ = started.result
    assert child.search.usage.tokens_decoded > 6
    for use in (lambda: session.sample({other: 2}), lambda: session.score({other: ["a"]})):
        with pytest.raises(InputError, match="closed"):
            use()
    with pytest.raises(InputError, match="closed"):
        child.extend("a")
    with pytest.raises(InputError, match="closed"):
        session.root("acde")
    assert pool_of(backend).num_used == 0


def test_a_closed_run_has_no_results_of_what_had_not_finished() -> None:
    run = run_of(backend_of(HistoryModel(eos_bias=-9.0)), long_sample, 4)
    for _ in range(5):
        run.step()
    run.close()
    assert list(run) == []


def test_a_search_may_close_its_run() -> None:
    async def closing(root: SearchNode) -> None:
        await root.sample(1, max_tokens=2)
        if root.search.name == "1":
            run.close()
        await root.sample(3, max_tokens=50)

    run = run_of(backend_of(HistoryModel(eos_bias=-9.0)), closing, 4)
    assert list(run) == []
    assert run.num_running == 0


def test_a_search_that_cancels_itself_fails_alone() -> None:
    async def cancelling(root: SearchNode) -> None:
        call = asyncio.ensure_future(root.sample(1))
        if root.search.name == "1":
            call.cancel()
        await call

    results = {r.name: r.error for r in run_of(backend_of(HistoryModel()), cancelling, 3)}
    error = results.pop("1") or ""
    assert results == {"0": None, "2": None}
    assert re.fullmatch(r"CancelledError \(test_search_session\.py:\d+, in cancelling\)", error)


def test_samples_that_nobody_waits_for_any_more_are_freed() -> None:
    async def impatient(root: SearchNode) -> tuple[int, int]:
        call = asyncio.ensure_future(root.sample(8, max_tokens=60))
        while not any(not request.samples or len(request.samples) < 8 for request in requests()):
            await asyncio.sleep(0.001)
        call.cancel()
        await asyncio.wait([call])
        late = asyncio.ensure_future(root.sample(1, max_tokens=3))
        await asyncio.sleep(0)
        root.drop()
        assert not (await late)[0].is_live
        return len(backend.scheduler.run.store.segments), pool_of(backend).num_used

    backend = backend_of(HistoryModel(eos_bias=1.0))
    requests = backend.scheduler.run.requests.values
    (result,) = run_of(backend, impatient, 1)
    assert result.error is None
    assert result.value == (0, 0)
    assert backend.usage.decoded_tokens == result.usage.tokens_decoded


def test_tasks_that_a_search_leaves_behind_end_with_the_run() -> None:
    ends: list[str] = []

    async def tool(name: str) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ends.append(name)

    async def careless(root: SearchNode) -> None:
        root.data = asyncio.ensure_future(tool(root.search.name))
        await root.sample(1)

    run = run_of(backend_of(HistoryModel()), careless, 3)
    assert len(list(run)) == 3
    assert sorted(ends) == ["0", "1", "2"]
    assert isinstance(run.backend, LiveBackend) and not run.backend.new


def test_a_score_that_cannot_fit_is_refused_alone() -> None:
    model = HistoryModel(eos_bias=-9.0)
    session = Session(backend_of(model, num_pages=14, page_size=4, context_length=60), PARAMS)
    root = session.root("acde")
    with pytest.raises(CapacityError, match="model's context"):
        session.score({root: ["a", "d" * 60]})
    with pytest.raises(CapacityError, match="the cache holds only"):
        session.score({root: ["a", "d" * 54]})
    assert not session.backend.has_work
    assert len(session.score({root: ["a", "d" * 40]})[root]) == 2
    assert len(session.backend.scheduler.run.store.segments) == 1


def test_a_deep_path_is_refused_before_it_fills_the_memory() -> None:
    model = HistoryModel(eos_bias=-9.0)
    backend = backend_of(model, num_pages=20, page_size=4)
    session = Session(backend, PARAMS)
    node = root = session.root("acd")
    with pytest.raises(CapacityError, match="the cache holds only"):
        while True:
            (node,) = session.sample({node: 1}, max_tokens=3)[node]
            backend.scheduler.check()
    # All but what is refused can still be drawn from, whatever has been evicted meanwhile.
    session.sample({session.root("h" * 70): 1}, max_tokens=3)
    assert node.parent is not None
    parent = node.parent
    check_children(
        model,
        parent,
        session.sample({parent: 1}, max_tokens=3)[parent],
        replace(PARAMS, max_tokens=3),
    )
    assert root.is_live


def test_a_row_above_which_a_part_was_split_off_meanwhile_gets_its_pages() -> None:
    model = HistoryModel(eos_bias=-9.0)
    session = Session(backend_of(model, num_pages=4, page_size=4), PARAMS)
    other = session.root("acde")
    session.sample({other: 1}, max_tokens=1)
    root = session.root("hhhhh")
    started = [session.start(root.sample(1, max_tokens=5))]
    session.step()  # Its first token is drawn; the prompt is folded into the row.
    started.append(session.start(root.sample(2, max_tokens=5)))  # From now on the prompt is not.
    for _ in range(60):
        session.step()
    assert [len(each.result) for each in started] == [1, 2]
    check_children(model, root, root.children, replace(PARAMS, max_tokens=5))


def test_idle_caches_leave_before_rows_wait() -> None:
    model = HistoryModel(eos_bias=-9.0)
    session = Session(backend_of(model, num_pages=30, page_size=4), PARAMS)
    root, other = session.root("acdefgha"), session.root("hhhhhhhh")
    session.sample({root: 6}, max_tokens=16)
    assert pool_of(session.backend).num_free < 6
    before = session.usage.decode_steps
    children = session.sample({other: 6}, max_tokens=8)[other]
    check_children(model, other, children, replace(PARAMS, max_tokens=8))
    assert session.usage.decode_steps - before == 7


def test_the_account_has_what_a_search_did_not_wait_for() -> None:
    async def hasty(root: SearchNode) -> None:
        root.data = asyncio.ensure_future(root.sample(2, max_tokens=30))
        await root.sample(1, max_tokens=9)
        root.data.add_done_callback(lambda call: call.exception())

    backend = backend_of(HistoryModel(eos_bias=-9.0))
    results = list(run_of(backend, hasty, 3))
    assert all(result.usage.tokens_decoded > 9 for result in results)
    assert backend.usage.decoded_tokens == sum(r.usage.tokens_decoded for r in results)


def test_a_stream_of_no_whole_number_is_refused() -> None:
    async def negative(root: SearchNode) -> list[str]:
        with pytest.raises(InputError, match="n must be at least 0"):
            await anext(root.stream(-1))
        return [child.key for child in await root.sample(2)]

    (result,) = run_of(backend_of(HistoryModel()), negative, 1)
    assert result.value == ["0/0/", "0/1/"]


def test_a_stream_of_equal_children_is_refused_as_by_sample() -> None:
    async def greedy(root: SearchNode) -> list[str]:
        for call in (root.sample(2, temperature=0), anext(root.stream(2, temperature=0))):
            with pytest.raises(InputError, match="temperature 0 produces n identical children"):
                await call
        return [child.key async for child in root.stream(1, temperature=0)]

    (result,) = run_of(backend_of(HistoryModel()), greedy, 1)
    assert result.value == ["0/0/"]


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("asks_score_first", [False, True])
def test_what_ends_while_its_search_is_stopped_is_dropped(
    steps: int, asks_score_first: bool
) -> None:
    """Stopping a score waits for the pass under way, with which samples of the search end."""
    model = HistoryModel(eos_bias=-20.0)
    backend = backend_of(model, run_ahead=True, prefill_chunk=4)
    session = Session(backend, PARAMS)
    root, other = session.root("cdefghij"), session.root("ggg")
    calls = [
        lambda: root.sample(3, max_tokens=1),
        lambda: root.score(["kkkkllllmmmmnnnnoooopppp"]),
    ]
    for call in reversed(calls) if asks_score_first else calls:
        session.start(call())
    last = session.start(other.sample(2, max_tokens=3))
    for _ in range(steps):
        session.step()
    backend.cancel(root.search)
    while not last.is_done:
        session.step()
    check_children(model, other, last.result, replace(PARAMS, max_tokens=3))
    session.close()
    pool_of(backend).check([])


def test_scores_are_computed_a_bounded_number_of_logits_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefilling, "max_prefill_logits", lambda device: 32 * 24)
    model = HistoryModel()
    rows: list[int] = []

    def watched(batch: Batch) -> torch.Tensor:
        rows.append(len(batch.logits_at_S))
        return HistoryModel.forward(model, batch)

    monkeypatch.setattr(model, "forward", watched)
    session = Session(backend_of(model, prefill_chunk=1000), PARAMS)
    root = session.root("cdef" * 30)
    texts = ["acd" * 30, "c", "hgf" * 20]
    for text, score in zip(texts, session.score({root: texts})[root], strict=True):
        context = context_of(root)
        for token, logprob in zip(text_ids(text), score.logprobs, strict=True):
            assert logprob == pytest.approx(float(model.logits(context).log_softmax(-1)[token]))
            context.append(token)
    assert max(rows) == 32 and len(rows) < 8


@pytest.mark.parametrize("steps", range(4))
def test_a_score_that_comes_while_another_is_stopped_is_not_lost(steps: int) -> None:
    """Both are in the pass under way, which stopping one of them waits for."""
    model = HistoryModel()
    backend = backend_of(model, run_ahead=True)
    session = Session(backend, PARAMS)
    root, other = session.root("cdefghij"), session.root("ggg")
    session.start(root.score(["kkk"]))
    last = session.start(other.score(["lll"]))
    for _ in range(steps):
        session.step()
    backend.cancel(root.search)
    for _ in range(10):
        session.step()
    (score,) = last.result
    assert score.tokens == tuple(text_ids("lll"))


# What prompts share


def alike(num: int, shared: int, own: int) -> list[str]:
    """Prompts that share their first letters, and part at the next one."""
    text = "acdefghacdfhgeda" * (shared // 16 + 1)
    return [text[:shared] + (chr(97 + i % 26) + chr(97 + i // 26) * own)[:own] for i in range(num)]


async def one_token(root: SearchNode) -> None:
    await root.sample(1, max_tokens=1)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("sharing", ["auto", "all", "off"])
def test_prompts_made_before_the_first_is_computed_share_what_searches_share(
    page_size: int, sharing: Sharing
) -> None:
    model, prompts = HistoryModel(eos_bias=-9.0), alike(10, 295, 13)
    backend = backend_of(model, page_size=page_size, sharing=sharing, num_pages=4000)
    run = SearchRun(
        backend,
        one_token,
        name_problems(prompts, str),
        params=PARAMS,
        concurrency=10,
        budget=None,
        rows=1,
    )
    assert len(list(run)) == 10
    expected = backend.usage.prompt_tokens_computed
    assert expected == 295 + 10 * 13

    session = Session(
        backend_of(model, page_size=page_size, sharing=sharing, num_pages=4000), PARAMS
    )
    roots = [session.root(prompt) for prompt in prompts]
    drawn = session.sample(dict.fromkeys(roots, 2), max_tokens=3)
    assert session.usage.prompt_tokens_computed == expected
    for root in roots:
        check_children(model, root, drawn[root], replace(PARAMS, max_tokens=3))
    session.backend.scheduler.check()


def test_prompts_made_after_the_first_is_computed_share_its_pages_and_then_each_others() -> None:
    model, prompts = HistoryModel(eos_bias=-9.0), alike(10, 295, 13)
    session = Session(backend_of(model, page_size=16), PARAMS)
    first = session.root(prompts[0])
    session.sample({first: 1})
    roots = [session.root(prompt) for prompt in prompts[1:]]
    drawn = session.sample(dict.fromkeys(roots, 2))
    # The last page that the first one fills is whole up to 288; what follows is computed once more.
    assert session.usage.prompt_tokens_computed == 308 + (295 - 288) + 9 * 13
    for root in roots:
        check_children(model, root, drawn[root], PARAMS)


def test_questions_that_are_asked_side_by_side_share_their_start() -> None:
    async def judge(root: SearchNode) -> int:
        async def ask(text: str) -> float:
            question = root.search.prompt(text)
            (score,) = await question.score(["a"])
            question.drop()
            return score.logprob

        return len(await asyncio.gather(*map(ask, alike(24, 160, 18))))

    backend = backend_of(HistoryModel(), page_size=16, num_pages=4000)
    (result,) = run_of(backend, judge, 1)
    assert result.value == 24 and result.error is None
    # The text that is scored has a token, and the last token before it is computed for its logits.
    assert backend.usage.prompt_tokens_computed <= 160 + 24 * (18 + 1)


def test_what_waits_still_fits_when_further_prompts_part_from_it() -> None:
    # Two rows with all that they could have alone, and no page to spare.
    text = "acdefghacdfhgedaacdefg"
    for num_pages in range(6, 12):
        backend = backend_of(HistoryModel(), num_pages=num_pages, sharing="off")
        session = Session(backend, PARAMS)
        first = session.root(text)
        try:
            waiting = [session.start(first.sample(1))]
        except CapacityError:
            continue
        for cut in (21, 17, 13, 9, 5, 3):  # not where a page of 4 ends
            try:
                waiting.append(session.start(session.root(text[:cut] + "h").sample(1)))
            except CapacityError:
                continue
        while backend.has_work:
            session.step()
        for each in waiting:
            assert each.is_done
            assert each.error is None or "the cache holds only" in str(each.error)
        session.close()


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    page_size=st.sampled_from([1, 4, 16]),
    sharing=st.sampled_from(["auto", "all", "one", "off"]),
    num_pages=st.integers(40, 100),
    run_ahead=st.booleans(),
)
def test_prompts_that_part_anywhere_are_split_while_others_wait(
    data: st.DataObject, page_size: int, sharing: Sharing, num_pages: int, run_ahead: bool
) -> None:
    """Roots, questions and given text of shared starts, before and while calls are under way."""
    model = HistoryModel(eos_bias=1.0)
    backend = backend_of(
        model,
        page_size=page_size,
        sharing=sharing,
        num_pages=num_pages * 4 // page_size + 20,
        max_rows=data.draw(st.integers(1, 12)),
        run_ahead=run_ahead,
        prefill_chunk=data.draw(st.sampled_from([5, 64])),
    )
    session = Session(backend, PARAMS)
    texts = ["acdefgh" * 4]
    nodes: list[SearchNode] = []
    started: list[tuple[SearchNode, str, Started[Any]]] = []
    for _ in range(data.draw(st.integers(2, 14))):
        action = data.draw(st.sampled_from(["root", "root", "sample", "score", "extend", "tell"]))
        if action == "root" or not nodes:
            before = data.draw(st.sampled_from(texts))
            cut = data.draw(st.integers(0, len(before)))
            texts.append(before[:cut] + data.draw(st.text("acd", min_size=1, max_size=9)))
            nodes.append(session.root(texts[-1]))
        elif action == "extend":
            nodes.append(data.draw(st.sampled_from(nodes)).extend(data.draw(st.text("ac"))))
        elif action == "tell":
            session.step()
        else:
            node = data.draw(st.sampled_from(nodes))
            call: Coroutine[Any, Any, Any]
            call = node.sample(2) if action == "sample" else node.score(["ac", "d"])
            started.append((node, action, session.start(call)))
        backend.scheduler.check()
    while backend.has_work:
        session.step()
        backend.scheduler.check()
    session.step()
    for node, action, each in started:
        if action == "sample":
            check_children(model, node, each.result, PARAMS)
            continue
        for text, score in zip(["ac", "d"], each.result, strict=True):
            context = context_of(node)
            for token, logprob in zip(text_ids(text), score.logprobs, strict=True):
                expected = model.logits(context).log_softmax(-1)[token]
                assert logprob == pytest.approx(float(expected), abs=1e-4)
                context.append(token)
    session.close()
    assert pool_of(backend).num_used == 0


# Time


async def beside_a_tool(root: SearchNode) -> SearchOutcome:
    """A strategy whose judge is a tool that takes for ever."""

    async def judge(nodes: Sequence[SearchNode]) -> list[float]:
        await asyncio.sleep(0 if all(node.depth == 1 for node in nodes) else 1000)
        return [node.logprob for node in nodes]

    steps = sample_steps(2, stop=(), max_tokens=2)
    return await beam(root, steps, judge, lambda node: node.depth == 2, width=2, depth=3)


async def in_a_task(root: SearchNode) -> None:
    async def call() -> None:
        await asyncio.to_thread(event.wait, 20)

    event = threading.Event()
    try:
        await asyncio.gather(call(), root.sample(2))
    finally:
        event.set()


async def cleans_up(root: SearchNode) -> None:
    try:
        await asyncio.sleep(1000)
    finally:
        await asyncio.sleep(0.001)
        root.data = "clean"
        await root.sample(1)  # which the budget does not allow any more


@pytest.mark.parametrize("fn", [beside_a_tool, in_a_task, cleans_up])
def test_seconds_end_what_a_search_waits_for_beside_the_model(fn: SearchFn) -> None:
    backend = backend_of(HistoryModel(eos_bias=-9.0))
    results = list(run_of(backend, fn, 5, concurrency=3, budget=Budget(seconds=0.2)))
    assert len(results) == 5
    for result in results:
        assert result.error is None and result.stopped == "budget of 0.2 seconds reached"
        assert (result.best is not None) == (fn is beside_a_tool)
    assert pool_of(backend).num_used == 0


def test_a_search_whose_time_is_over_leaves_the_others_alone() -> None:
    async def some_slow(root: SearchNode) -> int:
        if root.search.name == "1":
            await asyncio.sleep(1000)
        return len(await root.sample(1))

    results = run_of(backend_of(HistoryModel()), some_slow, 3, budget=Budget(seconds=2))
    stops = {result.name: (result.value, result.stopped) for result in results}
    assert stops == {"0": (1, ""), "1": (None, "budget of 2 seconds reached"), "2": (1, "")}


def test_a_run_knows_how_many_results_are_still_open() -> None:
    run = run_of(backend_of(HistoryModel()), two_levels, 7, concurrency=3)
    open_ones = [run.num_unknown for _ in run]
    assert max(open_ones) <= 3 + 2 and open_ones[-1] == 0 and open_ones[0] > 0


def test_a_second_thread_is_refused_and_disturbs_nothing() -> None:
    errors: list[BaseException | None] = []

    def elsewhere(call: Callable[[], object]) -> None:
        with ThreadPoolExecutor(1) as thread:
            errors.append(thread.submit(call).exception())

    async def solve(root: SearchNode) -> int:
        elsewhere(lambda: next(run))
        return len(await root.sample(2))

    run = run_of(backend_of(HistoryModel()), solve, 3)
    assert [result.value for result in run] == [2, 2, 2]
    session = Session(backend_of(HistoryModel()), PARAMS)
    root = session.root("acdefgha")

    async def ask() -> int:
        elsewhere(session.step)
        elsewhere(lambda: session.sample({root: 1}))
        return len(await root.sample(2))

    started = session.start(ask())
    while not started.is_done:
        session.step()
    assert started.result == 2
    assert len(errors) == 5 and all("another thread is using" in str(each) for each in errors)
    session.close()
