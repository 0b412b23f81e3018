"""Tasks without treegen's help: a JSONL file with no code, a file with a class, a package."""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cli_cases import EXAMPLES, Command, samples_of, write_jsonl

from treegen.common.bounded.patterns import MAX_PATTERN, Pattern
from treegen.errors import DataError, InputError
from treegen.evals.arguments import read_arguments
from treegen.prompts.tree import prompts_of
from treegen.tasks import TaskData, TaskOptions, get_task, list_tasks
from treegen.tasks.jsonl import QuestionAnswer, parse_template

ROW = {"question": "What is 2 + 3?", "answer": 5}


def load(
    path: Path,
    rows: Iterable[Mapping[str, Any]],
    extra: Mapping[str, str] | None = None,
    **more: Any,
) -> tuple[QuestionAnswer, TaskData]:
    task = QuestionAnswer()
    data = str(write_jsonl(path / "data.jsonl", rows))
    return task, task.load(TaskOptions(data=data, extra=extra or {}, **more))


def correct(path: Path, answer: Any, text: str, **extra: str) -> bool:
    task, data = load(path, [{"question": "q", "answer": answer}], extra)
    return task.score(data.problems[0], text)["answer"].correct


@pytest.mark.parametrize(
    ("metric", "answer", "text", "want"),
    [
        ("exact", "Paris", " Paris\n", True),
        ("exact", "New  York", "New York", True),
        ("exact", "Paris", "paris", False),
        ("exact", "Paris", "It is Paris", False),
        ("exact", ["Paris", "Lutetia"], "Lutetia", True),
        ("exact", 5, "5", True),
        ("exact", 5, "5.0", False),
        ("exact", True, "true", True),
        ("exact", "x", "", False),
        ("numeric", 5, "so 2 + 3 = 5.", True),
        ("numeric", "1,440", "The answer is 1440.00", True),
        ("numeric", "It is 5. #### 18", "18", True),
        ("numeric", [7, "seven"], "7", True),
        ("numeric", "-4", "It is 4", False),
        ("numeric", "5", "\uff15", True),
        ("numeric", "3/4", "It is 0.75", True),
        ("numeric", "1/3", "The answer is 2/6.", True),
    ],
)
def test_metrics(tmp_path: Path, metric: str, answer: Any, text: str, want: bool) -> None:
    assert correct(tmp_path, answer, text, metric=metric) == want


@pytest.mark.parametrize(
    ("extra", "right", "text", "want"),
    [
        ({}, "Paris", " Paris", True),
        ({"answer": "text"}, "Paris", "It is Paris", False),
        ({"answer": "contains"}, "Paris", "It is Paris", True),
        ({"answer": "number"}, 5, "so it is 5.0", True),
        ({"answer": "regex", "pattern": "is (.+)"}, "Paris", "It is Paris", True),
        ({"answer": "choice"}, "(b)", "The answer is B.", True),
        ({"answer": "choice"}, "B", "The answer is E.", False),
        ({"answer": "choice", "choices": "5"}, "E", "The answer is E.", True),
    ],
)
def test_answer_types(
    tmp_path: Path, extra: dict[str, str], right: Any, text: str, want: bool
) -> None:
    task, data = load(tmp_path, [{"question": "q", "answer": right}], extra)
    assert task.score(data.problems[0], text)["answer"].correct == want


