"""Beams, trees of thoughts, best first and best of n, where right answers can be listed."""

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest
from toy_search import (
    MODEL,
    at_length,
    find,
    hashed,
    moves,
    run,
    start,
    table,
    texts,
)

from treegen.search.evaluate import Evaluate, by_function, mean_logprob, min_logprob, sum_logprob
from treegen.search.propose import sample_steps
from treegen.search.strategies.beam import beam
from treegen.search.strategies.best_of_n import best_of_n
from treegen.search.strategies.tree_of_thoughts import best_first, bfs, dfs
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome


async def logprob_of_text(nodes: Sequence[SearchNode]) -> list[float]:
    """What the model gives each text after the prompt, scored by the model."""
    root = nodes[0].search.root
    scores = await root.score([node.path_text for node in nodes])
    return [score.logprob for score in scores]


# Beam


@pytest.mark.parametrize("seed", range(5))
def test_beam_of_full_width_finds_the_most_likely_text(seed: int) -> None:
    model = hashed("abc", salt=f"{seed}")
    ways = dict(model.continuations("", 3))

    async def search(root: SearchNode) -> SearchOutcome:
        return await beam(root, moves("abc"), logprob_of_text, at_length(3), width=27, depth=3)

    found = find(search, model)
    assert set(texts(found.candidates)) == set(ways)
    ranked = [ways[text] for text in texts(found.candidates)]  # equal ones in any order
    assert ranked == pytest.approx(sorted(ways.values(), reverse=True))
    assert found.best is found.candidates[0] and found.stopped == ""
    assert found.best.value == pytest.approx(math.log(max(ways.values())))


def random_values() -> dict[str, float]:
    """A value for each text of one to four letters, the longest last."""
    words = ("".join(w) for n in range(1, 5) for w in itertools.product("abc", repeat=n))
    return {word: random.random() for word in words}


@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_beam_keeps_the_best_at_each_step(width: int) -> None:
    values = random_values()
    kept = [""]
    for _ in range(4):
        longer = [text + letter for text in kept for letter in "abc"]
        kept = sorted(longer, key=lambda text: -values[text])[:width]

    async def search(root: SearchNode) -> SearchOutcome:
        return await beam(root, moves("abc"), table(values), at_length(4), width=width, depth=4)

    assert texts(find(search).candidates) == kept


def test_finished_paths_keep_their_places_in_the_beam() -> None:
    values = {"a": 0.9, "b": 0.8, "c": 0.1, "ba": 0.2, "bb": 0.3, "bc": 0.1}

    def done(node: SearchNode) -> bool:
        return node.path_text in ("a", "ba", "bb", "bc")

    search, backend = start(MODEL)
    result = run(
        search, lambda root: beam(root, moves("abc"), table(values), done, width=2, depth=5)
    )
    assert [result.tree.path_text(node) for node in result.candidates] == ["a", "bb"]
    pruned = {result.tree.path_text(node.id) for node in result.tree.nodes if node.pruned}
    assert pruned == {"c", "ba", "bc"}
    live = [node for node in search.nodes() if node._context in backend.live]
    assert {node.path_text for node in live} == {"", "a", "b", "bb"}


def test_of_equal_samples_one_is_kept() -> None:
    async def search(root: SearchNode) -> SearchOutcome:
        steps = sample_steps(30, stop=(), max_tokens=1)
        return await beam(root, steps, mean_logprob, at_length(2), width=9, depth=2)

    found = find(search)
    assert len(set(texts(found.candidates))) == len(found.candidates) == 9


def test_depth_limit_is_told() -> None:
    async def search(root: SearchNode) -> SearchOutcome:
        return await beam(root, moves("ab"), table({"aa": 1}), lambda _: False, width=2, depth=2)

    found = find(search)
    assert found.stopped == "depth of 2 steps reached" and found.candidates == ()
    assert found.best is not None and found.best.path_text == "aa"


def test_parents_without_a_way_on_are_given_up() -> None:
    values = {"a": 1.0, "b": 0.5, "ba": 3.0, "bb": 2.0}
    search, backend = start(MODEL)
    run(
        search,
        lambda root: beam(root, moves("ab"), table(values), at_length(3), width=2, depth=2),
    )
    states = {node.path_text: node.pruned for node in search.nodes()}
    assert states == {
        "": False,
        "a": True,
        "aa": True,
        "ab": True,
        "b": False,
        "ba": False,
        "bb": False,
    }
    assert len(backend.live) == 4


# Tree of thoughts


def test_bfs_goes_level_by_level_and_ends_at_the_first_solution() -> None:
    visited: list[str] = []
    values = {"a": 0.5, "b": 0.9, "c": 0.4, "aa": 0.1, "ab": 0.8, "ba": 0.7, "bb": 0.05}

    def done(node: SearchNode) -> bool:
        return node.path_text == "aba"

    async def search(root: SearchNode) -> SearchOutcome:
        propose = moves("abc", visited)
        return await bfs(root, propose, table(values), done, breadth=2, depth=9, prune_below=0.0)

    found = find(search)
    assert visited == ["", "b", "a", "ab", "ba"]
    assert texts(found.candidates) == ["aba"] and found.stopped == ""


def test_bfs_prunes_what_is_worth_too_little() -> None:
    visited: list[str] = []
    values = {"a": 0.5, "b": 0.9, "ba": 0.2, "bb": 0.6, "aa": 0.55}

    async def search(root: SearchNode) -> SearchOutcome:
        propose = moves("abc", visited)
        return await bfs(
            root, propose, table(values), at_length(3), breadth=5, depth=3, prune_below=0.3
        )

    found = find(search)
    assert visited == ["", "b", "a", "bb", "aa"]
    assert found.candidates == () and found.stopped == ""


