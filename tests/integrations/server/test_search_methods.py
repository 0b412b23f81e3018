"""Search methods behind a base_url, asked by the OpenAI client and by clients that mean no good."""

from __future__ import annotations

import asyncio
import json
import shlex
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from serving import HTTP, KEY, TEMPLATE, Running, draining, listening
from small_searches import SMALL, exact_demo, save_tiny_verifier

from treegen import LLM, AsyncLLM, SamplingParams
from treegen.errors import StoppedError
from treegen.evals.search.methods import TEXT_METHODS
from treegen.integrations.nodes.protocol import RootOperation
from treegen.integrations.server.limits import NodeLimits
from treegen.model.scorers.verifier import Verifier
from treegen.search.budget import Budget
from treegen.search.reward import load_verifier
from treegen.search.tree.records import SearchTree
from treegen.tasks.chat import ChatSearches

pytest.importorskip("openai")
import httpx2
import openai

from treegen.integrations.server.limits import SearchLimits
from treegen.integrations.server.search import SearchService
from treegen.integrations.server.search_requests import parse_search
from treegen.integrations.server.search_thread import SearchThread

CHAT: Any = [{"role": "user", "content": "Tom has 3 apples and buys 5 more. How many has he?"}]
LIMITS = SearchLimits(max_searches=2, max_search_tokens=1_000, max_search_seconds=60)


def demo() -> LLM:
    return exact_demo(TEMPLATE)


@pytest.fixture(name="running", scope="module")
def _running() -> Iterator[Running]:
    with listening(demo(), searches=ChatSearches(), search_limits=LIMITS) as running:
        yield running


@pytest.fixture(name="reference", scope="module")
def _reference() -> LLM:
    return demo()


def client_of(running: Running, method: str) -> openai.OpenAI:
    url = f"{running.url}/v1/search/{method}"
    http = openai.DefaultHttpxClient(verify=False)
    return openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, http_client=http)


def ask(running: Running, method: str, **fields: Any) -> httpx2.Response:
    body = {"messages": CHAT, "max_tokens": 16, "seed": 5, **fields}
    return running.post(f"search/{method}/chat/completions", body)


def error_of(response: httpx2.Response) -> tuple[int, str | None, str]:
    error = response.json()["error"]
    assert error["code"] == response.status_code
    return response.status_code, error["param"], error["message"]


@pytest.mark.parametrize("method", TEXT_METHODS)
def test_answers_are_those_of_a_local_search(running: Running, reference: LLM, method: str) -> None:
    with client_of(running, method) as client:
        answer = client.chat.completions.create(
            model="demo",
            messages=CHAT,
            max_tokens=16,
            seed=5,
            temperature=0.8,
            extra_body={"budget": {"tokens": 120}, "search": dict(SMALL[method])},
        )
    extra: Any = answer.model_extra and answer.model_extra["treegen"]
    search = ChatSearches().prepare(
        method,
        SMALL[method],
        params=SamplingParams(max_tokens=16, seed=5, temperature=0.8),
        budget=Budget(tokens=120),
        question="",
        instruction="\nuser: {}\nassistant:".format,
    )
    (want,) = reference.search(search, [CHAT], search.params, budget=search.budget)
    assert want.error is None
    assert SearchTree.from_json(extra["tree"]) == want.tree
    assert extra["candidates"] == list(want.candidates) and extra["votes"] == dict(want.votes)
    assert extra["stopped"] == want.stopped
    assert answer.usage is not None
    assert answer.usage.completion_tokens == want.usage.tokens_decoded <= 120
    assert want.best is not None
    first = next(iter(want.candidates), want.best)
    assert answer.choices[0].message.content == search.text(want.tree, first)
    assert extra["nodes"][0] == first and extra["method"] == method


