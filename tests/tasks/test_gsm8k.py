"""GSM8K: the data files, the examples and the tree."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_cases import write_data

from treegen.common.params import SamplingParams
from treegen.errors import DataError, InputError
from treegen.evals.problem import Problem
from treegen.evals.task import TaskData, TaskDefaults, TaskOptions
from treegen.prompts.tree import prompts_of
from treegen.tasks.common.answers import numeric_answer, strict_match
from treegen.tasks.common.arithmetic import canonical_number
from treegen.tasks.common.sources import bundled_rows
from treegen.tasks.gsm8k import GSM8K, reasoning_and_number

ROW = {"question": "How many?", "answer": "2+1=<<2+1=3>>3\n#### 3"}


def numbered(num: int, word: str = "apples") -> list[dict[str, object]]:
    return [
        {"question": f"{i} {word}?", "answer": f"It is <<{i}+0={i}>>{i}.\n#### {i}"}
        for i in range(num)
    ]


def test_bundled_solutions_calculate_correctly() -> None:
    rows = [row for _, row in bundled_rows("gsm8k_sample.jsonl")]
    assert len(rows) == 24
    for row in rows:
        notes = re.findall(r"<<([-0-9.+*/()]+)=(-?[0-9.]+)>>(-?[0-9.,]*[0-9])", row["answer"])
        assert 1 <= len(notes) <= 4
        assert row["answer"].count("<<") == len(notes)
        for expression, result, written in notes:
            value = eval(expression, {"__builtins__": {}})
            assert value == float(result) == float(written.replace(",", ""))
        final = reasoning_and_number(row["answer"])[1]
        assert canonical_number(final) == canonical_number(notes[-1][1])


def test_bundled_examples_calculate_correctly_and_read_as_their_answer() -> None:
    rows = [row for _, row in bundled_rows("gsm8k_fewshot.jsonl")]
    assert len(rows) == 8
    for row in rows:
        for expression, result in re.findall(r"([0-9][-0-9 +*/]*[0-9]) = ([0-9]+)", row["target"]):
            assert eval(expression, {"__builtins__": {}}) == int(result)
        assert strict_match(row["target"]) == numeric_answer(row["target"])
        assert re.search(r" The answer is [0-9]+\.$", row["target"])


def test_default_data_needs_no_files_and_has_two_shared_levels() -> None:
    data = GSM8K().load(TaskOptions())
    assert (len(data.problems), data.num_fewshot, data.skipped) == (24, 8, ())
    tree = GSM8K().tree(data, 5)
    assert tree.content == data.fewshot
    assert tree.samples in (None, 0)
    prompts = prompts_of(tree)
    assert [prompt.id for prompt in prompts] == [problem.id for problem in data.problems]
    assert {(len(prompt.path), prompt.samples) for prompt in prompts} == {(2, 5)}
    text = "".join(str(node.content) for node in prompts[0].path)
    assert text.startswith("Q: A bakery")
    assert text.count("\n\nQ: ") == 8
    assert text.endswith(f"Q: {data.problems[0].question}\nA:")


def test_a_form_has_its_stops_in_subclasses_too() -> None:
    class Fewer(GSM8K):
        @property
        def defaults(self) -> TaskDefaults:
            return replace(super().defaults, num_samples=5)

    class Brief(GSM8K):
        defaults = TaskDefaults(SamplingParams(max_tokens=9, stop=(".",)), 1, 0)

    fewer, brief = Fewer(), Brief()
    fewer.configure({"form": "self-consistency"})
    brief.configure({})
    assert (fewer.defaults.num_samples, fewer.defaults.sampling.stops) == (5, ("Q:", "\n\n"))
    assert brief.defaults.sampling.stops == (".",)
    assert "\n\n" not in GSM8K().defaults.sampling.stops


def test_no_examples_leave_an_empty_root() -> None:
    data = GSM8K().load(TaskOptions(num_fewshot=0))
    assert (data.fewshot, data.num_fewshot) == ("", 0)
    assert len(prompts_of(GSM8K().tree(data, 2))) == 24


def test_texts_are_taken_as_they_are(tmp_path: Path) -> None:
    """Line separators of Unicode do not end a line, and doubled spaces stay."""
    question = "One\u2028two  three\u0085four \u2019?"
    path = tmp_path / "a.jsonl"
    path.write_text(
        json.dumps({**ROW, "question": question}, ensure_ascii=False) + "\r\n\n", encoding="utf-8"
    )
    data = GSM8K().load(TaskOptions(data=str(path)))
    assert [problem.question for problem in data.problems] == [question]


def test_ids_are_given_or_count_lines_from_zero(tmp_path: Path) -> None:
    rows: list[Mapping[str, object]] = [*numbered(2), {**ROW, "id": "mine"}, {**ROW, "id": 7}]
    data = GSM8K().load(TaskOptions(data=write_data(tmp_path / "a.jsonl", rows)))
    assert [p.id for p in data.problems] == ["gsm8k-0", "gsm8k-1", "mine", "7"]


def test_unusable_rows_are_reported_and_the_others_run(tmp_path: Path) -> None:
    rows: list[Mapping[str, object]] = [
        ROW,
        {"answer": "#### 1"},
        {"question": "q"},
        {"question": " ", "answer": "#### 1"},
        {"question": 5, "answer": "#### 1"},
        {"question": "q", "answer": "#### many"},
        {"question": "\ud800", "answer": "#### 1"},
        {**ROW, "id": [1]},
    ]
    path = write_data(tmp_path / "a.jsonl", rows)
    data = GSM8K().load(TaskOptions(data=path))
    assert [p.id for p in data.problems] == ["gsm8k-0"]
    assert [(s.line, s.reason.split()[0]) for s in data.skipped] == [
        (2, "no"),
        (3, "no"),
        (4, "question"),
        (5, "question"),
        (6, "answer"),
        (7, "question"),
        (8, "id"),
    ]
    assert str(data.skipped[0]) == f"{path}, line 2: no question"


def test_a_subclass_may_reject_a_row_with_any_error_of_a_value(tmp_path: Path) -> None:
    class Short(GSM8K):
        def make_problem(self, row: dict[str, Any], line: int) -> Problem:
            if row["question"] == "1 apples?":
                raise DataError("too many apples")
            return super().make_problem(row, line)

    data = Short().load(TaskOptions(data=write_data(tmp_path / "a.jsonl", numbered(3))))
    assert [p.id for p in data.problems] == ["gsm8k-0", "gsm8k-2"]
    assert [(s.line, s.reason) for s in data.skipped] == [(2, "too many apples")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (json.dumps(ROW).encode() + b"\n{oops\n", "line 2 is not JSON"),
        (b'{"question": "a"\n', "line 1 is not JSON: Expecting ',' delimiter at column 17"),
        (b'{"question": "\xff"}\n', "line 1 is not UTF-8; save the file as UTF-8"),
        (b"1\n", "line 1 is not a JSON object"),
        (b"[1, 2]\n", "is not a list of JSON objects"),
        (b'{"question": ' + b"1" * 5000 + b"}\n", "line 1 is JSON that could not be read"),
        (b"[" * 100_000 + b"\n", "is not a JSON list"),
        (b'{"question": "q"}\n', "no usable problem"),
        (b'{"id": "a", "question": "q", "answer": "#### 1"}\n' * 2, "lines 1 and 2 have the same"),
    ],
)
def test_bad_files_are_named_with_the_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.jsonl") as caught:
        GSM8K().load(TaskOptions(data=str(path)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_and_directory_without_split(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        GSM8K().load(TaskOptions(data=str(tmp_path / "none.jsonl")))
    with pytest.raises(DataError, match=r"test\.jsonl or "):
        GSM8K().load(TaskOptions(data=str(tmp_path)))
    with pytest.raises(InputError, match="needs a folder"):
        GSM8K().load(TaskOptions(data="a.jsonl", split="test"))


def train_and_test(folder: Path) -> TaskOptions:
    write_data(folder / "train.jsonl", [*numbered(30), *numbered(4, "pears")])
    return TaskOptions(
        data=write_data(folder / "test.jsonl", numbered(4, "pears")),
        fewshot_data="train",
        num_fewshot=5,
    )


def shown(data: TaskData) -> list[str]:
    return re.findall(r"^Q: (.*)$", data.fewshot, flags=re.MULTILINE)


def test_examples_from_train_are_drawn_by_seed_without_notes_or_problems(tmp_path: Path) -> None:
    options = train_and_test(tmp_path)
    data = GSM8K().load(options)
    assert data == GSM8K().load(options)
    assert len(shown(data)) == len(set(shown(data))) == 5
    assert all("apples" in question for question in shown(data))
    assert "<<" not in data.fewshot
    assert re.match(r"Q: (\d+) apples\?\nA: It is \1\.\nThe answer is \1\.\n\nQ: ", data.fewshot)
    other = GSM8K().load(TaskOptions(data=options.data, fewshot_data="train", seed=1))
    assert shown(other) != shown(data)
    assert other.num_fewshot == 8
    assert other.fingerprint != data.fingerprint


def test_examples_from_the_evaluated_file_leave_its_problems_out(tmp_path: Path) -> None:
    path = write_data(tmp_path / "a.jsonl", numbered(10))
    data = GSM8K().load(TaskOptions(data=path, fewshot_data=path, num_fewshot=4, limit=6))
    assert not {problem.question for problem in data.problems} & set(shown(data))
    with pytest.raises(InputError, match="has 4 examples that are not"):
        GSM8K().load(TaskOptions(data=path, fewshot_data=path, num_fewshot=5, limit=6))


def test_a_few_shot_file_may_not_hold_a_problem(tmp_path: Path) -> None:
    data = write_data(tmp_path / "a.jsonl", numbered(3))
    shots = write_data(tmp_path / "s.jsonl", [ROW, {"question": " 2  APPLES?", "target": "2."}])
    with pytest.raises(DataError, match=r"example 2 in .* is also problem 'gsm8k-2' of this run"):
        GSM8K().load(TaskOptions(data=data, fewshot_file=shots))
    assert GSM8K().load(TaskOptions(data=data, fewshot_file=shots, num_fewshot=1)).num_fewshot == 1


def test_bad_few_shot_requests(tmp_path: Path) -> None:
    shots = write_data(tmp_path / "s.jsonl", [ROW, {"question": "q"}])
    with pytest.raises(DataError, match=r"s\.jsonl, line 2: no answer"):
        GSM8K().load(TaskOptions(fewshot_file=shots))
    with pytest.raises(InputError, match="num_fewshot is 9, but the bundled"):
        GSM8K().load(TaskOptions(num_fewshot=9))
    with pytest.raises(DataError, match="no train split"):
        GSM8K().load(TaskOptions(fewshot_data="train"))
    with pytest.raises(InputError, match="num_fewshot must be"):
        TaskOptions(num_fewshot=-1)
    with pytest.raises(InputError, match="cannot be used together"):
        TaskOptions(fewshot_file="a", fewshot_data="b")


def test_hub_name_goes_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local folder of the hub's name and layout stands in for the download."""
    home = tmp_path / "openai" / "gsm8k"
    home.mkdir(parents=True)
    write_data(home / "test.jsonl", numbered(3))
    write_data(home / "train.jsonl", numbered(9, "plums"))
    (home / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - {split: train, path: train.jsonl}\n  - {split: test, path: test.jsonl}\n---\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    data = GSM8K().load(TaskOptions(data="hf", fewshot_data="train", num_fewshot=3))
    from_file = GSM8K().load(TaskOptions(data=str(home / "test.jsonl"), num_fewshot=0))
    assert data.problems == from_file.problems
    assert all("plums" in question for question in shown(data))
    with pytest.raises(InputError, match="one of test and train"):
        GSM8K().load(TaskOptions(data="openai/gsm8k", split="dev"))


@pytest.fixture
def real_data() -> Path:
    folder = os.environ.get("TREEGEN_TEST_DATA")
    if not folder:
        pytest.skip("TREEGEN_TEST_DATA is not set")
    return Path(folder) / "gsm8k"


def test_every_real_problem_loads_and_its_answer_is_correct(real_data: Path) -> None:
    task = GSM8K()
    data = task.load(TaskOptions(data=str(real_data / "test.jsonl")))
    assert (len(data.problems), data.skipped) == (1319, ())
    for problem in data.problems:
        solution = problem.metadata["solution"]
        texts = (f" So it is.\nThe answer is {problem.answer}.", solution)
        assert all(task.score(problem, text)["numeric"].correct for text in texts)
        verdicts = task.score(problem, texts[0])
        assert all(verdict.correct for verdict in verdicts.values())
    assert sum(problem.answer.startswith("-") for problem in data.problems) == 2
    assert sum("," in problem.answer for problem in data.problems) == 14


def test_real_tree_has_the_published_examples_above_all_problems(real_data: Path) -> None:
    options = TaskOptions(
        data=str(real_data), fewshot_file=str(real_data / "cot_8shot.jsonl"), limit=50
    )
    data = GSM8K().load(options)
    tree = GSM8K().tree(data, 40)
    assert len(tree.children) == 50
    assert sum(prompt.samples for prompt in prompts_of(tree)) == 2000
    assert data.fewshot.startswith("Q: There are 15 trees in the grove.")
    assert data.fewshot.endswith("The answer is 8.\n\n")
    assert data.num_fewshot == 8


def test_real_train_split_gives_examples_for_all_test_problems(real_data: Path) -> None:
    data = GSM8K().load(TaskOptions(data=str(real_data), fewshot_data="train", num_fewshot=5))
    assert data.num_fewshot == 5
    assert data.fewshot.count("The answer is ") == 5
    assert "<<" not in data.fewshot


def test_the_label_tells_what_is_treegens_own(tmp_path: Path) -> None:
    data = write_data(tmp_path / "test.jsonl", [ROW])
    shots = write_data(tmp_path / "shots.jsonl", numbered(2))
    train = write_data(tmp_path / "train.jsonl", numbered(9, "pears"))

    def label(**options: Any) -> str:
        return GSM8K().load(TaskOptions(**options)).label

    assert label(data=data) == "bundled examples"
    assert label(data=data, num_fewshot=0) == label(data=data, fewshot_file=shots) == ""
    assert label(data=data, fewshot_data=train) == ""
    assert label() == label(fewshot_file=shots) == "bundled problems"
