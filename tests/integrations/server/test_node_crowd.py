"""Many clients of nodes at once, against trees that the test keeps and a local session draws again.

Each client makes random operations, and checks paths, counts and memory against its own trees. When
all have ended, a session of another LLM repeats the operations of each tree.
"""

from __future__ import annotations

import asyncio
import random
import string
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from serving import Running, listening

from treegen import LLM, SamplingParams
from treegen.integrations.server.limits import NodeLimits

pytest.importorskip("jsonschema")
import httpx2
from node_clients import LIMIT, check_answer, difference, evict_all, is_near_tie, tiny_llm

PROMPTS = [
    "Tom has 3 apples and buys 5 more. How many apples does Tom have?\n",
    "Tom has 3 apples and eats 2 of them. How many apples are left?\n",
    "Question: 12 * 4 = ?\nAnswer:",
    "\u00e9\u00e8 \U0001f600 \u4e2d\u6587:",
]
TEXTS = [" So", "\n", " 8 apples.", " \U0001f34e\u00fc", "Therefore, the answer is"]
PARAMS: list[dict[str, Any]] = [
    {"max_tokens": 3},
    {"max_tokens": 6, "stop": [" ", "\n"]},
    {"max_tokens": 8, "stop": ".", "include_stop": True},
    {"max_tokens": 5, "logprobs": 2},
]
CLIENTS = 30
CACHE = "512KiB"
BRIEF = 1.0  # lease of clients that vanish, in seconds


@dataclass(eq=False)
class Known:
    """A node as its client knows it."""

    id: str
    tree: Tree
    path: str
    num_tokens: int
    tokens: list[int] = field(default_factory=list)
    num_drawn: int = 0
    num_extended: int = 0
    children: list[Known] = field(default_factory=list)

    def walk(self) -> Iterator[Known]:
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(eq=False)
class Tree:
    """A tree as its client knows it, with everything that was done with it."""

    prompt: Any
    seed: int
    origin: str = ""
    root: Known = field(init=False)
    events: list[tuple[Any, ...]] = field(default_factory=list)
    redrawn: list[tuple[Any, Any, Any]] = field(default_factory=list)
    """Samples that differ from those drawn before, these, and the parameters."""


class Gone(Exception):
    """A tree of a client with a brief lease is gone."""


