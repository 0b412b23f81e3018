"""Search trees as records, results, and how they look in a terminal."""

import io
import json
import math
import random
from typing import Any

import pytest
from rich.console import Console
from toy_search import hashed, run, run_all, start

from treegen.common.params import SamplingParams
from treegen.errors import DataError
from treegen.search.budget import Budget
from treegen.search.strategies.common import prune
from treegen.search.tree.node import SearchNode
from treegen.search.tree.records import NodeRecord, SearchTree, draw_tree, round_value
from treegen.search.tree.result import SearchOutcome, SearchResult

FIELDS = [
    "id",
    "parent_id",
    "depth",
    "text",
    "score",
    "logprob",
    "n_tokens",
    "leaf",
    "pruned",
    "finish_reason",
]


async def grow(root: SearchNode) -> SearchOutcome:
    """A tree of three levels with values, a given text and a pruned branch."""
    first, second = await root.sample(2, max_tokens=3)
    tool = second.extend("\u2028a tool's\nresult\x1b[31m")
    last = await tool.sample(2, max_tokens=2)
    first.value, last[0].value, last[1].value = 0.25, math.pi, -1.0
    first.pruned = True
    return SearchOutcome(last[0], (last[0], last[1]), ("x", None), {"x": 1}, "tired")


def grown() -> SearchResult:
    params = SamplingParams(seed=random.randrange(10**6))
    return run(start(hashed("abc"), "prompt\n", params=params)[0], grow)


def test_records_are_parents_first_with_the_names_of_the_format() -> None:
    result = grown()
    nodes = result.tree.nodes
    assert [node.id for node in nodes] == list(range(6))
    assert [node.parent_id for node in nodes] == [None, 0, 0, 2, 3, 3]
    assert [node.depth for node in nodes] == [0, 1, 1, 2, 3, 3]
    assert [node.leaf for node in nodes] == [False, True, False, False, True, True]
    assert [node.n_tokens for node in nodes] == [0, 3, 3, 0, 2, 2]
    assert nodes[0].text == "prompt\n" and nodes[0].finish_reason == "given"
    assert nodes[3].logprob == 0 and nodes[4].logprob < 0
    assert nodes[1].pruned and nodes[1].score == 0.25
    assert result.best == 4 and result.candidates == (4, 5)
    assert result.best_text == nodes[2].text + nodes[3].text + nodes[4].text
    assert result.tree.path(4) == [0, 2, 3, 4] and result.tree.children(3) == [4, 5]
    assert result.answer == "x" and result.answers == ("x", None)


def test_jsonl_comes_back() -> None:
    tree = grown().tree
    text = tree.to_jsonl()
    assert text.isascii() and text.count("\n") == 6
    assert list(json.loads(text.split("\n")[0])) == FIELDS
    assert SearchTree.from_jsonl(text) == tree
    assert SearchTree.from_jsonl(text.replace("\\u2028", "\u2028")) == tree


def test_lone_surrogates_and_numbers_without_json_survive() -> None:
    async def fn(root: SearchNode) -> None:
        root.extend("\ud800").value = math.nan
        root.extend("b").value = -math.inf
        root.extend("c").value = 10**400

    tree = run(start(hashed("abc"))[0], fn).tree
    assert SearchTree.from_jsonl(tree.to_jsonl()) == tree
    assert [node.score for node in tree.nodes] == [None] * 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"id": 7}, "ids must count up from 0"),
        ({"parent_id": None}, "only node 0"),
        ({"parent_id": 5}, "parents must come first"),
        ({"depth": 3}, "depth 3"),
        ({"text": None}, "text None"),
        ({"score": "high"}, "score 'high'"),
        ({"score": math.nan}, "score nan"),
        ({"n_tokens": True}, "n_tokens True"),
        ({"leaf": 1}, "leaf 1"),
        ({"leaf": True}, "leaf"),
        ({"finish_reason": "bored"}, "bored"),
    ],
)
def test_records_that_are_no_tree_are_refused(change: dict[str, Any], reason: str) -> None:
    records = [node.to_json() for node in grown().tree.nodes]
    records[2].update(change)
    with pytest.raises(DataError, match=reason):
        SearchTree.from_jsonl("".join(json.dumps(record) + "\n" for record in records))