def test_answers_as_mathematics(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    task, data = load(tmp_path, [{"question": "q", "answer": [0.5, "\\pi"]}], {"answer": "math"})
    verdicts = [
        task.score(data.problems[0], text)["answer"] for text in ("$\\frac12$", "\\(\\pi\\)")
    ]
    assert [verdict.correct for verdict in verdicts] == [True, True]
    assert list(task.answer_types) == list(task.filters)


@pytest.mark.parametrize(
    ("pattern", "text", "want"),
    [
        (r"answer: (\w+)", "answer: Rome. answer: Paris", True),
        (r"answer: (\w+)", "answer: Paris. answer: Rome", False),
        (r"P\w+", "It is Paris!", True),
        (r"(x)?Paris", "Paris", False),  # the group, which is empty, is the answer
        (r"nothing", "Paris", False),
    ],
)
def test_patterns_give_the_group_of_the_last_match(
    tmp_path: Path, pattern: str, text: str, want: bool
) -> None:
    assert correct(tmp_path, "Paris", text, pattern=pattern) == want


def test_a_slow_pattern_gives_no_answer_and_the_next_text_is_read() -> None:
    pattern = Pattern(r"(a+)+b")
    assert pattern.last("a" * 5000 + "c") is None
    assert pattern.last("caab") == "aa"
    assert Pattern(".+").last("\ud800\u2028\0x") == "\ud800\u2028\0x"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(a", r"is not a regular expression: missing \)"),
        ("(a)(b)", "has 2 groups"),
        ("a" * (MAX_PATTERN + 1), "has 1,001 characters"),
    ],
)
def test_bad_patterns(pattern: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Pattern(pattern)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("metric", "answer", "text", "want"),
    [
        ("exact", "Paris", "paris", True),
        ("exact", "STRASSE", "stra\u00dfe", True),
        ("contains", "Paris", "It is paris, of course", True),
        ("contains", ["Rome", "New  York"], "in new\nyork!", True),
        ("contains", "Paris", "London", False),
        ("contains", "Paris", "", False),
        ("contains", "12", "So 12.", True),
        ("contains", "12", "112 or 12.5, 1,12 and 123", False),
        ("contains", "12", "112, then 12", True),
        ("contains", "F-16", "the F-16s", True),
        ("contains", "1998", "in 1998.", True),
    ],
)
def test_case_does_not_count_if_it_is_ignored(
    tmp_path: Path, metric: str, answer: Any, text: str, want: bool
) -> None:
    assert correct(tmp_path, answer, text, metric=metric, ignore_case="yes") == want
    # Digits have no case.
    is_same = (want and not any(map(str.isalpha, str(answer)))) or answer == "F-16"
    assert correct(tmp_path, answer, text, metric=metric) == is_same


def test_votes_count_contained_answers(tmp_path: Path) -> None:
    task, data = load(tmp_path, [{"question": "q", "answer": "Paris"}], {"metric": "contains"})
    verdicts = [
        task.score(data.problems[0], text)["answer"]
        for text in ("It is Paris", "Paris, I think", "It is Rome")
    ]
    assert [verdict.answer for verdict in verdicts] == ["Paris", "Paris", "It is Rome"]


def test_rows_with_choices_are_refused(tmp_path: Path) -> None:
    row = {"question": "Which?", "choices": ["a", "b"], "answer": "a"}
    with pytest.raises(DataError, match=r"line 2 has choices, but jsonl does not score choices"):
        load(tmp_path, [ROW, row])
    load(tmp_path, [{**row, "choices": "A. a, B. b"}], {"template": "{question} {choices}"})


def test_default_prompt_and_ids(tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "id": "mine"}, {**ROW, "id": 7}]
    _, data = load(tmp_path, rows)
    assert [problem.id for problem in data.problems] == ["line-1", "mine", "7"]
    assert data.problems[0].question == "Q: What is 2 + 3?\nA:"