class Person:
    """One client after the other; a new one has another key."""

    def __init__(self, crowd: Crowd, number: int) -> None:
        self.crowd, self.draw = crowd, random.Random(number)
        self.become_another()

    def become_another(self) -> None:
        self.key, self.trees = self.crowd.keys.pop(), list[Tree]()
        self.is_brief = self.draw.random() < 0.2
        self.crowd.used.append(self.key)
        self.num_left = self.draw.randint(2, 6) if self.is_brief else self.draw.randint(20, 200)

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """Return an answer; every 20th is compared with the OpenAPI document."""
        headers = {"authorization": f"Bearer {self.key}", **headers}
        while True:
            sent = {} if body is None else {"json": body}
            response = await self.crowd.http.request(method, path, headers=headers, **sent)
            self.crowd.bytes += len(response.content)
            answer = response.json()
            assert response.status_code < 500, answer
            self.crowd.count["answers"] += 1
            if self.crowd.count["answers"] % 20 == 0 or response.status_code != 200:
                check_answer(method, path, response.status_code, answer)
            if response.status_code == 404 and self.is_brief:
                raise Gone
            if response.status_code != 429:
                assert response.status_code == 200, (path, body, answer)
                return answer
            self.crowd.count["429"] += 1
            if "free" not in answer["error"] or answer["error"]["free"] is None:
                await asyncio.sleep(0.2)
                continue
            if "idempotency-key" in headers:  # two such requests would drop the same tree
                return None
            await self.drop(
                next(t for t in self.trees if t.root.id == answer["error"]["free"][0]["id"])
            )
            return None

    def check_memory(self, memory: Any) -> None:
        nodes = [node for tree in self.trees for node in tree.root.walk()]
        if not self.is_brief:
            assert memory["nodes"] == len(nodes)
            assert memory["tokens"] == sum(node.num_tokens for node in nodes)

    async def act(self) -> None:
        """Do one random operation."""
        self.num_left -= 1
        if self.num_left < 0:
            await self.vanish()
            return
        names = [
            "create",
            "sample",
            "extend",
            "score",
            "batch",
            "again",
            "repeat",
            "read",
            "drop",
            "text",
        ]
        (name,) = self.draw.choices(names, [3, 12, 6, 4, 6, 3, 3, 2, 3, 1])
        if not self.trees or (name == "create" and len(self.trees) > 3):
            name = "create" if not self.trees else "drop"
        self.crowd.count[name] += 1
        try:
            await getattr(self, name)()
        except Gone:
            self.become_another()

    def some_node(self) -> Known:
        tree = self.draw.choice(self.trees)
        return self.draw.choice(list(tree.root.walk()))

    async def create(self) -> None:
        tree, answer = self.new_tree()
        result = await self.ask("POST", "/v1/nodes", answer)
        if result is not None:
            self.add_root(tree, result["node"])
            self.check_memory(result["memory"])

    def new_tree(self) -> tuple[Tree, dict[str, Any]]:
        tree = Tree(self.draw.choice(PROMPTS), self.draw.randrange(1_000))
        if self.draw.random() < 0.3:
            tree.prompt = self.crowd.encode(tree.prompt)
        body = {"prompt": tree.prompt, "seed": tree.seed}
        if self.draw.random() < 0.5:
            body["name"] = "".join(self.draw.choices(string.printable + "\u00e9\0", k=5))
        if self.is_brief:
            body["lease_seconds"] = BRIEF
        return tree, body

    def add_root(self, tree: Tree, node: Any) -> None:
        tree.origin, tree.root = node["origin"], Known(node["id"], tree, "", node["num_tokens"])
        self.trees.append(tree)
        self.crowd.trees.append(tree)

    def add_samples(self, node: Known, params: Any, answers: Any) -> None:
        first = node.num_drawn
        for answer in answers:
            step = str(node.num_drawn)
            path = f"{node.path}/{step}" if node.path else step
            assert (answer["path"], answer["parent"]) == (path, node.id)
            assert len(answer["token_ids"]) == len(answer["logprobs"]) > 0
            child = Known(answer["id"], node.tree, path, answer["num_tokens"], answer["token_ids"])
            node.children.append(child)
            node.num_drawn += 1
        node.tree.events.append(("sample", node.path, first, params, answers))

    def add_extension(self, node: Known, text: str, answer: Any) -> Known:
        step = f"+{node.num_extended}"
        path = f"{node.path}/{step}" if node.path else step
        assert answer["path"] == path and answer["token_ids"] == []
        child = Known(answer["id"], node.tree, path, answer["num_tokens"])
        node.children.append(child)
        node.num_extended += 1
        node.tree.events.append(("extend", node.path, text, path))
        return child

    async def sample(self) -> None:
        node, n = self.some_node(), self.draw.randint(1, 4)
        params = self.draw.choice(PARAMS)
        if n == 1 and self.draw.random() < 0.2:
            params = {**params, "temperature": 0}
        path = f"/v1/nodes/{node.id}/sample"
        result = await self.ask("POST", path, {"n": n, "params": params})
        if result is not None:
            self.add_samples(node, params, result["nodes"])
            self.check_memory(result["memory"])

    async def extend(self) -> None:
        node, text = self.some_node(), self.draw.choice(TEXTS)
        result = await self.ask("POST", f"/v1/nodes/{node.id}/extend", {"text": text})
        if result is not None:
            self.add_extension(node, text, result["node"])
            self.check_memory(result["memory"])

    async def score(self) -> None:
        node, texts = self.some_node(), self.draw.sample(TEXTS, 2)
        top = self.draw.choice([0, 0, 2])
        result = await self.ask("POST", f"/v1/nodes/{node.id}/score", {"texts": texts, "top": top})
        node.tree.events.append(("score", node.path, texts, result["scores"]))

    async def batch(self) -> None:
        """Create a tree, sample it, extend a sample and sample that, all in one request."""
        if len(self.trees) > 3:
            await self.drop()
        tree, body = self.new_tree()
        params, text = self.draw.choice(PARAMS), self.draw.choice(TEXTS)
        operations = [
            {"op": "root", **body},
            {"op": "sample", "node": "#0", "n": 3, "params": params},
            {"op": "extend", "node": "#1.1", "text": text},
            {"op": "sample", "node": "#2", "n": 2, "params": params},
            {"op": "score", "node": "#3.0", "texts": TEXTS[:2]},
        ]
        result = await self.ask("POST", "/v1/nodes/batch", {"operations": operations})
        root, drawn, longer, more, scores = result["results"]
        if any(each["object"] == "error" for each in result["results"]):
            codes = {
                each["error"]["code"] for each in result["results"] if each["object"] == "error"
            }
            assert codes <= {429, 400}, result
            assert 429 in codes or self.is_brief, result
            self.crowd.count["429"] += 1
            if root["object"] != "error":
                await self.ask("DELETE", f"/v1/nodes/{root['node']['id']}")
            return
        self.add_root(tree, root["node"])
        self.add_samples(tree.root, params, drawn["nodes"])
        extended = self.add_extension(tree.root.children[1], text, longer["node"])
        self.add_samples(extended, params, more["nodes"])
        tree.events.append(("score", extended.children[0].path, TEXTS[:2], scores["scores"]))
        self.check_memory(result["memory"])

    async def again(self) -> None:
        """Draw a sample that was drawn before."""
        node = self.some_node()
        events = [e for e in node.tree.events if e[0] == "sample" and e[1] == node.path]
        if not events:
            return
        _, _, first, params, answers = self.draw.choice(events)
        place = self.draw.randrange(len(answers))
        body = {"n": 1, "first": first + place, "params": params}
        result = await self.ask("POST", f"/v1/nodes/{node.id}/sample", body)
        if result is None:
            return
        (drawn,), before = result["nodes"], answers[place]
        self.crowd.compare(node.tree, drawn, before, params)
        deleted = await self.ask("DELETE", f"/v1/nodes/{drawn['id']}")
        self.check_memory(deleted["memory"])

    async def repeat(self) -> None:
        """Send a request twice with an idempotency key, sometimes at once."""
        node = self.some_node()
        path, body = f"/v1/nodes/{node.id}/sample", {"n": 2, "params": PARAMS[0]}
        key = {"idempotency-key": f"{self.draw.random()}"}
        if self.draw.random() < 0.5:
            first, second = await asyncio.gather(
                self.ask("POST", path, body, **key), self.ask("POST", path, body, **key)
            )
        else:
            first = await self.ask("POST", path, body, **key)
            second = None if first is None else await self.ask("POST", path, body, **key)
        if first is None or second is None:
            self.trees.clear()  # the memory is not known now
            await self.vanish()
            return
        assert first == second
        self.add_samples(node, PARAMS[0], first["nodes"])

    async def read(self) -> None:
        node = self.some_node()
        result = await self.ask("GET", f"/v1/nodes/{node.id}")
        below = list(node.walk())
        assert result["node"]["token_ids"] == node.tokens
        assert sorted(result["children"]) == sorted(child.id for child in node.children)
        assert result["subtree_nodes"] == len(below)
        assert result["subtree_tokens"] == sum(other.num_tokens for other in below)

    async def drop(self, tree: Tree | None = None) -> None:
        """Drop a tree, or a random node with all nodes below it."""
        node = self.some_node() if tree is None else tree.root
        result = await self.ask("DELETE", f"/v1/nodes/{node.id}")
        assert result["dropped_nodes"] == len(list(node.walk()))
        if node is node.tree.root:
            self.trees.remove(node.tree)
        else:
            (above,) = [other for other in node.tree.root.walk() if node in other.children]
            above.children.remove(node)
        self.check_memory(result["memory"])

    async def text(self) -> None:
        """Ask the completions endpoint, whose samples share the steps."""
        headers = {"authorization": f"Bearer {self.key}"}
        body = {"prompt": PROMPTS[0], "n": 2, "max_tokens": 4}
        response = await self.crowd.http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code in (200, 429)

    async def vanish(self) -> None:
        """Hang up during a request, and never come back with this key."""
        self.crowd.count["vanish"] += 1
        if self.trees:
            body = {"n": 4, "params": {"max_tokens": 20, "ignore_eos": True}}
            path = f"/v1/nodes/{self.some_node().id}/sample"
            headers = {"authorization": f"Bearer {self.key}"}
            try:
                async with asyncio.timeout(self.draw.choice([0.001, 0.02, 0.2])):
                    await self.crowd.http.post(path, json=body, headers=headers)
            except (TimeoutError, httpx2.HTTPError):
                pass
        self.become_another()