def test_records_have_what_strategies_and_users_noted() -> None:
    async def fn(root: SearchNode) -> SearchNode:
        node, other = root.extend("a"), root.extend("b")
        node.visits, node.prior, node.value = 3, 0.123456, 1e-7 / 3
        node.scores = {"verifier": 0.98765432, "lost": math.nan}
        node.data, other.data = {"tool": [1, "x"]}, {1: math.inf}
        prune([other], root, "tired")
        root.search.restart += 1
        root.extend("c")
        return node

    result = run(start(hashed("abc"))[0], fn)
    _, node, other, again = records = [each.to_json() for each in result.tree.nodes]
    assert (node["visits"], node["prior"], node["score"]) == (3, 0.1235, 3.333e-08)
    assert node["scores"] == {"verifier": 0.9877} and node["data"] == {"tool": [1, "x"]}
    assert other["data"] == "{1: inf}" and other["pruned_because"] == "tired"
    assert (again["restart"], "restart" in node, "visits" in other) == (1, False, False)
    assert SearchTree.from_json(records) == result.tree
    for wrong in ({"visits": "3"}, {"visits": True}, {"scores": [1]}, {"restart": None}):
        with pytest.raises(DataError, match=next(iter(wrong))):
            SearchTree.from_json([{**records[0], **wrong}])


def test_numbers_of_records_are_without_noise() -> None:
    values = (0.0, 24, -0.5, 12345.67891, 0.98765432, -0.000123456, 1e-300)
    want = (0.0, 24.0, -0.5, 12345.6789, 0.9877, -0.0001235, 1e-300)
    assert tuple(map(round_value, values)) == want


@pytest.mark.parametrize("text", ["", "\n\n", "{", "[]", "1", '{"id": 0}', "[" * 100_000])
def test_text_that_is_no_tree_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="search tree"):
        SearchTree.from_jsonl(text)


def test_results_come_back_from_json() -> None:
    result = grown()
    record = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert SearchResult.from_json(record) == result
    del record["best"]
    with pytest.raises(DataError, match="best"):
        SearchResult.from_json(record)


@pytest.mark.parametrize(
    ("value", "kept"),
    [(3, 3), ([1, "a", None], [1, "a", None]), (math.inf, "inf"), ({1: 2}, "{1: 2}")],
)
def test_other_values_are_kept(value: object, kept: object) -> None:
    async def fn(root: SearchNode) -> object:
        return value

    result = run(start(hashed("abc"))[0], fn)
    assert result.value == value and result.best is None
    assert result.to_json()["value"] == kept


def test_nodes_and_lists_of_nodes_are_candidates() -> None:
    async def one(root: SearchNode) -> SearchNode:
        return (await root.sample(3, max_tokens=1))[1]

    async def many(root: SearchNode) -> list[SearchNode]:
        return (await root.sample(3, max_tokens=1))[::-1]

    assert run(start(hashed("abc"))[0], one).candidates == (2,)
    result = run(start(hashed("abc"))[0], many)
    assert result.best == 3 and result.candidates == (3, 2, 1)


def test_a_budget_that_ends_the_function_is_no_error() -> None:
    async def fn(root: SearchNode) -> None:
        while True:
            await root.sample(1, max_tokens=2)

    (result,) = run_all([start(hashed("abc"), budget=Budget(calls=3))[0]], fn)
    assert result.error is None and result.stopped == "budget of 3 calls reached"
    assert len(result.tree.nodes) == 4 and result.usage.calls == 3
    assert result.usage.seconds > 0


def printed(nodes: tuple[NodeRecord, ...], best: int | None = None) -> str:
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(draw_tree(nodes, best))
    return out.getvalue()


def test_the_best_path_is_marked_in_the_terminal() -> None:
    result = grown()
    shown = printed(result.tree.nodes, result.best).splitlines()
    assert len(shown) == 6
    marked = ["* " in line for line in shown]
    assert marked == [True, False, True, True, True, False]
    assert "score 0.250" in shown[1] and "pruned" in shown[1]
    assert "score 3.142, logprob -" in shown[4] and "2 tokens, cut off" in shown[4]


def test_hostile_text_is_only_text_in_the_terminal() -> None:
    node = {"parent_id": 0, "depth": 1, "score": None, "logprob": 0.0, "n_tokens": 0}
    texts = ["\x1b[2J", "[red]x[/red]", "\u202eevil", "a\r\nb", "\x9b1m", "", "x" * 500]
    nodes = (
        NodeRecord(0, None, 0, "root", None, 0.0, 0, False, False, "given"),
        *(
            NodeRecord(**node, id=i, text=text, leaf=True, pruned=False, finish_reason="given")  # type: ignore[arg-type]
            for i, text in enumerate(texts, start=1)
        ),
    )
    shown = printed(nodes)
    assert not any((ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0 for c in shown)
    assert "\u202e" not in shown and "[red]x[/red]" in shown and "(empty)" in shown
    assert len(shown.splitlines()) == len(nodes)
