"""Methods of search over a task's problems, and the run directories that they leave."""

import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from cli_cases import trees_of, write_jsonl
from puzzle_model import ToyLLM, puzzle_model
from toy_search import ToyModel

from treegen.errors import InputError, RunError, TaskError
from treegen.evals.config.base import check_no_unused
from treegen.evals.identity import run_settings
from treegen.evals.progress.run_progress import RunProgress
from treegen.evals.search.job import SearchJob, load_search_job
from treegen.evals.search.method_types import TreeSettings
from treegen.evals.search.methods import (
    METHODS,
    TEXT_METHODS,
    methods_with_setting,
    solution_text,
)
from treegen.evals.search.run import make_record, run_searches, write_search_results
from treegen.evals.search.searcher import TaskSearch
from treegen.evals.search.settings import (
    SearchSettings,
    resolve_search_settings,
    stored_search_choices,
)
from treegen.runs import RunDir, RunInfo, SearchRunDir
from treegen.search.tree.node import SearchNode
from treegen.search.tree.records import NodeRecord, SearchTree
from treegen.search.tree.result import SearchResult

TREES = [name for name in methods_with_setting("expand") if name in TEXT_METHODS]
ROLLOUTS = tuple(methods_with_setting("rollouts"))
SURE = ("beam", "rebase", "tot-bfs", "tot-dfs", "best-first", "mcts")
PUZZLES = [([1, 2, 3], 6), ([2, 3, 7], 13), ([1, 5, 5, 9], 20), ([2, 2], 4), ([3, 4, 7], 49)]
# In letters, each of which is a token of the toy model.
BUDGET = {"tokens": 2000}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = [{"id": f"p{i}", "numbers": n, "target": t} for i, (n, t) in enumerate(PUZZLES)]
    return str(write_jsonl(tmp_path_factory.mktemp("data") / "puzzles.jsonl", rows))


def job_of(data: str, **choices: Any) -> SearchJob:
    settings = {
        "task": "countdown",
        "data": data,
        "model": "toy",
        "budget": BUDGET,
        "num_fewshot": 1,
    }
    return load_search_job(resolve_search_settings({**settings, **choices}))


def results_of(job: SearchJob, llm: ToyLLM, names: list[str] | None = None) -> list[SearchResult]:
    settings = job.settings
    fn = TaskSearch(job.task, job.data, settings)
    roots = [(name, root) for name, root in job.roots.items() if names is None or name in names]
    return list(
        llm.search_stream(fn, roots, settings.solution, concurrency=1, budget=settings.budget)
    )


def records_of(job: SearchJob, llm: ToyLLM) -> list[dict[str, Any]]:
    records = [make_record(job, result) for result in results_of(job, llm)]
    for record in records:
        del record["time"], record["usage"]["seconds"]
    return records


# Methods


def test_methods_read_settings() -> None:
    known = {setting.name for setting in fields(TreeSettings)}
    assert {setting for method in METHODS.values() for setting in method.setting_names} == known


@pytest.mark.parametrize("method", TEXT_METHODS)
def test_each_method_finds_right_solutions_within_its_budget(method: str, data: str) -> None:
    job = job_of(data, method=method)
    records = records_of(job, ToyLLM(puzzle_model()))
    assert sum(record["solved"] for record in records) >= (4 if method in SURE else 2)
    for record, problem in zip(records, job.data.problems, strict=True):
        assert record["error"] is None and record["method"] == method
        tree = SearchTree.from_json(record["nodes"])
        assert record["usage"]["nodes"] == len(tree.nodes) - 1
        assert record["usage"]["tokens_decoded"] <= 2000 + 40
        if record["solved"]:
            text = solution_text(method, tree, record["best"])
            assert job.task.is_solved(problem, text) and record["text"] == text
            assert record["answer"] == problem.answer and record["best"] in record["candidates"]
            assert record["stopped"] == "solved" and not tree.nodes[record["best"]].pruned
        else:
            assert "budget of 2,000 tokens" in record["stopped"]
            assert record["answer"] != problem.answer


