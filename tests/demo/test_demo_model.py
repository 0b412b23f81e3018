"""The model that comes with treegen: what it can do, what it is asked by default, and the tour."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import Command, results_of
from click.testing import CliRunner
from train_demo import bundle
from train_demo.held_out import reserved
from train_demo.puzzles import key

from treegen import demo
from treegen.cli import demo as tour
from treegen.errors import InputError, TreegenError
from treegen.evals.config.eval_settings import resolve_eval_settings
from treegen.evals.job import load_job
from treegen.model.checkpoint.files import locate
from treegen.tasks.sandbox import SandboxPool

_TOLD = "bundled demo model, synthetic problems; use --model and --data for your own"
DATA = (
    "words.jsonl",
    "words_fewshot.jsonl",
    "programs.jsonl",
    "programs_fewshot.jsonl",
    "puzzles.jsonl",
)


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in demo.data_path(name).read_text("utf-8").splitlines()]


def metric(path: Path, name: str, filter: str | None = None) -> float:
    """The value of a metric in a run's results, of the first filter that has it."""
    found = [row for row in results_of(path)["report"]["metrics"] if row["metric"] == name]
    return float(next(row["value"] for row in found if filter in (None, row["filter"])))


# The files


def test_the_bundled_problems_are_what_the_script_makes(tmp_path: Path) -> None:
    done = CliRunner().invoke(bundle.main, [str(tmp_path)])
    assert done.exit_code == 0, done.output
    for name in DATA:
        assert (tmp_path / name).read_bytes() == demo.data_path(name).read_bytes(), name
    assert {each.name for each in demo.data_path("").iterdir()} == set(DATA)


def test_no_bundled_problem_may_be_trained_on() -> None:
    problems = rows_of("words.jsonl")
    assert len(problems) >= 200
    assert all(reserved(row["question"]) for row in problems)
    puzzles = rows_of("puzzles.jsonl")
    assert len(puzzles) == 100
    assert all(reserved(key(tuple(row["numbers"]), row["target"])) for row in puzzles)
    assert len(rows_of("programs.jsonl")) == 60  # reserved by what they are made of; see bundle


@pytest.mark.parametrize("task", ["gsm8k", "apps", "needle", "needle-grid", "countdown"])
def test_the_tasks_can_read_them(task: str) -> None:
    job = load_job(resolve_eval_settings(demo.fill_defaults({"task": task})))
    assert not job.data.skipped and len(job.data.problems) >= 60
    assert job.settings.engine.model == demo.NAME


def test_the_name_is_the_model_wherever_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert locate("demo", None, weights=True) == demo.model_path()
    assert locate("demo-agent", None, weights=True) == demo.model_path("demo-agent")
    assert locate("./demo", None, weights=True) == Path("demo")
    assert resolve_eval_settings({"task": "gsm8k", "model": "demo"}).engine.model == "demo"
    assert resolve_eval_settings({"task": "gsm8k", "model": "./demo"}).engine.model == str(
        tmp_path / "demo"
    )


# What is taken where a user says nothing


def test_arguments_that_are_no_mapping_reach_the_check_of_settings() -> None:
    with pytest.raises(InputError, match=r"extra must be a mapping of names to text, got \['a'\]"):
        resolve_eval_settings(demo.fill_defaults({"task": "gsm8k", "extra": ["a"]}))


def test_another_model_that_is_named_brings_nothing_with_it() -> None:
    assert demo.fill_defaults({"task": "gsm8k", "model": "x"}) == {"task": "gsm8k", "model": "x"}
    no_model = demo.fill_defaults({"task": "gsm8k"})
    assert demo.fill_defaults({"task": "gsm8k", "model": "demo"}) == no_model
    assert demo.fill_defaults({"task": "mmlu"}) == {"task": "mmlu"}
    assert demo.fill_defaults({"seed": 3}) == {"seed": 3}
    for given in ({"task": "text-world", "model": "demo"}, {"task": "gsm8k", "model": demo.AGENT}):
        assert demo.fill_defaults(given, search=True) == given