class Crowd:
    """The clients, and what they did."""

    def __init__(self, running: Running, keys: list[str], reference: LLM) -> None:
        self.keys, self.used = keys.copy(), list[str]()
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self.http = httpx2.AsyncClient(base_url=running.url, timeout=120, limits=limits)
        self.trees: list[Tree] = []
        self.count: Counter[str] = Counter()
        self.bytes, self._reference = 0, reference

    def encode(self, prompt: str) -> list[int]:
        return list(map(int, self._reference.tokenizer(prompt)["input_ids"]))

    def compare(self, tree: Tree, drawn: Any, before: Any, params: Any) -> None:
        """Compare a sample with one drawn before; tokens that differ may be a near-tie."""
        if drawn["token_ids"] != before["token_ids"]:
            tree.redrawn.append((drawn, before, params))
            return
        assert difference(drawn["logprobs"], before["logprobs"]) < LIMIT
        assert (drawn["text"], drawn["seed"]) == (before["text"], before["seed"])

    async def run(self, num_operations: int) -> None:
        people = [Person(self, number) for number in range(CLIENTS)]

        async def live(person: Person) -> None:
            for _ in range(num_operations // CLIENTS):
                await person.act()

        async with self.http:
            await asyncio.gather(*map(live, people))
            brief = [person for person in people if person.is_brief]
            await self._end(people, brief)

    async def _end(self, people: list[Person], brief: list[Person]) -> None:
        """Drop the trees of all keys; those with brief leases end by themselves."""
        await asyncio.sleep(BRIEF + 0.2 if brief else 0)
        for key in self.used:
            headers = {"authorization": f"Bearer {key}"}
            trees = (await self.http.get("/v1/nodes", headers=headers)).json()
            for tree in trees["data"]:
                await self.http.delete(f"/v1/nodes/{tree['id']}", headers=headers)
            memory = (await self.http.get("/v1/nodes", headers=headers)).json()["memory"]
            assert memory["nodes"] == memory["tokens"] == 0


@dataclass
class Difference:
    """Two samples of one path that differ from some token on."""

    context: list[int]
    seed: int
    tokens: tuple[list[int], list[int]]
    is_greedy: bool


class Replay:
    """Draws trees again in a session, and compares."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.num_samples, self.worst = llm, 0, 0.0
        self.differences: list[Difference] = []

    def run(self, trees: list[Tree]) -> None:
        waiting = [tree for tree in trees if tree.events]
        with self.llm.session() as session:
            running: list[Any] = []
            while waiting or running:
                while waiting and len(running) < 40:
                    running.append(session.start(self._follow(session, waiting.pop())))
                session.step()
                for started in [each for each in running if each.is_done]:
                    started.result  # noqa: B018 -- raises its error
                    running.remove(started)

    async def _follow(self, session: Any, tree: Tree) -> None:
        params = SamplingParams(seed=tree.seed)
        root = session.root(tree.prompt, name=tree.origin, params=params)
        nodes, wrong = {"": root}, set[str]()
        for kind, path, *facts in tree.events:
            if any(path == other or path.startswith(f"{other}/") for other in wrong):
                continue
            node = nodes[path]
            if kind == "extend":
                text, below = facts
                nodes[below] = node.extend(text)
            elif kind == "score":
                texts, scores = facts
                for score, want in zip(scores, await node.score(texts), strict=True):
                    assert score["token_ids"] == list(want.tokens)
                    self._measure(score["logprobs"], want.logprobs)
            else:
                _, params_given, answers = facts
                children = await node.sample(len(answers), **params_given)
                for answer, child in zip(answers, children, strict=True):
                    nodes[answer["path"]] = child
                    if not self._is_same(node, answer, child, params_given):
                        wrong.add(answer["path"])
        for drawn, before, params_given in tree.redrawn:
            context = nodes[before["path"].rpartition("/")[0]]._context.segment.path_tokens()
            tokens = drawn["token_ids"], before["token_ids"]
            greedy = params_given.get("temperature") == 0
            self.differences.append(Difference(context.tolist(), drawn["seed"], tokens, greedy))
        root.drop()

    def _is_same(self, node: Any, answer: Any, child: Any, params: Any) -> bool:
        self.num_samples += 1
        got, want = answer["token_ids"], list(child.tokens)
        assert answer["seed"] == child.completion.seed
        if got != want:
            context = node._context.segment.path_tokens().tolist()
            greedy = params.get("temperature") == 0
            self.differences.append(Difference(context, answer["seed"], (got, want), greedy))
            return False
        self._measure(answer["logprobs"], child.logprobs)
        facts = answer["text"], answer["finish_reason"], answer["stop"]
        assert facts == (child.text, child.finish_reason, child.stop)
        return True

    def _measure(self, got: Any, want: Any) -> None:
        self.worst = max(self.worst, difference(got, want))

    def check_differences(self) -> None:
        """Assert that every difference begins with a near-tie."""
        for each in self.differences:
            got, want = each.tokens
            at = next(
                i for i, pair in enumerate(zip(got, want, strict=False)) if pair[0] != pair[1]
            )
            context, tokens = [*each.context, *want[:at]], (got[at], want[at])
            if each.is_greedy:
                a, b = self.llm.score([(context, [token]) for token in tokens])
                assert abs(a.logprob - b.logprob) < LIMIT
            else:
                assert is_near_tie(self.llm, context, each.seed, at, tokens)


def run_crowd(num_operations: int, directory: Path) -> tuple[Replay, str]:
    # A key may hold as many nodes as the cache has room for, so the nodes of others are evicted.
    model, reference = tiny_llm(directory, CACHE), tiny_llm(directory, "16MiB")
    keys = [f"key {number}" for number in range(CLIENTS + num_operations // 5 + 20)]
    limits = NodeLimits(max_nodes=80, max_node_depth=400)
    begin = time.monotonic()
    with listening(model, key=keys, nodes=limits, max_waiting=2_000) as running:
        crowd = Crowd(running, keys, reference)
        asyncio.run(crowd.run(num_operations))
        running.wait_until_idle()
        assert asyncio.run(evict_all(running.served)) == (0, 0)
        usage = running.served.usages()[-1]
        assert len(running.served.usages()) == 1  # the engine never failed
    seconds = time.monotonic() - begin
    replay = Replay(reference)
    replay.run(crowd.trees)
    replay.check_differences()
    facts = (
        f"{dict(crowd.count)} in {seconds:.0f} s, {crowd.bytes:,} bytes; {usage.preemptions:,} "
        f"preemptions, {usage.recomputed_tokens:,} tokens recomputed; {replay.num_samples:,} "
        f"samples, {len(replay.differences)} near-ties, worst difference {replay.worst:.2g}"
    )
    assert replay.worst < LIMIT, facts
    return replay, facts


def test_a_crowd_gets_the_nodes_of_a_session(tmp_path: Path) -> None:
    replay, facts = run_crowd(300, tmp_path)
    assert replay.num_samples > 100, facts


@pytest.mark.soak
@pytest.mark.timeout(3_000)
def test_a_large_crowd_gets_the_nodes_of_a_session(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    replay, facts = run_crowd(20_000, tmp_path)
    record_property("facts", facts)
    assert replay.num_samples > 10_000, facts