def test_n_returns_the_best_distinct_answers(running: Running) -> None:
    options = {"num_samples": 8, "answer": "letter"}
    answer = ask(running, "best-of-n", n=20, search=options, max_tokens=12).json()
    extra = answer["treegen"]
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
    # Fewer replies than requested, because only eight are drawn.
    assert 1 < len(texts) <= 8 and len(set(texts)) == len(texts)
    answers = [answer for answer in extra["answers"] if answer is not None]
    assert len(set(answers)) == len(answers)
    assert extra["values"] == sorted(extra["values"], reverse=True)
    two = ask(running, "best-of-n", n=2, search={**options, "tree": False}, max_tokens=12).json()
    assert [c["message"]["content"] for c in two["choices"]] == texts[:2]
    assert two["treegen"]["tree"] is None


def test_requests_without_a_seed_draw_anew(running: Running) -> None:
    first, second = (ask(running, "sample", seed=None).json() for _ in range(2))
    assert first["treegen"]["tree"] != second["treegen"]["tree"]
    again = [ask(running, "sample").json()["treegen"]["tree"] for _ in range(2)]
    assert again[0] == again[1]


def test_a_stream_has_the_same_text(running: Running) -> None:
    whole = ask(running, "majority", n=2, search={"num_samples": 4}).json()
    with client_of(running, "majority") as client:
        stream = client.chat.completions.create(
            model="demo",
            messages=CHAT,
            max_tokens=16,
            seed=5,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"search": {"num_samples": 4}},
        )
        pieces = list(stream)
    texts = [""] * len(whole["choices"])
    for piece in pieces:
        for choice in piece.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == whole["usage"]["completion_tokens"]
    extra: Any = pieces[-2].model_extra
    assert extra["treegen"]["tree"] == whole["treegen"]["tree"]