def test_what_a_user_says_stands() -> None:
    own = {"task": "gsm8k", "data": "mine.jsonl"}
    form = {"extra": {"form": "self-consistency"}}
    assert demo.fill_defaults(own) == {**own, **form, "model": "demo"}
    assert demo.fill_defaults({**own, "extra": {"form": "cot"}})["extra"] == {"form": "cot"}
    shots = demo.fill_defaults({"task": "gsm8k", "fewshot_file": "mine.jsonl"})
    assert shots["fewshot_file"] == "mine.jsonl" and shots["data"].endswith("words.jsonl")
    assert demo.fill_defaults({"task": "apps", "num_samples": 3})["num_samples"] == 3
    needle = demo.fill_defaults({"task": "needle", "extra": {"length": "5000"}})
    assert needle["extra"] == {"questions": "100", "length": "5000"}
    search = demo.fill_defaults({"task": "countdown", "method": "beam"}, search=True)
    assert search["method"] == "beam" and search["budget"] == {"tokens": 500}
    world = demo.fill_defaults({"task": "text-world", "extra": {"problems": "3"}}, search=True)
    assert world["model"] == demo.AGENT and world["extra"] == {"level": "easy", "problems": "3"}


# What it can do, against generous bounds


def test_votes_are_better_than_single_answers(treegen: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = treegen("eval", "gsm8k", "--limit", 4, "-n", 8, "-o", run)
    assert done.code == 0 and _TOLD in done.err
    single = metric(run, "exact_match")
    votes = {row["k"]: row["value"] for row in results_of(run)["report"]["majority"]}
    assert 0.4 < single < 0.95 and votes[8] >= single + 0.05
    again = treegen("eval", "--resume", run)
    assert again.code == 0 and _TOLD not in again.err


def test_facts_are_found_in_a_long_text(treegen: Command, tmp_path: Path) -> None:
    done = treegen("eval", "needle", "--limit", 20, "-o", tmp_path / "run")
    assert done.code == 0 and metric(tmp_path / "run", "exact_match") >= 0.8


def test_programs_pass_their_tests(treegen: Command, tmp_path: Path) -> None:
    try:
        with SandboxPool(workers=1):
            pass
    except TreegenError as error:
        pytest.skip(f"there is no sandbox: {error}")
    run = tmp_path / "run"
    done = treegen("eval", "apps", "--limit", "15-24", "-n", 3, "--allow-code-execution", "-o", run)
    assert done.code == 0 and metric(run, "pass@1") > 0.3
    assert metric(run, "pass@3") > metric(run, "pass@1")


def test_a_search_solves_puzzles(treegen: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = treegen("search", "countdown", "--limit", 4, "-o", run)
    assert done.code == 0 and _TOLD in done.err
    assert results_of(run)["solved"]["value"] >= 0.3


# The tour


@pytest.fixture
def few_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_tour_shows_every_part(
    treegen: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_threads: None
) -> None:
    monkeypatch.setattr(tour, "_QUESTIONS", {"task": "gsm8k", "limit": "2", "num_samples": 2})
    grid = {"lengths": "1000", "depths": "0,100"}
    monkeypatch.setattr(tour, "_GRID", {"task": "needle-grid", "extra": grid})
    monkeypatch.setattr(tour, "_PROGRAMS", {"task": "apps", "limit": "1", "num_samples": 2})
    monkeypatch.setattr(tour, "_PUZZLES", {"task": "countdown", "limit": "1"})
    done = treegen("demo", "-o", tmp_path / "tour")
    assert done.code == 0, done.err
    for said in ("prompt tokens", "Right by vote", "accuracy in percent", "tot-dfs"):
        assert said in done.out
    assert "pass@1" in done.out or "left out" in done.err
    runs = {str(each.parent.relative_to(tmp_path / "tour")) for each in tmp_path.rglob("run.json")}
    assert runs >= {"gsm8k", "needle-grid", "countdown/sample", "countdown/tot-dfs"}
    assert str(tmp_path / "tour" / "gsm8k") in done.out
    again = treegen("demo", "-o", tmp_path / "tour")
    assert "is not empty" in again.error