@pytest.mark.parametrize("method", TREES)
def test_a_tree_holds_no_dead_end_that_is_followed(method: str, data: str) -> None:
    num_dead = num_unchecked = 0
    for seed, tokens in product(range(4), (77, 520, 2000)):
        job = job_of(data, method=method, seed=seed, budget={"tokens": tokens})
        problems = {problem.id: problem for problem in job.data.problems}
        for record in records_of(job, ToyLLM(puzzle_model(mistakes=1.0))):
            tree = SearchTree.from_json(record["nodes"])
            dead = [
                node
                for node in tree.nodes[1:]
                if job.task.state(problems[record["problem_id"]], tree.path_text(node.id)) is None
            ]
            assert all(node.leaf and not node.visits for node in dead)
            ends = Counter(node.parent_id for node in dead if is_rollout_end(node, method))
            assert max(ends.values(), default=0) <= job.settings.rollouts
            unchecked = [node for node in dead if not node.pruned or node.score is None]
            unchecked = [node for node in unchecked if not is_rollout_end(node, method)]
            # A solution also ends the search before the values of rollouts are known.
            is_over = record["stopped"] == "solved" and method in ROLLOUTS
            assert not unchecked or is_over or record["usage"]["tokens_decoded"] >= tokens
            for node in unchecked:
                check_cut(node, tree, job.settings)
            num_dead += len(dead)
            num_unchecked += len(unchecked)
    assert num_dead > 50 and num_unchecked


def is_rollout_end(node: NodeRecord, method: str) -> bool:
    """Return whether a node only evaluates the node above it."""
    is_passed = node.leaf and not node.pruned and not node.visits
    return method in ROLLOUTS and is_passed and node.score is not None


def check_cut(node: NodeRecord, tree: SearchTree, settings: SearchSettings) -> None:
    """Check that the search ended in the call that drew a node, so its steps were not checked.

    Nothing is drawn afterwards. A complete call would have pruned its dead ends.
    """
    method, width = settings.method, settings.width
    assert node.restart == max(each.restart for each in tree.nodes)
    siblings = [
        each
        for each in tree.nodes
        if (each.parent_id, each.restart) == (node.parent_id, node.restart)
        and not is_rollout_end(each, method)
    ]
    unchecked = [
        each
        for each in siblings
        if each.leaf and not (each.pruned or each.visits) and each.score is None
    ]
    assert node in unchecked
    if method == "rstar":
        return  # several calls at one node complete solutions, to check them
    num_calls = width if method == "dvts" and node.depth == 1 else 1  # the first of each subtree
    assert unchecked == siblings or num_calls > 1
    assert len(unchecked) < settings.expand * (width if method == "rebase" else num_calls)


def test_search_beats_sampling_where_its_judgements_are_good(data: str) -> None:
    model = puzzle_model(right=0.98, mistakes=0.3)
    budget = {"tokens": 800}
    solved = {
        method: sum(
            record["solved"]
            for seed in range(4)
            for record in records_of(
                job_of(data, method=method, budget=budget, seed=seed, expand=5), ToyLLM(model)
            )
        )
        for method in ("sample", "tot-dfs", "best-first")
    }
    assert solved["tot-dfs"] > solved["sample"] < solved["best-first"], solved


@pytest.mark.parametrize("method", TEXT_METHODS)
def test_a_tree_is_a_function_of_the_seed_alone(method: str, data: str) -> None:
    llm = ToyLLM(puzzle_model())
    first, again, other = (
        {r["problem_id"]: r for r in records_of(job_of(data, method=method, seed=seed), llm)}
        for seed in (1, 1, 2)
    )
    assert first == again != other
    job = job_of(data, method=method, seed=1)
    (alone,) = results_of(job, llm, ["p3"])
    assert [node.to_json() for node in alone.tree.nodes] == first["p3"]["nodes"]


@pytest.mark.parametrize("evaluate", ["judge", "judge-sampled", "logprob", "min-logprob"])
@pytest.mark.parametrize("propose", ["sample", "list"])
def test_ways_to_judge_and_to_propose(evaluate: str, propose: str, data: str) -> None:
    for method in ("tot-bfs", "mcts"):
        job = job_of(data, method=method, evaluate=evaluate, propose=propose, limit=2)
        records = records_of(job, ToyLLM(puzzle_model()))
        assert any(record["solved"] for record in records)
        given = {n["finish_reason"] for record in records for n in record["nodes"][1:]}
        # Rollouts of MCTS are sampled, whatever proposes.
        assert ("given" in given) is (propose == "list")


