"""Sessions and searches on tiny real checkpoints."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

from treegen import LLM, Node, SamplingParams
from treegen.common.outputs import Status
from treegen.errors import InputError, TreeError
from treegen.prompts.tokens import append_text
from treegen.search import Budget, Expand, SearchNode, bfs, mean_logprob, sample_steps

FEW_SHOT = "Q: Ann has 3 apples.\nA: The answer is 3.\n\n" * 4
QUESTIONS = [f"Q: Bob has {i} pens and {i % 3} caps. How many?\nA:" for i in range(6)]
PARAMS = SamplingParams(temperature=0.8, max_tokens=8, ignore_eos=True, seed=5)


@pytest.fixture(
    scope="module",
    params=["llama", "gemma2", pytest.param("gpt2", marks=pytest.mark.soak), "qwen3_next", "lfm2"],
)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path: Path = tmp_path_factory.mktemp(request.param)
    # With seed 0 two experts of qwen3_next differ by 2.5e-4 in the router's logits, at one token of
    # a scored text. Stock transformers in float32 is 1.8e-4 from float64 there: rounding chooses.
    seed = 1 if request.param == "qwen3_next" else 0
    tiny_models.save_tiny_model(path, request.param, seed=seed)
    return LLM(str(path), check=False, device="cpu", memory="8MiB")


SOME = pytest.mark.parametrize("llm", ["llama", "qwen3_next"], indirect=True)
"""Models without recurrent states and with them, where nothing else of a model matters."""


def ids_of(node: SearchNode) -> list[int]:
    context: Any = node._live()
    tokens: list[int] = []
    for segment in list(context.segment.path())[::-1]:
        tokens += segment.tokens.tolist()
    return tokens


def test_greedy_paths_are_those_of_whole_prompts(llm: LLM) -> None:
    with llm.session(PARAMS) as session:
        node = session.root(FEW_SHOT + QUESTIONS[0])
        contexts = []
        for _ in range(4):
            sampled = session.sample({node: 3})[node]
            (best,) = session.sample({node: 1}, temperature=0)[node]
            contexts.append((ids_of(node), best.tokens, best.logprobs))
            node = sampled[1]
    for ids, tokens, logprobs in contexts:
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        ((expected,),) = llm.generate([ids], greedy)
        assert expected.tokens == tokens
        assert expected.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_scores_below_a_node_are_those_of_the_whole_text(llm: LLM) -> None:
    texts = [" The answer is 7.", " no", "8"]
    with llm.session(PARAMS) as session:
        root = session.root(FEW_SHOT + QUESTIONS[1])
        child = session.sample({root: 2})[root][0]
        scores = session.score({root: texts, child: texts})
        ids = ids_of(child)
    pairs = [(FEW_SHOT + QUESTIONS[1], text) for text in texts]
    for actual, expected in zip(scores[root], llm.score(pairs), strict=True):
        assert actual.logprob == pytest.approx(expected.logprob, abs=1e-3)
    continued = [(ids, list(score.tokens)) for score in scores[child]]
    for actual, expected in zip(scores[child], llm.score(continued), strict=True):
        assert actual.logprobs == pytest.approx(expected.logprobs, abs=1e-3)


def test_given_text_is_tokenized_with_what_it_follows(llm: LLM) -> None:
    whole = FEW_SHOT + QUESTIONS[2] + " 3 + 4 = 7"
    expected = llm.tokenizer(whole)["input_ids"]
    with llm.session(PARAMS) as session:
        for cut in range(len(FEW_SHOT) - 3, len(whole), 7):
            node = session.root(whole[:cut]).extend(whole[cut : cut + 5]).extend(whole[cut + 5 :])
            assert ids_of(node) == expected, cut


def test_text_after_generated_tokens_leaves_them_as_they_are(llm: LLM) -> None:
    for text in ("Bob has 14 pens", "caps. How", "A:", "\n\nQ"):
        for addition in (" and", "s", "4", "\n", " 15."):
            tail = np.array(llm.tokenizer(text)["input_ids"], dtype=np.int32)
            ids = append_text(llm.tokenizer, tail, addition)
            assert llm.tokenizer.decode([*tail.tolist(), *ids.tolist()]).endswith(addition)


async def explore(root: SearchNode) -> list[SearchNode]:
    first = await root.sample(3)
    second = await asyncio.gather(*(node.extend(" so").sample(2) for node in first[:2]))
    return [child for children in second for child in children]


def test_same_seed_same_tree_whatever_runs_beside_it(llm: LLM) -> None:
    problems = [(f"q{i}", FEW_SHOT + question) for i, question in enumerate(QUESTIONS)]
    together = llm.search(explore, problems, PARAMS)
    assert [result.name for result in together] == [name for name, _ in problems]
    alone = [llm.search(explore, [problem], PARAMS)[0] for problem in problems[::-1]][::-1]
    few = llm.search(explore, problems, PARAMS, concurrency=2)
    for results in (alone, few):
        for actual, expected in zip(results, together, strict=True):
            for node, other in zip(actual.tree.nodes, expected.tree.nodes, strict=True):
                assert node.text == other.text
                assert node.logprob == pytest.approx(other.logprob, abs=1e-3)
    used = sum(result.usage.tokens_prefilled for result in together)
    again = sum(result.usage.tokens_reprompted for result in together)
    assert used * 3 < again


@SOME
def test_declared_levels_run_without_code(llm: LLM) -> None:
    levels = [
        Expand(3, max_tokens=5),
        Expand(2, max_tokens=4, keep=2, scorer="mean_logprob"),
        Expand(1, max_tokens=3, temperature=0, prefix=" so"),
    ]
    tree = Node(
        FEW_SHOT, children=[Node(q, expand=levels, id=f"q{i}") for i, q in enumerate(QUESTIONS[:3])]
    )
    plan = llm.plan(tree, PARAMS)
    assert plan.num_rows == 3 * 6
    assert "generated level 2: at most 18 rows, 72 tokens; 6 go on" in str(plan)
    results = llm.expand(tree, PARAMS)
    assert [result.name for result in results] == ["q0", "q1", "q2"]
    for result in results:
        # The root, three thoughts, two under each, a given text and an answer under the best two.
        assert len(result.tree.nodes) == 1 + 3 + 6 + 2 + 2
        assert len(result.candidates) == 2
    with pytest.raises(TreeError, match=r"LLM\.expand"):
        llm.run(tree)


def test_a_ready_made_strategy_and_its_budget(llm: LLM) -> None:
    async def solve(root: SearchNode) -> object:
        return await bfs(
            root,
            sample_steps(3, max_tokens=4),
            mean_logprob,
            lambda node: node.depth == 3,
            breadth=2,
            depth=3,
        )

    results = llm.search(solve, [FEW_SHOT + q for q in QUESTIONS[:3]], PARAMS)
    assert all(result.best is not None and not result.stopped for result in results)
    cut = llm.search(solve, QUESTIONS[:3], PARAMS, budget=Budget(tokens=20))
    assert all(result.stopped == "budget of 20 tokens reached" for result in cut)
    assert all(20 <= result.usage.tokens_decoded <= 29 for result in cut)


@SOME
def test_one_run_at_a_time(llm: LLM) -> None:
    session = llm.session(PARAMS)
    with pytest.raises(InputError, match="another run"):
        llm.generate(["a"])
    with pytest.raises(InputError, match="another run"):
        llm.search(explore, QUESTIONS)
    session.close()
    run = llm.search_stream(explore, QUESTIONS, PARAMS)
    next(run)
    with pytest.raises(InputError, match="another run"):
        llm.session()
    run.close()
    assert llm.cache.pool.num_used == 0
    for wrong in ({"concurrency": 0}, {"concurrency": None}, {"rows": None}):
        with pytest.raises(InputError, match=f"{next(iter(wrong))} must be"):
            llm.search(explore, QUESTIONS, **wrong)
    with pytest.raises(InputError, match="two problems are named 'a'"):
        llm.search(explore, [("a", "x"), ("a", "y")])
    for _ in range(2):
        with pytest.raises(InputError, match="token id") as failure:
            llm.search(explore, [[10**6]])
        assert failure.traceback  # which has hold of what was begun


@SOME
def test_runs_say_what_is_under_way(llm: LLM) -> None:
    tree = Node(FEW_SHOT, children=[Node(q, samples=2, id=q) for q in QUESTIONS[:3]])
    most = 0
    with llm.stream(tree, PARAMS) as stream:
        while stream.has_work:
            stream.step()
            status, levels = stream.status(), stream.levels()
            assert status.num_pages == llm.cache.pool.num_pages
            assert not levels or levels[0].depth == 0
            most = max(most, status.rows)
            if status.rows == 6:
                assert status.pages > 0 and levels[0].rows == 6 and len(levels) > 1
    assert most == 6 and stream.status() == Status(0, 0, status.num_pages)
    with llm.search_stream(explore, QUESTIONS[:2], PARAMS) as run:
        assert run.status().rows == 0
        seen: set[int] = set()
        while run.num_running or not seen:
            run.step()
            seen.add(run.status().rows)
        assert max(seen) > 2 and run.status().num_pages == status.num_pages
    assert run.status().pages == 0


def test_kept_prefixes_serve_searches(llm: LLM) -> None:
    with llm.keep(FEW_SHOT):
        results = llm.search(explore, [FEW_SHOT + q for q in QUESTIONS[:2]], PARAMS)
        with llm.session(PARAMS) as session:
            root = session.root(FEW_SHOT + QUESTIONS[0])
            session.sample({root: 2})
            assert session.usage.prompt_tokens_reused > 50
    fresh = llm.search(explore, [FEW_SHOT + q for q in QUESTIONS[:2]], PARAMS)
    for actual, expected in zip(results, fresh, strict=True):
        assert [n.text for n in actual.tree.nodes] == [n.text for n in expected.tree.nodes]
        assert (
            actual.usage.tokens_prefilled < expected.usage.tokens_prefilled or actual is results[1]
        )


@SOME
def test_a_call_whose_searches_all_fail_warns(llm: LLM) -> None:
    async def broken(root: SearchNode) -> None:
        raise KeyError(root.search.name)

    with pytest.warns(
        RuntimeWarning, match=r"all 2 searches failed; the first error: KeyError: '0'"
    ):
        results = llm.search(broken, ["a", "b"], PARAMS)
    assert [type(result.exception) for result in results] == [KeyError, KeyError]


def test_roots_that_are_split_below_a_kept_prefix_reuse_it(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [FEW_SHOT + question for question in QUESTIONS]
    expected = llm.generate(prompts, greedy)
    kept_tokens = len(llm.tokenizer(FEW_SHOT)["input_ids"]) - 1
    with llm.keep(FEW_SHOT), llm.session(greedy) as session:
        roots = [session.root(prompt) for prompt in prompts]
        drawn = session.sample(dict.fromkeys(roots, 1))
        session.backend.scheduler.check()
        usage = session.usage
    for root, (completion,) in zip(roots, expected, strict=True):
        assert drawn[root][0].tokens == completion.tokens
    assert usage.prompt_tokens_reused >= kept_tokens
    whole = sum(len(llm.tokenizer(prompt)["input_ids"]) for prompt in prompts)
    assert usage.prompt_tokens_computed < whole - len(prompts) * kept_tokens


@SOME
def test_what_ends_the_program_comes_out_of_a_search(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    async def leave(root: SearchNode) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        llm.search(leave, ["a", "b"])
    gc.collect()  # asyncio tells of exceptions that nobody looked at
    assert not caplog.records
    assert len(llm.run(Node("a", samples=2), PARAMS).completions) == 2