def test_keep_alives_come_while_the_search_runs(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treegen.integrations.server.search._KEEP_ALIVE_SECONDS", 0.01)
    body = {"messages": CHAT, "max_tokens": 40, "stream": True}
    text = running.post("search/best-of-n/chat/completions", body).text
    assert text.startswith(": searching\n\n") and text.endswith("data: [DONE]\n\n")


def test_numbers_that_json_lacks_are_null(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = SearchService._build

    def build_worse(service: Any, prepared: Any, result: Any) -> Any:
        root, *nodes = result.tree.nodes
        tree = SearchTree((replace(root, logprob=float("nan")), *nodes))
        votes = {"a": float("inf"), "b": 1.0}
        return build(service, prepared, replace(result, tree=tree, votes=votes))

    monkeypatch.setattr(SearchService, "_build", build_worse)
    extra = json.loads(ask(running, "sample").text, parse_constant=pytest.fail)["treegen"]
    assert extra["tree"][0]["logprob"] is None and extra["votes"] == {"a": None, "b": 1.0}


def test_models_are_listed_below_each_method(running: Running) -> None:
    with client_of(running, "beam") as client:
        assert [model.id for model in client.models.list()] == ["demo"]
        assert client.models.retrieve("demo").id == "demo"
        with pytest.raises(openai.NotFoundError, match="is not served"):
            client.models.retrieve("gpt-4")
    headers = {"authorization": f"Bearer {KEY}"}
    missing = HTTP.get(f"{running.url}/v1/search/best/models", headers=headers)
    assert error_of(missing)[0] == 404


@pytest.mark.parametrize(
    ("method", "fields", "status", "param", "message"),
    [
        ("beams", {}, 404, None, "no search method 'beams'; did you mean 'beam'"),
        ("beam", {"model": "gpt-4"}, 404, None, "'gpt-4' is not served"),
        ("beam", {"budget": {"tokens": 10**9}}, 400, "budget.tokens", "at most 1,000, the limit"),
        ("beam", {"budget": {"tokens": 0}}, 400, "budget.tokens", "must be at least 1, got 0"),
        ("beam", {"budget": {"tokens": "9"}}, 400, "budget.tokens", "an integer, got '9'"),
        ("beam", {"budget": {"tokens": True}}, 400, "budget.tokens", "an integer, got true"),
        ("beam", {"budget": {"seconds": 1e308}}, 400, "budget.seconds", "at most 60"),
        ("beam", {"budget": {"dollars": 1}}, 400, "budget.dollars", "is not supported; remove it"),
        ("beam", {"budget": [1]}, 400, "budget", "budget must be an object, got a list of 1"),
        ("beam", {"search": [1]}, 400, "search", "search must be an object"),
        ("beam", {"search": {"tree": 1}}, 400, "search", "search.tree must be true or false"),
        ("beam", {"search": {"width": "2"}}, 400, "search.width", "search.width must be an int"),
        ("beam", {"search": {"width": 10**12}}, 400, "search.width", "at most 2,000"),
        ("beam", {"search": {"widht": 2}}, 400, "search.widht", "did you mean 'width'"),
        ("beam", {"search": {"evaluate": "verifier"}}, 400, "search.evaluate", "logprob"),
        ("mcts", {"search": {"batch": 0}}, 400, "search.batch", "search.batch cannot be used"),
        ("mcts", {"search": {"batch": "8"}}, 400, "search.batch", "must be a number"),
        ("rstar", {"search": {"checks": 3_000_000}}, 400, "search.checks", "at most 2,000"),
        ("self-refine", {"search": {"chains": "3000000"}}, 400, "search.chains", "be a number"),
        ("beam", {"width": 2}, 400, "width", "width is not supported"),
        ("beam", {"n": 0}, 400, "n", "n must be from 1 to 128"),
        ("beam", {"n": 10**6}, 400, "n", "n must be from 1 to 128"),
        ("beam", {"n": 1.5}, 400, "n", "n must be from 1 to 128"),
        ("beam", {"temperature": -1}, 400, "temperature", "temperature"),
        ("beam", {"temperature": 0}, 400, None, "use a temperature above 0"),
        ("beam", {"max_tokens": "many"}, 400, "max_tokens", "an integer, got 'many'"),
        ("beam", {"messages": []}, 400, "messages", "at least 1 item"),
        ("beam", {"messages": "Hi"}, 400, "messages", "must be a list, got 'Hi'"),
        ("beam", {"messages": [{"content": 3}]}, 400, None, "role"),
        ("beam", {"first": 2, "seed": 1}, 400, "first", "first is not supported: a search"),
        ("beam", {"include_stop": True}, 400, "include_stop", "include_stop is not supported"),
        ("beam", {"tools": [{"type": "function"}]}, 400, "tools", "tools is not supported"),
        ("beam", {"logprobs": True}, 400, "logprobs", "logprobs is not supported"),
        ("beam", {"response_format": {"type": "json_object"}}, 400, "response_format", "text"),
        ("beam", {"prompt": "Hi"}, 400, "prompt", "prompt is not supported"),
        ("beam", {"search": {"feedback": "Hi"}}, 400, "search.feedback", "no option 'feedback'"),
        ("majority", {"search": {"depth": 3}}, 400, "search.depth", "has no effect on majority"),
        (
            "best-first",
            {"search": {"depth": 3}},
            400,
            "search.depth",
            "search.depth has no effect on best-first, which reads only expand, evaluate",
        ),
    ],
)
def test_errors_name_the_field(
    running: Running, method: str, fields: Any, status: int, param: str | None, message: str
) -> None:
    got = error_of(ask(running, method, **fields))
    assert got[:2] == (status, param) and message in got[2]


def test_images_are_refused_by_a_model_without_images(running: Running) -> None:
    url = "data:image/png;base64,iVBORw0KGgo="
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    status, _, message = error_of(
        ask(running, "beam", messages=[{"role": "user", "content": parts}])
    )
    assert status == 400 and "image" in message


def test_texts_and_other_paths_are_not_found(running: Running) -> None:
    for path in ("search/beam/completions", "search/beam", "search", "search/beam/embeddings"):
        status, _, message = error_of(running.post(path, {"prompt": "Hi"}))
        assert status == 404 and "/v1/search/METHOD" in message


def test_the_question_is_the_text_of_the_last_message() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}, "text": 1}
    content = [{"type": "text", "text": "What is"}, image, {"text": "here?"}]
    body = {"messages": [*CHAT, {"role": "user", "content": content}]}
    assert parse_search("beam", body, LIMITS).question == "What is\nhere?"


