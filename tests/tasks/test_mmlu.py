"""MMLU: reading its files, its two published prompts, and its averages."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_cases import write_jsonl

from treegen.errors import DataError, InputError
from treegen.prompts.tree import prompts_of
from treegen.tasks import ReportOptions, SampleScore, Task, TaskData, TaskOptions
from treegen.tasks.mmlu.task import CATEGORY_OF, MMLU, MMLUGenerate

HEADER = ["question", "choice0", "choice1", "choice2", "choice3", "answer"]
SIZES = {
    "abstract_algebra": 100,
    "anatomy": 135,
    "college_physics": 102,
    "formal_logic": 126,
    "high_school_mathematics": 270,
    "international_law": 121,
    "machine_learning": 112,
    "philosophy": 311,
    "us_foreign_policy": 100,
    "world_religions": 171,
}


def rows_of(word: str, num: int, answers: str = "ABCD") -> list[list[str]]:
    return [
        [f"{word} {i}?", f"{i}", f"{i + 1}", f"{i + 2}", f"{i + 3}", answers[i % 4]]
        for i in range(num)
    ]


def write_csv(path: Path, rows: Sequence[Sequence[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def write_subject(
    folder: Path, subject: str, test: Sequence[Sequence[str]], dev: Sequence[Sequence[str]]
) -> None:
    write_csv(folder / "test" / f"{subject}_test.csv", test)
    write_csv(folder / "dev" / f"{subject}_dev.csv", dev)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two subjects with three and two questions."""
    write_subject(tmp_path, "anatomy", rows_of("Bone", 3), rows_of("Shown bone", 5))
    write_subject(tmp_path, "world_religions", rows_of("Rite", 2), rows_of("Shown rite", 5))
    return tmp_path


def load(folder: Path, task: Task | None = None, **options: Any) -> TaskData:
    return (task or MMLU()).load(TaskOptions(data=str(folder), **options))


def prompt_texts(task: Task, data: TaskData) -> dict[str, str]:
    return {
        prompt.id: "".join(str(node.content) for node in prompt.path)
        for prompt in prompts_of(task.tree(data, 1))
    }


def test_original_prompt_to_the_character(folder: Path) -> None:
    data = load(folder, num_fewshot=2)
    assert prompt_texts(MMLU(), data)["world_religions-1"] == (
        "The following are multiple choice questions (with answers) about  world religions.\n\n"
        "Shown rite 0?\nA. 0\nB. 1\nC. 2\nD. 3\nAnswer: A\n\n"
        "Shown rite 1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer: B\n\n"
        "Rite 1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:"
    )
    assert data.problems[0].choices == (" A", " B", " C", " D")


# The prompt of lm-eval's mmlu, from lm_eval/tasks/mmlu/default: its template and a description.
LM_EVAL_TEMPLATE = (
    "{{question.strip()}}\nA. {{choices[0]}}\nB. {{choices[1]}}\nC. {{choices[2]}}\n"
    "D. {{choices[3]}}\nAnswer:"
)
LM_EVAL_DESCRIPTION = (
    "The following are multiple choice questions (with answers) about world religions.\n\n"
)


def test_lm_eval_prompt_to_the_character(tmp_path: Path) -> None:
    """Rendered by jinja as lm-eval does, with space around questions and in choices."""
    jinja2 = pytest.importorskip("jinja2")
    rows = [[f" \n Rite {i}?\t \n", f" {i}", f"{i} ", "", "x\ny", "ABCD"[i % 4]] for i in range(7)]
    write_subject(tmp_path, "world_religions", rows[:2], rows[2:])
    template = jinja2.Environment(keep_trailing_newline=True).from_string(LM_EVAL_TEMPLATE)

    def text(row: list[str]) -> str:
        found: str = template.render(question=row[0], choices=row[1:5])
        return found

    shots = "".join(f"{text(row)} {row[5]}\n\n" for row in rows[2:])
    data = load(tmp_path, extra={"form": "lm-eval"})
    assert prompt_texts(MMLU(), data) != prompt_texts(MMLU(), load(tmp_path))
    task = MMLU()
    data = load(tmp_path, task, extra={"form": "lm-eval"})
    assert prompt_texts(task, data) == {
        f"world_religions-{i}": f"{LM_EVAL_DESCRIPTION}{shots}{text(rows[i])}" for i in range(2)
    }
    assert data.label == "lm-eval form" and load(tmp_path).label == "hendrycks form"
    with pytest.raises(InputError, match="form must be one of hendrycks, lm-eval"):
        load(tmp_path, extra={"form": "original"})
    with pytest.raises(InputError, match="no argument 'form'"):
        load(tmp_path, MMLUGenerate(), extra={"form": "lm-eval"})


def test_a_run_in_one_form_does_not_continue_in_the_other(folder: Path) -> None:
    """The texts of their problems and examples may be the same."""
    forms = [load(folder, extra={"form": form}) for form in ("hendrycks", "lm-eval")]
    assert forms[0].examples == load(folder).examples != forms[1].examples
    assert forms[0].fingerprint != forms[1].fingerprint