def test_bfs_full_breadth_is_exhaustive() -> None:
    visited: list[str] = []

    async def search(root: SearchNode) -> SearchOutcome:
        return await bfs(
            root, moves("ab", visited), table({}), at_length(4), breadth=99, depth=4, solutions=None
        )

    found = find(search)
    assert sorted(texts(found.candidates)) == [
        "".join(w) for w in itertools.product("ab", repeat=4)
    ]
    assert len(visited) == 1 + 2 + 4 + 8


def reference_dfs(
    values: dict[str, float], letters: str, depth: int, prune_below: float, goal: str
) -> list[str]:
    """Texts in the order in which depth-first search visits them, up to the goal."""
    visited: list[str] = []

    def visit(text: str) -> bool:
        if text == goal:
            return True
        if len(text) == depth:
            return False
        visited.append(text)
        ways = sorted((text + letter for letter in letters), key=lambda way: -values[way])
        return any(visit(way) for way in ways if values[way] >= prune_below)

    visit("")
    return visited


@pytest.mark.parametrize("prune_below", [-1.0, 0.15, 0.4] * 4)
def test_dfs_backtracks_as_recursion_does(prune_below: float) -> None:
    values = random_values()
    goal = random.choice(list(values)[-81:])
    visited: list[str] = []

    async def search(root: SearchNode) -> SearchOutcome:
        return await dfs(
            root,
            moves("abc", visited),
            table(values),
            lambda node: node.path_text == goal,
            depth=4,
            prune_below=prune_below,
        )

    found = find(search)
    assert visited == reference_dfs(values, "abc", 4, prune_below, goal)
    reachable = all(values[goal[:length]] >= prune_below for length in range(1, 5))
    assert texts(found.candidates) == [goal] * reachable


def test_dfs_frees_what_it_backs_out_of() -> None:
    search, backend = start(MODEL)
    values = {"a": 0.9, "b": 0.5, "ba": 0.5}
    run(
        search,
        lambda root: dfs(
            root,
            moves("ab"),
            table(values),
            lambda node: node.path_text == "ba",
            depth=3,
            prune_below=0.0,
        ),
    )
    assert {node.path_text for node in search.nodes() if node.pruned} == {
        "a",
        "aa",
        "ab",
        "aaa",
        "aab",
        "aba",
        "abb",
    }
    live = {node.path_text for node in search.nodes() if node._context in backend.live}
    assert live == {"", "b", "ba", "bb"}


def test_depth_counts_steps_and_not_nodes() -> None:
    """A step that a tool answers is two nodes."""

    async def propose(node: SearchNode) -> list[SearchNode]:
        return [node.extend(letter).extend("c") for letter in "ab"]

    async def search(root: SearchNode) -> SearchOutcome:
        return await dfs(root, propose, table({}), at_length(6), depth=3, solutions=None)

    assert len(find(search).candidates) == 8


def test_dfs_stops_after_max_visits() -> None:
    visited: list[str] = []

    async def search(root: SearchNode) -> SearchOutcome:
        return await dfs(
            root, moves("ab", visited), table({}), lambda _: False, depth=9, max_visits=4
        )

    assert find(search).stopped == "limit of 4 visits reached"
    assert visited == ["", "a", "aa", "aaa"]


# Best first


@pytest.mark.parametrize("batch", [1, 3])
def test_best_first_expands_in_order_of_value(batch: int) -> None:
    values = random_values()
    goal = random.choice(list(values)[-81:])
    visited: list[str] = []

    async def search(root: SearchNode) -> SearchOutcome:
        async def propose(node: SearchNode) -> Sequence[SearchNode]:
            return await moves("abc" if len(node.path_text) < 4 else "", visited)(node)

        return await best_first(
            root, propose, table(values), lambda node: node.path_text == goal, batch=batch
        )

    found = find(search)
    opened, expected = [""], list[str]()
    while goal not in opened[:1]:
        chosen = list(itertools.takewhile(lambda text: text != goal, opened[:batch]))
        expected += chosen
        opened = opened[len(chosen) :]
        opened += [t + letter for t in chosen if len(t) < 4 for letter in "abc"]
        opened.sort(key=lambda text: -values[text])
    assert visited == expected
    assert texts(found.candidates) == [goal] and found.stopped == ""


def test_best_first_stops_after_max_expansions() -> None:
    visited: list[str] = []

    async def search(root: SearchNode) -> SearchOutcome:
        return await best_first(
            root, moves("ab", visited), table({}), lambda _: False, max_expansions=5, batch=2
        )

    found = find(search)
    assert len(visited) == 5 and found.stopped == "limit of 5 expansions reached"


# Best of n


@pytest.mark.parametrize(
    ("scorer", "score"),
    [
        (mean_logprob, lambda node: sum(node.logprobs) / len(node.logprobs)),
        (min_logprob, lambda node: min(node.logprobs)),
        (sum_logprob, lambda node: sum(node.logprobs)),
        (by_function(lambda node: node.text.count("a")), lambda node: node.text.count("a")),
    ],
)
def test_best_of_n_with_each_scorer(scorer: Evaluate, score: Callable[[SearchNode], float]) -> None:
    async def search(root: SearchNode) -> SearchOutcome:
        return await best_of_n(root, 20, scorer, max_tokens=6)

    found = find(search, hashed("abc", eos=0.2, salt=random.random()))
    assert len(found.candidates) == 20
    values = [score(node) for node in found.candidates]
    assert values == pytest.approx(sorted(values, reverse=True))
    assert [node.value for node in found.candidates] == pytest.approx(values)
