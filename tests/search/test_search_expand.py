"""Generated levels: declared in the tree, bounded before they run, run without own code."""

from collections.abc import Sequence
from typing import Any

import pytest
from toy_search import ToyModel, hashed, run, start

from treegen.common.params import SamplingParams
from treegen.errors import TreeError
from treegen.prompts.expansion import Expand, LevelBound, bound_levels, sum_levels
from treegen.prompts.tree import Node, expansions_of, prompts_of
from treegen.search.strategies.expand import expand
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome, SearchResult

THOUGHTS = [
    Expand(5, stop=".", max_tokens=40),
    Expand(3, stop=".", max_tokens=40, keep=4, scorer="mean_logprob"),
    Expand(1, prefix="c", max_tokens=8),
]


def run_levels(
    levels: Sequence[Expand], model: ToyModel | None = None, **params: Any
) -> tuple[SearchResult, SearchNode]:
    search, _ = start(model or hashed("abc."), "ab", params=SamplingParams(**params))

    async def fn(root: SearchNode) -> SearchOutcome:
        return await expand(root, levels)

    return run(search, fn), search.root


def test_levels_are_generated_as_declared() -> None:
    result, root = run_levels(THOUGHTS)
    assert len(root.children) == 5
    assert all(node.text.count(".") == 1 and node.text.endswith(".") for node in root.children)
    second = [child for node in root.children for child in node.children]
    assert len(second) == 15
    kept = [node for node in second if not node.pruned]
    means = {node: sum(node.path_logprobs) / len(node.path_logprobs) for node in second}
    assert kept == sorted(sorted(second, key=lambda node: -means[node])[:4], key=second.index)
    for node in kept:
        (given,) = node.children
        assert given.text == "c" and given.finish_reason == "given"
        (answer,) = given.children
        assert len(answer.tokens) == 8
    assert all(not node.children for node in second if node.pruned)
    assert len(result.candidates) == 4 and result.stopped == ""
    values = [result.tree.nodes[index].score for index in result.candidates]
    assert values == sorted(values, key=lambda value: -(value or 0))


def test_one_level_of_one_sample_is_a_sample() -> None:
    result, root = run_levels([Expand(1)], max_tokens=6)
    assert result.best_text == root.children[0].text and len(root.search.nodes()) == 2


def test_texts_that_the_model_ended_are_not_expanded() -> None:
    model = hashed("abc.", eos=0.15)
    result, root = run_levels([Expand(6, stop="."), Expand(2, stop="."), Expand(2)], model)
    over = [node for node in root.children if node.stop == 0]
    assert over and all(node.is_leaf for node in over)
    ids = {node: index for index, node in enumerate(root.search.nodes())}
    assert {ids[node] for node in over} <= set(result.candidates)


def test_a_function_scores_a_level() -> None:
    async def shortest(nodes: Sequence[SearchNode]) -> list[float]:
        return [-len(node.text) for node in nodes]

    levels = [Expand(8, stop=".", keep=1, scorer=shortest)]
    _, root = run_levels(levels)
    (kept,) = [node for node in root.children if not node.pruned]
    assert len(kept.text) == min(len(node.text) for node in root.children)


def test_levels_are_bounded_before_they_run() -> None:
    params = SamplingParams(max_tokens=100)
    assert bound_levels(THOUGHTS, params) == [
        LevelBound(1, rows=5, kept=5, tokens=200),
        LevelBound(2, rows=15, kept=4, tokens=600),
        LevelBound(3, rows=4, kept=4, tokens=32),
    ]
    assert bound_levels([Expand(3, keep=9), Expand(2)], params)[1].tokens == 600
    assert sum_levels([THOUGHTS, THOUGHTS[:1]], params)[:2] == (
        LevelBound(1, rows=10, kept=10, tokens=400),
        LevelBound(2, rows=15, kept=4, tokens=600),
    )
    result, _ = run_levels(THOUGHTS)
    assert result.usage.tokens_decoded <= 832


def test_greedy_runs_draw_one_continuation() -> None:
    greedy = SamplingParams(temperature=0)
    with pytest.raises(TreeError, match="generated level 2 draws 3"):
        bound_levels([Expand(1), Expand(3)], greedy)
    assert len(bound_levels([Expand(3, temperature=0.5), Expand(1)], greedy)) == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"samples": 0}, "samples of a level must be an integer >= 1, got 0"),
        ({"samples": True}, "samples of a level"),
        ({"samples": 2.0}, "samples of a level"),
        ({"samples": 3, "keep": 0}, "keep of a level"),
        ({"samples": 3, "temperature": 0.0}, "temperature 0"),
        ({"samples": 3, "temperature": -1}, "temperature must be"),
        ({"samples": 3, "max_tokens": 0}, "max_tokens must be"),
        ({"samples": 3, "stop": ""}, "stop strings"),
        ({"samples": 3, "prefix": 5}, "prefix must be a string, got int"),
        ({"samples": 3, "scorer": "best"}, "one of mean_logprob"),
        ({"samples": 3, "scorer": 5}, "scorer must be a name or a function, got int"),
    ],
)
def test_levels_that_make_no_sense_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(TreeError, match=reason):
        Expand(**options)


@pytest.mark.parametrize("levels", [Expand(2), "ab", 5, [Expand(2), 3], [None]])
def test_what_is_no_list_of_levels_is_refused(levels: Any) -> None:
    with pytest.raises(TreeError, match="expand"):
        Node("x", expand=levels)


def test_samples_and_levels_exclude_each_other() -> None:
    with pytest.raises(TreeError, match="cannot be used together"):
        Node("x", samples=3, expand=[Expand(2)])
    assert Node("x", samples=0, expand=[Expand(2)]).num_samples == 0
    assert Node("x", expand=[Expand(2)]).num_samples == 0


def test_expansions_of_a_tree() -> None:
    tree = Node(
        "few-shot",
        children=[
            Node("one", id="a", expand=THOUGHTS),
            Node("group", samples=0, children=[Node("two", expand=iter(THOUGHTS[:1]))]),  # type: ignore[arg-type]
        ],
    )
    found = expansions_of(tree)
    assert [each.id for each in found] == ["a", "0/1/0"]
    assert [node.content for node in found[1].path] == ["few-shot", "group", "two"]
    assert found[0].node.expand == tuple(THOUGHTS)
    assert found[1].node.expand == tuple(THOUGHTS[:1])
    with pytest.raises(TreeError, match=r"'a' generates levels .*LLM\.expand"):
        prompts_of(tree)


def test_trees_do_one_or_the_other() -> None:
    levels = [Expand(2)]
    with pytest.raises(TreeError, match="'0/1' is sampled"):
        expansions_of(Node("x", children=[Node("a", expand=levels), Node("b")]))
    with pytest.raises(TreeError, match="'0' is sampled"):
        expansions_of(Node("x"))
    with pytest.raises(TreeError, match="no node generates levels"):
        expansions_of(Node("x", samples=0))
    with pytest.raises(TreeError, match="ids must be unique"):
        children = [Node("a", expand=levels, id="i"), Node("b", expand=levels, id="i")]
        expansions_of(Node("x", children=children))
