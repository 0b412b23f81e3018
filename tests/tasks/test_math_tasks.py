"""AIME, MATH, MATH-500 and GPQA: their data, prompts, examples and tables."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_cases import write_jsonl

from treegen.errors import DataError, InputError
from treegen.evals.task import TaskOptions
from treegen.evals.verdict import SampleScore, Verdict
from treegen.prompts.tree import prompts_of
from treegen.tasks import ReportOptions, Task, TaskData, get_task
from treegen.tasks.common import sources
from treegen.tasks.gpqa import GPQA
from treegen.tasks.math.competitions import AIME
from treegen.tasks.math.task import Math, Math500, equivalent, extract_boxed, minerva_answer

AIME_ROW = {"ID": "2024-I-1", "Problem": "How many?", "Solution": "Many.", "Answer": 33}
MATH_ROW = {
    "problem": "What is $1+1$?",
    "level": "Level 1",
    "type": "Prealgebra",
    "solution": "It is $\\boxed{2}$.",
}
MATH_500_ROW = {
    "problem": "Why?",
    "solution": "So.",
    "answer": "\\frac{1}{2}",
    "level": 3,
    "subject": "Algebra",
    "unique_id": "test/algebra/7.json",
}
GPQA_ROW = {
    "Record ID": "rec1",
    "Question": "Which {x}?",
    "Correct Answer": "this\n",
    "Incorrect Answer 1": "that",
    "Incorrect Answer 2": "those",
    "Incorrect Answer 3": "these",
    "High-level domain": "Physics",
}


def load(task: Task, data: Any, extra: Mapping[str, str] | None = None, **more: Any) -> TaskData:
    return task.load(
        TaskOptions(data=None if data is None else str(data), extra=extra or {}, **more)
    )


def prompt(task: Task, data: TaskData, number: int = 0) -> str:
    return "".join(str(node.content) for node in prompts_of(task.tree(data, 1))[number].path)


@pytest.mark.parametrize(
    ("name", "num"), [("aime", 10), ("math", 17), ("math500", 17), ("gpqa", 10), ("hmmt", 6)]
)
def test_bundled_problems_run_without_files_and_say_what_they_are(name: str, num: int) -> None:
    task = get_task(name)
    data = load(task, None)
    assert (len(data.problems), data.skipped, data.label) == (num, (), "bundled problems")
    assert "comes with treegen" in data.notes[0]
    assert len(prompts_of(task.tree(data, 3))) == num
    with pytest.raises(DataError, match="no split 'train'"):
        load(task, None, split="train")


def test_bundled_solutions_box_their_answers() -> None:
    for problem in load(Math500(), None).problems:
        found = extract_boxed(problem.metadata["solution"])
        assert found is not None and equivalent(found, problem.answer)
    assert {p.metadata["level"] for p in load(Math500(), None).problems} == {1, 2, 3, 4, 5}


# AIME


@pytest.mark.parametrize(
    ("row", "want"),
    [
        (AIME_ROW, ("2024-I-1", "How many?", "33", "2024")),
        ({"problem": "p", "answer": "073", "id": "7"}, ("aime-7", "p", "73", None)),
        ({"question": "p", "answer": "336^\\circ"}, ("aime-0", "p", "336", None)),
        (
            {"id": 60, "problem": "p", "answer": "0", "year": "2024"},
            ("aime-2024-60", "p", "0", "2024"),
        ),
        (
            {"id": 1, "problem": "p", "answer": 5, "url": "https://x.org/2025_AIME_I"},
            ("aime-2025-1", "p", "5", "2025"),
        ),
    ],
)
def test_aime_rows(tmp_path: Path, row: dict[str, Any], want: tuple[Any, ...]) -> None:
    (problem,) = load(AIME(), write_jsonl(tmp_path / "a.jsonl", [row])).problems
    assert (problem.id, problem.question, problem.answer, problem.metadata["year"]) == want


def test_unusable_aime_rows_are_skipped_with_their_lines(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        AIME_ROW,
        {"answer": 3},
        {"problem": "p"},
        {"problem": "p", "answer": "1000"},
    ]
    data = load(AIME(), write_jsonl(tmp_path / "a.jsonl", rows))
    assert len(data.problems) == 1
    assert [str(row).partition("a.jsonl, ")[2] for row in data.skipped] == [
        "line 2: no problem or question; the row has answer",
        "line 3: no answer; the row has problem",
        "line 4: answer '1000' is not an integer from 0 to 999",
    ]


def test_aime_years(tmp_path: Path) -> None:
    rows = [AIME_ROW, {**AIME_ROW, "ID": "2025-I-1"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert [p.id for p in load(AIME(), path, {"year": "2025"}).problems] == ["2025-I-1"]
    assert len(load(AIME(), path, {"year": "2024,2025"}).problems) == 2
    with pytest.raises(
        InputError, match=r"no problem from 2023; the data set has only problems from 2024, 2025"
    ):
        load(AIME(), path, {"year": "2023"})
    with pytest.raises(InputError, match="does not name the year of its rows"):
        load(AIME(), None, {"year": "2024"})
    with pytest.raises(InputError, match="one of 2024, 2025, 2026 for hf, got '2023'"):
        load(AIME(), "hf", {"year": "2023"})


def test_aime_tables_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []

    def table(dataset: str, split: str, **more: Any) -> list[dict[str, Any]]:
        loads.append((dataset, split, more.get("name")))
        return [{"id": number, "problem": "p", "answer": number} for number in range(2)]

    monkeypatch.setattr(sources, "load_table", table)
    data = load(AIME(), "hf")
    assert [p.id for p in data.problems] == [
        f"aime-{y}-{n}" for y in (2024, 2025, 2026) for n in (0, 1)
    ]
    assert data.label == "" and data.source == (
        "HuggingFaceH4/aime_2024 and math-ai/aime25 and MathArena/aime_2026"
    )
    load(AIME(), "hf", {"year": "2025"})
    load(AIME(), "Maxwell-Jia/AIME_2024")
    assert loads == [
        ("HuggingFaceH4/aime_2024", "train", None),
        ("math-ai/aime25", "test", None),
        ("MathArena/aime_2026", "train", None),
        ("math-ai/aime25", "test", None),
        ("Maxwell-Jia/AIME_2024", "train", None),
    ]


def test_aime_is_sampled_as_reasoning_models_are() -> None:
    task = AIME()
    sampling = task.defaults.sampling
    assert (task.defaults.num_samples, sampling.temperature, sampling.top_p) == (64, 0.6, 0.95)
    assert sampling.max_tokens == 32_768
    data = load(task, None)
    instruction = "Please reason step by step, and put your final answer within \\boxed{}."
    assert prompt(task, data) == f"{data.problems[0].question}\n{instruction}"
    with pytest.raises(InputError, match="aime does not support few-shot examples"):
        load(task, None, num_fewshot=3)


# MATH and MATH-500


def test_math_reads_the_authors_folders(tmp_path: Path) -> None:
    for place in ("algebra/10", "algebra/2", "geometry/1"):
        path = tmp_path / "test" / f"{place}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(MATH_ROW), encoding="utf-8")
    data = load(Math(), tmp_path)
    ids = ["test/algebra/2.json", "test/algebra/10.json", "test/geometry/1.json"]
    assert [problem.id for problem in data.problems] == ids
    assert data.problems[0].answer == "2"
    assert data.problems[0].metadata["level"] == 1
    assert data.problems[0].metadata["subject"] == "Prealgebra"
    row = {**MATH_ROW, "problem": ""}
    (tmp_path / "test/algebra/10.json").write_text(json.dumps(row), encoding="utf-8")
    (skipped,) = load(Math(), tmp_path).skipped
    assert str(skipped) == f"{tmp_path}/test/algebra/10.json, line 1: problem is empty"
    (tmp_path / "test/algebra/2.json").write_text("[]", encoding="utf-8")
    with pytest.raises(DataError, match=r"2\.json is not a JSON object"):
        load(Math(), tmp_path)


def test_math_of_the_hub_is_all_subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []

    def table(dataset: str, split: str, **more: Any) -> list[dict[str, Any]]:
        loads.append((dataset, split, more["name"]))
        return [MATH_ROW]

    monkeypatch.setattr(sources, "load_table", table)
    data = load(Math(), "hf")
    assert [problem.id for problem in data.problems] == [f"math-{n}" for n in range(7)]
    assert loads[0] == ("EleutherAI/hendrycks_math", "test", "algebra") and len(loads) == 7
    shots = load(Math(), "hf", fewshot_data="train", num_fewshot=0)
    assert shots.num_fewshot == 0 and data.source == "EleutherAI/hendrycks_math test"


def test_math_500_rows_of_all_kinds_of_files(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([MATH_500_ROW]), tmp_path / "test.parquet")
    with (tmp_path / "a.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(MATH_500_ROW))
        writer.writeheader()
        writer.writerow(MATH_500_ROW)
    jsonl = write_jsonl(tmp_path / "a.jsonl", [MATH_500_ROW, {"problem": "p", "solution": "No."}])
    for path in (tmp_path, tmp_path / "test.parquet", tmp_path / "a.csv", jsonl):
        data = load(Math500(), path)
        assert [p.content for p in data.problems] == [
            ["test/algebra/7.json", "Why?", "\\frac{1}{2}"]
        ]
        assert data.problems[0].metadata["level"] == 3
    reason = "line 2: the row has no answer, and its solution has no boxed answer"
    assert reason in str(data.skipped[0])


def test_math_has_minervas_prompt() -> None:
    task = Math()
    data = load(task, None)
    text = prompt(task, data)
    assert data.num_fewshot == 4 and text.startswith("Problem:\nFind the sum")
    shots = text.split("Problem:\n")[1:]
    assert shots[-1] == f"{data.problems[0].question}\n\nSolution:"
    for shot in shots[:-1]:
        question, solution = shot.split("\n\nSolution: ")
        found = minerva_answer(solution.strip())
        assert found is not None and found == f"${extract_boxed(solution)}$"
        assert question and solution.endswith("I hope it is correct.\n\n")


def test_math_examples_from_files_are_never_problems(tmp_path: Path) -> None:
    rows = [{**MATH_ROW, "problem": f"What is {n}?"} for n in range(8)]
    path = write_jsonl(tmp_path / "test.jsonl", rows[:2])
    shots = str(write_jsonl(tmp_path / "train.jsonl", rows))
    drawn = [
        load(Math(), path, fewshot_data=given, num_fewshot=3, seed=seed).turns
        for given, seed in ((shots, 0), ("train", 0), (shots, 1))
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert load(Math(), path).label == "bundled examples"
    assert load(Math(), path, fewshot_data=shots).label == ""
    assert not {"Problem:\nWhat is 0?\n\nSolution:"} & {question for question, _ in drawn[0]}
    assert drawn[0][0][1].endswith("Final Answer: The final answer is $2$. I hope it is correct.")
    with pytest.raises(DataError, match=r"example 1 in .* is also problem 'math-0' of this run"):
        load(Math(), path, fewshot_file=shots, num_fewshot=3)
    with pytest.raises(InputError, match=r"num_fewshot is 9, but .* has 8 examples"):
        load(Math(), path, fewshot_file=shots, num_fewshot=9)


def test_accuracy_has_tables_by_subject_and_level() -> None:
    task = Math500()
    data = load(task, None, limit=4)
    scores = [
        SampleScore(p.id, 0, "stop", {f: Verdict("1", n < 2) for f in task.filters})
        for n, p in enumerate(data.problems)
    ]
    ids = [problem.id for problem in data.problems]
    options = ReportOptions(problem_ids=ids, num_samples=1, problems=data.problems)
    subjects, levels = task.aggregate(scores, options).tables
    assert [row[:3] for row in subjects.rows] == [("Algebra", 3, 2 / 3), ("Prealgebra", 1, 0.0)]
    assert [row[:3] for row in levels.rows] == [("1", 2, 0.5), ("2", 1, 1.0), ("4", 1, 0.0)]


# GPQA


def write_gpqa(path: Path, num: int) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(GPQA_ROW))
        writer.writeheader()
        for number in range(num):
            question = f"Which {{x}} is {number}?\n"
            writer.writerow({**GPQA_ROW, "Record ID": f"r{number}", "Question": question})
    return path


def test_gpqa_has_the_prompt_of_simple_evals(tmp_path: Path) -> None:
    task = GPQA()
    data = load(task, write_gpqa(tmp_path / "a.csv", 1), {"shuffle": "simple-evals"})
    # random.Random(0).sample(range(4), 4) is [3, 1, 0, 2].
    assert prompt(task, data) == (
        "Answer the following multiple choice question. The last line of your response should be "
        "of the following format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. "
        "Think step by step before answering.\n\nWhich {x} is 0?\n\n\nA) these\nB) that\nC) this\n"
        "\nD) those"
    )
    assert (data.problems[0].id, data.problems[0].answer) == ("r0", "C")
    assert data.problems[0].metadata["domain"] == "Physics"


def test_gpqa_choices_follow_from_the_seed_and_the_texts(tmp_path: Path) -> None:
    path = write_gpqa(tmp_path / "a.csv", 40)
    answers = [p.answer for p in load(GPQA(), path).problems]
    assert {letter: answers.count(letter) > 4 for letter in "ABCD"} == dict.fromkeys("ABCD", True)
    assert [p.answer for p in load(GPQA(), path, seed=1).problems] != answers
    assert [p.answer for p in load(GPQA(), path, limit="31-40").problems] == answers[30:]
    published = [p.answer for p in load(GPQA(), path, {"shuffle": "simple-evals"}).problems]
    shown = load(GPQA(), path, {"shuffle": "simple-evals"}, limit="31-40").problems
    assert [p.answer for p in shown] == published[30:]


def test_gpqa_subsets_are_files_of_a_folder(tmp_path: Path) -> None:
    write_gpqa(tmp_path / "gpqa_diamond.csv", 2)
    write_gpqa(tmp_path / "gpqa_main.csv", 3)
    assert len(load(GPQA(), tmp_path).problems) == 2
    assert len(load(GPQA(), tmp_path, {"subset": "main"}).problems) == 3
    with pytest.raises(InputError, match="has no subsets; remove the subset, or use hf"):
        load(GPQA(), tmp_path / "gpqa_main.csv", {"subset": "main"})
    with pytest.raises(DataError, match=r"no usable problem; .*line 1: no Question; the row has q"):
        load(GPQA(), write_jsonl(tmp_path / "b.jsonl", [{"q": "?"}]))


def test_gpqa_filters() -> None:
    (problem, *_) = load(GPQA(), None).problems
    wrong = "A" if problem.answer != "A" else "B"
    for text, want in [
        (f"Answer: {problem.answer}", (True, True)),
        (f"Answer: {problem.answer.lower()}", (False, False)),
        (f"Answer: {wrong}. No, answer: {problem.answer}", (False, True)),
        (f"The answer is {problem.answer}.", (False, True)),
        ("I pass.", (False, False)),
    ]:
        verdicts = GPQA().score(problem, text)
        assert tuple(verdicts[f].correct for f in GPQA.filters) == want, text


def test_later_competitions_are_files(tmp_path: Path) -> None:
    file = tmp_path / "aime_2026.jsonl"
    row = {"year": 2026, "problem_idx": 1, "problem": "What is 1 + 1?", "answer": "2"}
    file.write_text(json.dumps(row))
    data = get_task("aime").load(TaskOptions(data=str(file), extra={"year": "2026"}))
    assert [problem.id for problem in data.problems] == ["aime-2026-1"]


# HMMT


def test_hmmt_reads_answers_as_mathematics(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "problem_idx": 7,
            "problem": "Compute.",
            "answer": "\\frac{1}{576}",
            "problem_type": ["Number Theory", "Algebra"],
        },
        {"question": "Again.", "answer": "8\\sqrt{10}"},
        {"problem": "No answer."},
    ]
    task = get_task("hmmt")
    data = load(task, write_jsonl(tmp_path / "rows.jsonl", rows))
    assert [p.id for p in data.problems] == ["hmmt-7", "hmmt-1"] and len(data.skipped) == 1
    assert [p.metadata["subject"] for p in data.problems] == ["Number Theory", None]
    assert prompt(task, data) == (
        "Compute.\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    for problem, right in zip(
        data.problems, ("\\boxed{1/576}", "\\boxed{\\sqrt{640}}"), strict=True
    ):
        found = task.score(problem, f"So it is ${right}$.")
        assert found["math-verify"].correct
        assert not task.score(problem, "So it is $\\boxed{577}$.")["math-verify"].correct
    with pytest.raises(InputError, match="-T contest must be one of feb_2025"):
        load(task, tmp_path / "rows.jsonl", {"contest": "feb_2025"})
    with pytest.raises(InputError, match="-T contest must be one of"):
        load(task, "hf", {"contest": "feb_1999"})


def test_hmmt_of_the_hub_has_its_contests(monkeypatch: pytest.MonkeyPatch) -> None:
    def table(name: str, split: str, **how: Any) -> list[dict[str, Any]]:
        assert split == "train"
        return [{"problem_idx": 1, "problem": f"Of {name}.", "answer": 3}]

    monkeypatch.setattr(sources, "load_table", table)
    data = load(get_task("hmmt"), "hf")
    assert [p.id for p in data.problems] == [
        "hmmt-feb_2025-1",
        "hmmt-nov_2025-1",
        "hmmt-feb_2026-1",
    ]
    assert data.source == (
        "MathArena/hmmt_feb_2025 and MathArena/hmmt_nov_2025 and MathArena/hmmt_feb_2026"
    )
    chosen = load(get_task("hmmt"), "hf", {"contest": "nov_2025"})
    assert [p.question for p in chosen.problems] == ["Of MathArena/hmmt_nov_2025."]
    recent = load(AIME(), "hf", {"year": "2026"})
    assert [(p.id, p.answer) for p in recent.problems] == [("aime-2026-1", "3")]