def test_relay_attention_prompt_to_the_character(folder: Path) -> None:
    task = MMLUGenerate()
    ask = (
        "There is a single choice question about world religions. Answer the question by "
        "replying A, B, C or D.\nQuestion: "
    )
    assert prompt_texts(task, load(folder, task, num_fewshot=1))["world_religions-0"] == (
        f"{ask}Shown rite 0?\nA. 0\nB. 1\nC. 2\nD. 3\nAnswer: \nA\n\n"
        f"{ask}Rite 0?\nA. 0\nB. 1\nC. 2\nD. 3\nAnswer: "
    )


def test_five_examples_of_a_subject_stand_above_all_its_questions(folder: Path) -> None:
    tree = MMLU().tree(load(folder), 1)
    assert len(tree.children) == 2
    above = {tuple(map(id, prompt.path[:-1])) for prompt in prompts_of(tree)}
    assert [len(path) for path in above] == [7, 7]  # root, header and five examples


def test_zero_shot_keeps_the_header_and_needs_no_dev(folder: Path) -> None:
    for path in (folder / "dev").iterdir():
        path.unlink()
    data = load(folder, num_fewshot=0)
    assert prompt_texts(MMLU(), data)["anatomy-0"].startswith("The following are")
    with pytest.raises(DataError, match=r"dev.csv does not exist"):
        load(folder)


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("answers", ["ABCD", "0123"])
def test_headers_and_indices(tmp_path: Path, header: bool, answers: str) -> None:
    rows = [HEADER] * header + rows_of("Bone", 4, answers)
    write_subject(tmp_path, "anatomy", rows, rows_of("Shown", 5))
    data = load(tmp_path)
    assert [(p.id, p.answer) for p in data.problems] == [
        ("anatomy-0", "A"),
        ("anatomy-1", "B"),
        ("anatomy-2", "C"),
        ("anatomy-3", "D"),
    ]


def test_cells_stay_as_they_are(tmp_path: Path) -> None:
    """Readers that guess types make NaN of None and 0.5 of 0.50."""
    row = [" Two\nlines,  \u2203x?", "None", "0.50", "N/A", "", "C"]
    write_subject(tmp_path, "anatomy", [row], [])
    path = tmp_path / "test" / "anatomy_test.csv"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    (problem,) = load(tmp_path, num_fewshot=0).problems
    assert problem.question == " Two\nlines,  \u2203x?\nA. None\nB. 0.50\nC. N/A\nD. "


def test_unusable_rows_are_reported_with_their_lines(tmp_path: Path) -> None:
    good = rows_of("Bone", 1)[0]
    rows = [good, [*good[:-1], "E"], [*good[:-1], "x", "A"], ["", *good[1:]], ["Q\nq", *good[1:]]]
    write_subject(tmp_path, "anatomy", [*rows, [*good[:-1], ""]], [])
    data = load(tmp_path, num_fewshot=0)
    assert [problem.id for problem in data.problems] == ["anatomy-0", "anatomy-4"]
    assert [(s.line, s.reason.split()[0]) for s in data.skipped] == [
        (2, "answer"),
        (3, "7"),
        (4, "question"),
        (7, "answer"),
    ]


