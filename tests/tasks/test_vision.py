"""MMMU, MMMU-Pro, ChartQA and DocVQA: their data in every form, prompts, and published scores."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_cases import write_jsonl
from tiny_images import picture, save_tiny_vision_model

from treegen.errors import DataError, InputError
from treegen.evals.problem import Problem
from treegen.evals.statistics.metrics import ReportOptions
from treegen.evals.verdict import SampleScore, Verdict
from treegen.prompts.tree import prompts_of
from treegen.tasks import TaskOptions, get_task
from treegen.tasks.common.text_task import interleave_images
from treegen.tasks.vision.documents import anls, is_relaxed_match
from treegen.tasks.vision.mmmu import guess, mmmu_letter, mmmu_pro_letter, readings

NAMES = ("mmmu", "mmmu-pro", "chartqa", "docvqa")
WORDS = (
    "the",
    "answer",
    "is",
    "A",
    "B",
    "C",
    "D",
    "(A)",
    "(B)",
    "(C)",
    "A.",
    "C ",
    "Answer:",
    "Answer: B",
    "FDA",
    "\n",
    "so",
    "thus",
    "=",
    "1,234",
    "1.5e3",
    "12",
    "-3.25",
    ".5",
    "1.25e5",
    "12e5x",
    "1,23",
    "50%",
    "$5",
    "nan",
    "inf",
    "1_000",
    "٣",
    "²",
    "ß",
    "İ",
    "red",
    "Blue",
    "blue car",
    "5",
    "5.00",
    "5.",
    "therefore",
    "could be",
    "final",
    ":",
    ",",
    ".",
    "'",
    "",
    "  ",
    "-",
    "--5",
    "1-2",
    "a",
    "1,2345",
)
OPTIONS = ("red", "Blue", "blue car", "5", "1,234", "", "the answer is", "A", "İx", "ß", "(C)")


def parts_of(task: Any, data: Any) -> list[Any]:
    """The content of each prompt's message; images are told by their names."""
    found = []
    for prompt in prompts_of(task.tree(data, 1)):
        content: Any = prompt.node.content
        (message,) = content
        found.append([part.get("text", part.get("name")) for part in message["content"]])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_bundled_questions(name: str) -> None:
    task = get_task(name)
    data = task.load(TaskOptions())
    assert len(data.problems) >= 4 and not data.skipped and data.label == "bundled problems"
    scores = []
    for problem in data.problems:
        assert problem.images and min(problem.images[0].size) > 50
        answer = json.loads(problem.answer)
        right = answer["answer"] if isinstance(answer, dict) else answer
        text = right if isinstance(right, str) else right[0]
        verdicts = task.score(problem, text)
        assert set(verdicts) == set(task.filters)
        assert all(verdict.correct for verdict in verdicts.values()), problem.id
        assert not any(verdict.correct for verdict in task.score(problem, "?? ? x").values()) or (
            "options" in answer
        )
        scores.append(SampleScore(problem.id, 0, "stop", verdicts))
    ids = [problem.id for problem in data.problems]
    options = ReportOptions(problem_ids=ids, num_samples=1, problems=data.problems)
    report = task.aggregate(scores, options)
    assert report.metrics[0].value == 1.0
    assert report.metrics[0].metric == ("anls" if name == "docvqa" else "exact_match")
    assert bool(report.tables) == (name != "docvqa")