def test_too_many_searches_get_429(running: Running) -> None:
    def search(seed: int) -> httpx2.Response:
        return ask(running, "best-of-n", seed=seed, max_tokens=60, search={"num_samples": 16})

    with ThreadPoolExecutor(6) as threads:
        responses = list(threads.map(search, range(6)))
    statuses = {response.status_code for response in responses}
    assert statuses == {200, 429}
    refused = next(response for response in responses if response.status_code == 429)
    assert (
        refused.headers["retry-after"]
        and "at most 2 searches can run at the same time (max_searches)" in error_of(refused)[2]
    )


def test_one_key_cannot_take_the_places_of_others(running: Running) -> None:
    keys, limits = ("first", "second"), SearchLimits(max_searches=3, max_key_searches=1)
    body = {"messages": CHAT, "max_tokens": 60, "search": {"num_samples": 16}}

    def search(key: str) -> httpx2.Response:
        url = f"{shared.url}/v1/search/best-of-n/chat/completions"
        return HTTP.post(url, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)

    with (
        listening(demo(), key=keys, searches=ChatSearches(), search_limits=limits) as shared,
        ThreadPoolExecutor(5) as threads,
    ):
        many = [threads.submit(search, keys[0]) for _ in range(4)]
        while not shared.served.status().rows:
            time.sleep(0.01)
        assert search(keys[1]).status_code == 200
        responses = [call.result() for call in many]
        assert sorted(response.status_code for response in responses) == [200, 429, 429, 429]
        refused = next(response for response in responses if response.status_code == 429)
        assert "can run at the same time (max_key_searches)" in error_of(refused)[2]


def test_a_model_without_a_template_says_how_to_give_one() -> None:
    body = {"messages": CHAT, "max_tokens": 4}
    with listening(exact_demo(), searches=ChatSearches(), nodes=NodeLimits()) as running:
        for path in ("search/sample/chat/completions", "chat/completions"):
            status, param, message = error_of(running.post(path, body))
            assert (status, param) == (400, "messages") and "no chat template" in message
        assert error_of(running.post("nodes", {"messages": CHAT})) == (status, param, message)
    option, template = shlex.split(message.partition("such as ")[2].rpartition(", or")[0])
    assert option == "--chat-template"
    with listening(exact_demo(template), searches=ChatSearches()) as running:
        assert ask(running, "sample", max_tokens=4).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_ends_says_so(stream: bool) -> None:
    bodies: list[str] = []

    def search(url: str) -> None:
        body = {"messages": CHAT, "max_tokens": 1_000, "stream": stream, "search": {"tree": False}}
        url = f"{url}/v1/search/best-of-n/chat/completions"
        bodies.append(HTTP.post(url, json=body, timeout=60).text)

    with AsyncLLM(demo(), nodes=True) as served:
        with draining(served, searches=ChatSearches()) as running:
            thread = threading.Thread(target=search, args=(running.url,))
            thread.start()
            while not served.status().rows:
                time.sleep(0.01)
        thread.join()
    last = bodies[0].strip().split("\n\n")[-1].removeprefix("data: ")
    assert json.loads(last)["error"]["code"] == 503