def test_restarts_are_kept_apart(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", [{"id": "p", "numbers": [1, 1, 1], "target": 97}])
    (record,) = records_of(job_of(str(file), method="tot-dfs"), ToyLLM(puzzle_model()))
    nodes = record["nodes"]
    assert "restart" not in nodes[0] and max(node.get("restart", 0) for node in nodes) > 1
    for node in nodes[1:]:
        parent = nodes[node["parent_id"]]
        assert parent["id"] == 0 or parent.get("restart", 0) == node.get("restart", 0)
        assert node["pruned"] == bool(node.get("pruned_because"))


def test_without_solutions_a_search_ends_with_its_budget(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "d.jsonl", [{"numbers": [1, 1, 1], "target": 50}])
    for budget in ({"calls": 9}, {"nodes": 30}, {"tokens": 500}, {"seconds": 0.05}):
        (record,) = records_of(job_of(str(data), budget=budget), ToyLLM(puzzle_model()))
        ((name, limit),) = budget.items()
        assert not record["solved"] and record["stopped"] == f"budget of {limit:,} {name} reached"


def test_a_search_that_fails_fails_alone(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(data, method="beam")
    evaluate = job.task.evaluate

    def broken(problem: Any, how: str) -> Any:
        if problem.id == "p1":
            raise ValueError("no \x1b[31mjudge\nhere")
        return evaluate(problem, how)

    monkeypatch.setattr(job.task, "evaluate", broken)
    records = {r["problem_id"]: r for r in records_of(job, ToyLLM(puzzle_model()))}
    failed = records["p1"]
    assert failed["error"].startswith("ValueError: no ") and "\n" not in failed["error"]
    assert failed["solved"] is False and failed["answer"] is None and len(failed["nodes"]) == 1
    assert all(record["error"] is None for name, record in records.items() if name != "p1")
    assert sum(record["solved"] for record in records.values()) >= 2


def test_mcts_plays_rollouts_on_puzzles_unless_told_otherwise(data: str) -> None:
    drawn: dict[int, int] = {}
    for rollouts in (0, 1, 3):
        job = job_of(data, method="mcts", rollouts=rollouts, limit=3, budget={"calls": 60})
        *_, record = records_of(job, ToyLLM(puzzle_model(mistakes=3.0)))
        tree = SearchTree.from_json(record["nodes"])
        # A step is a line of its own; what a rollout draws is all lines to the end.
        drawn[rollouts] = sum(node.text.count("\n") != 1 for node in tree.nodes[1:])
        assert record["error"] is None
    assert drawn[0] == 0 < drawn[1]
    assert (
        resolve_search_settings({"task": "countdown", "model": "m", "method": "mcts"}).rollouts == 1
    )


def test_faults_of_a_task_name_the_method_and_the_problem(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(data, method="beam")

    def state(problem: Any, text: str) -> Any:
        raise SystemExit("no more")

    monkeypatch.setattr(job.task, "state", state)
    (record, *_) = records_of(job, ToyLLM(puzzle_model()))
    assert record["error"].startswith(
        "TaskError: state of problem 'p0' fails in task 'countdown': SystemExit: no more (test_"
    )

    def root(given: Any, problem: Any) -> str:
        raise KeyError("x")

    monkeypatch.setattr(type(job.task), "root", staticmethod(root))
    with pytest.raises(TaskError, match="root of problem 'p0' fails in task 'countdown': KeyErr"):
        job_of(data)


# Tasks that cannot be checked


@pytest.mark.parametrize("end", ["", "\n\nQ: It is 1.\n\nQ: It is"])
def test_answers_that_cannot_be_checked_are_not_looked_up(tmp_path: Path, end: str) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", [{"question": "How many?", "answer": "#### 12"}])
    settings = {
        "task": "gsm8k",
        "data": str(file),
        "model": "toy",
        "num_fewshot": 0,
        "num_samples": 12,
        "budget": {"tokens": 3000},
        "width": 3,
        "expand": 3,
    }
    found = {}
    for method in TEXT_METHODS:
        job = load_search_job(resolve_search_settings({**settings, "method": method}))
        (record,) = records_of(job, ToyLLM(words_model(end)))
        assert record["stopped"] != "solved" and record["error"] is None
        found[method] = record
    assert found["sample"]["usage"]["nodes"] == 1
    assert found["majority"]["answer"] == "7" and not found["majority"]["solved"]
    assert set(found["majority"]["votes"]) <= {"7", "12"}
    assert {record["answer"] for record in found.values()} <= {"7", "12", None}
    assert found["beam"]["answer"] == "7" and found["beam"]["best"] in found["beam"]["candidates"]


def words_model(end: str = "") -> ToyModel:
    """Answers every question by one of two numbers, or by none, and goes on with an end."""
    texts = {
        f" It is so. The answer is 7.\n{end}": 9.0,
        f" It is so. The answer is 12.\n{end}": 1.0,
        f" It is.\n{end}": 2.0,
    }
    letters = "".join(sorted({letter for text in texts for letter in text}))

    def weights(text: str) -> list[float]:
        typed = text.rpartition("\nA:")[2]
        found = dict.fromkeys(letters, 0.0)
        for whole, weight in texts.items():
            if whole.startswith(typed) and len(whole) > len(typed):
                found[whole[len(typed)]] += weight
        return [0.0 if any(found.values()) else 1.0, *found.values()]

    return ToyModel(letters, weights)


def test_what_a_budget_cuts_short_has_no_answer(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", [{"question": "How many?", "answer": "#### 7"}])
    settings = {"task": "gsm8k", "data": str(file), "model": "toy", "num_fewshot": 0}
    job = load_search_job(
        resolve_search_settings({**settings, "method": "beam", "budget": {"tokens": 60}})
    )
    (record,) = records_of(job, ToyLLM(words_model()))
    assert record["stopped"] == "budget of 60 tokens reached"
    assert (record["answer"], record["text"], record["solved"]) == (None, None, False)


@pytest.mark.parametrize("method", ["best-of-n", "beam", "dvts", "rebase", "tot-bfs", "mcts"])
def test_solutions_may_vote_with_the_weight_of_their_values(tmp_path: Path, method: str) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", [{"question": "How many?", "answer": "#### 12"}])
    settings = {
        "task": "gsm8k",
        "data": str(file),
        "model": "toy",
        "num_fewshot": 0,
        "num_samples": 12,
        "budget": {"tokens": 3000},
        "width": 3,
        "expand": 3,
        "method": method,
    }
    found = {}
    for choose in ("best", "vote"):
        job = load_search_job(resolve_search_settings({**settings, "choose": choose}))
        (found[choose],) = records_of(job, ToyLLM(words_model()))
    assert found["best"]["nodes"] == found["vote"]["nodes"] and not found["best"]["votes"]
    votes, job_task = found["vote"]["votes"], job.task
    tree = SearchTree.from_json(found["vote"]["nodes"])
    weights: dict[str, float] = {}
    for index in found["best"]["candidates"]:
        answer = job_task.answer(job.data.problems[0], tree.path_text(index))
        score = tree.nodes[index].score
        if answer is not None and score is not None:
            # Values are mean log-probabilities; those of rebase and mcts are from 0 to 1.
            weight = score if method in ("rebase", "mcts") else math.exp(score)
            weights[answer] = weights.get(answer, 0) + weight
    assert votes == pytest.approx(weights, abs=1e-3) and votes
    assert found["vote"]["answer"] == max(votes, key=lambda answer: votes[answer])


def test_solutions_without_values_are_evaluated_for_a_vote(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", [{"question": "How many?", "answer": "#### 12"}])
    own = tmp_path / "mine.py"
    own.write_text("async def draw(root, tools):\n    return await tools.finish(root, 9)\n")
    settings = {"task": "gsm8k", "data": str(file), "model": "toy", "num_fewshot": 0}
    job = load_search_job(
        resolve_search_settings({**settings, "method": f"{own}:draw", "choose": "vote"})
    )
    (record,) = records_of(job, ToyLLM(words_model()))
    votes: dict[str, float] = {}
    for node in record["nodes"][1:]:
        if answer := job.task.answer(job.data.problems[0], node["text"]):
            votes[answer] = votes.get(answer, 0) + math.exp(node["score"])
    assert votes and record["votes"] == pytest.approx(votes, abs=1e-3)


# Settings


def test_settings_come_from_the_task_and_the_user(data: str) -> None:
    plain = resolve_search_settings({"task": "countdown", "model": "m"})
    assert (plain.method, plain.budget.tokens, plain.evaluate) == ("tot-bfs", 2000, "judge")
    assert plain.step.include_stop and plain.step.stops == ("\n",)
    given = resolve_search_settings(
        {
            "task": "countdown",
            "model": "m",
            "method": "beam",
            "width": 2,
            "temperature": 0.5,
            "seed": 3,
            "max_tokens": 99,
            "step_tokens": 9,
            "budget": {"calls": 7},
            "evaluate": "logprob",
        }
    )
    assert (given.step.temperature, given.solution.temperature) == (0.5, 0.5)
    assert (given.step.max_tokens, given.solution.max_tokens) == (9, 99)
    assert (given.budget.calls, given.budget.tokens, given.width) == (7, None, 2)
    # A limit of one scale says nothing on another.
    assert plain.prune_below == pytest.approx(1 / 3) and given.prune_below is None


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"method": "bfs"}, "there is no method 'bfs'; did you mean 'tot-bfs'"),
        ({"method": "x"}, "known: sample, best-of-n"),
        ({"evaluate": "jugde"}, "there is no way to evaluate 'jugde'; did you mean 'judge'"),
        ({"evaluate": "reward:"}, "there is no way to evaluate"),
        ({"propose": "guess"}, "there is no way to propose 'guess'; known: sample, list"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"num_samples": -1}, "num_samples must be at least 1"),
        ({"step_tokens": 0}, "step_tokens must be at least 1, got 0"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"rollouts": -1}, "rollouts must be at least 0, got -1"),
        ({"choose": "votes"}, "there is no way to choose 'votes'; did you mean 'vote'"),
        ({"exploration": float("nan")}, "exploration must be at least 0"),
        ({"temperature": 0.0}, "all samples are the same at temperature 0"),
        ({"top_p": 2.0}, "top_p must be in"),
        ({"budget": {"tokens": 0}}, "budget tokens must be"),
        ({"budget": {"actions": 3}}, "actions of budget= has no effect on countdown, which is"),
        ({"nonsense": 1}, "there is no setting 'nonsense'"),
        ({"task": "apps"}, "cannot be searched"),
        ({"task": ""}, "no task is given"),
    ],
)
def test_settings_that_cannot_be(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        resolve_search_settings({"task": "countdown", "model": "m", **choices})


@pytest.mark.parametrize(
    ("task", "form", "message"),
    [
        ("gsm8k", "cot", "a search of gsm8k requires the task argument form=self-consistency, got"),
        ("game24", "expression", "a search of game24 requires the task argument form=steps, got"),
        ("gsm8k", "prose", "task argument form must be one of cot, self-consistency, got 'prose'"),
    ],
)
def test_arguments_of_a_task_that_a_search_cannot_follow(
    task: str, form: str, message: str
) -> None:
    choices = {"task": task, "model": "toy", "data": "a.csv", "budget": BUDGET}
    with pytest.raises(InputError, match=message):
        resolve_search_settings({**choices, "extra": {"form": form}})


def test_a_run_from_before_an_argument_was_checked_is_continued() -> None:
    stored = {"task": "gsm8k", "model": "toy", "method": "beam", "extra": {"form": "cot"}}
    assert resolve_search_settings({}, stored).options.extra == {"form": "cot"}


@pytest.mark.parametrize(
    ("task", "known", "right"),
    [
        ("gsm8k", "cot, self-consistency", "self-consistency"),
        ("game24", "steps, expression", "steps"),
    ],
)
def test_a_run_with_an_invalid_argument_says_how_to_resume_it(
    task: str, known: str, right: str
) -> None:
    stored = {"task": task, "model": "toy", "method": "beam", "data": "a", "extra": {"form": "x"}}
    message = (
        f"task argument form must be one of {known}, got 'x'; the run stores this value, so resume "
        f"the run with task_args form={right}"
    )
    with pytest.raises(InputError, match=f"^{message}$"):
        resolve_search_settings({}, stored)
    extra = {"form": right}
    assert resolve_search_settings({"extra": extra}, stored).options.extra == extra


def test_only_an_argument_that_is_stored_is_named_as_stored(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from treegen.errors import InputError\n"
        "from treegen.tasks.gsm8k import GSM8K\n"
        "class Own(GSM8K):\n"
        "    arguments = {**GSM8K.arguments, 'depth': 'steps'}\n"
        "    def configure(self, arguments):\n"
        "        if 'depth' not in arguments:\n"
        "            raise InputError('set the task argument depth')\n"
    )
    choices = {"task": f"{tmp_path}/own.py:Own", "model": "toy", "method": "beam"}
    for stored in (None, {**choices, "extra": {"form": "self-consistency"}}):
        with pytest.raises(InputError, match=r"^set the task argument depth$"):
            resolve_search_settings(choices, stored)


def test_a_search_configures_the_task(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from dataclasses import replace\n"
        "from treegen.tasks.puzzles.base import Countdown\n"
        "class Own(Countdown):\n"
        "    arguments = {'depth': 'steps'}\n"
        "    depth, whole = 2, True\n"
        "    @property\n"
        "    def search_defaults(self):\n"
        "        return replace(super().search_defaults, depth=self.depth)\n"
        "    def configure(self, arguments):\n"
        "        self.depth = int(arguments.get('depth', 2))\n"
    )
    choices = {"task": f"{tmp_path}/own.py:Own", "model": "toy", "extra": {"depth": "4"}}
    job = load_search_job(resolve_search_settings(choices))
    assert job.settings.depth == job.task.search_defaults.depth == 4


@pytest.mark.parametrize(
    ("task", "method", "choices", "message"),
    [
        ("gsm8k", "best-of-n", {"step_tokens": 5}, "on best-of-n, which draws whole solutions"),
        ("gsm8k", "self-refine", {"choose": "vote"}, "which evaluates no solutions"),
        ("gsm8k", "sample", {"choose": "vote"}, "which evaluates no solutions"),
        ("gsm8k", "rstar", {"choose": "vote"}, "on rstar, which takes a vote of its own"),
        ("gsm8k", "sample", {"width": 8}, "which draws one solution if the task cannot check"),
        ("text-world", "sample", {"width": 8}, "which draws one solution if the task"),
        ("countdown", "sample", {"width": 8}, None),
        ("countdown", "beam", {"step_tokens": 5, "choose": "vote"}, None),
        ("gsm8k", "best-first", {"step_tokens": 5}, None),
    ],
)
def test_settings_without_effect_are_refused(
    task: str, method: str, choices: dict[str, Any], message: str | None
) -> None:
    settings = resolve_search_settings({"task": task, "model": "m", "method": method, **choices})
    if message is None:
        return check_no_unused(choices, [settings])
    with pytest.raises(InputError, match=f"{next(iter(choices))}= has no effect .*{message}"):
        check_no_unused(choices, [settings])
    beam = resolve_search_settings({"task": task, "model": "m", "method": "beam", **choices})
    if task != "text-world":
        check_no_unused(choices, [settings, beam])  # it has an effect on one of the runs


@pytest.mark.parametrize(
    ("method", "greedy", "several"),
    [
        ("sample", {}, None),
        ("self-refine", {}, None),
        ("best-of-n", {"num_samples": 1}, {"num_samples": 2}),
        ("beam", {"expand": 1}, {}),
        ("rebase", {"expand": 1, "width": 1}, {"expand": 1}),
        ("mcts", {"expand": 1}, {"expand": 1, "rollouts": 2}),
        ("ab-mcts", None, {}),
        ("majority", None, {"num_samples": 1}),
        ("sample", None, {"repeats": 2}),
    ],
)
def test_temperature_0_needs_one_sample_of_each_state(
    method: str, greedy: dict[str, int] | None, several: dict[str, int] | None
) -> None:
    given = {"task": "gsm8k", "model": "m", "method": method, "temperature": 0.0}
    if greedy is not None:
        check_no_unused(greedy, [resolve_search_settings({**given, **greedy})])
    if several is not None:
        with pytest.raises(InputError, match="all samples are the same at temperature 0"):
            resolve_search_settings({**given, **several})


def test_a_greedy_search_ends_with_its_only_solution(data: str) -> None:
    job = job_of(data, method="sample", temperature=0.0)
    for record in records_of(job, ToyLLM(puzzle_model())):
        assert record["solved"] or len(record["nodes"]) == 2


# Run directories


@pytest.fixture
def job(data: str) -> SearchJob:
    return job_of(data, method="best-first")


def settings_of(job: SearchJob, **changes: Any) -> Any:
    given: dict[str, Any] = {"dtype": "float32", "fingerprint": "f"}
    return run_settings(job, **given | changes)


def steps_of(
    job: SearchJob, run: SearchRunDir, llm: ToyLLM | None = None, **more: Any
) -> list[RunProgress]:
    return list(run_searches(job, run, llm or ToyLLM(puzzle_model()), **more))  # type: ignore[arg-type]


@pytest.fixture
def whole(job: SearchJob, tmp_path: Path) -> Path:
    path = tmp_path / "whole"
    with SearchRunDir.create(path, settings_of(job)) as run:
        steps = steps_of(job, run)
        assert [step.done for step in steps] == [1, 2, 3, 4, 5]
        assert steps[-1].unit == "searches" and steps[-1].estimate is not None
        assert [step.unknown for step in steps] == [4, 3, 2, 1, 0]
        least = [step.estimate.value for step in steps if step.estimate]
        assert least == sorted(least) and all(
            step.estimate and step.estimate.num_problems == 5 for step in steps
        )
        write_search_results(job, run)
    return path


def test_results_add_up(whole: Path) -> None:
    records = trees_of(whole)
    results = json.loads((whole / "results.json").read_text())
    assert (results["complete"], results["done"], results["planned"]) == (True, 5, 5)
    num_solved = sum(record["solved"] for record in records)
    assert results["num_solved"] == num_solved
    estimate = results["solved"]
    assert estimate["value"] == pytest.approx(num_solved / 5)
    assert 0 <= estimate["low"] <= estimate["value"] <= estimate["high"] <= 1
    decoded = [record["usage"]["tokens_decoded"] for record in records]
    assert results["cost"]["tokens_decoded"] == {
        "total": sum(decoded),
        "mean": sum(decoded) / 5,
        "most": max(decoded),
    }
    assert sum(results["stopped"].values()) == 5 and results["errors"] == {}
    assert results["seconds"] > 0 and results["method"] == "best-first"


def test_pass_at_k_is_over_the_searches_of_each_problem(data: str, tmp_path: Path) -> None:
    job = job_of(data, method="sample", width=1, repeats=5, budget={"tokens": 60})
    path = tmp_path / "run"
    with SearchRunDir.create(path, settings_of(job)) as run:
        steps = steps_of(job, run)
        assert steps[-1].done == steps[-1].planned == 25
        assert all(step.estimate and step.estimate.num_problems <= 5 for step in steps)
        results = write_search_results(job, run)
    right: dict[str, list[bool]] = {}
    for record in trees_of(path):
        right.setdefault(record["problem_id"], []).append(record["solved"])
    assert [len(each) for each in right.values()] == [5] * 5
    assert len({tuple(sorted(each)) for each in right.values()}) > 1
    assert list(results["pass@k"]) == ["1", "2", "4", "5"]
    for k, found in results["pass@k"].items():
        share = [
            sum(any(group) for group in combinations(each, int(k))) / math.comb(5, int(k))
            for each in right.values()
        ]
        assert found["value"] == pytest.approx(sum(share) / 5)
    assert results["solved"]["value"] == pytest.approx(results["pass@k"]["1"]["value"])


def test_names_of_searches_are_told_apart(tmp_path: Path) -> None:
    rows = [{"id": name, "numbers": [1, 2, 3], "target": 6} for name in ("p", "p #2")]
    file = str(write_jsonl(tmp_path / "d.jsonl", rows))
    assert job_of(file).planned == 2
    with pytest.raises(InputError, match="'p #2' is the same as the name that"):
        job_of(file, repeats=2)


def test_results_of_a_stopped_run_count_those_under_way_as_unknown(
    job: SearchJob, whole: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(whole, tmp_path / "cut"))
    lines = (path / "trees.jsonl").read_bytes().splitlines(keepends=True)
    solved = [line for line in lines if json.loads(line)["solved"]]
    (path / "trees.jsonl").write_bytes(b"".join(solved[:2]))
    for concurrency, unknown in ((64, 3), (1, 1)):
        few = replace(job, settings=replace(job.settings, concurrency=concurrency))
        with SearchRunDir.resume(path, settings_of(job)) as run:
            results = write_search_results(few, run)
        assert (results["complete"], results["done"], results["num_solved"]) == (False, 2, 2)
        assert results["solved"]["value"] == 2 / (2 + unknown)
        assert results["solved"]["low"] < results["solved"]["value"] < results["solved"]["high"]


def test_a_run_can_be_stopped_and_continued_anywhere(
    job: SearchJob, whole: Path, tmp_path: Path
) -> None:
    for number in range(6):
        path = Path(shutil.copytree(whole, tmp_path / f"cut-{number}"))
        lines = (path / "trees.jsonl").read_bytes().splitlines(keepends=True)
        torn = lines[number][:50] if number < 5 else b""
        (path / "trees.jsonl").write_bytes(b"".join(lines[:number]) + torn)
        llm = ToyLLM(puzzle_model())
        with SearchRunDir.resume(path, settings_of(job)) as run:
            steps_of(job, run, llm)
            assert len(llm.begun) == 5 - number and run.missing == 0
        assert trees_of(path) == trees_of(whole)


def test_a_stop_keeps_what_is_finished_and_nothing_else(
    job: SearchJob, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Polled in each round of the event loop, so a count of polls stops somewhere inside a search.
    monkeypatch.setattr("treegen.evals.search.searcher.POLL_SECONDS", 0)
    for limit in (1, 50, 300, 10**6):
        path = tmp_path / f"stopped-{limit}"
        polls: Iterator[int] = iter(range(10**9))
        with SearchRunDir.create(path, settings_of(job)) as run:
            steps_of(job, run, stop=lambda: next(polls) >= limit)  # noqa: B023
            assert run.missing > 0 or limit == 10**6
        assert all(record in trees_of(whole) for record in trees_of(path))
        with SearchRunDir.resume(path, settings_of(job)) as run:
            steps_of(job, run)
        assert trees_of(path) == trees_of(whole)


def test_runs_from_before_there_was_a_choice_are_continued_as_they_were(data: str) -> None:
    old = job_of(data, method="mcts", rollouts=0)
    settings = settings_of(old)
    assert not {"rollouts", "choose"} & set(settings.identity["search"])
    info = RunInfo(
        fingerprint=settings.fingerprint,
        created="",
        identity=settings.identity,
        free=settings.free,
        problem_ids=tuple(settings.problem_ids),
        planned=5,
        versions={},
        resumes=(),
    )
    again = resolve_search_settings({}, stored_search_choices(info))
    assert (again.rollouts, again.choose) == (0, "best")
    new = job_of(data, method="mcts", choose="vote")
    assert settings_of(new).fingerprint != settings.fingerprint


def test_a_changed_setting_is_refused_by_name(data: str, whole: Path, job: SearchJob) -> None:
    for choices, message in (
        ({"width": 2}, "search.width: 3 -> 2"),
        ({"method": "beam"}, 'search.method: "best-first" -> "beam"'),
        ({"budget": {"tokens": 50}}, "budget.tokens: 2000 -> 50"),
        ({"temperature": 0.1}, "draw.temperature: 0.7 -> 0.1"),
        ({"step_tokens": 5}, "draw.step_tokens: 48 -> 5"),
    ):
        changed = job_of(data, **{"method": "best-first", **choices})
        with pytest.raises(RunError, match="started with other settings") as error:
            SearchRunDir.resume(whole, settings_of(changed))
        assert message in str(error.value)
    free = job_of(data, method="best-first", concurrency=3, memory="1GiB")
    with SearchRunDir.resume(whole, settings_of(free)) as run:
        assert stored_search_choices(run.info)["concurrency"] == 3
        again = resolve_search_settings({}, stored_search_choices(run.info))
    assert again == free.settings


def test_runs_of_samples_and_of_searches_are_told_apart(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match="was created with `treegen search`, not with `treegen eval`"
    ):
        RunDir.open(whole)
    other = Path(shutil.copytree(whole, tmp_path / "other"))
    (other / "trees.jsonl").rename(other / "samples.jsonl")
    with pytest.raises(
        RunError, match="was created with `treegen eval`, not with `treegen search`"
    ):
        SearchRunDir.open(other)
    (other / "samples.jsonl").unlink()
    with pytest.raises(RunError, match=r"has no trees\.jsonl"):
        SearchRunDir.open(other)


def test_the_text_that_is_judged_never_reaches_the_prompt_of_another(data: str) -> None:
    """A search asks about the numbers that are left, not about text of the model."""
    job = job_of(data, method="tot-bfs", limit=1)
    seen: list[SearchNode] = []
    original = job.task.evaluate(job.data.problems[0], "judge")

    async def spy(nodes: Any) -> Any:
        seen.extend(nodes)
        return await original(nodes)

    job.task.evaluate = lambda problem, how: spy  # type: ignore[method-assign]
    records_of(job, ToyLLM(puzzle_model(mistakes=2.0)))
    problem = job.data.problems[0]
    assert seen and all(job.task.state(problem, node.path_text) for node in seen)