def test_template_of_other_fields(tmp_path: Path) -> None:
    rows = [{"a": "x", "n": 1.5, "gold": "y", "key": "k"}]
    extra = {"template": r"{{{a}}}\t{n} ->", "answer_field": "gold", "id_field": "key"}
    _, data = load(tmp_path, rows, extra)
    assert (data.problems[0].id, data.problems[0].question) == ("k", "{x}\t1.5 ->")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("Q: {question", "'}' before end"),
        ("Q: question}", "single '}'"),
        ("Q: {", "single '{'"),
        ("Q: {}", "must contain only a field name"),
        ("Q: {question.x}", "must contain only a field name"),
        ("Q: {question[0]}", "must contain only a field name"),
        ("Q: {question!r}", "must contain only a field name"),
        ("Q: {question:>10}", "must contain only a field name"),
        ("Q:", "contains no field"),
        ("Q: {qestion}", "has a field 'qestion'; did you mean 'question'"),
    ],
)
def test_bad_templates_are_one_line(tmp_path: Path, template: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(tmp_path, [ROW], {"template": template})
    assert "\n" not in str(caught.value)


def test_the_first_error_of_other_data_names_the_cure(tmp_path: Path) -> None:
    row = {"problem": "1 + 1?", "gold": "2"}
    cure = "the rows have gold, problem; set the fields with"
    template = r"-T template='Q: \{problem\}\\nA:'"
    answer = "-T answer_field=gold"
    with pytest.raises(DataError, match=f"has a field 'question'; {cure} {template} {answer}$"):
        load(tmp_path, [row], {})
    with pytest.raises(DataError, match=f"has a field 'answer'; {cure} {answer}$"):
        load(tmp_path, [row], {"template": "{problem}"})
    with pytest.raises(DataError, match=f"has a field 'question'; {cure} {template}$"):
        load(tmp_path, [row], {"answer_field": "gold"})
    with pytest.raises(DataError, match=r"has a field 'question'; the rows have gold, problem$"):
        load(tmp_path, [row], {"template": "{question}", "answer_field": "gold"})
    _, data = load(tmp_path, [row], {"template": "{problem}", "answer_field": "gold"})
    assert data.problems[0].question == "1 + 1?"


def test_a_table_without_rows_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "questions.csv"
    path.write_text("question,answer\n")
    with pytest.raises(DataError, match="has no rows; write a question and its answer"):
        get_task("jsonl").load(TaskOptions(data=str(path)))


def test_values_are_put_in_as_they_are() -> None:
    assert parse_template("{a}{b}").fill({"a": "{b} {0!r}", "b": "%s"}) == "{b} {0!r}%s"


def test_rows_that_cannot_be_used_are_reported(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        ROW,
        {"question": "q"},
        {"answer": 1},
        {"question": ["q"], "answer": 1},
        {"question": "q", "answer": "many"},
        {"question": "q", "answer": []},
        {**ROW, "id": 1.5},
        {"question": "q", "answer": {"a": 1}},
    ]
    _, data = load(tmp_path, rows, {"metric": "numeric"})
    assert [problem.id for problem in data.problems] == ["line-1"]
    assert [skipped.line for skipped in data.skipped] == [2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(DataError, match=r"no usable problem.*line 1: answer 'x'"):
        load(tmp_path, [{"question": "q", "answer": "x"}], {"metric": "numeric"})
    with pytest.raises(DataError, match="lines 1 and 2 have the same id"):
        load(tmp_path, [{**ROW, "id": 1}, {**ROW, "id": "1"}])


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"metric": "numric"}, "did you mean 'numeric'"),
        ({"metric": "regex"}, "needs a pattern"),
        ({"answer": "numeric"}, "answer must be one of text, contains, number"),
        (
            {"answer": "math", "ignore_case": "yes"},
            "answer=math cannot be used together with ignore_case",
        ),
        ({"answer": "math", "choices": "5"}, "answer=math cannot be used together with choices"),
        ({"answer": "choice", "choices": "27"}, "must be from 2 to 26, got 27"),
        ({"answer": "math", "metric": "exact"}, "answer and metric cannot be used together"),
        ({"metric": "exact", "pattern": "x"}, "does not use a pattern"),
        ({"metric": "numeric", "ignore_case": "yes"}, "cannot be used together with ignore_case"),
        ({"ignore_case": "true"}, "must be one of yes, no"),
        ({"metrics": "exact"}, "no argument 'metrics'; did you mean 'metric'"),
    ],
)
def test_arguments_that_mean_nothing(tmp_path: Path, extra: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(tmp_path, [ROW], extra)


def test_arguments_are_read_from_pairs() -> None:
    assert read_arguments(["a-b=x=y,z", "c="]) == {"a_b": "x=y,z", "c": ""}
    for texts in (["a"], ["=x"], ["a=1", "a=2"]):
        with pytest.raises(InputError, match="task argument"):
            read_arguments(texts)


def test_examples_stand_before_every_problem(tmp_path: Path) -> None:
    rows = [{"question": "1 + 1?", "answer": 2, "target": "One and one. 2"}]
    shots = write_jsonl(tmp_path / "shots.jsonl", [*rows, {**ROW, "question": "5?"}])
    task, data = load(tmp_path, [ROW], fewshot_file=str(shots))
    (prompt,) = prompts_of(task.tree(data, 3))
    assert "".join(str(node.content) for node in prompt.path) == (
        "Q: 1 + 1?\nA: One and one. 2\n\nQ: 5?\nA: 5\n\nQ: What is 2 + 3?\nA:"
    )
    assert (data.num_fewshot, prompt.samples) == (2, 3)
    with pytest.raises(InputError, match="num_fewshot is 3, but"):
        load(tmp_path, [ROW], fewshot_file=str(shots), num_fewshot=3)
    with pytest.raises(InputError, match="needs examples; pass fewshot_file or fewshot_data"):
        load(tmp_path, [ROW], num_fewshot=3)
    write_jsonl(shots, [{**ROW, "question": "what is  2 + 3?"}])
    with pytest.raises(DataError, match=r"example 1 in .* is also problem 'line-1' of this run"):
        load(tmp_path, [ROW], fewshot_file=str(shots))


@pytest.mark.parametrize("field", ["image_field", "messages_field"])
@pytest.mark.parametrize("option", ["fewshot_file", "fewshot_data"])
def test_examples_cannot_stand_before_images_or_messages(
    tmp_path: Path, field: str, option: str
) -> None:
    shots = str(write_jsonl(tmp_path / "shots.jsonl", [ROW]))
    with pytest.raises(InputError, match=f"{option} cannot be used together with {field}"):
        load(tmp_path, [ROW], {field: "chat"}, **{option: shots})
    rows = [{"messages": [{"role": "user", "content": "2 + 3?"}], "answer": "5"}]
    _, data = load(tmp_path, rows, {"messages_field": "messages"}, **{option: shots}, num_fewshot=0)
    assert len(data.problems) == 1 and not data.fewshot


def test_examples_are_drawn_by_seed_and_never_a_problem(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [ROW, *({**ROW, "question": f"{i}?"} for i in range(9))])
    drawn = [
        load(tmp_path, [ROW], fewshot_data="train", num_fewshot=4, seed=seed)[1].fewshot
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all("2 + 3" not in text for text in drawn)


def test_questions_from_the_command_line(treegen: Command, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    args = ["eval", "jsonl", "--data", EXAMPLES / "questions.jsonl", "-M", tiny]
    args += ["--max-tokens", "6", "-q"]
    done = treegen(*args, "-o", out, "-T", r"template={question}\n", "-T", "metric=numeric")
    assert done.code == 0
    assert [record["problem_id"] for record in samples_of(out)] == [
        "debt",
        "dozen",
        "half",
        "minutes",
        "product",
        "weeks",
    ]
    again = treegen("score", out, "-q", "-T", "metric=regex", "-T", r"pattern=\d").document
    assert again["runs"][0]["report"]["metrics"][0]["metric"] == "exact_match"
    error = treegen("eval", "--resume", out, "-T", "template={question}").error
    assert "--data" in error
    assert "given twice" in treegen(*args, "-T", "metric=exact", "-T", "metric=numeric").error


def test_own_task_in_a_file(treegen: Command, tiny: Path, tmp_path: Path) -> None:
    task = f"{EXAMPLES / 'own_task.py'}:Sums"
    args = ["-M", tiny, "-o", tmp_path / "run", "-T", "digits=1", "--limit", "5", "-q"]
    report = treegen("eval", task, *args).document["runs"][0]["report"]
    assert (report["metrics"][0]["task"], report["num_samples"]) == ("sums", 20)
    error = treegen("eval", task, "-M", tiny, "-T", "digit=1").error
    assert "no argument 'digit'; did you mean 'digits'" in error


def test_own_task_in_a_package(
    treegen: Command,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in (EXAMPLES / "own_task_package").iterdir():
        if path.is_file():
            (source / path.name).write_bytes(path.read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    offline = [
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        str(tmp_path / "site"),
    ]
    subprocess.run([*pip, *offline, str(source)], check=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert ("capitals", "treegen-capitals") in [(info.name, info.source) for info in list_tasks()]
    assert get_task("capitals").defaults.num_samples == 1
    assert "\n  capitals " in treegen("tasks").out
    out = tmp_path / "run"
    assert treegen("eval", "capitals", "-M", tiny, "-o", out, "-q").code == 0
    records = samples_of(out)
    assert len(records) == 6
    assert all(len(record["choice_logprobs"]) == 4 for record in records)
    assert json.loads((out / "run.json").read_text())["planned"] == 6