@pytest.mark.parametrize("stream", [False, True])
def test_places_are_taken_before_a_search_is_prepared(
    running: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Many requests arrive at once, and each waits before its search can start."""
    prepare, num_waiting = SearchService.prepare, [0, 0]

    async def wait_and_prepare(service: Any, request: Any) -> Any:
        num_waiting[0] += 1
        num_waiting[1] = max(num_waiting)
        await asyncio.sleep(0.3)
        num_waiting[0] -= 1
        return await prepare(service, request)

    monkeypatch.setattr(SearchService, "prepare", wait_and_prepare)

    def search(seed: int) -> int:
        return ask(running, "sample", seed=seed, stream=stream).status_code

    with ThreadPoolExecutor(8) as threads:
        statuses = list(threads.map(search, range(8)))
    assert set(statuses) == {200, 429} and num_waiting[1] == 2
    assert ask(running, "sample", stream=stream).status_code == 200


def test_a_search_that_computes_for_long_does_not_keep_the_server_from_closing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("treegen.integrations.server.search_thread._CLOSE_SECONDS", 0.1)
    started, may_end = threading.Event(), threading.Event()

    def compute() -> None:
        started.set()
        may_end.wait(60)

    async def main() -> SearchThread:
        async def run_operations(operations: Any) -> Any:
            return []

        return SearchThread(run_operations)

    thread = asyncio.run(main())
    thread._searches.loop.call_soon_threadsafe(compute)
    started.wait(60)
    begin = time.monotonic()
    thread.close()
    assert time.monotonic() - begin < 10
    may_end.set()
    thread._thread.join()
    thread.close()


def test_a_closed_thread_refuses_searches() -> None:
    async def fn(root: Any) -> None:
        raise AssertionError

    async def main() -> None:
        async def run_operations(operations: Any) -> Any:
            return []

        thread = SearchThread(run_operations)
        thread.close()
        root = RootOperation(op="root", prompt="a")
        with pytest.raises(StoppedError, match="send the request again"):
            await thread.run(fn, root, name="late", params=SamplingParams())

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_searches_end_with_an_error_when_their_thread_fails_and_later_ones_run(
    stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads_of_searches: list[SearchThread] = []
    start = SearchThread.__init__

    def start_and_note(thread: SearchThread, run_operations: Any) -> None:
        start(thread, run_operations)
        threads_of_searches.append(thread)

    def fail() -> bool:
        raise SystemExit("no luck")

    monkeypatch.setattr(SearchThread, "__init__", start_and_note)
    fields = {"max_tokens": 400, "stream": stream, "search": {"num_samples": 2}}
    with (
        listening(demo(), searches=ChatSearches(), search_limits=LIMITS) as running,
        ThreadPoolExecutor(1) as threads,
    ):
        answer = threads.submit(ask, running, "best-of-n", **fields)
        while not running.served.status().rows:
            time.sleep(0.01)
        loop: Any = threads_of_searches[0]._searches.loop
        loop.call_soon_threadsafe(setattr, loop._selector, "_on_idle", fail)
        text = answer.result(30).text
        later = ask(running, "sample", stream=stream)
        assert HTTP.get(f"{running.url}/health").status_code == 200
    error = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
    assert error["code"] == 503 and "send the request again" in error["message"]
    assert later.status_code == 200 and "error" not in later.text
    assert len(threads_of_searches) == 2 and threads_of_searches[0].failure is not None
    assert "SystemExit: no luck" in caplog.text


def test_two_clients_at_once_get_their_own_answers(running: Running) -> None:
    def search(seed: int) -> Any:
        return ask(running, "beam", seed=seed, search=SMALL["beam"]).json()["treegen"]["tree"]

    alone = [search(seed) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(search, (1, 2))) == alone
    assert alone[0] != alone[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_cancels_its_search(running: Running, stream: bool) -> None:
    async def leave() -> None:
        body = {
            "messages": CHAT,
            "max_tokens": 400,
            "stream": stream,
            "budget": {"tokens": 1_000},
            "search": {"iterations": 1_000, "rollouts": 2},
        }
        headers = {"authorization": f"Bearer {KEY}"}
        url = f"{running.url}/v1/search/mcts/chat/completions"
        async with httpx2.AsyncClient(headers=headers, timeout=60) as client:
            call = asyncio.create_task(client.post(url, json=body))
            while not running.served.status().rows:
                await asyncio.sleep(0.01)
            call.cancel()

    before = running.served.usages()[-1].decoded_tokens
    asyncio.run(leave())
    begin = time.monotonic()
    running.wait_until_idle()
    # It did not decode its budget.
    assert running.served.usages()[-1].decoded_tokens - before < 900
    assert time.monotonic() - begin < 30
    assert ask(running, "sample").status_code == 200


def test_a_budget_too_small_for_any_reply_is_an_error(running: Running) -> None:
    response = ask(running, "beam", budget={"seconds": 1e-6})
    status, param, message = error_of(response)
    assert (status, param) == (400, "budget") and "set a larger budget" in message


def test_a_search_that_ends_without_a_reply_is_an_error(running: Running) -> None:
    options = {"expand": 2, "depth": 1, "step_tokens": 2}
    status, param, message = error_of(ask(running, "tot-dfs", search=options))
    assert (status, param) == (400, "search") and "set a larger depth" in message


def test_the_key_is_checked(running: Running) -> None:
    url = f"{running.url}/v1/search/beam/chat/completions"
    response = HTTP.post(url, json={"messages": CHAT})
    assert response.status_code == 401
    assert json.loads(response.text)["error"]["type"] == "authentication_error"


@pytest.fixture(name="judge", scope="module")
def _judge(tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    from transformers import LlamaForSequenceClassification

    folder = save_tiny_verifier(tmp_path_factory.mktemp("judge"), LlamaForSequenceClassification, 1)
    return load_verifier(folder, device="cpu", memory="4MiB")


def test_searches_and_nodes_share_the_verifier(judge: Verifier) -> None:
    """A reward and searches use one cache of one verifier at once, and get the values of alone."""

    def search(seed: int) -> Any:
        options = {"num_samples": 6}
        answer = ask(running, "best-of-n", seed=seed, n=6, max_tokens=6, search=options).json()
        return answer["treegen"]["values"]

    def reward(number: int) -> Any:
        operations = [
            {"op": "root", "prompt": f"{number} apples", "seed": 1, "params": {"max_tokens": 4}},
            {"op": "sample", "node": "#0", "n": 4},
            {"op": "reward", "nodes": [f"#1.{index}" for index in range(4)]},
            {"op": "drop", "node": "#0"},
        ]
        return running.post("nodes/batch", {"operations": operations}).json()["results"][2]

    shared: dict[str, Any] = {"verifier": judge, "searches": ChatSearches(judge)}
    with listening(demo(), nodes=NodeLimits(), **shared) as running:
        alone = [*map(search, range(4)), *(reward(number)["rewards"] for number in range(12))]
        judge.reader._values.clear()  # type: ignore[union-attr]
        with ThreadPoolExecutor(16) as threads:
            searches = [threads.submit(search, seed) for seed in range(4)]
            rewards = [threads.submit(reward, number) for number in range(12)]
            together = [call.result() for call in searches]
            together += [call.result()["rewards"] for call in rewards]
    for got, want in zip(together, alone, strict=True):
        assert got == pytest.approx(want, abs=1e-5)


def test_the_verifier_of_the_server_chooses_the_best_reply(judge: Verifier) -> None:
    def value_of(reply: str) -> float:
        ids, ends = judge.encode(CHAT[0]["content"], reply)
        return judge.reduce_steps(judge.read([ids], [ends])[0])

    searches = ChatSearches(judge)
    with listening(demo(), searches=searches, search_limits=LIMITS) as running:
        options: dict[str, Any] = {"num_samples": 4}
        answer = ask(running, "best-of-n", n=4, max_tokens=12, search=options).json()
        values = answer["treegen"]["values"]
        replies = [choice["message"]["content"] for choice in answer["choices"]]
        assert values == pytest.approx([value_of(reply) for reply in replies], abs=1e-3)
        assert values == sorted(values, reverse=True) and len(set(values)) > 1
        options = {"num_samples": 4, "evaluate": "logprob"}
        other = ask(running, "best-of-n", max_tokens=12, search=options).json()
        assert other["treegen"]["values"][0] < 0