def test_mmmu_from_files_and_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local folder of the hub's name and layout stands in for the download."""
    datasets = pytest.importorskip("datasets")
    for number in (1, 2):
        picture(number).save(tmp_path / f"{number}.png")
    images = [(tmp_path / f"{number}.png").read_bytes() for number in (1, 2)]
    common = {
        "id": "validation_Art_1",
        "question": "Is <image 2> like <image 1>?",
        "answer": "B",
        "question_type": "multiple-choice",
    }
    free = {
        **common,
        "id": "validation_Math_7",
        "question": "How many?",
        "question_type": "open",
        "answer": "['5', 'five']",
    }
    data_url = f"data:image/png;base64,{base64.b64encode(images[1]).decode()}"
    path = write_jsonl(
        tmp_path / "rows.jsonl",
        [
            {**common, "options": ["yes", "no"], "image_1": "1.png", "image_2": data_url},
            {**free, "options": [], "image_1": "2.png"},
            {**common, "id": "c", "options": ["yes", "no"], "image_1": "none.png"},
            {**common, "id": "d", "options": ["yes"], "image_1": "1.png"},
            {**common, "id": "e", "options": ["yes", "no"], "image_2": "1.png"},
            {**common, "id": "f", "options": ["yes", "no"], "image_1": "1.png", "answer": "C"},
            {**free, "id": "g", "options": [], "image_1": "1.png", "answer": "?"},
            {**common, "id": "h", "options": "[{[]: 1}]", "image_1": "1.png"},
        ],
    )
    task = get_task("mmmu")
    data = task.load(TaskOptions(data=str(path)))
    assert parts_of(task, data) == [
        [
            "Is ",
            "validation_Art_1-2",
            " like ",
            "1.png",
            "?\n(A) yes\n(B) no\n\n"
            "Answer with the option's letter from the given choices directly.",
        ],
        ["2.png", "How many?\nAnswer the question using a single word or phrase."],
    ]
    reasons = {row.line: row.reason for row in data.skipped}
    assert set(reasons) == {3, 4, 5, 6, 7, 8}
    assert "none.png" in reasons[3] and f"relative to {tmp_path}" in reasons[3]
    assert "options" in reasons[4] and "image_1 is missing" in reasons[5] and "letter" in reasons[6]
    assert "options" in reasons[8]
    verdict = task.score(data.problems[1], "There are five.")["mmmu"]
    assert verdict.correct and not task.score(data.problems[1], "55")["mmmu"].correct

    home = tmp_path / "hub" / "MMMU" / "MMMU"
    (home / "Art").mkdir(parents=True)
    features = datasets.Features(
        {name: datasets.Value("string") for name in (*common, "options")}
        | {name: datasets.Image() for name in ("image_1", "image_2")}
    )
    row: dict[str, Any] = {**common, "options": "['yes', 'no']"}
    row |= {f"image_{n}": {"bytes": each, "path": None} for n, each in enumerate(images, 1)}
    table = datasets.Dataset.from_list([row], features=features)
    parquet = home / "Art" / "validation-00000-of-00001.parquet"
    table.to_parquet(parquet)
    (home / "README.md").write_text(
        "---\nconfigs:\n- config_name: Art\n  data_files:\n"
        "  - {split: validation, path: Art/validation-*.parquet}\n---\n"
    )
    monkeypatch.chdir(tmp_path / "hub")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    from_hub = task.load(TaskOptions(data="hf", extra={"subjects": "Art"}))
    from_file = task.load(TaskOptions(data=str(parquet)))
    from_folder = task.load(TaskOptions(data=str(home / "Art")))
    first = data.problems[0]
    for found in (from_hub, from_file, from_folder):
        assert [problem.content for problem in found.problems] == [first.content]
    assert from_hub.problems[0].metadata["discipline"] == "Art and Design"
    with pytest.raises(InputError, match="did you mean"):
        task.load(TaskOptions(data="hf", extra={"subjects": "Arts"}))
    with pytest.raises(DataError):
        task.load(TaskOptions(data=str(tmp_path / "none.jsonl")))


def test_mmmu_pro_has_its_settings(tmp_path: Path) -> None:
    picture(1).save(tmp_path / "1.png")
    row = {
        "id": "a",
        "question": "What?",
        "options": ["x", "y"],
        "answer": "B",
        "image_1": "1.png",
        "image": "1.png",
        "subject": "Art",
    }
    path, task = write_jsonl(tmp_path / "rows.jsonl", [row]), get_task("mmmu-pro")

    def first_prompt(**extra: str) -> str:
        (parts,) = parts_of(task, task.load(TaskOptions(data=str(path), extra=extra)))
        assert parts[0] == "1.png"
        return str(parts[1])

    assert first_prompt().startswith(
        "What?\nA. x\nB. y\nAnswer the preceding multiple choice question. "
    )
    assert first_prompt(prompt="direct") == (
        "What?\nA. x\nB. y\nAnswer with the option letter from the given choices directly."
    )
    assert first_prompt(setting="vision").startswith("Write out the multiple-choice question")
    assert task.load(TaskOptions(data=str(path))).problems[0].metadata["subject"] == "Art"


