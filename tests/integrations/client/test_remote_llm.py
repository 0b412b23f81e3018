"""RemoteLLM against a real server: its trees, samples and scores are those of a local LLM."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import numpy as np
import pytest
from serving import HTTP, KEY, TEMPLATE, Running, listening
from shallow_demo import shallow_demo
from small_searches import exact_demo

from treegen import LLM, Node, SamplingParams
from treegen.errors import BusyError, InputError
from treegen.evals.search.job import load_search_job
from treegen.evals.search.methods import METHODS, TEXT_METHODS
from treegen.evals.search.searcher import TaskSearch
from treegen.evals.search.settings import resolve_search_settings
from treegen.search import (
    Budget,
    SearchNode,
    SearchOutcome,
    SearchResult,
    beam,
    choice_scores,
    is_ended,
    majority,
    mean_logprob,
    sample_steps,
    value_prompt,
)

pytest.importorskip("treegen.integrations.client")

import httpx2

from treegen.integrations.client import RemoteLLM, connection
from treegen.integrations.nodes.protocol import RootOperation, SampleOperation
from treegen.integrations.nodes.step_requests import NodeContext, StepCall, StepRequest, Ticket
from treegen.integrations.server.limits import NodeLimits
from treegen.search.budgeted_search import BudgetedSearch

QUESTION = "Question: {} has 3 apples and buys 5 more. How many apples does {} have?\nAnswer:"
PROBLEMS = [(name, QUESTION.format(name, name)) for name in ("Tom", "Ann", "Eve")]
PARAMS = SamplingParams(max_tokens=16, seed=4)


def demo() -> LLM:
    return exact_demo(TEMPLATE)


@pytest.fixture(name="running", scope="module")
def _running() -> Iterator[Running]:
    with listening(demo(), nodes=NodeLimits()) as running:
        yield running


@pytest.fixture(name="local", scope="module")
def _local() -> LLM:
    return demo()


@pytest.fixture(name="remote")
def _remote(running: Running) -> RemoteLLM:
    return RemoteLLM(f"{running.url}/v1", KEY)


def check_equal(got: list[SearchResult], want: list[SearchResult]) -> None:
    for actual, expected in zip(got, want, strict=True):
        assert actual.error == expected.error
        for node, other in zip(actual.tree.nodes, expected.tree.nodes, strict=True):
            assert node == other
        # Which tokens are in the cache already depends on timing.
        usage = replace(expected.usage, tokens_prefilled=0, seconds=0.0)
        assert replace(actual.usage, tokens_prefilled=0, seconds=0.0) == usage
        assert replace(actual, usage=expected.usage) == expected


async def step_by_step(root: SearchNode) -> SearchOutcome:
    propose = sample_steps(2, stop=("\n", "."), max_tokens=6)
    return await beam(root, propose, mean_logprob, is_ended, width=2, depth=3)


async def vote(root: SearchNode) -> SearchOutcome:
    return await majority(root, lambda node: node.text[-2:], max_samples=6, batch=3)


async def stream_below_a_text(root: SearchNode) -> None:
    async with aclosing(root.extend(" It is").stream(4, max_tokens=5)) as children:
        async for _ in children:
            pass


async def everything(root: SearchNode) -> list[SearchNode]:
    """Uses all that nodes can do: extensions, values by prompts, scores, drops and tools."""
    first, second = await root.sample(2, max_tokens=5)
    extended = first.extend(" It is ").extend("easy:")
    (deeper,) = await extended.sample(1, temperature=0)
    ask = value_prompt(lambda node: f"Rate: {node.path_text}\n", len, n=2, max_tokens=3)
    choose = choice_scores(lambda node: f"Right? {node.path_text}\n", {" yes": 1.0, " no": 0.0})
    for node, length, share in zip(
        (deeper, second), await ask([deeper, second]), await choose([deeper, second]), strict=True
    ):
        node.value = length + share
    scores = await deeper.score([" and", " so on"])
    deeper.data = [len(score.tokens) for score in scores]
    second.drop()
    assert await root.run(len, "tool") == 4
    more = await asyncio.gather(deeper.sample(2, max_tokens=3), root.sample(1, max_tokens=3))
    return [deeper, *more[0]]


@pytest.mark.parametrize(
    ("fn", "budget"),
    [
        (everything, None),
        (step_by_step, Budget(calls=5)),
        (vote, Budget(nodes=6)),
        (everything, Budget(tokens=45)),
        (stream_below_a_text, None),
        (stream_below_a_text, Budget(tokens=100)),
    ],
    ids=range(6),
)
def test_trees_are_those_of_a_local_search(
    remote: RemoteLLM, local: LLM, fn: Any, budget: Budget | None
) -> None:
    want = local.search(fn, PROBLEMS, PARAMS, budget=budget)
    check_equal(remote.search(fn, PROBLEMS, PARAMS, budget=budget, concurrency=2), want)


FAST = ("tot-dfs",)
SETTINGS = {
    "task": "countdown",
    "model": "demo",
    "limit": 1,
    "budget": {"tokens": 200},
    "iterations": 6,
}


@pytest.mark.parametrize(
    "method",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.soak) for name in TEXT_METHODS],
)
def test_every_method_finds_the_same_tree(
    running: Running, remote: RemoteLLM, local: LLM, method: str
) -> None:
    reads = {name: SETTINGS[name] for name in SETTINGS if name != "iterations"}
    if "iterations" in METHODS[method].setting_names:
        reads["iterations"] = 6
    job = load_search_job(resolve_search_settings({**reads, "method": method}))
    fn, problems = TaskSearch(job.task, job.data, job.settings), list(job.roots.items())
    whole, budget = job.settings.solution, job.settings.budget
    logprobs: list[dict[str, Any]] = [{}, {}]

    async def search(root: SearchNode) -> Any:
        try:
            return await fn(root)
        finally:
            logprobs[-1][root.search.name] = [node.logprobs for node in root.search.nodes()]

    want = local.search(search, problems, whole, budget=budget)
    assert not any(result.error for result in want)
    logprobs.reverse()
    check_equal(remote.search(search, problems, whole, budget=budget), want)
    for name, nodes in logprobs[-1].items():
        for actual, expected in zip(nodes, logprobs[0][name], strict=True):
            assert actual == pytest.approx(expected, abs=1e-6)
    running.wait_until_idle()


def test_unnamed_problems_draw_what_local_ones_draw(running: Running) -> None:
    async def search(root: SearchNode) -> list[SearchNode]:
        (child,) = await root.sample(1, max_tokens=3)
        return await child.sample(2, max_tokens=3)

    local, remote = demo(), RemoteLLM(f"{running.url}/v1", KEY)
    prompts = [PROBLEMS[0][1], PROBLEMS[0][1], [5, 6, 7], [{"role": "user", "content": "Hello"}]]
    for params in (SamplingParams(max_tokens=8), PARAMS):
        for _ in range(2):
            want = local.search(search, prompts, params)
            check_equal(remote.search(search, prompts, params), want)


def test_the_calls_of_a_step_are_one_request(running: Running, remote: RemoteLLM) -> None:
    async def search(root: SearchNode) -> SearchNode:
        children = await root.sample(4, max_tokens=3)
        below = await asyncio.gather(*(child.sample(2, max_tokens=3) for child in children))
        scored = [child.extend(" so").score([" it"]) for child in children]
        await asyncio.gather(*scored)
        return below[0][0]

    (result,) = remote.search(search, PROBLEMS[:1], PARAMS)
    assert result.error is None
    # The root, three steps, and dropping the tree.
    assert remote.num_requests == 5 and remote.num_sent < 5_000


def test_nodes_are_dropped_on_the_server(running: Running, remote: RemoteLLM) -> None:
    remote.search(everything, PROBLEMS, PARAMS)
    headers = {"authorization": f"Bearer {KEY}"}
    listed = HTTP.get(f"{running.url}/v1/nodes", headers=headers).json()
    assert listed["data"] == [] and listed["memory"]["nodes"] == 0


def test_many_searches_run_at_once(remote: RemoteLLM, local: LLM) -> None:
    problems = [(f"p{index}", QUESTION.format(index, index)) for index in range(40)]

    async def search(root: SearchNode) -> list[SearchNode]:
        return await root.sample(3, max_tokens=4)

    check_equal(remote.search(search, problems, PARAMS), local.search(search, problems, PARAMS))


def test_results_stream_as_they_finish(remote: RemoteLLM) -> None:
    async def search(root: SearchNode) -> list[SearchNode]:
        long = 30 if root.search.name == "Tom" else 1
        return await root.sample(1, max_tokens=long, ignore_eos=True)

    run = remote.search_stream(search, PROBLEMS, PARAMS)
    assert {result.name for result in run} == set(run.names) == {"Tom", "Ann", "Eve"}
    with pytest.raises(StopIteration):
        next(run)


def test_a_run_that_is_closed_leaves_nothing(running: Running, remote: RemoteLLM) -> None:
    async def search(root: SearchNode) -> list[SearchNode]:
        long = 1 if root.search.name == "Tom" else 400
        return await root.sample(1, max_tokens=long, ignore_eos=True)

    run = remote.search_stream(search, PROBLEMS, PARAMS)
    assert next(run).name == "Tom"
    run.close()
    assert list(run) == []
    running.wait_until_idle()


def test_a_failing_search_does_not_end_others(remote: RemoteLLM) -> None:
    async def search(root: SearchNode) -> SearchNode:
        (child,) = await root.sample(1, max_tokens=2)
        if root.search.name == "Ann":
            raise ValueError("no luck")
        if root.search.name == "Eve":
            await child.sample(1, max_tokens=2, temperature=-1)
        return child

    results = remote.search(search, PROBLEMS, PARAMS)
    assert [bool(result.error) for result in results] == [False, True, True]
    assert re.fullmatch(
        r"ValueError: no luck \(test_remote_llm\.py:\d+, in \w+\)", results[1].error or ""
    )
    assert len(results[1].tree.nodes) == 2
    assert "temperature" in str(results[2].error)


def test_a_call_that_cannot_be_sent_fails_its_own_search(
    remote: RemoteLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = StepRequest.add

    def fail(request: StepRequest, call: StepCall) -> bool:
        if call.ticket.search.name == "Ann":
            raise RuntimeError("no operation")
        return add(request, call)

    monkeypatch.setattr(StepRequest, "add", fail)
    results = remote.search(step_by_step, PROBLEMS, PARAMS)
    assert ["no operation" in str(result.error) for result in results] == [False, True, False]


def test_a_call_that_cannot_be_sent_leaves_other_calls_of_its_step_alone(remote: RemoteLLM) -> None:
    async def search(root: SearchNode) -> list[Any]:
        calls = [root.score(texts) for texts in (["\ud800", "9"], [" 8"])]
        return await asyncio.gather(*calls, return_exceptions=True)

    (result,) = remote.search(search, PROBLEMS[:1], PARAMS)
    error, scores = cast(Any, result.value)
    assert isinstance(error, InputError) and isinstance(scores, list)


def test_errors_of_the_server_reach_the_search(remote: RemoteLLM) -> None:
    seen: list[Exception] = []

    async def search(root: SearchNode) -> SearchNode:
        try:
            await root.extend("\ud800").sample(1)
        except Exception as error:
            seen.append(error)
        try:
            await root.score([""])
        except InputError as error:
            seen.append(error)
        try:
            await root.sample(1, stop=[str(number) for number in range(65)])
        except InputError as error:
            seen.append(error)
        (child,) = await root.sample(1, max_tokens=2)
        return child

    (result,) = remote.search(search, PROBLEMS[:1], PARAMS)
    assert result.error is None and result.best is not None
    assert len(seen) == 3 and "a text is empty" in str(seen[1])
    assert str(seen[2]).startswith("the server does not accept stop: List should have at most 64")


def test_seconds_end_a_search(remote: RemoteLLM) -> None:
    async def search(root: SearchNode) -> None:
        while True:
            await root.sample(1, max_tokens=200, ignore_eos=True)

    (result,) = remote.search(search, PROBLEMS[:1], PARAMS, budget=Budget(seconds=1))
    assert result.stopped == "budget of 1 seconds reached" and result.error is None


def test_a_limit_of_the_server_is_an_error_that_says_what_to_free(local: LLM) -> None:
    async def search(root: SearchNode) -> str:
        await root.sample(8, max_tokens=2)
        await root.sample(8, max_tokens=2)
        return "all"

    with listening(demo(), nodes=NodeLimits(max_nodes=12)) as running:
        remote = RemoteLLM(f"{running.url}/v1", KEY)
        with pytest.warns(RuntimeWarning, match="the only search failed"):
            (result,) = remote.search(search, PROBLEMS[:1], PARAMS)
    assert result.error is not None and "BusyError" in result.error and "nodes" in result.error


@pytest.mark.parametrize(("samples", "operations"), [(2, 1), (16, 20)], ids=str)
def test_searches_keep_the_limits_of_the_server(local: LLM, samples: int, operations: int) -> None:
    async def search(root: SearchNode) -> list[SearchNode]:
        children = await root.sample(12, max_tokens=2)
        below = root
        for _ in range(9):
            below = below.extend(" so")
        grandchildren = [child.extend(" it").extend(" is") for child in children]
        calls = [
            below.sample(5, max_tokens=2),
            *(node.sample(1, max_tokens=2) for node in grandchildren),
        ]
        last = await asyncio.gather(*calls)
        for child in children[1:]:
            child.drop()
        return [*last[0], *await last[0][0].sample(1, max_tokens=2)]

    limits = NodeLimits(max_node_samples=samples, max_node_operations=operations)
    with listening(demo(), nodes=limits) as running:
        remote = RemoteLLM(f"{running.url}/v1", KEY)
        got = remote.search(search, PROBLEMS[:1], PARAMS)
        check_equal(got, local.search(search, PROBLEMS[:1], PARAMS))
        headers = {"authorization": f"Bearer {KEY}"}
        listed = HTTP.get(f"{running.url}/v1/nodes", headers=headers).json()
        assert listed["memory"]["nodes"] == 0


def test_more_calls_than_a_request_has_room_for(remote: RemoteLLM, local: LLM) -> None:
    async def search(root: SearchNode) -> SearchNode:
        children = await root.sample(126, max_tokens=1)
        deep = root
        for _ in range(9):
            deep = deep.extend(" b")
        more = [
            deep.sample(1, max_tokens=1),
            *(child.sample(1, max_tokens=1) for child in children),
        ]
        first, *_ = await asyncio.gather(*more)
        for child in children:
            child.drop()
        await first[0].sample(1, max_tokens=1)
        return first[0]

    problems, whole = PROBLEMS[:1], SamplingParams(max_tokens=1, seed=4)
    check_equal(remote.search(search, problems, whole), local.search(search, problems, whole))


def test_a_tree_may_be_deeper_than_the_recursion_limit() -> None:
    context = NodeContext(None, "a", "")
    for _ in range(sys.getrecursionlimit() + 1):
        context = NodeContext(context, "b", f"{context.path}+0/")
    request = StepRequest(10_000, None)
    ticket = Ticket(BudgetedSearch("", None, None), [None])
    make = partial(SampleOperation, op="sample")
    assert request.add(StepCall(ticket, context, "name", make, range(1), 1, None))
    root, *others = request.operations
    assert isinstance(root, RootOperation) and root.name == "name"
    nodes = [getattr(operation, "node", None) for operation in others]
    assert nodes == [f"#{index}" for index in range(sys.getrecursionlimit() + 2)]


def test_a_prompt_that_needs_more_operations_than_a_request_has_is_an_error() -> None:
    choose = choice_scores(lambda node: "Right?\n", {" yes": 1.0, " no": 0.0})

    async def search(root: SearchNode) -> SearchNode:
        await choose(await root.sample(1, max_tokens=1))
        return root

    with listening(demo(), nodes=NodeLimits(max_node_operations=2)) as running:
        remote = RemoteLLM(f"{running.url}/v1", KEY)
        with pytest.warns(RuntimeWarning, match="the only search failed"):
            (result,) = remote.search(search, PROBLEMS[:1], PARAMS)
    assert "the server accepts at most 2" in str(result.error)


def test_a_search_chooses_its_lease(running: Running) -> None:
    leases: list[float] = []

    async def search(root: SearchNode) -> SearchNode:
        headers = {"authorization": f"Bearer {KEY}"}
        (tree,) = HTTP.get(f"{running.url}/v1/nodes", headers=headers).json()["data"]
        leases.append(tree["expires_in"])
        return root

    for lease in (None, 1_000):
        remote = RemoteLLM(f"{running.url}/v1", KEY, lease_seconds=lease)
        remote.search(search, PROBLEMS[:1], PARAMS)
    assert 500 < leases[0] <= 600 and 900 < leases[1] <= 1_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base_url": "http://[::1/v1"}, "base_url must be an address"),
        ({"base_url": "http://a:port/v1"}, "base_url must be an address"),
        ({"base_url": "http:///v1"}, "base_url must be an address"),
        ({"api_key": "key\n"}, "api_key must be a text without line breaks"),
        ({"api_key": ""}, "api_key must be a text"),
        ({"timeout": 0}, "timeout must be more than 0"),
        ({"timeout": "1"}, "timeout must be a finite number"),
        ({"timeout": None}, "timeout must be a finite number"),
        ({"lease_seconds": 0}, "lease_seconds must be more than 0"),
        ({"lease_seconds": float("nan")}, "lease_seconds must be a finite number"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RemoteLLM(**{"base_url": "http://127.0.0.1:9/v1", **arguments})


def test_keys_may_have_any_characters() -> None:
    with listening(demo(), key="ключ 1") as running:
        (output,) = RemoteLLM(f"{running.url}/v1", "ключ 1").generate(["a"], {"max_tokens": 1})
    assert output[0].num_tokens == 1


def test_a_server_cannot_make_the_client_wait_for_hours() -> None:
    from treegen.integrations.client import connection

    assert connection._seconds("7") == 7 and connection._seconds("9" * 400) == 60
    assert connection._seconds("Wed, 21 Oct 2026 07:28:00 GMT") == 0


@pytest.mark.parametrize("retries", [0, 3])
def test_a_call_waits_for_a_busy_server_no_longer_than_its_timeout(
    retries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*request: str) -> httpx2.Response:
        error = {"message": "busy", "type": "", "param": None, "code": 429}
        return httpx2.Response(429, headers={"Retry-After": "60"}, json={"error": error})

    monkeypatch.setattr(connection.Connection, "_send", refuse)
    begin = time.monotonic()
    with pytest.raises(BusyError, match="busy"):
        RemoteLLM("http://127.0.0.1:9/v1", timeout=0.2, retries=retries).generate(["a"])
    assert (time.monotonic() - begin >= 0.2) == bool(retries)
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("prompt", [np.array([1.5]), np.array([[1, 2]]), [True], []])
def test_what_is_no_prompt_is_refused(prompt: Any, remote: RemoteLLM) -> None:
    with pytest.raises(InputError, match="a prompt must be a string, token ids or chat messages"):
        remote.generate([prompt])


def test_samples_are_those_of_generate(remote: RemoteLLM, local: LLM) -> None:
    prompts: list[Any] = [
        PROBLEMS[0][1],
        [5, 6, 7],
        [np.int64(8), 9],
        [{"role": "user", "content": "Hello"}],
    ]
    params = SamplingParams(n=2, seed=1, max_tokens=8, stop="\n", top_k=50)
    for got, want in zip(
        remote.generate(prompts, params), local.generate(prompts, params), strict=True
    ):
        assert [one.tokens for one in got] == [one.tokens for one in want]
        assert [one.text for one in got] == [one.text for one in want]
        assert got.prompt_token_ids == want.prompt_token_ids
        for actual, expected in zip(got, want, strict=True):
            assert actual.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
            assert actual.finish_reason == expected.finish_reason
    assert remote.generate([]) == []
    with pytest.raises(InputError, match="does not return logprobs"):
        remote.generate(prompts, SamplingParams(logprobs=2))


def test_many_prompts_share_connections(
    running: Running, remote: RemoteLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_open = num_most = 0
    generate = running.served.generate

    async def count(*args: Any, **how: Any) -> Any:
        nonlocal num_open, num_most
        num_open += 1
        num_most = max(num_most, num_open)
        try:
            return await generate(*args, **how)
        finally:
            num_open -= 1

    monkeypatch.setattr(running.served, "generate", count)
    monkeypatch.setattr(connection, "_MAX_CONNECTIONS", 3)
    assert len(remote.generate([str(index) for index in range(12)], PARAMS)) == 12
    assert 1 < num_most <= 3


def test_a_call_waits_for_a_server_that_its_own_prompts_keep_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_FIRST_WAIT", 0.01)
    monkeypatch.setattr(connection, "_LONGEST_WAIT", 0.05)
    monkeypatch.setattr(connection, "_seconds", lambda text: 0.0)  # of Retry-After
    params = SamplingParams(n=40, max_tokens=30, ignore_eos=True)
    with listening(demo(), max_waiting=8) as running:
        remote = RemoteLLM(f"{running.url}/v1", KEY, retries=1)
        outputs = remote.generate([str(index) for index in range(12)], params)
        assert [len(output) for output in outputs] == [40] * 12 and remote.num_requests > 24
        impatient = RemoteLLM(f"{running.url}/v1", KEY, retries=0)
        with pytest.raises(BusyError, match="samples are waiting"):
            impatient.generate([str(index) for index in range(12)], params)


def draw_everywhere(
    running: Running, remote: RemoteLLM, prompts: list[Any], params: SamplingParams
) -> dict[str, list[tuple[int, ...]]]:
    """Return the tokens of the samples of prompts that are drawn in every way, in order."""

    async def draw() -> list[Any]:
        return (await running.served.generate(prompts, params))[1]

    body = {"prompt": prompts, "n": params.n, "seed": params.seed, "max_tokens": params.max_tokens}
    answer = running.post("completions", {**body, "return_token_ids": True}).json()
    tree = Node(children=[Node(prompt, samples=params.n) for prompt in prompts])
    of = {
        "async": [one for output in asyncio.run(draw()) for one in output],
        "tree": demo().run(tree, replace(params, n=1)).completions,
        "remote": [one for output in remote.generate(prompts, params) for one in output],
    }
    ways = {name: [one.tokens for one in completions] for name, completions in of.items()}
    return {**ways, "http": [tuple(choice["token_ids"]) for choice in answer["choices"]]}


def test_repeated_prompts_get_further_samples_in_every_call(
    running: Running, remote: RemoteLLM
) -> None:
    once, other = QUESTION.format("Tom", "Tom"), QUESTION.format("Ann", "Ann")
    prompts: list[Any] = [once, other, once, once]
    params = SamplingParams(n=2, max_tokens=6, seed=1)
    outputs = demo().generate(prompts, params)
    want = [one.tokens for output in outputs for one in output]
    assert len(set(want)) == 8
    ways = draw_everywhere(running, remote, prompts, params)
    assert ways == dict.fromkeys(("async", "tree", "remote", "http"), want)
    separate = [demo().generate([prompt], params)[0] for prompt in prompts]
    assert separate[0] == separate[2] == separate[3] == outputs[0]


def test_repeated_prompts_may_have_several_forms(remote: RemoteLLM, local: LLM) -> None:
    text = "user: Hello\nassistant:"  # what the chat template renders
    messages = [{"role": "user", "content": "Hello"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    ids = local.generate([text], SamplingParams(max_tokens=1))[0].prompt_token_ids
    prompts: list[Any] = [text, ids, [5, 6, 7], text, messages, parts, ids]
    for temperature in (1.0, 0.0):
        params = SamplingParams(n=2, max_tokens=6, seed=3, temperature=temperature)
        got, want = remote.generate(prompts, params), local.generate(prompts, params)
        assert [output.prompt_token_ids for output in got] == [
            output.prompt_token_ids for output in want
        ]
        for output, expected in zip(got, want, strict=True):
            assert [(one.tokens, one.seed) for one in output] == [
                (one.tokens, one.seed) for one in expected
            ]


def test_texts_may_have_their_stops(remote: RemoteLLM, local: LLM) -> None:
    prompts: list[Any] = [PROBLEMS[0][1], [{"role": "user", "content": "Hello"}]]
    params = SamplingParams(n=2, seed=1, max_tokens=30)
    stops = tuple(one.text[-8:-5] for one in local.generate(prompts[:1], params)[0])
    params = replace(params, stop=stops, include_stop=True)
    got, want = remote.generate(prompts, params), local.generate(prompts, params)
    texts = [[one.text for one in output] for output in got]
    assert texts == [[one.text for one in output] for output in want]
    assert all(text.endswith(stops) for text in texts[0])


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_may_start_at_a_later_sample(running: Running, stream: bool) -> None:
    path, body = "completions", {"prompt": ["a b", "a b"], "seed": 1, "max_tokens": 4}

    def texts(**more: Any) -> list[str]:
        response = running.post(path, {**body, **more, "stream": stream})
        if not stream:
            return [choice["text"] for choice in response.json()["choices"]]
        found: dict[int, str] = {}
        for line in response.text.splitlines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
        return [found[index] for index in sorted(found)]

    every = texts(n=3)
    assert texts(n=2, first=2)[:2] == every[2:4]
    assert texts(n=1, first=4) == every[4:6]
    body.pop("seed")
    assert "first needs a seed" in running.post(path, {**body, "first": 2}).text


@pytest.mark.parametrize(
    "structure",
    [
        {"regex": "[0-9]{3}"},
        {"choice": ("yes", "no")},
        {"json_schema": {"type": "boolean"}},
        {"grammar": 'root ::= "a" | "b"'},
    ],
)
def test_generate_takes_structures(
    remote: RemoteLLM, local: LLM, structure: dict[str, Any]
) -> None:
    params = SamplingParams(seed=1, max_tokens=8, **structure)
    for prompt in ("Is it so?", [{"role": "user", "content": "Hello"}]):
        (got,), (want,) = remote.generate([prompt], params), local.generate([prompt], params)
        assert got[0].tokens == want[0].tokens


def test_calls_of_tools_stay_in_the_text(remote: RemoteLLM, local: LLM) -> None:
    pytest.importorskip("llguidance")
    call = '{"name": "add", "arguments": {"a": 1}}'
    params = SamplingParams(seed=1, max_tokens=60, choice=[call])
    tools = [{"type": "function", "function": {"name": "add"}}]
    prompts = [[{"role": "user", "content": "Hello"}]]
    (got,), (want,) = (llm.generate(prompts, params, tools=tools)[0] for llm in (remote, local))
    assert (got.text, got.finish_reason) == (want.text, want.finish_reason) == (call, "stop")


def test_scores_are_those_of_score(remote: RemoteLLM, local: LLM) -> None:
    ids = np.array([5, 6]), np.array([7, 8, 9])
    pairs: list[Any] = [("The cat", " sat down."), ([5, 6], [7, 8, 9]), ("a b", "c"), ("x", "x x")]
    pairs.append(ids)
    for got, want in zip(remote.score(pairs, top=3), local.score(pairs, top=3), strict=True):
        assert (got.tokens, got.is_greedy) == (want.tokens, want.is_greedy)
        assert got.logprobs == pytest.approx(want.logprobs, rel=1e-5, abs=1e-5)
        assert got.top is not None and want.top is not None
        assert (got.top.tokens == want.top.tokens).all()
    assert remote.score([]) == []
    wrong: list[Any] = [("", "a"), ("a", [1]), ("a", ""), ("a",), "ab", None, ([], [1])]
    for pair in wrong:
        with pytest.raises(InputError, match="pair 0"):
            remote.score([pair])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base_url": "127.0.0.1:8000"}, "base_url must be an address"),
        ({"base_url": "http://127.0.0.1:9/v1", "retries": 1}, "cannot be reached"),
        ({"api_key": "wrong"}, "the API key is missing or wrong"),
        ({"model": "gpt-4"}, "'gpt-4' is not served"),
    ],
)
def test_a_server_that_cannot_be_used_is_an_error(
    running: Running, arguments: dict[str, Any], message: str
) -> None:
    how = {"base_url": f"{running.url}/v1", "api_key": KEY, **arguments}
    with pytest.raises(InputError, match=message):
        RemoteLLM(**how).search(vote, PROBLEMS, PARAMS)


def test_other_pages_are_no_answers(running: Running) -> None:
    with pytest.raises(InputError, match="there is no POST /v2/nodes/batch"):
        RemoteLLM(f"{running.url}/v2", KEY).search(vote, PROBLEMS, PARAMS)


class Flaky(BaseHTTPRequestHandler):
    """Passes requests on, and loses two thirds of the answers."""

    target = ""
    count = 0
    keys: list[str | None]

    def do_POST(self) -> None:
        kind = type(self)
        kind.count += 1
        turn = kind.count
        kind.keys.append(self.headers.get("Idempotency-Key"))
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if turn % 3 == 1:
            self.send_response(503)
            self.end_headers()
            return
        names = ("Authorization", "Content-Type", "Idempotency-Key")
        headers = {name: self.headers[name] for name in names if name in self.headers}
        answer = HTTP.post(f"{kind.target}{self.path}", content=body, headers=headers, timeout=60)
        if turn % 3 == 2:
            self.connection.close()  # after the server has computed the answer
            return
        self.send_response(answer.status_code)
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def test_lost_answers_are_asked_for_again(
    running: Running, local: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treegen.integrations.client.connection._FIRST_WAIT", 0.01)
    Flaky.target, Flaky.count, Flaky.keys = running.url, 0, []
    with ThreadingHTTPServer(("127.0.0.1", 0), Flaky) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        remote = RemoteLLM(f"http://127.0.0.1:{proxy.server_port}/v1", KEY, retries=9)
        got = remote.search(step_by_step, PROBLEMS[:1], PARAMS)
        proxy.shutdown()
        thread.join()
    check_equal(got, local.search(step_by_step, PROBLEMS[:1], PARAMS))
    assert len(set(Flaky.keys)) < len(Flaky.keys)
    running.wait_until_idle()


@pytest.mark.filterwarnings("ignore:the only search failed:RuntimeWarning")
def test_a_restarted_server_draws_the_same_tree(
    local: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first server goes away in the middle of a search."""
    stopped = threading.Event()
    found: list[list[SearchResult]] = []

    async def search(root: SearchNode) -> list[SearchNode]:
        (child,) = await root.sample(1, max_tokens=3)
        is_first = not stopped.is_set()
        stopped.set()
        while is_first:
            await child.sample(1, max_tokens=400, ignore_eos=True)
        return await child.sample(2, max_tokens=3)

    with listening(demo(), nodes=NodeLimits()) as running:
        remote = RemoteLLM(f"{running.url}/v1", KEY, retries=1)
        thread = threading.Thread(
            target=lambda: found.append(remote.search(search, PROBLEMS[:1], PARAMS))
        )
        thread.start()
        stopped.wait(60)
        running.served.close(drain=False)
        thread.join()
        ((broken,),) = found
        assert broken.error is not None and len(broken.tree.nodes) >= 2
        monkeypatch.setattr(running, "wait_until_idle", lambda: None)
    with listening(demo(), nodes=NodeLimits()) as running:
        again = RemoteLLM(f"{running.url}/v1", KEY).search(search, PROBLEMS[:1], PARAMS)
    assert again[0].tree.nodes[1].text == broken.tree.nodes[1].text
    check_equal(again, local.search(search, PROBLEMS[:1], PARAMS))


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:the only search failed:RuntimeWarning")
def test_a_search_whose_server_is_killed_can_be_run_again(local: LLM) -> None:
    """SIGKILL comes between two steps of the search; another server gives the equal tree."""
    options = ["--port", "0", "--memory", "64MiB", "--device", "cpu", "--dtype", "float32"]
    model = str(shallow_demo())
    command = [sys.executable, "-m", "treegen", "serve", "--model", model, *options]
    servers: list[subprocess.Popen[str]] = []

    async def search(root: SearchNode) -> list[SearchNode]:
        (child,) = await root.sample(1, max_tokens=3)
        if len(servers) == 1:
            servers[0].kill()
            servers[0].wait()
        return await child.extend(" so").sample(2, max_tokens=3)

    results: list[SearchResult] = []
    for _ in range(2):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            servers.append(server)
            url = next(line for line in server.stderr if "is served at" in line).split()[-1]
            results += RemoteLLM(url, retries=1).search(search, PROBLEMS[:1], PARAMS)
            server.kill()
    broken, again = results
    assert f"{url.rpartition(':')[0]}:" in str(broken.error)
    assert "cannot be reached" in str(broken.error) and "that the server is running" in str(
        broken.error
    )
    assert broken.tree.nodes[1].text == again.tree.nodes[1].text
    servers.append(servers[1])  # the local search kills nothing
    (want,) = local.search(search, PROBLEMS[:1], PARAMS)
    for actual, expected in zip(again.tree.nodes, want.tree.nodes, strict=True):
        assert (actual.text, actual.n_tokens) == (expected.text, expected.n_tokens)


def test_it_runs_where_an_event_loop_runs(remote: RemoteLLM) -> None:
    async def main() -> list[SearchResult]:
        return remote.search(vote, PROBLEMS[:1], PARAMS)

    assert asyncio.run(main())[0].error is None


def test_the_client_imports_neither_torch_nor_the_server() -> None:
    program = (
        "import sys\nfrom treegen.integrations.client import RemoteLLM\n"
        "from treegen.search import Budget, beam\nRemoteLLM('http://127.0.0.1:1/v1')\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "assert 'treegen.integrations.server' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_server_needs_no_extra_of_the_client() -> None:
    program = (
        "import sys, treegen.integrations.server.run, treegen.tasks.chat\n"
        "assert 'treegen.integrations.nodes.searches' in sys.modules\n"
        "assert 'treegen.integrations.client' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
