"""Nodes over HTTP: faults of libraries, and texts that take long."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import HTTP, KEY, Running, listening

from treegen import LLM
from treegen.errors import InternalError
from treegen.integrations.nodes.params import Sampling
from treegen.integrations.nodes.protocol import MAX_INDEX, NodeAnswer, RootFields, SampleFields
from treegen.integrations.server import node_answers, node_calls, requests
from treegen.integrations.server.errors import StatusError, for_client, run_exclusively
from treegen.integrations.server.limits import NodeLimits
from treegen.integrations.server.node_calls import NodeCalls
from treegen.integrations.server.node_routes import StoredAnswers
from treegen.integrations.server.nodes import Changes, NodeStore
from treegen.integrations.server.openapi import make_openapi
from treegen.llm.engine_loop import EngineLoop
from treegen.prompts import tokens
from treegen.prompts.tokens import PromptAppender
from treegen.search.live import pending
from treegen.search.live.run import LiveRun

pytest.importorskip("jsonschema")
from node_clients import NodeClient, clean_client, tiny_llm


class Panic(BaseException):
    """What a library written in Rust raises; no Exception."""


def panic(*args: Any, **more: Any) -> Any:
    raise Panic("index out of bounds")


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("model"))


@pytest.fixture(name="running", scope="module")
def _running(model: LLM) -> Iterator[Running]:
    with listening(model, nodes=NodeLimits()) as running:
        yield running


@pytest.fixture(name="client")
def _client(running: Running) -> Iterator[NodeClient]:
    with clean_client(running.url, KEY) as client:
        yield client
    running.wait_until_idle()


def test_a_panic_of_the_tokenizer_is_an_error_of_the_request(
    client: NodeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = client.root("A")
    with monkeypatch.context() as patched:
        patched.setattr(PromptAppender, "append", panic)
        patched.setattr(pending, "append_text", panic)
        patched.setattr(tokens, "_encode_shared", panic)
        for path, body, param in (
            ("", {"prompt": "new"}, "prompt"),
            (f"/{root['id']}/extend", {"text": "x"}, "text"),
            (f"/{root['id']}/score", {"texts": ["x"]}, "texts"),
        ):
            status, error = client.error("POST", f"/v1/nodes{path}", body)
            assert (status, error["param"]) == (400, param) and "tokenizer" in error["message"]
    assert client.sample(client.extend(root, "x"), params={"max_tokens": 2})


def test_texts_are_encoded_outside_the_engine(
    client: NodeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, append, append_text = set[str](), PromptAppender.append, tokens.append_text

    def note(function: Any) -> Any:
        def noted(*args: Any) -> Any:
            threads.add(threading.current_thread().name)
            return function(*args)

        return noted

    root = client.root("A")
    (sample,) = client.sample(root, params={"max_tokens": 2})
    monkeypatch.setattr(PromptAppender, "append", note(append))
    monkeypatch.setattr(pending, "append_text", note(append_text))
    for node in (root, sample, client.extend(sample, "x")):
        client.extend(node, " then")
        client.post(f"/v1/nodes/{node['id']}/score", {"texts": [" then"]})
    assert threads and all(name.startswith("treegen-encode") for name in threads)


def test_a_panic_of_the_engine_ends_only_the_calls_of_now(
    client: NodeClient, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = client.root("A")
    with monkeypatch.context() as patched:
        patched.setattr(LiveRun, "step", panic)
        assert client.error("POST", f"/v1/nodes/{root['id']}/sample", {})[0] == 500
    assert client.sample(client.root("A"), params={"max_tokens": 2})
    assert HTTP.get(f"{running.url}/health").status_code == 200


def test_an_engine_that_cannot_restart_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last check of the server raises the failure too.
    with (
        pytest.raises(InternalError),
        listening(tiny_llm(tmp_path), nodes=NodeLimits()) as running,
    ):
        client = NodeClient(running.url, KEY)
        with closing(client.http):
            root = client.root("A")
            with monkeypatch.context() as patched:
                patched.setattr(LiveRun, "step", panic)
                patched.setattr(EngineLoop, "_open_run", panic)
                assert client.error("POST", f"/v1/nodes/{root['id']}/sample", {})[0] >= 500
                # The answer may come before the engine tries to restart.
                deadline = time.monotonic() + 30
                while HTTP.get(f"{running.url}/health").status_code != 503:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
            assert client.error("POST", "/v1/nodes", {"prompt": "A"})[0] >= 500


def test_stored_answers_are_dropped_oldest_first() -> None:
    computed: list[int] = []

    async def use() -> None:
        answers = StoredAnswers(4_000, seconds=3_600)

        async def get(place: int) -> bytes:
            async def compute() -> bytes:
                computed.append(place)
                await asyncio.sleep(0)
                return b"x" * 300

            return await answers.get(str(place), b"request", compute)

        for place in (0, 1, 2, 3, 1, 0):
            await get(place)
        with pytest.raises(StatusError):
            await answers.get("0", b"another request", asyncio.Future)

    asyncio.run(use())
    assert computed == [0, 1, 2, 3, 0]  # there is room for three answers


def test_large_requests_are_refused_before_they_take_long(
    client: NodeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = client.root("A")
    monkeypatch.setattr(node_calls, "_MAX_PARAMS_CHARS", 1_000)
    monkeypatch.setattr(node_answers, "_MAX_LOGPROBS", 30_000)
    monkeypatch.setattr(requests, "_MAX_VALUES", 5_000)
    for body in ({"prompt": [1] * 3_000}, {"prompt": "A", "params": {"regex": "a" * 2_000}}):
        assert client.error("POST", "/v1/nodes", body)[0] == 400
    text = "a," * 5_001
    status, error = client.error("POST", f"/v1/nodes/{root['id']}/extend", {"text": text})
    assert status == 400 and "values" in error["message"]
    status, error = client.error("POST", "/v1/nodes/batch", {"operations": [{}] * 500})
    assert (status, error["param"]) == (400, "operations") and "can have at most" in error[
        "message"
    ]
    # The answers of a batch count together.
    score = {"op": "score", "node": root["id"], "texts": ["a" * 1_000], "top": 20}
    status, error = client.error("POST", "/v1/nodes/batch", {"operations": [score, score]})
    assert (status, error["param"]) == (400, "top")


def test_errors_of_a_batch_name_the_operation(client: NodeClient, running: Running) -> None:
    root = client.root("A")
    batch = [
        {"op": "read", "node": root["id"]},
        {"op": "score", "node": root["id"], "texts": ["x", ""]},
        {"op": "root", "messages": [{"role": "user", "content": "\ud800"}]},
        {"op": "sample", "node": "node-none"},
    ]
    body = json.dumps({"operations": batch}).encode()
    results = running.post("nodes/batch", body).json()["results"]
    params = [result.get("error", {}).get("param") for result in results]
    assert params == [None, "operations.1.texts", "operations.2.messages", "operations.3.node"]
    operations = [{"op": "reward", "nodes": ["#0"]}]
    error = client.error("POST", "/v1/nodes/batch", {"operations": operations})[1]
    assert error["param"] == "operations.0.nodes"


@pytest.mark.parametrize(
    ("body", "param", "hint"),
    [
        ({"n": 2, "frist": 0}, "frist", "; did you mean 'first'?"),
        ({"max_tokens": 5}, "max_tokens", "; pass it in params"),
        ({"params": {"tempature": 1}}, "params.tempature", "; did you mean 'temperature'?"),
        ({"params": {"max_new_tokens": 5}}, "params.max_new_tokens", "; did you mean 'max_tokens'"),
        ({"params": {"n": 2}}, "params.n", "; pass it outside params"),
        ({"colour": 1}, "colour", "; remove it"),
    ],
)
def test_unknown_fields_have_a_hint(
    client: NodeClient, body: dict[str, Any], param: str, hint: str
) -> None:
    operation = {"op": "sample", "node": "node-none", **body}
    for path, sent, start in (
        ("/v1/nodes/node-none/sample", body, ""),
        ("/v1/nodes/batch", {"operations": [operation]}, "operations.0."),
    ):
        status, error = client.error("POST", path, sent)
        assert (status, error["param"]) == (400, start + param)
        assert f"{start}{param} is not supported{hint}" in error["message"]


def test_a_batch_reads_what_a_single_request_reads(client: NodeClient) -> None:
    root = client.root("A")
    client.sample(root, 2, params={"max_tokens": 2})
    (result,) = client.batch({"op": "read", "node": root["id"]})
    single = client.ask("GET", f"/v1/nodes/{root['id']}")[1]
    for answer in (result, single):
        del answer["node"]["expires_in"]
    assert result == single and len(result["children"]) == 2 and result["subtree_nodes"] == 3


def test_errors_name_the_field_that_the_request_has(client: NodeClient) -> None:
    root = client.root("A")
    part = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}]
    for operation, param in (
        ({"op": "sample", "params": {"top_k": -5}}, "params.top_k"),
        ({"op": "sample", "params": {"regex": "("}}, "params.regex"),
        ({"op": "sample", "params": {"allowed_token_ids": [10**6]}}, "params"),
        ({"op": "extend", "parts": part}, "parts"),
    ):
        (result,) = client.batch({"node": root["id"], **operation})
        assert result["error"]["param"] == f"operations.0.{param}"
    status, error = client.error("POST", "/v1/nodes", {"prompt": "A", "params": {"top_p": 0}})
    assert (status, error["param"]) == (400, "params.top_p")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": []}, "prompt must have at least 1 item, got an empty list"),
        ({"prompt": [-1]}, "prompt must be at least 0, got -1"),
        ({"prompt": 3}, "prompt must be a string or a list, got 3"),
        ({"prompt": "A", "params": {"stop": ["x"] * 65}}, "params.stop must have at most 64 items"),
        ({"prompt": "A", "params": {"stop": 5}}, "params.stop must be a string or a list, got 5"),
        (
            {"prompt": "A", "params": {"logit_bias": {"x": 1}}},
            "the key 'x' of params.logit_bias must be an integer",
        ),
        (
            {"prompt": "A", "params": {"json_schema": 5}},
            "params.json_schema must be an object, a boolean or a string, got 5",
        ),
        (
            {"prompt": "A", "params": {"reasoning_tags": "off"}},
            "params.reasoning_tags must be 'auto' or a list, got 'off'",
        ),
        ({"prompt": "A", "lease_seconds": 0}, "lease_seconds must be more than 0, got 0"),
        (
            {"prompt": "A", "params": {"skip_special_tokens": False}},
            "params.skip_special_tokens is not supported; remove it: texts never contain",
        ),
        (
            {"prompt": "A", "max_new_tokens": 5},
            "max_new_tokens is not supported; did you mean 'params.max_tokens'?",
        ),
        ([], "the body"),
    ],
)
def test_errors_tell_what_is_wrong_with_a_list(
    client: NodeClient, body: dict[str, Any], message: str
) -> None:
    status, error = client.error("POST", "/v1/nodes", body)
    assert status == 400 and error["message"].startswith(message)


def test_the_error_of_a_long_text_tells_what_is_wrong(client: NodeClient) -> None:
    path = f"/v1/nodes/{client.root('A')['id']}/score"
    status, error = client.error("POST", path, {"texts": [" b" * 8_000]})
    assert (status, error["param"]) == (400, "texts") and "context" in error["message"]


def test_advice_in_brackets_stays_whole() -> None:
    assert for_client("no tags; give them: reasoning_tags=('a', 'b')") == "no tags; remove it"
    assert for_client("too big; lower n, or raise memory='1GiB'") == "too big; lower n"


def test_unknown_operations_have_a_hint(client: NodeClient) -> None:
    for operation, message in (
        ({"op": "smaple"}, "the op 'smaple' is not supported; did you mean 'sample'?"),
        (
            {"op": "fly"},
            "the op 'fly' is not supported; use one of root, sample, extend, score, reward",
        ),
        ({}, "the op '' is not supported; use one of root"),
    ):
        status, error = client.error("POST", "/v1/nodes/batch", {"operations": [operation]})
        assert (status, error["param"]) == (400, "operations.0") and message in error["message"]


def test_a_child_after_the_highest_index_is_refused(client: NodeClient) -> None:
    root = client.root("A", params={"max_tokens": 1})
    (last,) = client.sample(root, first=MAX_INDEX)
    assert last["path"] == str(MAX_INDEX)
    for body in ({}, {"n": 2, "first": MAX_INDEX}):
        status, error = client.error("POST", f"/v1/nodes/{root['id']}/sample", body)
        assert (status, error["param"]) == (400, "first")


def test_a_stream_gives_back_the_room_of_samples_that_have_ended(running: Running) -> None:
    async def use() -> None:
        calls = NodeCalls(running.served, NodeStore(running.served, NodeLimits()), None)
        client, changes = calls.store.client("1"), Changes()
        params = Sampling(max_tokens=9, ignore_eos=True)
        answer = await calls.root(client, RootFields(prompt="A", params=params), changes)
        node = calls.store.find(client, answer.node.id)
        nodes = tokens = 0
        async for item in calls.stream(client, node, SampleFields(n=4)):
            if isinstance(item, NodeAnswer):
                nodes, tokens = nodes + 1, tokens + 9
                assert client.reserved_nodes <= 4 - nodes
                assert client.reserved_tokens <= 4 * 9 - tokens
        assert nodes == 4 and not client.reserved_nodes and not client.reserved_tokens
        changes.undo(calls.store)

    asyncio.run(use())


def test_a_cancelled_reward_keeps_the_verifier(
    running: Running, model: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    running_now, most, total, over = [0], [0], [0], threading.Event()

    def compute(*args: Any) -> list[float]:
        total[0] += 1
        running_now[0] += 1
        most[0] = max(most[0], running_now[0])
        over.wait(0.2)
        running_now[0] -= 1
        return [0.5]

    monkeypatch.setattr(node_calls, "compute_values", compute)
    verifier: Any = SimpleNamespace(encode=lambda *text: text)

    async def use() -> list[float]:
        calls = NodeCalls(running.served, NodeStore(running.served, NodeLimits()), verifier)
        client, changes = calls.store.client("1"), Changes()
        answer = await calls.root(client, RootFields(prompt="A"), changes)
        node = calls.store.find(client, answer.node.id)
        first, waiting = (asyncio.ensure_future(calls.reward(client, [node])) for _ in range(2))
        await asyncio.sleep(0.05)
        assert node.tree.num_open == 2
        first.cancel()
        waiting.cancel()
        rewards = (await calls.reward(client, [node])).rewards
        changes.undo(calls.store)
        return rewards

    assert asyncio.run(use()) == [0.5] and most == [1]
    assert total == [2]  # a call that is cancelled while it waits computes nothing


def test_the_openapi_document_has_every_refusal(running: Running) -> None:
    sent = {"authorization": f"Bearer {KEY}", "content-type": "text/plain"}
    status = HTTP.post(f"{running.url}/v1/nodes", headers=sent, content="{}").status_code
    assert status == 415
    document = make_openapi(searches=True)
    for path in ("/v1/nodes", "/v1/search/{method}/chat/completions"):
        assert {"403", "408", "415"} <= document["paths"][path]["post"]["responses"].keys()
    assert not any("search" in path for path in make_openapi()["paths"])


def test_a_call_that_cannot_start_leaves_the_lock_free() -> None:
    def fail() -> Any:
        raise InternalError("no coroutine")

    async def main() -> int:
        lock = asyncio.Lock()
        with pytest.raises(InternalError, match="no coroutine"):
            await run_exclusively(lock, fail)
        return await run_exclusively(lock, lambda: asyncio.sleep(0, 7))

    assert asyncio.run(main()) == 7
