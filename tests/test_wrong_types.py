"""Public functions and constructors, given arguments of wrong types and edge values.

Each argument in turn gets each value, while the others are good. Only errors of treegen may come.
Where the annotation excludes the value, one must come.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import treegen.search
from treegen import LLM, Cluster, Expand, Score
from treegen.errors import InputError, TreegenError
from treegen.evals.config.stop_rule import parse_stop_rule
from treegen.evals.judging import published_scores
from treegen.evals.scoring.universal_self_consistency import parse_pick, question_of
from treegen.evals.statistics import confidence, maj_at_k, replay, weighted
from treegen.integrations.score_texts import score_texts
from treegen.llm.async_llm import AsyncLLM
from treegen.ops.attention import merge, prepare
from treegen.prompts.replies import ReplyReader
from treegen.prompts.replies.formats import tool_format
from treegen.search import AskTell, Budget, SampleRequest, SearchNode
from treegen.search.strategies import ab_mcts as posterior
from treegen.tasks import (
    Problem,
    ReportOptions,
    TaskData,
    TaskDefaults,
    TaskOptions,
    Verdict,
    majority_vote,
    select,
    summarize,
)
from treegen.train import tree_logprobs, tree_of

VALUES: list[Any] = [
    None,
    True,
    "",
    "x",
    [[]],
    [None],
    {},
    (),
    b"x",
    -1,
    0,
    1.5,
    float("nan"),
    object(),
]


async def steps(node: SearchNode, n: int = 2) -> Sequence[SearchNode]:
    return await node.sample(2)


async def step(node: SearchNode) -> SearchNode:
    return (await node.sample(1))[0]


async def worth(nodes: Sequence[SearchNode], *more: Any) -> list[float]:
    return [0.5] * len(nodes)


async def reflected(node: SearchNode, reward: float) -> str:
    return "again"


# Arguments that a function needs, by their names.
GOOD: dict[str, Any] = {
    "done": lambda node: node.depth >= 2,
    "evaluate": worth,
    "reward": worth,
    "propose": steps,
    "generate": steps,
    "complete": steps,
    "step": steps,
    "reflect": reflected,
    "feedback": step,
    "refine": step,
    "answer": lambda node: node.text,
    "enough": lambda node: True,
    "answer_of": lambda node: node.text,
    "prompt_of": lambda node: "q",
    "read": lambda text: 1.0,
    "function": lambda node: 1.0,
    "iterations": 2,
    "width": 2,
    "depth": 2,
    "breadth": 2,
    "subtrees": 2,
    "n": 2,
    "samples": 2,
    "rounds": 2,
    "levels": [Expand(2, max_tokens=2)],
    "choices": {"a": 1.0},
    "text": "a",
    "num": 2,
    "scores": [0.5],
    "values": [0.5, 0.25],
    "rng": Random(0),
    "stop": "\n",
}
STRATEGIES = (
    "ab_mcts",
    "beam",
    "best_first",
    "best_of_n",
    "bfs",
    "dfs",
    "dvts",
    "expand",
    "lats",
    "majority",
    "mcts",
    "rebase",
    "self_refine",
)
TINY = LlamaConfig(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
)
VERDICTS = [Verdict("a", True), Verdict(None, False)]
SETTINGS = ReportOptions(problem_ids=("a",), num_samples=2, num_fewshot=0)

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    **{
        name: (getattr(treegen.search, name), {})
        for name in (
            "along_path",
            "by_function",
            "choice_scores",
            "combine_proposers",
            "propose_lines",
            "read_choice",
            "rollouts",
            "sample_step",
            "sample_steps",
            "value_prompt",
            "vote_prompt",
            "answer_after",
            "lines",
        )
    },
    "agreement": (treegen.search.lead_probability, {"first": 2, "second": 1}),
    "allocate": (treegen.search.allocate, {"values": [0.5], "budget": 2, "temperature": 1.0}),
    "Budget": (Budget, {}),
    "AskTell": (AskTell, {"fn": step, "problems": ["a"]}),
    "gaussian": (posterior.draw_gaussian, {}),
    "beta": (posterior.draw_beta, {}),
    "mixed": (posterior.draw_mixed, {"groups": [[0.5, 0.25]], "num": 1}),
    "tool_format": (tool_format, {"name": "hermes"}),
    "majority_vote": (majority_vote, {"answers": ["a"]}),
    "select": (select, {"problems": [Problem("a", "q", "1")], "options": TaskOptions()}),
    "summarize": (
        summarize,
        {"scores": [], "options": SETTINGS, "task": "t", "version": "1", "filters": ["f"]},
    ),
    "Verdict": (Verdict, {"answer": "a", "correct": True}),
    "TaskOptions": (TaskOptions, {}),
    "TaskDefaults": (
        TaskDefaults,
        {"sampling": treegen.SamplingParams(), "num_samples": 1, "num_fewshot": 0},
    ),
    "TaskData": (TaskData, {"problems": (), "source": "here"}),
    "ReportOptions": (ReportOptions, {"problem_ids": ["a"], "num_samples": 2, "num_fewshot": 0}),
    "decided_at": (parse_stop_rule, {}),
    "question_of": (question_of, {"problem_id": "a", "question": "q", "texts": {0: "a", 1: "b"}}),
    "picked": (parse_pick, {"text": "1", "samples": [0, 1]}),
    "maj_at_k": (maj_at_k.maj_at_k, {"correct": [2], "wrong": [1], "invalid": 0, "k": 2}),
    "tie_at_k": (maj_at_k.tie_at_k, {"counts": [2, 1], "invalid": 0, "k": 2}),
    "check_votes": (weighted.check_votes, {"names": ["majority"]}),
    "Confidence": (confidence.Confidence, {}),
    "group_confidences": (confidence.group_confidences, {"confidences": [1.0], "window": 1}),
    "summary": (confidence.summary, {"confidences": [1.0], "window": 1}),
    "stops_at": (confidence.stops_at, {"confidences": [1.0], "window": 1, "floor": 0.5}),
    "until_decided": (
        replay.replay_early_stopping,
        {"drawn": replay.DrawnProblem(VERDICTS, [1, 1]), "chances": [0.9], "batch": 1},
    ),
    "plain": (replay.replay_majority, {"drawn": replay.DrawnProblem(VERDICTS, [1, 1]), "k": 1}),
    "simpleqa_scores": (published_scores.simpleqa_scores, {"texts": ["A"]}),
    "merge": (merge, {"outs": torch.zeros(1, 2, 1, 4), "lses": torch.zeros(1, 2, 1)}),
    "prepare": (prepare, {"levels": []}),
    "tree_of": (tree_of, {"texts": [[5, 6]]}),
    "tree_logprobs": (tree_logprobs, {"module": LlamaForCausalLM(TINY), "tree": tree_of([[5, 6]])}),
}


def answers(request: Any) -> list[Any]:
    if isinstance(request, SampleRequest):
        return ["4\nThe best choice is 1"] * len(request.indices)
    return [Score((1,), (-1.0,), True) for _ in request.texts]


def searched(strategy: Callable[..., Awaitable[Any]], **given: Any) -> None:
    """Run a strategy with made-up samples; raise what it raises."""
    raised: list[BaseException] = []

    async def fn(root: SearchNode) -> Any:
        try:
            return await strategy(root, **given)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raised.append(error)
            raise

    with AskTell(fn, ["a"], budget=Budget(calls=8), count_tokens=len) as searches:
        while requests := searches.ask():
            for request in requests:
                searches.tell(request, answers(request))
    if raised:
        raise raised[0]


def faults(name: str, call: Callable[..., Any], good: Mapping[str, Any]) -> Iterator[str]:
    """Give each argument each value, in an order that a seed decides."""
    parameters = inspect.signature(call).parameters.values()
    needed = {p.name: GOOD[p.name] for p in parameters if p.name in GOOD and p.default is p.empty}
    given = {**needed, **good}
    values = Random(name).sample(VALUES, len(VALUES))
    for each in parameters:
        if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) or each.name == "root":
            continue
        refused = 0
        for value in values:
            try:
                # A copy: some arguments are filled by the call.
                found = call(**{**given, each.name: copy(value)})
                if hasattr(found, "close"):
                    found.close()
            except TreegenError:
                refused += 1
            except Exception as error:
                yield f"{name}({each.name}={value!r:.40}): {type(error).__name__}: {error!s:.160}"
        if not refused and each.annotation not in (each.empty, "Any", Any):
            yield f"{name} takes anything for {each.name}: {each.annotation}"


@pytest.mark.filterwarnings("ignore:the only search failed:RuntimeWarning")
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_refuses_wrong_arguments(name: str) -> None:
    strategy = getattr(treegen.search, name)
    call = partial(searched, strategy)
    call.__signature__ = inspect.signature(strategy)  # type: ignore[attr-defined]
    needed = {
        p.name: GOOD[p.name]
        for p in inspect.signature(strategy).parameters.values()
        if p.name in GOOD and p.default is p.empty
    }
    if name == "self_refine":
        needed["generate"] = step
    call(**needed)  # the good arguments are good
    found = list(faults(name, call, needed))
    assert not found, "\n".join(found)


@pytest.mark.filterwarnings("ignore:the only search failed:RuntimeWarning")
@pytest.mark.parametrize("name", CALLS)
def test_a_function_refuses_wrong_arguments(name: str) -> None:
    call, good = CALLS[name]
    found = list(faults(name, call, good))
    assert not found, "\n".join(found)


def test_calls_that_take_files_or_a_tokenizer_refuse_others(tmp_path: Path) -> None:
    llm = LLM("demo", device="cpu", memory="16MiB", check=False)
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "ab"}\n')

    def scored(**given: Any) -> None:
        with closing(score_texts(**given)) as parts:
            next(parts)

    def replies(**given: Any) -> None:
        ReplyReader(**given)

    def rollouts(**given: Any) -> None:
        pytest.importorskip("trl")
        from treegen.integrations.trl import Rollouts

        Rollouts(**given)

    good = {"llm": llm, "path": str(file), "folder": tmp_path / "out"}
    scored(**good)
    for call, names, given in (
        (scored, ("llm", "path", "folder", "top", "part"), good),
        (replies, ("tokenizer", "tool_format_name"), {"tokenizer": llm.tokenizer}),
        (rollouts, ("memory",), {}),
    ):
        for name in names:
            for value in (5.5, b"x", [[]], object(), {}):
                with pytest.raises(TreegenError):
                    call(**{**given, name: value})


def test_arguments_that_were_taken_or_failed_with_another_error() -> None:
    llm = LLM("demo", device="cpu", memory="16MiB", check=False)
    for call in (
        lambda: AsyncLLM(llm, tool_format=[[]]),  # type: ignore[arg-type]
        lambda: Cluster("demo", address=0),  # type: ignore[arg-type]
        lambda: AskTell(step, ["a"], budget=1.5),  # type: ignore[arg-type]
        lambda: AskTell(step, ["a"], count_tokens=-1),  # type: ignore[arg-type]
        lambda: AskTell(step, ["a"], params=True),  # type: ignore[arg-type]
        lambda: AskTell(None, ["a"]),  # type: ignore[arg-type]
        lambda: AskTell(step, [5]),
        lambda: llm.search("x", ["a"]),  # type: ignore[arg-type]
        lambda: treegen.search.search_with({"a": llm}, None, ["a"]),  # type: ignore[arg-type]
        lambda: treegen.search.search_with({"a": 5}, step, ["a"]),  # type: ignore[dict-item]
        lambda: treegen.search.search_with({"a": llm}, step, [5]),
    ):
        with pytest.raises(InputError):
            call()


@pytest.mark.parametrize("n", [0, -1])
def test_no_samples_are_refused_before_the_search(n: int) -> None:
    makes: tuple[Callable[[], object], ...] = (
        lambda: treegen.search.rollouts(n, GOOD["done"], worth),
        lambda: treegen.search.vote_prompt(lambda nodes: "q", n=n),
        lambda: treegen.search.value_prompt(lambda node: "q", lambda text: 1.0, n=n),
    )
    for make in makes:
        with pytest.raises(InputError, match=f"n must be at least 1, got {n}"):
            make()


@pytest.mark.filterwarnings("ignore:the only search failed:RuntimeWarning")
def test_what_an_evaluation_gives_must_be_numbers() -> None:
    for given in (None, 5, ["x"], [None], [10**400]):

        async def evaluate(nodes: Sequence[SearchNode], given: Any = given) -> Any:
            return given

        with pytest.raises(InputError, match="evaluate must return a list of numbers, got"):
            searched(treegen.search.best_of_n, n=2, evaluate=evaluate)
