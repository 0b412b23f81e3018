"""The tasks about make-the-target puzzles: data, prompts, scores, and what search asks of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from cli_cases import write_jsonl

from treegen.errors import DataError, InputError
from treegen.evals.problem import Problem
from treegen.evals.search.settings import resolve_search_settings
from treegen.evals.search.task import SearchTask, get_search_task
from treegen.prompts.tree import prompts_of
from treegen.tasks import ReportOptions, SampleScore, Task, TaskOptions, get_task
from treegen.tasks.gsm8k import GSM8K
from treegen.tasks.puzzles.base import Countdown, PuzzleTask, read_puzzle
from treegen.tasks.puzzles.game24 import Game24
from treegen.tasks.puzzles.puzzle import apply_steps

CSV = "Rank,Puzzles,AMT (s)\n" + "".join(
    f"{rank},{puzzle},4.4\n"
    for rank, puzzle in enumerate(["1 1 4 6", "1 1 11 11", "6 12 13 13", "2 9 10 11"], start=1)
)


def puzzle(numbers: list[int], target: int, **more: Any) -> dict[str, Any]:
    return {"numbers": numbers, "target": target, **more}


def load(task: Task, **options: Any) -> list[Problem]:
    return list(task.load(TaskOptions(**options)).problems)


# Data


def test_the_bundled_puzzles_can_be_solved_and_their_solutions_are_right() -> None:
    task = Countdown()
    data = task.load(TaskOptions())
    assert len(data.problems) == 40 and data.num_fewshot == 5
    text = (Path(__file__).parent.parent.parent / "tasks/data/countdown_sample.jsonl").read_text()
    for problem, row in zip(data.problems, map(json.loads, text.splitlines()), strict=True):
        assert apply_steps(row["numbers"], row["solution"]) == (row["target"],)
        assert task.is_solved(problem, row["solution"]) and task.is_solved(
            problem, row["solution"] + "\n"
        )
    assert len({(p.question, p.answer) for p in data.problems}) == 40


@pytest.mark.parametrize("task", [Countdown(), Game24()])
def test_no_puzzle_is_among_its_own_examples(task: PuzzleTask, tmp_path: Path) -> None:
    bundled = Path(__file__).parent.parent.parent / "tasks/data" / task.examples
    rows = [json.loads(line) for line in bundled.read_text().splitlines()]
    if isinstance(task, Countdown):
        data = write_jsonl(
            tmp_path / "puzzles.jsonl", [{**row, "id": i} for i, row in enumerate(rows)]
        )
    else:
        data = tmp_path / "24.csv"
        lines = [f"{i},{' '.join(map(str, row['numbers']))}\n" for i, row in enumerate(rows)]
        data.write_text("Rank,Puzzles\n" + "".join(lines))
    split: dict[str, Any] = {"split": "all"} if isinstance(task, Game24) else {}
    loaded = task.load(TaskOptions(data=str(data), limit=3, **split))
    for row in rows[:3]:
        assert f"Input: {' '.join(map(str, sorted(row['numbers'])))}\n" not in loaded.fewshot
    assert loaded.num_fewshot == 5  # others are shown in their place
    with pytest.raises(InputError, match="has 0 examples that are not in this run"):
        task.load(TaskOptions(data=str(data), **split))
    assert task.load(TaskOptions(data=str(data), num_fewshot=0, **split)).num_fewshot == 0


def test_examples_from_a_file(tmp_path: Path) -> None:
    file = write_jsonl(
        tmp_path / "shots.jsonl",
        [
            puzzle([9, 4], 5, solution="9 - 4 = 5 (left: 5)"),
            puzzle([1, 2], 3, solution="1 + 2 = 3 (left: 3)"),
        ],
    )
    data = write_jsonl(tmp_path / "data.jsonl", [puzzle([2, 3], 6)])
    options: dict[str, Any] = {"data": str(data), "fewshot_file": str(file)}
    assert Countdown().load(TaskOptions(**options)).fewshot == (
        "Combine the numbers to reach the target. Use each number once.\n\n"
        "Input: 4 9\nTarget: 5\nSteps:\n9 - 4 = 5 (left: 5)\n\n"
        "Input: 1 2\nTarget: 3\nSteps:\n1 + 2 = 3 (left: 3)\n\n"
    )
    write_jsonl(data, [puzzle([4, 9], 5, id="mine")])
    with pytest.raises(DataError, match=r"example 1 in .* is also problem 'mine' of this run"):
        Countdown().load(TaskOptions(**options))
    write_jsonl(file, [puzzle([9, 4], 5, solution="9 - 4 = 6 (left: 6)")])
    with pytest.raises(DataError, match="line 1: the solution does not reach the target"):
        Countdown().load(TaskOptions(**options))
    with pytest.raises(InputError, match="does not draw examples at random"):
        Countdown().load(TaskOptions(data=str(data), fewshot_data="train"))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (puzzle([1], 1), "must have 2 to 6 entries, not 1"),
        (puzzle([1] * 7, 1), "not 7"),
        (puzzle([1, -2], 1), "numbers is not a list of integers"),
        (puzzle([1, 2.0], 1), "numbers is not a list"),  # type: ignore[list-item]
        (puzzle([True, 2], 1), "numbers is not a list"),
        ({"numbers": "1 2", "target": 3}, "numbers is not a list"),
        ({"target": 3}, "numbers is not a list"),
        ({"numbers": [1, 2]}, "target is not an integer"),
        (puzzle([1, 2], 3, id=1.5), "id must be text or an integer"),
        (puzzle([1, 2], 3, id=""), "id is empty"),
    ],
)
def test_rows_that_are_no_puzzle_are_skipped(
    row: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [row, puzzle([2, 3], 6)])
    loaded = Countdown().load(TaskOptions(data=str(data)))
    assert [(p.id, p.question, p.answer) for p in loaded.problems] == [("countdown-1", "2 3", "6")]
    (skipped,) = loaded.skipped
    assert skipped.line == 1 and reason in skipped.reason
    write_jsonl(data, [row])
    with pytest.raises(DataError, match=r"has no usable puzzle; .*line 1"):
        Countdown().load(TaskOptions(data=str(data)))


def test_an_argument_that_the_puzzles_do_not_have() -> None:
    with pytest.raises(InputError, match="task 'countdown' has no argument 'form'"):
        Countdown().load(TaskOptions(extra={"form": "steps"}))


def test_the_same_id_twice(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "d.jsonl", [puzzle([1, 2], 3, id=7), puzzle([1, 2], 2, id="7")])
    with pytest.raises(DataError, match="lines 1 and 2 have the same id '7'"):
        Countdown().load(TaskOptions(data=str(data)))


def test_splits_of_a_folder(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "hard.jsonl", [puzzle([1, 2], 3)])
    assert len(load(Countdown(), data=str(tmp_path), split="hard")) == 1
    for options in ({"data": str(tmp_path / "hard.jsonl"), "split": "x"}, {"split": "x"}):
        with pytest.raises((InputError, DataError), match="split"):
            load(Countdown(), **options)


def test_ranks_of_the_game_of_24(tmp_path: Path) -> None:
    file = tmp_path / "24.csv"
    file.write_text(CSV)
    found = load(Game24(), data=str(tmp_path), split="train")
    assert [(p.id, p.question) for p in found][:2] == [
        ("game24-1", "1 1 4 6"),
        ("game24-2", "1 1 11 11"),
    ]
    with pytest.raises(DataError, match=r"no puzzle in split test .ranks 901 to 1000"):
        load(Game24(), data=str(file))
    with pytest.raises(InputError, match="has no split 'dev'; use one of test, train, all"):
        load(Game24(), data=str(file), split="dev")
    with pytest.raises(InputError, match=r"set data= to the 24\.csv"):
        load(Game24())
    file.write_text(CSV + "5,1 2 x,1\n6,,1\n7,1 2 \u0663,1\n")
    skipped = Game24().load(TaskOptions(data=str(file), split="all")).skipped
    num_lines = len(CSV.splitlines())
    assert [row.line - num_lines for row in skipped] == [1, 2, 3]
    for content in ("", "a,b\n1,2\n", "\x00"):
        file.write_text(content)
        with pytest.raises(DataError):
            load(Game24(), data=str(file))
    with pytest.raises(DataError, match="does not exist"):
        load(Game24(), data=str(tmp_path / "none.csv"))


def test_the_published_puzzles(data_dir: Path) -> None:
    found = load(Game24(), data=str(data_dir / "game24"))
    assert [found[0].id, found[-1].id, len(found)] == ["game24-901", "game24-1000", 100]
    assert found[0].question == "4 5 6 10"
    every = load(Game24(), data=str(data_dir / "game24"), split="all", num_fewshot=0)
    assert len(every) == 1362


# Prompts and scores


def test_a_sample_continues_the_steps() -> None:
    task = Countdown()
    data = task.load(TaskOptions(limit=2, num_fewshot=1))
    first, second = prompts_of(task.tree(data, 3))
    problem = data.problems[0]
    assert (first.id, first.samples) == (problem.id, 3)
    text = "".join(str(node.content) for node in first.path)
    assert text == task.root(data, problem)
    assert text.endswith(f"\n\nInput: {problem.question}\nTarget: {problem.answer}\nSteps:\n")
    assert second.path[0] is first.path[0]


@pytest.mark.parametrize(
    ("text", "answer", "correct"),
    [
        ("4 + 6 = 10 (left: 6 10)\n10 + 6 = 16 (left: 16)", "16", False),
        ("4 * 6 = 24 (left: 6 24)\n24 - 6 = 18 (left: 18)", "18", True),
        ("4 * 6 = 24 (left: 6 24)\n24 - 6 = 18 (left: 18)\n\nInput: 9", "18", True),
        ("4 * 6 = 24 (left: 6 24)\n24 - 6 = 18 (left: 18)\nand so", None, False),
        ("4 * 6 = 24 (left: 6 24)", None, False),
        ("4 * 6 = 24 (left: 24)\n24 - 6 = 18 (left: 18)", None, False),
        ("18", None, False),
        ("", None, False),
    ],
)
def test_scores(text: str, answer: str | None, correct: bool) -> None:
    (problem,) = load(Countdown(), ids=["countdown-0"])
    assert (problem.question, problem.answer) == ("4 6 6", "18")
    verdict = Countdown().score(problem, text)["solved"]
    assert (verdict.answer, verdict.correct) == (answer, correct)
    report = Countdown().aggregate(
        [SampleScore(problem.id, 0, "stop", {"solved": verdict})],
        ReportOptions(problem_ids=[problem.id], num_samples=1),
    )
    assert report.value("exact_match", "solved") == correct
    assert report.value("invalid", "solved") == (answer is None)


def test_both_forms_of_the_game_of_24(tmp_path: Path) -> None:
    (tmp_path / "24.csv").write_text(CSV)
    task = Game24()
    options: dict[str, Any] = {"data": str(tmp_path), "split": "train", "ids": ["game24-4"]}
    data = task.load(TaskOptions(**options, extra={"form": "expression"}))
    (problem,) = data.problems
    assert problem.question == "2 9 10 11"
    (prompt,) = prompts_of(task.tree(data, 1))
    assert "(left:" not in data.fewshot and " = 24\n\n" in data.fewshot
    assert str(prompt.path[-1].content).endswith("Target: 24\nAnswer:")
    with pytest.raises(InputError, match="a search needs solutions in steps"):
        task.root(data, problem)
    right = [
        " ((11 + 10) - 9) * 2 = 24",
        "2 * (11 + 10 - 9)",
        "(11+10-9)*2 = 24.\nThat is it.",
        "Let me think.\nAnswer: (11 + 10 - 9) \u00d7 2 = 24",
        "11 + 10 = 21 (left: 2 9 21)\n21 - 9 = 12 (left: 2 12)\n12 * 2 = 24 (left: 24)",
    ]
    wrong = [
        "(11 + 10 - 9) * 2 = 25",
        "9 + 11 + 2 + 2 = 24",
        "24",
        "11 + 10 + 9 + 2",
        "2 * 12 = 24",
        "",
    ]
    assert all(task.is_solved(problem, text) for text in right)
    assert not any(task.is_solved(problem, text) for text in wrong)
    with pytest.raises(InputError, match="form must be one of steps, expression"):
        task.load(TaskOptions(**options, extra={"form": "prose"}))


def test_fractions_count_in_the_game_of_24_alone(tmp_path: Path) -> None:
    text = "8 / 3 = 8/3 (left: 8/3 3 8)\n3 - 8/3 = 1/3 (left: 1/3 8)\n8 / 1/3 = 24 (left: 24)"
    (tmp_path / "24.csv").write_text("Rank,Puzzles\n1,3 3 8 8\n")
    (problem,) = load(Game24(), data=str(tmp_path), split="all")
    assert Game24().is_solved(problem, text)
    file = write_jsonl(tmp_path / "d.jsonl", [puzzle([3, 3, 8, 8], 24)])
    (problem,) = load(Countdown(), data=str(file))
    assert not Countdown().is_solved(problem, text)


# What search asks


@pytest.mark.parametrize(
    ("text", "state", "done"),
    [
        ("", "4 6 6", False),
        ("4 * 6 = 24 (left: 6 24)\n", "6 24", False),
        ("6 * 4 = 24 (left: 24 6)\n", "6 24", False),
        ("4 * 6 = 24 (left: 6 24)", None, False),  # cut off, or the model has ended there
        ("4 * 6 = 24 (left: 6 24)\n\n", None, False),  # it has given up
        ("\n", None, False),
        ("4 * 6 = 25 (left: 6 25)\n", None, False),
        ("4 * 6 = 24 (left: 6 24)\n24 - 6 = 18 (left: 18)\n", "18", True),
        ("4 * 6 = 24 (left: 6 24)\n24 - 6 = 18 (left: 18)", "18", True),
        ("4 * 6 = 24 (left: 6 24)\n24 + 6 = 30 (left: 30)\n", "30", True),
    ],
)
def test_states_of_a_puzzle(text: str, state: str | None, done: bool) -> None:
    (problem,) = load(Countdown(), ids=["countdown-0"])
    assert Countdown().state(problem, text) == state
    assert Countdown().done(problem, text) is done


@pytest.mark.parametrize(
    ("text", "done", "answer"),
    [
        (" She has 3 boxes.", False, "3"),
        (" She has 3 boxes. The answer is 3.", False, "3"),  # may become 3.50
        (" She has 3 boxes. The answer is 3.50.\n", True, "3.5"),
        (" She has\n3 boxes.", False, "3"),
        (" She has 3 boxes.\n\n", True, "3"),
        (" The answer is 3.\n\nQ: How many are 7?", True, "3"),
        (" What", False, None),
    ],
)
def test_states_of_a_word_problem(text: str, done: bool, answer: str | None) -> None:
    task = GSM8K()
    data = task.load(TaskOptions(limit=1))
    (problem,) = data.problems
    assert task.done(problem, text) is done
    assert task.answer(problem, text) == answer
    assert task.state(problem, text) == text and task.state(problem, " \n") is None
    assert task.root(data, problem).endswith(f"Q: {problem.question}\nA:")
    assert task.is_solved(problem, f" It is 1.\nThe answer is {problem.answer}.\n\nQ: Next: 5?")
    assert not task.is_solved(problem, f" The answer is 0.\n\nQ: The answer is {problem.answer}.")


def test_tasks_without_steps_cannot_be_searched() -> None:
    for name in ("countdown", "game24", "gsm8k"):
        assert isinstance(get_search_task(name), SearchTask)
    assert not isinstance(get_task("mmlu"), SearchTask)
    with pytest.raises(
        InputError, match=r"'needle' cannot be searched, .*: countdown, game24, gsm8k"
    ):
        get_search_task("needle")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"propose": "list"}, "no way to propose 'list'; known: sample"),
        ({"evaluate": "judge"}, "no way to evaluate 'judge'; known: logprob, min-logprob"),
    ],
)
def test_unknown_proposers_and_evaluators_are_errors(choice: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_search_settings({"task": "gsm8k", "model": "m", **choice})


@pytest.mark.parametrize("member", ["propose", "evaluate"])
def test_a_task_must_define_its_proposers_and_evaluators(tmp_path: Path, member: str) -> None:
    (tmp_path / "own.py").write_text(
        "from dataclasses import replace\nfrom treegen.tasks.gsm8k import GSM8K\n"
        "class Own(GSM8K):\n"
        f"    search_defaults = replace(GSM8K.search_defaults, {member}=('own',))\n"
    )
    with pytest.raises(InputError, match=rf"names ways to {member} \(own\) .* no method"):
        get_search_task(f"{tmp_path}/own.py:Own")


def test_numbers_are_sorted_whatever_their_order() -> None:
    assert read_puzzle(puzzle([9, 0, 4], 0)) == ((0, 4, 9), 0)
