"""Nodes over HTTP of recurrent models, with images, and with values by a verifier."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from image_cases import url_of
from serving import KEY, TEMPLATE, listening
from small_searches import save_tiny_verifier
from tiny_images import picture, save_tiny_vision_model
from tiny_models import save_tiny_model
from transformers import LlamaForTokenClassification

from treegen import LLM, SamplingParams
from treegen.integrations.server.limits import NodeLimits
from treegen.search import by_verifier, load_verifier

pytest.importorskip("jsonschema")
from node_clients import LIMIT, NodeClient, difference, evict_all

PROMPT = "How many apples are there?"


def check_same(nodes: Any, children: Any) -> None:
    for node, child in zip(nodes, children, strict=True):
        assert node["token_ids"] == list(child.tokens)
        assert difference(node["logprobs"], child.logprobs) < LIMIT


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_nodes_of_recurrent_models_are_those_of_a_session(tmp_path: Path, family: str) -> None:
    save_tiny_model(tmp_path, family)
    llm, reference = (LLM(str(tmp_path), device="cpu", memory="8MiB") for _ in range(2))
    with (
        listening(llm, nodes=NodeLimits()) as running,
        reference.session(SamplingParams(seed=2, max_tokens=6)) as session,
    ):
        client = NodeClient(running.url, KEY)
        made = client.root(PROMPT, seed=2, name="p", params={"max_tokens": 6})
        root = session.root(PROMPT, name="p")
        nodes, children = client.sample(made, 3), session.sample({root: 3})[root]
        check_same(nodes, children)
        longer, child = client.extend(nodes[1], " So"), children[1].extend(" So")
        check_same(client.sample(longer, 2), session.sample({child: 2})[child])
        assert asyncio.run(evict_all(running.served))[0] == 0
        check_same(client.sample(longer, 2), session.sample({child: 2})[child])
        scores = client.post(f"/v1/nodes/{longer['id']}/score", {"texts": [" 8", " 9"]})["scores"]
        want = session.score({child: [" 8", " 9"]})[child]
        assert [s["token_ids"] for s in scores] == [list(score.tokens) for score in want]
        assert difference([s["logprob"] for s in scores], [s.logprob for s in want]) < 10 * LIMIT
        client.http.close()


def test_nodes_take_images(tmp_path: Path) -> None:
    save_tiny_vision_model(tmp_path, "qwen2_vl", seed=1)
    llm, reference = (
        LLM(str(tmp_path), images=True, device="cpu", memory="16MiB") for _ in range(2)
    )
    image, other = picture(3), picture(4, 30, 50)
    sent = [{"type": "text", "text": "Look: "}, {"type": "image_url", "image_url": url_of(image)}]
    parts: list[Any] = [
        {"type": "image", "image": url_of(other)},
        {"type": "text", "text": " is it."},
    ]
    parts_sent = [{"type": "image_url", "image_url": {"url": url_of(other)}}, parts[1]]
    messages = [{"role": "user", "content": sent}]
    params = SamplingParams(seed=5, max_tokens=5, ignore_eos=True)
    with (
        listening(llm, nodes=NodeLimits(), key=KEY) as running,
        reference.session(params) as session,
    ):
        client = NodeClient(running.url, KEY)
        given = {"seed": 5, "name": "p", "params": {"max_tokens": 5, "ignore_eos": True}}
        result = client.post("/v1/nodes", {"messages": messages, **given})
        local = [{"role": "user", "content": [sent[0], {"type": "image", "image": url_of(image)}]}]
        root, made = session.root(local, name="p"), result["node"]
        (node,), (child,) = client.sample(made), session.sample({root: 1})[root]
        check_same([node], [child])
        longer = client.post(f"/v1/nodes/{node['id']}/extend", {"parts": parts_sent})["node"]
        extended = child.extend(parts)
        assert longer["num_context_tokens"] == extended.num_context_tokens
        check_same(client.sample(longer, 2), session.sample({extended: 2})[extended])
        turns = [{"role": "user", "content": parts_sent}]
        more = client.post(f"/v1/nodes/{node['id']}/extend", {"messages": turns})["node"]
        assert more["num_context_tokens"] > longer["num_context_tokens"]
        client.sample(more, 2)
        # Nobody can use the image of another client by guessing its ids.
        body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
        ids = running.post("chat/completions", body).json()["prompt_token_ids"]
        assert max(ids) >= llm.spec.vocab_size
        for path, prompt in (("completions", ids), ("completions", [[5], ids]), ("nodes", ids)):
            error = running.post(path, {"prompt": prompt}).json()["error"]
            assert (error["code"], error["param"]) == (400, "prompt")
        assert "[image" not in client.ask("GET", f"/v1/nodes/{made['id']}")[1]["node"]["text"]
        client.http.close()


def test_a_verifier_gives_nodes_values(tmp_path: Path) -> None:
    folder = save_tiny_verifier(tmp_path / "verifier", LlamaForTokenClassification, 2, TEMPLATE)
    save_tiny_model(tmp_path / "model")
    llm, reference = (LLM(str(tmp_path / "model"), device="cpu", memory="2MiB") for _ in range(2))
    verifier = load_verifier(folder, device="cpu", memory="1MiB")
    with listening(llm, nodes=NodeLimits(), verifier=verifier) as running:
        client = NodeClient(running.url, KEY)
        *_, rewards = client.batch(
            {"op": "root", "prompt": PROMPT, "seed": 1, "name": "p", "params": {"max_tokens": 8}},
            {"op": "sample", "node": "#0", "n": 3},
            {"op": "extend", "node": "#1.0", "text": "\n\nSo 8."},
            {"op": "reward", "nodes": ["#1.0", "#1.1", "#1.2", "#2"]},
        )
        ids = client.root([5, 6])
        (refused,) = client.batch({"op": "reward", "nodes": [ids["id"]]})
        assert "the prompt as text" in refused["error"]["message"]
        client.http.close()

    async def search(root: Any) -> None:
        children = await root.sample(3)
        nodes = [*children, children[0].extend("\n\nSo 8.")]
        values.extend(await by_verifier(verifier)(nodes))

    values: list[float] = []
    (result,) = reference.search(search, [("p", PROMPT)], SamplingParams(seed=1, max_tokens=8))
    assert result.error is None
    assert rewards["rewards"] == pytest.approx(values, abs=1e-5)


def test_a_server_without_a_verifier_gives_no_values(tmp_path: Path) -> None:
    llm = LLM(str(save_tiny_model(tmp_path)), device="cpu", memory="2MiB")
    with listening(llm, nodes=NodeLimits()) as running:
        client = NodeClient(running.url, KEY)
        node = client.root(PROMPT)
        (refused,) = client.batch({"op": "reward", "nodes": [node["id"]]})
        assert refused["error"]["code"] == 400 and "no verifier" in refused["error"]["message"]
        client.http.close()