def test_documents_in_the_forms_of_their_files(tmp_path: Path) -> None:
    (tmp_path / "png").mkdir()
    picture(1).save(tmp_path / "png" / "1.png")
    path = tmp_path / "test_human.json"
    rows: list[dict[str, Any]] = [{"imgname": "1.png", "query": "How many?", "label": "14"}]
    path.write_text(json.dumps(rows))
    chart = get_task("chartqa")
    (problem,) = chart.load(TaskOptions(data=str(path))).problems
    assert problem.images[0].name == "1.png"
    texts = {
        "14": (True, True),
        "14.7": (True, True),
        " 13.3\n": (True, True),
        "14.8": (False, False),
        "1400%": (True, True),
        "I see bars.\n**Answer**: 14.": (False, True),
        "": (False, False),
        "fourteen": (False, False),
        "answer: 3\nanswer: 14": (False, True),
    }
    for text, expected in texts.items():
        verdicts = chart.score(problem, text)
        assert (verdicts["relaxed"].correct, verdicts["final"].correct) == expected, text
    half = Problem("h", "?", '["0.5"]')
    for text in ("Answer: .5", "Answer: **.5**.", "answer: *.50*"):
        assert chart.score(half, text)["final"] == Verdict("0.5", correct=True), text
    rows += [{**rows[0], "type": ["human"]}, {**rows[0], "type": 1}]
    path.write_text(json.dumps(rows))
    data = chart.load(TaskOptions(data=str(path)))
    assert [problem.metadata["type"] for problem in data.problems] == ["", "augmented"]
    ((line, reason),) = [(row.line, row.reason) for row in data.skipped]
    assert line == 2 and "type" in reason
    document = {"questionId": 7, "question": "Date?", "answers": ["1/8/93"], "image": "png/1.png"}
    page = get_task("docvqa")
    data = page.load(TaskOptions(data=str(write_jsonl(tmp_path / "d.jsonl", [document]))))
    (problem,) = data.problems
    assert problem.id == "7"
    assert page.score(problem, "1/8/93")["anls"].credit == 1
    assert page.score(problem, "1/8/94")["anls"].credit == pytest.approx(5 / 6)
    assert not page.score(problem, "1/8/94")["anls"].correct
    assert page.score(problem, "in 1993")["anls"].credit == 0


def test_images_stand_where_a_text_names_them() -> None:
    data = get_task("mmmu").load(TaskOptions()).problems[1]
    one, two = data.images

    def shown(text: str) -> list[Any]:
        return [
            part.get("text", part.get("image")) for part in interleave_images(text, data.images)
        ]

    assert shown("no place") == [one.data, two.data, "no place"]
    assert shown("<image 2>") == [one.data, two.data]
    assert shown("a <image 2><image 1> b <image 2>") == [
        "a ",
        two.data,
        one.data,
        " b ",
        two.data,
    ]
    assert shown("<image 3> <image 1> <image 0>") == [
        two.data,
        "<image 3> ",
        one.data,
        " <image 0>",
    ]


def random_text(draw: random.Random) -> str:
    joined = draw.choice([" ", " ", "", "\n", ". "])
    text = joined.join(draw.choice(WORDS) for _ in range(draw.choice([0, 1, 2, 3, 5, 8, 15, 30])))
    return text + draw.choice(["", "", "", ".", "!.", "'.'", "\n"])


def test_scores_are_those_of_the_published_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval has MMMU's own parser and score; `random.choice` is where it guesses."""
    published: Any = pytest.importorskip("lm_eval.tasks.mmmu.utils")
    draw, task, right = random.Random(7), get_task("mmmu"), 0
    monkeypatch.setattr(published, "random", SimpleNamespace(choice=lambda _: None))
    for _ in range(2000):
        text = random_text(draw)
        options = [draw.choice(OPTIONS) for _ in range(draw.choice([2, 4, 9]))]
        letters = "ABCDEFGHI"[: len(options)]
        expected = published.parse_multi_choice_response(
            text, list(letters), dict(zip(letters, options, strict=True))
        )
        assert mmmu_letter(text, options) == expected, (text, options)
        answers = [draw.choice(WORDS).strip() or "x" for _ in range(draw.choice([1, 2]))]
        found = published.parse_open_response(text)
        assert sorted(map(repr, set(found))) == sorted(map(repr, readings(text).readings)), text
        says = published.eval_open(answers, found)
        problem = Problem("a", "?", json.dumps({"answer": answers}))
        assert readings(text).has(answers) == says, (text, answers)
        assert task.score(problem, text)["mmmu"].correct == (says and bool(readings(text).shown))
        right += says
    assert 200 < right < 1000


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: C", "C"),
        ("Answer: (B) or so", "B"),
        ("Answer: A or B", "B"),
        ("It is (B)", "B"),
        ("FDA approved", "A"),
        ("so (A), no, (C)", "C"),
        ("D.", "D"),
        ("x", None),
        ("A is not, B is it", "B"),
        ("I would say that it is blue car", "B"),
        ("E ", None),
        ("Answer: A\nAnswer: D", "D"),
        ("the red one is what I mean here", "A"),
        ("D. and A. both", "A"),
    ],
)
def test_letters_of_mmmu_pro(text: str, letter: str | None) -> None:
    """What mmmu-pro/evaluate.py says of these texts."""
    assert mmmu_pro_letter(text, ["red", "Blue", "blue car", "green"]) == letter


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("The answer is 1,000", "1000"),
        ("It is 5, so it is 1000.", "1000"),
        ("first 3 and then 2,000", "2000"),
        ("is $7,000.", "7000"),
        ("is 1.5e3", "1500"),
        ("12,345.5", "12345.5"),
        ("is -.5", "-0.5"),
        ("is 4, not 2.5", "2.5"),
        ("is -0.001", "0"),
        ("is 3,", "3"),
        ("is red  car", "red car"),
        ("", ""),
    ],
)
def test_open_answers_vote_by_their_last_number(text: str, shown: str) -> None:
    assert readings(text).shown == shown


