"""Nodes over HTTP: what each operation returns, and what the server refuses."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from serving import HTTP, KEY, Running, draining, listening

from treegen import LLM, AsyncLLM, SamplingParams
from treegen.errors import NumericsError
from treegen.integrations.nodes.params import Sampling, merge_params, sampling_fields
from treegen.integrations.server.limits import NodeLimits
from treegen.search.live.run import LiveRun

pytest.importorskip("jsonschema")
import httpx2
from node_clients import LIMIT, NodeClient, clean_client, difference, evict_all, tiny_llm

PROMPT = "Tom has 3 apples and buys 5 more. How many apples does Tom have?\n"
OTHER = "another key"
LIMITS = NodeLimits(max_nodes=60, max_node_depth=6, max_node_samples=16, max_node_operations=20)


@pytest.fixture(name="directory", scope="module")
def _directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(name="model", scope="module")
def _model(directory: Path) -> LLM:
    return tiny_llm(directory)


@pytest.fixture(name="reference", scope="module")
def _reference(directory: Path) -> LLM:
    return tiny_llm(directory)


@pytest.fixture(name="running", scope="module")
def _running(model: LLM) -> Iterator[Running]:
    with listening(model, key=[KEY, OTHER], nodes=LIMITS) as running:
        yield running


@pytest.fixture(name="client")
def _client(running: Running) -> Iterator[NodeClient]:
    with clean_client(running.url, KEY) as client:
        yield client
    running.wait_until_idle()


def same(nodes: Any, children: Any) -> bool:
    """Whether nodes of the server are those of a local session."""
    pairs = list(zip(nodes, children, strict=True))
    assert all(node["token_ids"] == list(child.tokens) for node, child in pairs)
    for node, child in pairs:
        assert difference(node["logprobs"], child.logprobs) < LIMIT
    facts = [(n["text"], n["finish_reason"], n["stop"], n["seed"]) for n, _ in pairs]
    return facts == [(c.text, c.finish_reason, c.stop, c.completion.seed) for _, c in pairs]


@pytest.mark.parametrize("form", ["text", "ids", "messages", "unnamed"])
def test_nodes_are_those_of_a_session(client: NodeClient, reference: LLM, form: str) -> None:
    content: Any = PROMPT
    if form == "ids":
        content = reference.tokenizer(PROMPT)["input_ids"]
    if form == "messages":
        content = [{"role": "user", "content": PROMPT}]
    name = None if form == "unnamed" else "named"
    given = {"messages" if form == "messages" else "prompt": content, "name": name, "seed": 3}
    made = client.post("/v1/nodes", {**given, "params": {"max_tokens": 9}})["node"]
    params = SamplingParams(seed=3, max_tokens=9)
    with reference.session(params) as session:
        root = session.root(content, name=name)
        assert made["origin"] == root.search.origin
        children = session.sample({root: 3})[root]
        nodes = client.sample(made, 3)
        assert same(nodes, children)
        assert [node["path"] for node in nodes] == ["0", "1", "2"]
        below = session.sample({children[1]: 2}, stop=" ", logprobs=2)[children[1]]
        drawn = client.sample(nodes[1], 2, params={"stop": " ", "logprobs": 2})
        assert same(drawn, below)
        tops = [pair for top in drawn[0]["top_logprobs"] for pair in top]
        completion = below[0].completion
        assert completion is not None
        want = [pair for top in completion.top_logprobs for pair in top]
        assert [token for token, _ in tops] == [token for token, _ in want]
        more, given_text = (
            client.extend(nodes[0], " Thus \u00e9\U0001f600"),
            " Thus \u00e9\U0001f600",
        )
        longer = children[0].extend(given_text)
        assert same(client.sample(more, 2), session.sample({longer: 2})[longer])
        assert more["path"] == "0/+0" and more["num_context_tokens"] == longer.num_context_tokens
        # Text that follows a prompt is encoded with it.
        first, second = client.extend(made, "A: "), root.extend("A: ")
        assert same(client.sample(first, 1), session.sample({second: 1})[second])
        texts = ["There", " are 8 apples."]
        path = f"/v1/nodes/{more['id']}/score"
        scores = client.post(path, {"texts": texts, "top": 3})["scores"]
        for score, want_score in zip(scores, session.score({longer: texts})[longer], strict=True):
            assert score["token_ids"] == list(want_score.tokens)
            assert difference(score["logprobs"], want_score.logprobs) < LIMIT
            assert score["is_greedy"] == want_score.is_greedy
            assert [len(top) for top in score["top_logprobs"]] == [3] * len(want_score.tokens)
        greedy = session.sample({children[2]: 1}, temperature=0)[children[2]]
        assert same(client.sample(nodes[2], params={"temperature": 0}), greedy)
    read = client.ask("GET", f"/v1/nodes/{more['id']}")[1]
    assert read["node"]["text"] == given_text and len(read["children"]) == 2
    assert read["cached_tokens"] <= read["node"]["num_tokens"]
    whole = client.ask("GET", f"/v1/nodes/{made['id']}")[1]
    assert PROMPT.strip() in whole["node"]["text"]
    assert whole["subtree_nodes"] == client.memory()["nodes"] == 12
    assert whole["subtree_tokens"] == client.memory()["tokens"]


def test_samples_can_have_a_structure(client: NodeClient) -> None:
    pytest.importorskip("llguidance")
    root = client.root(PROMPT, params={"max_tokens": 40})
    choice = {"structured_outputs": {"choice": ["yes", "no"]}}
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": [7, 8]}}}
    for params, texts in (
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        (choice, {"yes", "no"}),
        ({"regex": "[ab]{2}"}, {"aa", "ab", "ba", "bb"}),
        ({"response_format": schema}, {"7", "8"}),
    ):
        assert {node["text"] for node in client.sample(root, 4, params=params)} <= texts
    assert (
        client.error("POST", f"/v1/nodes/{root['id']}/sample", {"params": {"regex": "("}})[0] == 400
    )


def test_params_of_a_sample_replace_those_of_its_tree() -> None:
    tree = SamplingParams(regex="[ab]", stop="x")
    for name, structure in (
        ("choice", {"choice": ["yes"]}),
        ("choice", {"structured_outputs": {"choice": ["yes"]}}),
        ("json_schema", {"response_format": {"type": "json_object"}}),
        (None, {"response_format": {"type": "text"}}),
    ):
        merged = merge_params(tree, Sampling(**structure))
        assert (merged.structure or (None,))[0] == name and merged.stops == ("x",)
    for stop, stops in ((None, ("x",)), ("", ()), ([""], ()), ("y", ("y",))):
        merged = merge_params(tree, Sampling(stop=stop))
        assert merged.stops == stops and merged.regex == tree.regex


def test_params_can_have_every_name_that_sampling_params_has() -> None:
    names = set(signature(SamplingParams).parameters)
    # A request has n beside params, and the log-probabilities of given text are those of `score`.
    assert names - {"n", "prompt_logprobs"} <= set(Sampling.model_fields)
    merged = merge_params(SamplingParams(), Sampling(include_stop_str_in_output=True))
    assert merged == SamplingParams(include_stop=True)
    assert sampling_fields(merged) == {"include_stop": True}


def test_a_child_has_its_stop_string_by_vllms_name_too(client: NodeClient) -> None:
    root = client.root(PROMPT, seed=6, params={"max_tokens": 12})
    (whole,) = client.sample(root)
    stop = next(char for char in whole["text"][1:] if char.isascii() and char.isprintable())
    params = {"stop": stop}
    for more in ({}, {"include_stop": True}, {"include_stop_str_in_output": True}):
        (child,) = client.sample(root, first=0, params={**params, **more})
        kept = stop if more else ""
        assert child["text"] == whole["text"].partition(stop)[0] + kept and child["stop"] == stop


def test_messages_continue_a_conversation(client: NodeClient, reference: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    root = client.post("/v1/nodes", {"messages": messages, "seed": 1})["node"]
    (reply,) = client.sample(root, params={"max_tokens": 5})
    turns = [{"role": "tool", "content": "8"}, {"role": "user", "content": "And?"}]
    more = client.post(f"/v1/nodes/{reply['id']}/extend", {"messages": turns})["node"]
    text = client.ask("GET", f"/v1/nodes/{more['id']}")[1]["node"]["num_context_tokens"]
    whole = [*messages, {"role": "assistant", "content": reply["text"]}, *turns]
    rendered = reference.tokenizer.apply_chat_template(
        whole, tokenize=False, add_generation_prompt=True
    )
    assert text == more["num_context_tokens"]
    with reference.session(SamplingParams(seed=1)) as session:
        node = session.root(messages)
        (child,) = session.sample({node: 1}, max_tokens=5)[node]
        rest = rendered.partition(f"assistant: {reply['text']}")[2]
        longer = child.extend(rest)
        drawn = client.sample(more, 2, params={"max_tokens": 6})
        assert same(drawn, session.sample({longer: 2}, max_tokens=6)[longer])
    path = f"/v1/nodes/{reply['id']}/extend"
    refused: list[Any] = [[{"role": "assistant", "content": "x"}], [{"role": "user"}], [{}]]
    for wrong in refused:
        assert client.error("POST", path, {"messages": wrong})[0] == 400


def test_each_drop_of_a_batch_waits_for_the_drop_before(
    client: NodeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_awaited, wait = list[int](), asyncio.wait

    def count(tasks: Any, **how: Any) -> Any:
        num_awaited.append(len(tasks))
        return wait(tasks, **how)

    monkeypatch.setattr(asyncio, "wait", count)
    extend, names = {"op": "extend", "node": "#0", "text": "a"}, [f"#{i}" for i in range(1, 9)]
    drops = [{"op": "drop", "node": name} for name in names]
    results = client.batch({"op": "root", "prompt": PROMPT}, *[extend] * 8, *drops)
    assert [result["dropped_nodes"] for result in results[9:]] == [1] * 8
    # The first drop awaits all nine operations before it, each other operation awaits one.
    assert sum(num_awaited) - 9 <= 2 * len(results)


def test_a_batch_names_what_it_makes(client: NodeClient, running: Running) -> None:
    results = client.batch(
        {"op": "root", "prompt": PROMPT, "seed": 2, "params": {"max_tokens": 4}},
        {"op": "sample", "node": "#0", "n": 3},
        {"op": "extend", "node": "#1.2", "text": "\n"},
        {"op": "sample", "node": "#2", "n": 2},
        {"op": "score", "node": "#3.1", "texts": [" 8"]},
        {"op": "read", "node": "#0"},
        {"op": "sample", "node": "#1.7"},
        {"op": "sample", "node": "#6"},
        {"op": "drop", "node": "#1.0"},
        {"op": "sample", "node": "#1.0"},
    )
    kinds = [result["object"] for result in results]
    assert kinds[:6] == [
        "node.result",
        "node.samples",
        "node.result",
        "node.samples",
        "node.scores",
        "node.result",
    ]
    assert kinds[6:8] == ["error", "error"] and kinds[8:] == ["node.dropped", "node.samples"]
    assert "did not create this node" in results[6]["error"]["message"]
    assert "#6 refers to operation 6, which failed" in results[7]["error"]["message"]
    assert results[2]["node"]["path"] == "2/+0"
    # Samples that do not depend on each other share the steps of the engine.
    before = running.served.usages()[-1].decode_steps
    node = results[0]["node"]["id"]
    draw = {"op": "sample", "node": node, "n": 4, "params": {"max_tokens": 8, "ignore_eos": True}}
    client.batch(*[draw] * 4)
    assert running.served.usages()[-1].decode_steps - before < 2 * 8
    body = {"operations": [{"op": "sample", "node": "#1"}, {"op": "root", "prompt": "x"}]}
    status, error = client.error("POST", "/v1/nodes/batch", body)
    assert status == 400 and error["param"] == "operations.0.node"


def test_draws_follow_from_seed_and_path(client: NodeClient, running: Running) -> None:
    given = {"prompt": PROMPT, "seed": 5, "params": {"max_tokens": 6}}
    root = client.post("/v1/nodes", given)["node"]
    nodes = client.sample(root, 4)
    below = client.sample(nodes[2], 2)
    pages, _ = asyncio.run(evict_all(running.served))
    assert pages == 0  # everything is computed again
    assert same_draws(client.sample(nodes[2], 2, first=0), below)
    client.ask("DELETE", f"/v1/nodes/{root['id']}")
    again = client.batch(
        {"op": "root", **given},
        {"op": "sample", "node": "#0", "n": 1, "first": 2},
        {"op": "sample", "node": "#1", "n": 2},
    )
    assert same_draws(again[2]["nodes"], below)
    other = client.post("/v1/nodes", {**given, "repeat": 1})["node"]
    assert other["origin"] != root["origin"]
    assert not same_draws(client.sample(other, 4), nodes)
    seedless = client.root(PROMPT)
    assert seedless["seed"] != client.root(PROMPT)["seed"]


def same_draws(nodes: Any, others: Any) -> bool:
    return all(
        node["token_ids"] == other["token_ids"]
        and difference(node["logprobs"], other["logprobs"]) < LIMIT
        for node, other in zip(nodes, others, strict=True)
    )


def test_a_repeated_key_gets_the_stored_answer(client: NodeClient, running: Running) -> None:
    root = client.root(PROMPT, seed=1)
    path, body = f"/v1/nodes/{root['id']}/sample", {"n": 2, "params": {"max_tokens": 5}}
    first = client.post(path, body, idempotency_key="a")
    asyncio.run(evict_all(running.served))
    assert client.post(path, body, idempotency_key="a") == first
    assert client.memory()["nodes"] == 3
    assert client.post(path, body, idempotency_key="b")["nodes"][0]["path"] == "2"
    other = NodeClient(running.url, OTHER)
    with closing(other.http):
        assert other.error("POST", path, body, idempotency_key="a")[0] == 404
    for key, changed in (("a", {**body, "n": 1}), ("a", {})):
        assert client.error("POST", path, changed, idempotency_key=key)[0] == 409
    assert client.error("POST", path, body, idempotency_key="k" * 300)[0] == 400
    assert client.error("POST", path, {**body, "stream": True}, idempotency_key="s")[0] == 400
    # An error is not stored.
    wrong = f"/v1/nodes/{root['id']}/score"
    assert client.error("POST", wrong, {"texts": [""]}, idempotency_key="c")[0] == 400
    client.post(wrong, {"texts": ["x"]}, idempotency_key="c")


def test_equal_requests_at_once_share_an_answer(client: NodeClient, running: Running) -> None:
    root = client.root(PROMPT, seed=1)
    path, body = (
        f"/v1/nodes/{root['id']}/sample",
        {"params": {"max_tokens": 40, "ignore_eos": True}},
    )
    answers = []

    def ask() -> None:
        own = NodeClient(running.url, KEY)
        with closing(own.http):
            answers.append(own.post(path, body, idempotency_key="shared"))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 4 and all(answer == answers[0] for answer in answers)
    assert client.memory()["nodes"] == 2


def test_a_client_at_a_limit_is_told_what_to_free(client: NodeClient) -> None:
    roots = [client.root("A", seed=seed) for seed in range(3)]
    nodes = client.sample(roots[1], 16, params={"max_tokens": 1})
    for root in (roots[0], roots[2], roots[1]):
        client.sample(root, 12, params={"max_tokens": 1})
    status, error = client.error("POST", f"/v1/nodes/{roots[0]['id']}/sample", {"n": 6})
    assert status == 429 and error["type"] == "rate_limit_error"
    assert error["param"] == "n" and "max_nodes" in error["message"]
    # The tree that is asked for comes last.
    assert [tree["id"] for tree in error["free"]] == [roots[i]["id"] for i in (2, 1, 0)]
    assert error["free"][1]["nodes"] == 29
    dropped = client.ask("DELETE", f"/v1/nodes/{nodes[3]['id']}")[1]
    assert dropped["dropped_nodes"] == 1
    client.ask("DELETE", f"/v1/nodes/{roots[1]['id']}")
    assert client.memory()["nodes"] == 26
    node = roots[0]
    for _ in range(LIMITS.max_node_depth):
        node = client.extend(node, "x")
    for path, body in (("extend", {"text": "x"}), ("sample", {})):
        status, error = client.error("POST", f"/v1/nodes/{node['id']}/{path}", body)
        assert status == 400 and f"the depth {LIMITS.max_node_depth}" in error["message"]
    status, error = client.error("POST", f"/v1/nodes/{roots[0]['id']}/sample", {"n": 17})
    assert (status, error["param"]) == (400, "n")
    operations = [{"op": "read", "node": roots[0]["id"]}] * 21
    assert client.error("POST", "/v1/nodes/batch", {"operations": operations})[0] == 400


def test_the_memory_of_a_key_is_limited(model: LLM, running: Running) -> None:
    with closing(NodeClient(running.url, OTHER).http) as http:
        assert http.get("/v1/nodes").json()["memory"]["tokens"] == 0
    most = running_tokens(running, model)
    client = NodeClient(running.url, OTHER)
    with closing(client.http):
        root = client.root("word " * 100)
        tokens = client.memory()["tokens"]
        assert client.memory()["bytes"] == tokens * model.spec.kv_bytes_per_token
        body = {"n": 16, "params": {"max_tokens": most // 16}}
        status, error = client.error("POST", f"/v1/nodes/{root['id']}/sample", body)
        assert (status, error["param"]) == (429, "params.max_tokens")
        assert "exceed the limit max_tokens" in error["message"]
        while client.memory()["tokens"] + 1_000 <= most:
            client.root([5] * 1_000)
        status, error = client.error("POST", "/v1/nodes", {"prompt": [5] * 1_000})
        assert (status, error["param"]) == (429, "prompt")
        for tree in client.ask("GET", "/v1/nodes")[1]["data"]:
            if tree["id"] != root["id"]:
                client.ask("DELETE", f"/v1/nodes/{tree['id']}")
        assert client.memory()["tokens"] == tokens
        client.ask("DELETE", f"/v1/nodes/{root['id']}")
        assert client.memory()["tokens"] == 0


def running_tokens(running: Running, model: LLM) -> int:
    return model.cache.pool.num_pages * model.cache.page_size


def test_other_keys_see_nothing(client: NodeClient, running: Running) -> None:
    root = client.root(PROMPT)
    other = NodeClient(running.url, OTHER)
    with closing(other.http):
        path = f"/v1/nodes/{root['id']}"
        missing = other.error("GET", "/v1/nodes/node-none")[1]["message"]
        for method, rest, body in (
            ("GET", "", None),
            ("DELETE", "", None),
            ("POST", "/sample", {}),
            ("POST", "/sample", {"stream": True}),
            ("POST", "/extend", {"text": "x"}),
            ("POST", "/score", {"texts": ["x"]}),
        ):
            status, error = other.error(method, path + rest, body)
            assert status == 404
            assert error["message"].replace(root["id"], "node-none") == missing
        results = other.batch(
            {"op": "drop", "node": root["id"]}, {"op": "read", "node": root["id"]}
        )
        assert [result["error"]["code"] for result in results] == [404, 404]
        assert other.ask("GET", "/v1/nodes")[1]["data"] == []
    assert client.ask("GET", f"/v1/nodes/{root['id']}")[0] == 200
    assert HTTP.get(f"{running.url}/v1/nodes").status_code == 401


def test_a_tree_ends_with_its_lease(client: NodeClient) -> None:
    brief = client.root(PROMPT, lease_seconds=0.6)
    long = client.root(PROMPT, lease_seconds=1e9)
    assert brief["expires_in"] <= 0.6 and long["expires_in"] <= LIMITS.max_node_lease
    (child,) = client.sample(brief, params={"max_tokens": 2})
    until = time.monotonic() + 1.2
    while time.monotonic() < until:  # use renews the lease
        assert client.ask("GET", f"/v1/nodes/{child['id']}")[0] == 200
    while client.memory()["nodes"] > 1:  # reading the list does not
        time.sleep(0.05)
    status, error = client.error("GET", f"/v1/nodes/{child['id']}")
    assert status == 404 and "lease" in error["message"]


def test_a_client_that_hangs_up_takes_its_nodes_along(client: NodeClient, running: Running) -> None:
    root = client.root(PROMPT, seed=4)
    body = {"n": 8, "params": {"max_tokens": 900, "ignore_eos": True}}
    operations = [{"op": "sample", "node": root["id"], **body}, {"op": "root", "prompt": "x"}]
    path = f"/v1/nodes/{root['id']}/sample"
    for where, sent, headers in (
        (path, body, {}),
        (path, {**body, "stream": True}, {}),
        ("/v1/nodes/batch", {"operations": operations}, {}),
        (path, body, {"idempotency-key": "gone"}),
    ):
        with pytest.raises(httpx2.TimeoutException):
            client.http.post(where, json=sent, headers=headers, timeout=0.7)
        running.wait_until_idle()
        assert client.memory()["nodes"] == 1
    assert running.served.usages()[-1].decoded_tokens < 4 * 8 * 900
    # The indices are given back, so the same request draws the same samples.
    assert client.sample(root, params={"max_tokens": 2})[0]["index"] == 0


def test_a_node_dropped_in_use_ends_its_calls(client: NodeClient, running: Running) -> None:
    root = client.root(PROMPT)
    answers = []

    def ask() -> None:
        own = NodeClient(running.url, KEY)
        with closing(own.http):
            body = {"n": 2, "params": {"max_tokens": 400, "ignore_eos": True}}
            answers.append(own.error("POST", f"/v1/nodes/{root['id']}/sample", body))

    thread = threading.Thread(target=ask)
    thread.start()
    while not running.served.status().rows:
        time.sleep(0.01)
    client.ask("DELETE", f"/v1/nodes/{root['id']}")
    thread.join()
    assert answers[0][0] == 404 and "dropped" in answers[0][1]["message"]


def events(response: httpx2.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_stream_has_each_child_as_it_ends(client: NodeClient) -> None:
    root = client.root(PROMPT, seed=6, params={"max_tokens": 12, "stop": " "})
    path = f"/v1/nodes/{root['id']}/sample"
    with client.http.stream("POST", path, json={"n": 6, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *nodes, done = events(response)
    assert [event["type"] for event in nodes] == ["node"] * 6 and done["type"] == "done"
    assert done["memory"]["nodes"] == 7
    drawn = sorted((event["node"] for event in nodes), key=lambda node: node["index"])
    assert done["usage"]["decoded_tokens"] == sum(len(node["token_ids"]) for node in drawn)
    assert same_draws(client.sample(root, 6, first=0), drawn)


def test_a_server_that_ends_says_so_in_streams(directory: Path) -> None:
    with AsyncLLM(tiny_llm(directory), nodes=True) as served:
        responses: list[Any] = []

        def read(url: str, root: Any) -> None:
            body = {"n": 2, "stream": True, "params": {"max_tokens": 2_000, "ignore_eos": True}}
            path = f"{url}/v1/nodes/{root['id']}/sample"
            with httpx2.stream("POST", path, json=body, timeout=60) as response:
                responses.append(response.status_code if response.is_error else events(response))

        with draining(served, nodes=NodeLimits()) as running:
            client = NodeClient(running.url, "")
            root = client.root(PROMPT)
            client.sample(root, params={"max_tokens": 2})
            thread = threading.Thread(target=read, args=(running.url, root))
            thread.start()
            while not served.status().rows:
                time.sleep(0.01)
            client.http.close()
        thread.join()
    assert responses == [503] or responses[0][-1]["error"]["code"] == 503


def test_a_restarted_server_can_be_given_the_tree_again(directory: Path) -> None:
    llm = tiny_llm(directory)
    drawn, ids = list[Any](), list[str]()
    given = {"prompt": PROMPT, "seed": 9, "params": {"max_tokens": 8}}
    for _ in range(2):
        with listening(llm, nodes=NodeLimits()) as running:
            client = NodeClient(running.url, KEY)
            with closing(client.http):
                for node in ids:
                    status, error = client.error("GET", f"/v1/nodes/{node}")
                    assert status == 404 and "same seed and paths" in error["message"]
                results = client.batch(
                    {"op": "root", **given},
                    {"op": "sample", "node": "#0", "n": 1, "first": 3},
                    {"op": "extend", "node": "#1", "text": "\nB:", "index": 2},
                    {"op": "sample", "node": "#2", "n": 2, "first": 1},
                )
                assert results[2]["node"]["path"] == "3/+2"
                drawn.append(results[3]["nodes"])
                ids = [node["id"] for node in drawn[-1]]
    assert same_draws(*drawn)


def test_nodes_are_gone_once_the_engine_has_failed(
    client: NodeClient, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, step, failed = client.root(PROMPT, seed=1), LiveRun.step, list[bool]()

    def fail_once(run: LiveRun) -> Any:
        if not failed:
            failed.append(True)
            raise NumericsError("the logits are not numbers")
        return step(run)

    path = f"/v1/nodes/{root['id']}/sample"
    with monkeypatch.context() as patched:
        patched.setattr(LiveRun, "step", fail_once)
        status, error = client.ask("POST", path, {})
    assert status == 500 and error["error"]["type"] == "server_error"
    assert client.error("POST", path, {})[0] == 404
    assert client.memory()["nodes"] == 0
    again = client.root(PROMPT, seed=1)
    assert len(client.sample(again, 2, params={"max_tokens": 2})) == 2


DEEP: dict[str, Any] = {}
for _ in range(400):
    DEEP = {"not": DEEP}
WRONG: list[tuple[str, Any, str | None]] = [
    ("", {}, "prompt"),
    ("", {"prompt": PROMPT, "messages": [{"role": "user", "content": "x"}]}, "prompt"),
    ("", {"prompt": []}, "prompt"),
    ("", {"prompt": [10**9]}, None),
    ("", {"prompt": [-1]}, "prompt"),
    ("", {"prompt": [2**40]}, "prompt"),
    ("", {"prompt": [True]}, "prompt"),
    ("", {"prompt": "x", "seed": -1}, "seed"),
    ("", {"prompt": "x", "seed": 2**70}, "seed"),
    ("", {"prompt": "x", "seed": 1.5}, "seed"),
    ("", {"prompt": "x", "lease_seconds": 0}, "lease_seconds"),
    ("", {"prompt": "x", "lease_seconds": "long"}, "lease_seconds"),
    ("", {"prompt": "x", "color": 1}, "color"),
    ("", {"prompt": "x", "tools": [{}]}, "tools"),
    ("", {"prompt": "x", "params": {"color": 1}}, "params.color"),
    ("", {"prompt": "x", "params": {"temperature": -1}}, None),
    ("", {"prompt": "x", "params": {"json_schema": DEEP}}, "params"),
    ("", {"prompt": "x", "stream": True}, "stream"),
    ("", {"messages": [{"role": "user"}]}, None),
    ("", {"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "messages"),
    (
        "",
        {
            "messages": [{"role": "user", "content": "x"}],
            "chat_template_kwargs": {"chat_template": ""},
        },
        "chat_template_kwargs",
    ),
    ("", {"prompt": "word " * 9_000}, None),
    ("", {"prompt": "x", "model": "other"}, None),
    ("/sample", {"n": 0}, "n"),
    ("/sample", {"n": 10**30}, "n"),
    ("/sample", {"n": True}, "n"),
    ("/sample", {"n": 2, "params": {"temperature": 0}}, "n"),
    ("/sample", {"first": -1}, "first"),
    ("/sample", {"params": {"max_tokens": 0}}, None),
    ("/sample", {"params": {"temperature": "hot"}}, "params.temperature"),
    ("/sample", {"params": {"stop": ["x"] * 65}}, "params.stop"),
    ("/sample", {"params": {"logprobs": 21}}, "params.logprobs"),
    ("/sample", {"params": {"regex": "a", "choice": ["b"]}}, None),
    ("/sample", {"params": {"stop_token_ids": [-4]}}, "params.stop_token_ids.0"),
    ("/sample", {"params": {"allowed_token_ids": [10**6]}}, None),
    ("/extend", {}, "text"),
    ("/extend", {"text": "x", "parts": [{"type": "text", "text": "x"}]}, "text"),
    ("/extend", {"text": 5}, "text"),
    ("/extend", {"text": "word " * 9_000}, None),
    ("/extend", {"parts": [{"type": "image_url", "image_url": "http://host/a.png"}]}, "parts"),
    ("/extend", {"parts": [{"type": "image_url", "image_url": "data:image/png;base64,AA"}]}, None),
    ("/extend", {"index": -2, "text": "x"}, "index"),
    ("/score", {}, "texts"),
    ("/score", {"texts": []}, "texts"),
    ("/score", {"texts": [""]}, None),
    ("/score", {"texts": "abc"}, "texts"),
    ("/score", {"texts": ["x"], "top": 21}, "top"),
    ("/score", {"texts": ["a "] * 200}, None),
    ("/batch", {}, "operations"),
    ("/batch", {"operations": []}, "operations"),
    ("/batch", {"operations": [{"op": "fly"}]}, "operations.0"),
    ("/batch", {"operations": [{"op": "sample", "node": "#0"}]}, "operations.0.node"),
    ("/batch", {"operations": [{"op": "sample", "node": "", "n": 1}]}, "operations.0.node"),
    ("/batch", {"operations": [{"op": "root", "prompt": "x", "n": 1}]}, "operations.0.n"),
]


@pytest.mark.parametrize(("path", "body", "param"), WRONG)
def test_what_cannot_be_used_is_refused_by_name(
    client: NodeClient, path: str, body: Any, param: str | None
) -> None:
    where = "/v1/nodes"
    if path == "/batch":
        where += path
    elif path:
        where += f"/{client.root('x')['id']}{path}"
    before = client.memory()
    status, error = client.error("POST", where, body)
    assert 400 <= status < 500, error
    assert param is None or error["param"] == param, error
    assert client.memory() == before


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b'{"prompt":' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"messages": [{"role": "user", "content": "\\udfff"}]}',
        b'{"prompt": "x", "name": "\\ud800"}',
    ],
)
def test_rubbish_is_refused(running: Running, body: bytes) -> None:
    assert running.post("nodes", body).status_code == 400


def test_the_metrics_have_the_memory_of_each_key(client: NodeClient) -> None:
    client.sample(client.root(PROMPT), 2, params={"max_tokens": 2})
    text = client.http.get("/metrics").text
    assert 'treegen_nodes{client="1"} 3.0' in text
    assert f'treegen_node_tokens{{client="1"}} {float(client.memory()["tokens"])}' in text


def test_a_wrong_method_is_told_the_methods_of_all_routes(running: Running) -> None:
    for path, methods in (("nodes", "GET, HEAD, POST"), ("nodes/batch", "DELETE, GET, HEAD, POST")):
        response = HTTP.request("PUT", f"{running.url}/v1/{path}")
        assert (response.status_code, response.headers["allow"]) == (405, methods)


def test_the_openapi_document_describes_every_route(running: Running) -> None:
    document = HTTP.get(f"{running.url}/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    from jsonschema import Draft202012Validator

    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    text = json.dumps(document)
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method in methods:
            sent = HTTP.request(method, f"{running.url}{path}")
            assert sent.status_code == 401  # the route exists, and needs a key