def test_a_question_is_never_its_own_example(tmp_path: Path) -> None:
    shown = [" BONE  1?", *rows_of("Bone", 2)[1][1:]]
    write_subject(tmp_path, "anatomy", rows_of("Bone", 3), [shown])
    data = load(tmp_path, num_fewshot=1)
    assert [problem.id for problem in data.problems] == ["anatomy-0", "anatomy-2"]
    assert "one of the examples" in data.skipped[0].reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_fewshot": 6}, "num_fewshot is 6, but the dev split of anatomy has 5"),
        ({"fewshot_data": "train"}, "examples from the dev split"),
        ({"extra": {"subjects": "anatomi"}}, "did you mean 'anatomy'"),
        ({"extra": {"subject": "anatomy"}}, "no argument 'subject'; did you mean 'subjects'"),
        ({"extra": {"per_subject": "0"}}, "a positive integer"),
    ],
)
def test_requests_that_cannot_be_met(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(folder, **options)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "is not UTF-8"),
        (b"q,a,b,c,d,4\n", "got 1 to 4"),
        (b"", "no usable question"),
        (b'q,a,b,c,d,"' + b"A" * 200_000 + b'"\n', "line 1: field larger"),
    ],
)
def test_bad_files(folder: Path, content: bytes, message: str) -> None:
    (folder / "test" / "anatomy_test.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(folder, extra={"subjects": "anatomy"})


def test_missing_data(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="MMLU has no bundled problems"):
        MMLU().load(TaskOptions())
    with pytest.raises(DataError, match="the folder test/ was not found"):
        load(tmp_path)
    (tmp_path / "test").mkdir()
    with pytest.raises(DataError, match=r"with a name such as anatomy_test\.csv"):
        load(tmp_path)


def test_questions_are_chosen_by_subject_number_and_id(folder: Path) -> None:
    few = load(folder, extra={"subjects": "world_religions, anatomy", "per_subject": "1"})
    assert [problem.id for problem in few.problems] == ["anatomy-0", "world_religions-0"]
    one = load(folder, ids=["world_religions-1"])
    assert (len(one.problems), list(one.fewshot_of)) == (1, ["world_religions"])
    assert one.fingerprint != load(folder, ids=["world_religions-1"], num_fewshot=4).fingerprint


def test_only_choices_are_answers(folder: Path) -> None:
    task = MMLUGenerate()
    problem = load(folder, task).problems[1]
    verdicts = task.score(problem, "The answer is B")
    assert verdicts["letter"].correct
    assert verdicts["first-capital"].answer is None


def test_averages_over_questions_and_over_subjects(folder: Path) -> None:
    data = load(folder)
    right = {"anatomy-0", "world_religions-0", "world_religions-1"}
    scores = [
        SampleScore(
            p.id, 0, "stop", MMLU().score(p, f" {p.answer}" if p.id in right else " nothing")
        )
        for p in data.problems
    ]
    ids = [problem.id for problem in data.problems]
    report = MMLU().aggregate(scores[::-1], ReportOptions(problem_ids=ids, num_samples=1))
    assert report.value("acc", "none") == 3 / 5
    assert report.value("acc_macro", "none") == pytest.approx((1 / 3 + 1) / 2)
    micro, macro = report.metrics
    assert micro.stderr == pytest.approx((0.6 * 0.4 / 4) ** 0.5)
    assert macro.stderr == pytest.approx((2 / 9 / 2) ** 0.5 / 2)  # the other subject has none
    tables = {table.title: table.rows for table in report.tables}
    assert [row[:3] for row in tables["accuracy by subject"]] == [
        ("anatomy", 3, pytest.approx(1 / 3)),
        ("world_religions", 2, 1.0),
    ]
    assert [row[:2] for row in tables["accuracy by category"]] == [("humanities", 2), ("other", 3)]
    assert report.majority == ()
    json.dumps(report.to_json(), allow_nan=False)
    nothing = MMLU().aggregate([], ReportOptions(problem_ids=ids, num_samples=1))
    assert nothing.value("acc", "none") is None


def test_hub_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local folder of the hub's name and layout stands in for the download."""
    home = tmp_path / "cais" / "mmlu"
    home.mkdir(parents=True)
    for split, word, num in (("test", "Bone", 3), ("dev", "Shown", 5)):
        rows = [
            {"question": row[0], "subject": subject, "choices": row[1:5], "answer": i % 4}
            for subject in ("anatomy", "virology")
            for i, row in enumerate(rows_of(f"{word} {subject}", num))
        ]
        write_jsonl(home / f"{split}.jsonl", rows)
    (home / "README.md").write_text(
        "---\nconfigs:\n- config_name: all\n  data_files:\n"
        "  - {split: test, path: test.jsonl}\n  - {split: dev, path: dev.jsonl}\n---\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    data = MMLU().load(TaskOptions(data="hf", extra={"subjects": "virology"}))
    assert [(p.id, p.answer) for p in data.problems] == [
        ("virology-0", "A"),
        ("virology-1", "B"),
        ("virology-2", "C"),
    ]
    assert len(data.fewshot_of["virology"]) == 5
    with pytest.raises(InputError, match="has no split 'train'"):
        MMLU().load(TaskOptions(data="cais/mmlu", split="train"))


def test_all_57_subjects_have_a_category() -> None:
    assert len(CATEGORY_OF) == 57
    assert set(SIZES) <= set(CATEGORY_OF)


def test_every_real_question_loads(data_dir: Path) -> None:
    data = load(data_dir / "mmlu")
    assert data.skipped == ()
    counts = dict.fromkeys(SIZES, 0)
    for problem in data.problems:
        counts[problem.metadata["subject"]] += 1
        assert MMLU().score(problem, f" {problem.answer}")["none"].correct
    assert counts == SIZES


def test_a_real_prompt(data_dir: Path) -> None:
    text = prompt_texts(MMLU(), load(data_dir / "mmlu"))["anatomy-0"]
    assert text.startswith(
        "The following are multiple choice questions (with answers) about  anatomy.\n\n"
        "What is the embryological origin of the hyoid bone?\nA. The first pharyngeal arch\n"
    )
    assert text.count("\nAnswer: ") == 5
    assert text.endswith(
        "Answer: B\n\nA lesion causing compression of the facial nerve at the stylomastoid foramen "
        "will cause ipsilateral\nA. paralysis of the facial muscles.\n"
        "B. paralysis of the facial muscles and loss of taste.\n"
        "C. paralysis of the facial muscles, loss of taste and lacrimation.\n"
        "D. paralysis of the facial muscles, loss of taste, lacrimation and decreased salivation.\n"
        "Answer:"
    )