def test_guesses_follow_from_problem_and_text() -> None:
    drawn = [guess("a", f"text {number}", 4) for number in range(400)]
    assert drawn == [guess("a", f"text {number}", 4) for number in range(400)]
    assert {letter: 60 < drawn.count(letter) < 140 for letter in "ABCD"} == dict.fromkeys(
        "ABCD", True
    )
    problem = get_task("mmmu").load(TaskOptions()).problems[0]
    verdicts = get_task("mmmu").score(problem, "no idea")
    assert verdicts["mmmu"].answer in set("ABCD") and verdicts["read"].answer is None


def test_answers_that_are_near() -> None:
    for text, answer, is_near in (
        ("105", "100", True),
        ("105.1", "100", False),
        ("-95", "-100", True),
        ("5%", "0.05", True),
        ("0", "0", True),
        ("0.0", "0", False),
        ("Yes", "yes", True),
        ("nan", "nan", False),
        ("inf", "1", False),
        ("1,000", "1000", False),
    ):
        assert is_relaxed_match(text, answer) == is_near, (text, answer)
    zero = Problem("z", "?", '["0"]')
    verdicts = [get_task("chartqa").score(zero, text)["relaxed"] for text in ("0", "0.0", "0%")]
    assert [verdict.correct for verdict in verdicts] == [True, False, False]
    assert verdicts[0].answer not in {verdict.answer for verdict in verdicts[1:]}
    draw = random.Random(3)
    for _ in range(2000):
        text, *answers = (
            "".join(draw.choice("abAB ßİ5\n") for _ in range(draw.randrange(9))) for _ in range(3)
        )
        assert anls(text, answers) == pytest.approx(plain_anls(text, answers)), (text, answers)


def plain_anls(text: str, answers: list[str]) -> float:
    """By the definition, with a whole table of edits."""

    def edits(a: str, b: str) -> int:
        table = [[i + j if not i * j else 0 for j in range(len(b) + 1)] for i in range(len(a) + 1)]
        for i in range(1, len(a) + 1):
            for j in range(1, len(b) + 1):
                swap = table[i - 1][j - 1] + (a[i - 1] != b[j - 1])
                table[i][j] = min(swap, table[i - 1][j] + 1, table[i][j - 1] + 1)
        return table[-1][-1]

    values = []
    for answer in answers:
        length = max(len(answer.upper()), len(text.upper()))
        plain = [" ".join(each.lower().split()) for each in (answer, text)]
        values.append(edits(plain[0], plain[1]) / length if length else 0.0)
    best = 1 - min(values)
    return best if best >= 0.5 else 0.0


def test_a_text_of_digits_alone_is_read_in_time() -> None:
    for text in ("1" * 50_000 + "x", "1." + "1" * 50_000 + "x", ",111" * 10_000):
        readings(text)


def test_a_run_of_bundled_questions(tmp_path: Path) -> None:
    from treegen import evaluate

    model = save_tiny_vision_model(tmp_path / "model", "llava", seed=1)
    result = evaluate(
        "mmmu",
        model=str(model),
        images=True,
        output=str(tmp_path / "run"),
        max_tokens=2,
        num_samples=2,
        limit=2,
        temperature=1.0,
    )
    assert result.results["usage"]["images_encoded"] == 2  # the two problems share one of them
    assert len(list((tmp_path / "run" / "images").iterdir())) == 2
