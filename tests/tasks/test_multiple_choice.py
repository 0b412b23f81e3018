"""Likelihood choices: the published files, what cannot be asked, examples, and openings."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from cli_cases import write_data

from treegen.errors import DataError, InputError
from treegen.evals.multiple_choice import choice_prompts, is_multiple_choice, pick_length_normalized
from treegen.evals.problem import Problem
from treegen.prompts.tree import Node
from treegen.tasks import TaskData, TaskOptions, get_task
from treegen.tasks.choices import ARCEasy, read_id

NAMES = ("arc-easy", "arc-challenge", "hellaswag", "winogrande", "piqa")


@pytest.mark.parametrize("name", NAMES)
def test_bundled_questions_say_that_they_are_not_the_published_ones(name: str) -> None:
    data = get_task(name).load(TaskOptions())
    assert len(data.problems) >= 6 and not data.skipped and data.label == "bundled problems"
    assert is_multiple_choice(data)
    assert all(problem.answer in problem.candidates for problem in data.problems)


def test_arc_in_the_forms_of_its_files_and_of_the_hub(tmp_path: Path) -> None:
    nested = {
        "id": "a",
        "question": {
            "stem": "Hot?",
            "choices": [{"text": "ice", "label": "1"}, {"text": "fire", "label": "2"}],
        },
        "answerKey": "2",
    }
    flat = {
        "id": "b",
        "question": "Hot?",
        "answerKey": "2",
        "choices": {"text": ["ice", "fire"], "label": ["1", "2"]},
    }
    wrong = {**flat, "id": "c", "answerKey": "D"}
    equal = {**flat, "id": "d", "choices": {"text": ["ice", "ice"], "label": ["1", "2"]}}
    path = tmp_path / "ARC-Easy-Test.jsonl"
    write_data(path, [nested, flat, wrong, equal])
    data = get_task("arc-easy").load(TaskOptions(data=str(tmp_path)))
    for problem in data.problems:
        assert (problem.question, problem.choices) == ("Question: Hot?\nAnswer:", (" ice", " fire"))
        assert problem.answer == " fire"
    assert [row.line for row in data.skipped] == [3, 4]
    assert "not one of the labels" in data.skipped[0].reason and "equal" in data.skipped[1].reason
    with pytest.raises(DataError, match=r"ARC-Easy-Train\.jsonl or train\.jsonl"):
        get_task("arc-easy").load(TaskOptions(data=str(tmp_path), split="train"))


def test_hellaswag_is_cleaned_as_published(tmp_path: Path) -> None:
    row = {
        "activity_label": "Tea",
        "ctx_a": "[header] Tea [title] Boil water.",
        "ctx_b": "THEN she",
        "endings": ["[step] pours  it.", "b", "c", "d"],
        "label": "1",
    }
    data = get_task("hellaswag").load(TaskOptions(data=write_data(tmp_path / "a.jsonl", [row])))
    assert data.problems[0].question == "Tea: Tea. Boil water. Then she"
    assert data.problems[0].choices[0] == "  pours it."
    row["label"] = ""
    with pytest.raises(DataError, match="the split may have no answers"):
        get_task("hellaswag").load(TaskOptions(data=write_data(tmp_path / "a.jsonl", [row])))


def test_piqa_takes_labels_from_the_file_beside_it(tmp_path: Path) -> None:
    rows = [{"goal": "g", "sol1": "one", "sol2": "two"}] * 2
    rows[1] = {**rows[0], "goal": "h"}
    write_data(tmp_path / "valid.jsonl", rows)
    (tmp_path / "valid-labels.lst").write_text("1\n0\n")
    data = get_task("piqa").load(TaskOptions(data=str(tmp_path)))
    assert [problem.answer for problem in data.problems] == [" two", " one"]
    (tmp_path / "valid-labels.lst").write_text("1\n")
    with pytest.raises(DataError, match="1 labels for 2 rows"):
        get_task("piqa").load(TaskOptions(data=str(tmp_path)))


def test_arc_needs_a_label_for_each_choice() -> None:
    choices = {"text": ["ice", "sand"], "label": ["A", "B", "C"]}
    with pytest.raises(ValueError, match="3 labels for 2 choices"):
        ARCEasy().item({"question": "What melts?", "choices": choices, "answerKey": "A"})


def winogrande(tmp_path: Path, **options: Any) -> TaskData:
    rows = [
        {
            "sentence": "The cup is in the _ box.",
            "option1": "red",
            "option2": "old",
            "answer": "2",
        },
        {"sentence": "_ sings.", "option1": "Ann", "option2": "Bo", "answer": "1"},
        {"sentence": "She met _", "option1": "Ann", "option2": "Bo", "answer": "1"},
    ]
    data = write_data(tmp_path / "dev.jsonl", rows)
    return get_task("winogrande").load(TaskOptions(data=data, **options))


def test_winogrande_scores_the_same_words_after_each_option(tmp_path: Path) -> None:
    data = winogrande(tmp_path)
    first, second = data.problems
    assert (first.question, first.openings, first.choices) == (
        "The cup is in the ",
        ("red", "old"),
        (" box.", " box."),
    )
    assert first.candidates == ("red box.", "old box.") and first.answer == "old box."
    assert (second.question, second.openings) == ("", ("Ann", "Bo"))
    assert "ends with the blank" in data.skipped[0].reason
    assert "openings" not in repr(first.content) and first.content != second.content


def test_examples_are_drawn_by_seed_or_are_the_first_of_a_file(tmp_path: Path) -> None:
    row = {"option1": "a", "option2": "b", "answer": "2"}
    train = [{**row, "sentence": f"Sentence {i} has _ here."} for i in range(20)]
    write_data(tmp_path / "train.jsonl", train)
    shown = winogrande(tmp_path, num_fewshot=2, fewshot_file=str(tmp_path / "train.jsonl"))
    assert shown.fewshot == "Sentence 0 has b here.\n\nSentence 1 has b here.\n\n"
    drawn = [winogrande(tmp_path, num_fewshot=3, seed=seed).fewshot for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(InputError, match="num_fewshot is 30"):
        winogrande(tmp_path, num_fewshot=30)
    with pytest.raises(DataError, match="is also problem 'winogrande-0' of this run"):
        winogrande(tmp_path, num_fewshot=1, fewshot_file=str(tmp_path / "dev.jsonl"))


class Letters:
    """A tokenizer with one token for each character."""

    chat_template = "yes"

    def __call__(self, text: Any, **options: Any) -> Any:
        if isinstance(text, list):
            return {"input_ids": [list(map(ord, each)) for each in text]}
        return {"input_ids": list(map(ord, text))}

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<a>"


@pytest.mark.parametrize("chat", [False, True])
def test_openings_are_read_and_not_scored(chat: bool) -> None:
    problem = Problem("p", "ab", "", choices=(" z", " zz"), openings=("cd", "ce"))
    content: Any = [{"role": "user", "content": "ab"}] if chat else "ab"
    tree = Node("", children=[Node(content, samples=1, id="p")])
    (prompt,) = choice_prompts(tree, {"p": problem}, _tokenizer())
    pairs = [("".join(map(chr, a)), "".join(map(chr, b))) for a, b in prompt.pairs()]
    if chat:
        assert pairs == [("<user>abcd<a>", "z"), ("<user>abce<a>", "zz")]
    else:
        assert pairs == [("abcd", " z"), ("abce", " zz")]
    assert "".join(map(chr, prompt.context)).endswith("abc")


def _tokenizer() -> Any:
    return Letters()


def test_length_is_that_of_lm_eval() -> None:
    """The one space before a choice does not count; its own spaces do."""
    problem = Problem("p", "ab", "", choices=(" x  ", " yy"))
    assert pick_length_normalized(problem, [-3.0, -2.2]) == " x  "
    assert pick_length_normalized(problem, [-3.0, -1.9]) == " yy"


def test_openings_need_one_for_each_choice() -> None:
    problem = Problem("p", "ab", "", choices=("a", "b"), openings=("c",))
    with pytest.raises(InputError, match="has 1 openings for 2 choices"):
        is_multiple_choice(TaskData((problem,), "here"))


def test_invalid_gzip_and_json_files_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "valid.jsonl.gz"
    for content in (b"no gzip", gzip.compress(b"x" * 999)[:-20], b"\x1f\x8b\x08" + b"\xff" * 40):
        path.write_bytes(content)
        with pytest.raises(DataError, match="is not a gzip file"):
            get_task("piqa").load(TaskOptions(data=str(path)))
    row = {"goal": "g", "sol1": "a", "sol2": "b", "label": 1}
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + json.dumps([row]).encode()))
    assert get_task("piqa").load(TaskOptions(data=str(path))).problems[0].answer == " b"
    listed = tmp_path / "valid.json"
    for text in ("[1]", "[", "[]", "[" * 10**6):
        listed.write_text(text)
        with pytest.raises(DataError, match="is not a"):
            get_task("piqa").load(TaskOptions(data=str(listed)))
    with pytest.raises(DataError, match="does not exist"):
        get_task("piqa").load(TaskOptions(data=str(tmp_path / "none.jsonl")))


@pytest.mark.parametrize(("row", "want"), [({"id": 0}, "0"), ({"id": "a"}, "a"), ({}, "")])
def test_an_id_of_zero_is_an_id(row: dict[str, Any], want: str) -> None:
    assert read_id(row, "id") == want
