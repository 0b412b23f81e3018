"""APPS: its data, prompts and programs, and reference solutions in the judge."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_cases import write_jsonl

from treegen.errors import DataError, InputError
from treegen.evals.task import TaskOptions
from treegen.prompts.tree import prompts_of
from treegen.tasks.apps.compare import COMPARERS
from treegen.tasks.apps.data import LoadedRows, load_bundled_shots, load_rows
from treegen.tasks.apps.task import APPS, ask, extract_program, with_tabs
from treegen.tasks.programs.scoring import PACKAGES
from treegen.tasks.sandbox import Limits, SandboxPool

ADD = "a, b = map(int, input().split())\nprint(a + b)\n"


def row(number: int, **changes: Any) -> dict[str, Any]:
    """Return a row of the JSON Lines form: add two numbers."""
    tests = {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10\n"]}
    return {
        "problem_id": number,
        "question": f"Add two numbers, form {number}.",
        "solutions": json.dumps([ADD]),
        "input_output": json.dumps(tests),
        "difficulty": ("introductory", "interview")[number % 2],
        "url": "",
        "starter_code": "",
        **changes,
    }


def write_folder(folder: Path, number: int, **changes: Any) -> None:
    """Write a row in the official form."""
    fields = row(number, **changes)
    place = folder / f"{number:04d}"
    place.mkdir(parents=True)
    (place / "question.txt").write_text(fields["question"])
    (place / "solutions.json").write_text(fields["solutions"])
    (place / "metadata.json").write_text(
        json.dumps({"difficulty": fields["difficulty"], "url": ""})
    )
    if fields["input_output"]:
        (place / "input_output.json").write_text(fields["input_output"])
    if fields["starter_code"]:
        (place / "starter_code.py").write_text(fields["starter_code"])


def test_folders_and_json_lines_are_the_same_problems(tmp_path: Path) -> None:
    starter = "def f(x):\n\t"
    call = json.dumps({"fn_name": "f", "inputs": [[1]], "outputs": [1]})
    changes: dict[int, dict[str, str]] = {2: {"starter_code": starter, "input_output": call}}
    for number in range(4):
        write_folder(tmp_path / "apps" / "test", number, **changes.get(number, {}))
    lines = write_jsonl(tmp_path / "a.jsonl", [row(n, **changes.get(n, {})) for n in range(4)])
    task = APPS()
    from_folders = task.load(TaskOptions(data=str(tmp_path / "apps")))
    from_split = task.load(TaskOptions(data=str(tmp_path / "apps" / "test")))
    from_lines = task.load(TaskOptions(data=str(lines)))
    assert [p.content for p in from_folders.problems] == [p.content for p in from_lines.problems]
    assert from_split.fingerprint == from_folders.fingerprint == from_lines.fingerprint
    assert [p.id for p in from_lines.problems] == ["0000", "0001", "0002", "0003"]
    assert task.solutions("0003") == [ADD]


def test_the_hub_is_read_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    loads: list[Any] = []

    def load_dataset(kind: str, **options: Any) -> Any:
        loads.append((kind, options))
        return datasets.Dataset.from_list([row(4000), row(4001)])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    loaded = load_rows("codeparrot/apps", None)
    assert [r.id for r in loaded.rows] == ["4000", "4001"]
    assert loaded.rows[1].solutions == [ADD]
    location = "hf://datasets/codeparrot/apps/test.jsonl"
    assert loads == [("json", {"data_files": {"test": location}, "split": "test"})]


def test_problems_without_tests_are_skipped_with_a_reason(tmp_path: Path) -> None:
    rows = [row(0), row(1, input_output=""), row(2, input_output="{}"), row(3, question=" ")]
    data = APPS().load(TaskOptions(data=str(write_jsonl(tmp_path / "a.jsonl", rows))))
    assert [p.id for p in data.problems] == ["0000"]
    assert [(s.line, s.reason) for s in data.skipped] == [
        (2, "the row has no tests"),
        (3, "the row has no tests"),
        (4, "question is empty"),
    ]
    write_folder(tmp_path / "test", 7, input_output="")
    with pytest.raises(DataError, match=r"no usable problem.*0007.*no tests"):
        load_rows(str(tmp_path), None)


@pytest.mark.parametrize("content", ["{", "[1]", '{"question": "\xff'])
def test_lines_that_are_no_rows_are_errors(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(f"{json.dumps(row(0))}\n{content}\n".encode("latin-1"))
    with pytest.raises(DataError, match="line 2"):
        load_rows(str(path), None)


def test_filters_go_by_what_the_data_say(tmp_path: Path) -> None:
    starter = {"starter_code": "def f(x):\n\t"}
    path = str(write_jsonl(tmp_path / "a.jsonl", [row(0), row(1), row(2, **starter)]))

    def ids(**extra: str) -> list[str]:
        data = APPS().load(TaskOptions(data=path, extra=extra))
        return [p.id for p in data.problems]

    assert ids() == ["0000", "0001", "0002"]
    assert ids(difficulty="introductory") == ["0000", "0002"]
    assert ids(difficulty="introductory,interview", starter="without") == ["0000", "0001"]
    assert ids(starter="with") == ["0002"]
    with pytest.raises(InputError, match="did you mean 'interview'"):
        ids(difficulty="intervew")
    with pytest.raises(InputError, match="none of the 3 problems matches"):
        ids(difficulty="interview", starter="with")
    with pytest.raises(InputError, match="timeout must be a number of seconds"):
        ids(timeout="nan")


def test_prompts_of_both_published_forms() -> None:
    assert ask("Q", "", calls=False, form="train") == (
        "\nQUESTION:\nQ\n" + "\n" + "\nUse Standard Input format\n" + "\nANSWER:\n"
    )
    assert ask("Q", "def f():", calls=False, form="train") == (
        "\nQUESTION:\nQ\ndef f():\n" + "\nUse Call-Based format\n" + "\nANSWER:\n"
    )
    assert ask("Q", "", calls=True, form="eval") == (
        "\nQUESTION:\nQ" + "\nUse Call-Based format" + "\nANSWER:\n"
    )
    assert ask("Q", "def f():", calls=False, form="eval") == (
        "\nQUESTION:\nQ\ndef f():" + "\nUse Standard Input format" + "\nANSWER:\n"
    )


def test_examples_come_from_train_and_stand_above_all_problems(tmp_path: Path) -> None:
    for number in range(3):
        write_folder(tmp_path / "test", number)
        write_folder(tmp_path / "train", number + 100)
    write_folder(tmp_path / "train", 200, starter_code="def f():")
    write_folder(tmp_path / "train", 201, solutions="")
    write_folder(tmp_path / "train", 202, question="Add two numbers,\nform 0.")
    options = TaskOptions(data=str(tmp_path))
    data = APPS().load(options)
    assert data.num_fewshot == 2 and data.label == ""
    tree = APPS().tree(data, 4)
    (first,) = tree.children
    (second,) = first.children
    assert first.content != second.content
    for shot in (first, second):
        assert "form 10" in str(shot.content)
        assert str(shot.content).endswith(f"\nUse Standard Input format\n\nANSWER:\n{ADD}")
    assert [p.samples for p in prompts_of(tree)] == [4, 4, 4]
    assert [c.id for c in second.children] == ["0000", "0001", "0002"]
    assert APPS().load(TaskOptions(data=str(tmp_path), num_fewshot=0)).fewshot_of == {}
    with pytest.raises(InputError, match="num_fewshot is 9"):
        APPS().load(TaskOptions(data=str(tmp_path), num_fewshot=9))
    itself = write_jsonl(tmp_path / "shots.jsonl", [row(0)])
    with pytest.raises(DataError, match="is also a problem of this run"):
        APPS().load(TaskOptions(data=str(tmp_path), num_fewshot=1, fewshot_file=str(itself)))


def test_the_label_tells_of_examples_that_are_treegens_own(tmp_path: Path) -> None:
    write_folder(tmp_path / "test", 0)
    data = APPS().load(TaskOptions(data=str(tmp_path)))
    assert data.num_fewshot == 2 and data.label == "bundled examples"
    assert "examples: 2 that come with treegen" in data.notes[-1]
    assert APPS().load(TaskOptions(data=str(tmp_path), num_fewshot=0)).label == ""


def test_solutions_are_shown_with_tabs() -> None:
    source = (
        "def f(x):\r\n  # note\n  if x:\n     y = [1,\n          2]\n     return '''a\n    b'''\n"
        "  return f'''{x}\n    c'''\n\nfor i in range(2):\n\tprint(i)"
    )
    assert with_tabs(source) == (
        "def f(x):\n\t# note\n\tif x:\n\t\ty = [1,\n\t\t\t 2]\n\t\treturn '''a\n    b'''\n"
        "\treturn f'''{x}\n    c'''\n\nfor i in range(2):\n\tprint(i)\n"
    )
    assert with_tabs("if x:\n    a\n  b") == "if x:\n    a\n  b\n"


@pytest.mark.parametrize(
    ("text", "raw", "fenced"),
    [
        ("print(1)", "print(1)", None),
        (" \n\t", None, None),
        ("So:\n```python\nprint(1)\n```\nDone", "same", "print(1)\n"),
        ("```\nno\n```\n```text\nno\n```\n```py\nyes\n```", "same", "yes\n"),
        ("```\nyes\n```", "same", "yes\n"),
        ("```cpp\nno\n```", "same", None),
        ("```python\nunfinished", "same", "unfinished"),
        ("```python\n\n```", "same", None),
        ("````python\nx = '''\n```\n'''\n````", "same", "x = '''\n```\n'''\n"),
        ("  ```Python3 title\n  a\n  ```", "same", "a\n"),
    ],
)
def test_programs_in_completions(text: str, raw: str | None, fenced: str | None) -> None:
    assert extract_program(text, "raw") == (text if raw == "same" else raw)
    assert extract_program(text, "fenced") == fenced


@pytest.fixture(scope="module")
def judge() -> Iterator[SandboxPool]:
    with SandboxPool(packages=PACKAGES, limits=Limits()) as judge:
        yield judge


def rejected(
    judge: SandboxPool, loaded: LoadedRows, most: int | None = None
) -> list[tuple[str, str]]:
    """Judge reference solutions under both comparers at once; return those that one rejects."""
    jobs = []
    for row in loaded.rows:
        ways = [row.suite.cases(comparer) for comparer in COMPARERS.values()]
        assert len({repr(cases.tests) for cases in ways}) == 1
        for source in row.solutions[:most]:
            program, tests = ways[0].program(source), ways[0].tests

            def compare(output: Any, expected: Any, ways: Any = ways) -> bool:
                return all(cases.compare(output, expected) for cases in ways)

            jobs.append((row.id, judge.submit(program, tests, compare)))
    assert len(jobs) >= len(loaded.rows)
    results = [(problem, future.result().verdict) for problem, future in jobs]
    return [result for result in results if result[1] != "accepted"]


def test_bundled_solutions_are_accepted(judge: SandboxPool) -> None:
    assert rejected(judge, load_rows(None, None)) == []
    assert rejected(judge, load_bundled_shots()) == []


@pytest.mark.parametrize("most", [1, pytest.param(None, marks=pytest.mark.soak)])
def test_published_solutions_are_accepted(
    judge: SandboxPool, data_dir: Path, most: int | None
) -> None:
    loaded = load_rows(str(data_dir / "apps"), "train")
    assert loaded.skipped == () and len(loaded.rows) == len(
        list((data_dir / "apps/train").iterdir())
    )
    assert rejected(judge, loaded, most) == []
