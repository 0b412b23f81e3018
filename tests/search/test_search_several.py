"""Searches over several LLMs, each with a cache of its own, on tiny real checkpoints."""

import sys
from pathlib import Path

import pytest
import tiny_models

from treegen import LLM, SamplingParams
from treegen.errors import InputError
from treegen.search import (
    Budget,
    SearchNode,
    SearchOutcome,
    ab_mcts,
    by_function,
    gather,
    sample_step,
    search_with,
)

PROMPTS = [f"Q: Bob has {i} pens and {i % 3} caps. How many?\nA:" for i in range(3)]
PARAMS = SamplingParams(temperature=0.9, max_tokens=6, seed=3)


@pytest.fixture(scope="module")
def llms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LLM]:
    found = {}
    for family in ("llama", "gpt2"):
        path: Path = tmp_path_factory.mktemp(family)
        tiny_models.save_tiny_model(path, family)
        found[family] = LLM(str(path), check=False, device="cpu", memory="8MiB")
    return found


def test_each_llm_goes_on_from_what_the_others_wrote(llms: dict[str, LLM]) -> None:
    written: list[tuple[str, str, SearchNode]] = []

    async def solve(root: SearchNode) -> SearchNode:
        node = root
        for turn in range(4):
            name = ("llama", "gpt2")[turn % 2]
            both = await node.sample(2, llm=name, ignore_eos=True)
            before = root.text + node.path_text
            written.extend((name, before, each) for each in both if turn < 2)
            scores = await gather(node.score([" no"], llm=each) for each in llms)
            assert scores[0][0].logprob != scores[1][0].logprob
            both[0].drop()
            node = both[1].extend("\nSo:")
        return node

    results = search_with(llms, solve, PROMPTS, PARAMS)
    assert [result.error for result in results] == [None] * 3
    again = search_with(llms, solve, PROMPTS, PARAMS)
    assert [r.tree for r in again] == [r.tree for r in results]
    assert all(result.usage.tokens_decoded == 8 * 6 for result in results)
    num_compared = 0
    for name, before, node in written:
        (score,) = llms[name].score([(before, node.text)])
        if score.tokens == node.tokens:  # not if its text has other tokens
            num_compared += 1
            assert score.logprobs == pytest.approx(node.logprobs, abs=1e-4)
    assert num_compared


def test_another_llm_reads_a_path_deeper_than_the_recursion_limit(llms: dict[str, LLM]) -> None:
    depth = sys.getrecursionlimit() + 100

    async def solve(root: SearchNode) -> SearchNode:
        node = root
        for _ in range(depth):
            node = node.extend("")
        await node.score(["b"], llm="gpt2")
        return node

    (result,) = search_with(llms, solve, PROMPTS[:1], PARAMS)
    assert result.error is None and len(result.tree.nodes) == depth + 1


def test_llms_are_arms_of_adaptive_branching(llms: dict[str, LLM]) -> None:
    async def solve(root: SearchNode) -> SearchOutcome:
        ways = {name: sample_step((), llm=name, max_tokens=3) for name in llms}
        value = by_function(lambda node: min(1.0, len(node.path_text) / 30))
        return await ab_mcts(
            root, ways, value, lambda node: node.depth == 3, iterations=20, batch=4, rule="a"
        )

    budget = Budget(tokens=150)
    results = search_with(llms, solve, PROMPTS, PARAMS, budget=budget)
    for result in results:
        assert result.error is None and result.best is not None
        assert 0 < result.usage.tokens_decoded <= 150 + 8 * 3
    # The caches are free again.
    for llm in llms.values():
        assert llm.generate(["Q:"], PARAMS)


def test_what_several_llms_cannot_do_is_refused(llms: dict[str, LLM]) -> None:
    async def other(root: SearchNode) -> None:
        await root.sample(1, llm="opt")

    with pytest.warns(
        RuntimeWarning, match="there is no LLM 'opt'; the available LLMs are llama, gpt2"
    ):
        search_with(llms, other, PROMPTS[:1], PARAMS)
    with pytest.warns(RuntimeWarning, match="llm='opt' is not supported with a single LLM"):
        llms["llama"].search(other, PROMPTS[:1], PARAMS)
    with pytest.raises(InputError, match="for several LLMs, use text or messages"):
        search_with(llms, other, [[1, 2, 3]], PARAMS)
    with pytest.raises(InputError, match="concurrency must be at least 1"):
        search_with(llms, other, PROMPTS, PARAMS, concurrency=0)
    with pytest.raises(InputError, match="llms must not be empty"):
        search_with({}, other, PROMPTS, PARAMS)
