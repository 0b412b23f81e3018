"""What tasks share: choosing problems, and finding tasks by name."""

import inspect
import os
import py_compile
import re
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import pytest
from cli_cases import OWN_TASK

from treegen.errors import InputError
from treegen.evals.job import load_task_data
from treegen.evals.registry import ENTRY_POINT_GROUP, get_task_name, load_file
from treegen.evals.search.task import SearchTask, get_search_task
from treegen.evals.selection import parse_limit
from treegen.tasks import (
    Problem,
    ReportOptions,
    SampleScore,
    Task,
    TaskOptions,
    get_task,
    list_tasks,
    select,
)


@pytest.mark.parametrize(
    ("limit", "want"),
    [
        (None, (0, 25)),
        (5, (0, 5)),
        ("5", (0, 5)),
        (100, (0, 25)),
        (0.1, (0, 3)),
        (".5", (0, 13)),
        (1.0, (0, 1)),
        ("10-20", (9, 20)),
        ("20-99", (19, 25)),
        ("3-3", (2, 3)),
    ],
)
def test_limit(limit: int | float | str | None, want: tuple[int, int]) -> None:
    assert parse_limit(limit, 25) == want


@pytest.mark.parametrize(
    "limit",
    [0, -1, 1.5, "x", "nan", "inf", "1_0", "\uff15", "0-3", "5-2", "30-40", "", "1-", "1e1"],
)
def test_limits_that_mean_nothing(limit: int | float | str) -> None:
    with pytest.raises(InputError, match="limit"):
        parse_limit(limit, 25)


def test_problems_by_id() -> None:
    problems = [Problem(f"gsm8k-{i}", "q", "1") for i in range(5)]
    chosen = select(problems, TaskOptions(ids=["gsm8k-3", "gsm8k-0"]))
    assert [problem.id for problem in chosen] == ["gsm8k-3", "gsm8k-0"]
    with pytest.raises(InputError, match="no problem 'gsm8k-9'; did you mean"):
        select(problems, TaskOptions(ids=["gsm8k-9"]))
    with pytest.raises(InputError, match="twice"):
        select(problems, TaskOptions(ids=["gsm8k-1", "gsm8k-1"]))
    with pytest.raises(InputError, match="empty"):
        select(problems, TaskOptions(ids=[]))
    with pytest.raises(InputError, match="cannot be used together"):
        TaskOptions(ids=["gsm8k-1"], limit=1)


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, "abcde"),
        ({"limit": 2}, "ab"),
        ({"limit": "2-3"}, "bc"),
        ({"ids": ["d", "b"]}, "db"),
        ({"limit": 9}, "abcde"),
        ({"limit": "4-5"}, "de"),
    ],
)
@pytest.mark.parametrize("selects", [False, True])
def test_a_limit_holds_whether_or_not_a_task_applies_it(
    tmp_path: Path, options: dict[str, Any], want: str, selects: bool
) -> None:
    chosen = "select(problems, options)" if selects else "problems"
    path = tmp_path / "own.py"
    path.write_text(
        OWN_TASK.replace("import Problem", "import select, Problem").replace(
            'return TaskData((Problem("a", "say hi", "hi"),), "here")',
            'problems = tuple(Problem(name, "say hi", "hi") for name in "abcde")\n'
            f'        return TaskData({chosen}, "here")',
        )
    )
    task = get_task(f"{path}:Echo")
    data = load_task_data(task, TaskOptions(**options))
    assert "".join(problem.id for problem in data.problems) == want
    with pytest.raises(InputError, match="no problem 'x'"):
        load_task_data(task, TaskOptions(ids=[*"abcd", "x"]))


def test_fingerprint_follows_what_prompts_and_scores_depend_on() -> None:
    task = get_task("gsm8k")
    prints = [
        task.load(options).fingerprint
        for options in (
            TaskOptions(),
            TaskOptions(limit=24),
            TaskOptions(limit=23),
            TaskOptions(num_fewshot=7),
        )
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_known_task_is_found_and_listed() -> None:
    assert isinstance(get_task("gsm8k"), Task)
    assert ("gsm8k", "treegen") in [(info.name, info.source) for info in list_tasks()]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm8", "did you mean 'gsm8k'"),
        ("zzz", "known: aime, apps, .*countdown, .*game24"),
        ("none.py:Mine", "does not exist"),
        ("mine.py", "must include the name of a class"),
    ],
)
def test_unknown_tasks(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        get_task(name)


def test_own_task_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN_TASK)
    task = get_task(f"{path}:Echo")
    data = task.load(TaskOptions())
    scores = [
        SampleScore("a", index, "stop", task.score(data.problems[0], text))
        for index, text in enumerate(["hi", "no"])
    ]
    report = task.aggregate(scores, ReportOptions(problem_ids=["a"], num_samples=2))
    assert report.value("exact_match", "exact") == 0.5
    with pytest.raises(InputError, match="no class 'Ech'; did you mean 'Echo'"):
        get_task(f"{path}:Ech")
    with pytest.raises(InputError, match="is not a task: it has no version, filters"):
        get_task(f"{path}:Half")
    with pytest.raises(InputError, match="must be the name of a task or a task, got"):
        get_task(["gsm8k"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content", ["def broken(:\n", "1 / 0\n", "class T:\n    def __init__(self, x): ...\n"]
)
def test_broken_task_files_give_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(content)
    with pytest.raises(InputError, match="cannot") as caught:
        get_task(f"{path}:T")
    assert "\n" not in str(caught.value)


def test_tasks_of_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo_package.py").write_text(OWN_TASK)
    info = tmp_path / "echo_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{ENTRY_POINT_GROUP}]\necho = echo_package:Echo\ngone = echo_package:Gone\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert get_task("echo").name == "echo"
    assert ("echo", "echo-package") in [(info.name, info.source) for info in list_tasks()]
    with pytest.raises(InputError, match="cannot load task 'gone'"):
        get_task("gone")


def test_loading_a_task_imports_neither_torch_nor_datasets() -> None:
    program = (
        "import sys; from treegen.tasks import *; t = get_task('gsm8k'); t.load(TaskOptions());"
        "print({'torch', 'datasets', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    """The second must not take the first one's place: a run stores the code of its task."""
    found = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        file = folder / "task.py"
        file.write_text(OWN_TASK.replace('"say hi"', f'"say {name}"'))
        found.append(get_task(f"{file}:Echo"))
    first, second = found
    assert sys.modules[type(first).__module__] is not sys.modules[type(second).__module__]
    for name, task in zip(("first", "second"), found, strict=True):
        assert f'"say {name}"' in inspect.getsource(type(task))
        assert inspect.getfile(type(task)) == str(tmp_path / name / "task.py")
        assert get_task_name(task) == f"{tmp_path / name / 'task.py'}:Echo"
        (problem,) = task.load(TaskOptions()).problems
        assert problem.question == f"say {name}"


@pytest.mark.parametrize("base", [Task, SearchTask])
def test_the_documentation_of_tasks_names_every_member(base: type[Task], repository: Path) -> None:
    members = {name for name in vars(base) if not name.startswith("_")}
    named = set(re.findall(r"`(\w+)`", base.__doc__ or ""))
    assert members <= named and all(getattr(base, name).__doc__ for name in members)
    for path in (repository / "treegen").rglob("*.py"):
        assert not re.findall(r'getattr\(\S*\btask, "\w+"', path.read_text()), path


def test_a_task_that_inherits_nothing_has_the_defaults_of_tasks(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        OWN_TASK + "\nclass Named(Echo):\n    arguments = {'loud': 'yes or no'}\n"
        "    def verdicts(self, problem, record):\n        return {'exact': self}\n"
    )
    echo, named = get_task(f"{path}:Echo"), get_task(f"{path}:Named")
    assert isinstance(echo, Task) and not isinstance(echo, SearchTask)
    assert (echo.arguments, echo.answer_types, echo.shorter) == ({}, {}, None)
    assert echo.rubric == "correctness"
    (problem,) = echo.load(TaskOptions()).problems
    assert echo.verdicts(problem, {}) is None and not echo.executes_code
    assert named.arguments == {"loud": "yes or no"}
    original = sys.modules[type(named).__module__].Named
    assert isinstance((named.verdicts(problem, {}) or {})["exact"], original)
    assert get_task_name(named) == f"{path}:Named"
    assert isinstance(get_task(named), Task)


def test_a_task_that_executes_code_must_define_its_scoring(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        OWN_TASK + "\nclass Programs(Echo):\n    executes_code = True\n"
        "class Scored(Programs):\n    def open_scoring(self, *args):\n        return None\n"
    )
    with pytest.raises(InputError, match="must also define the method open_scoring"):
        get_task(f"{path}:Programs")
    assert get_task(f"{path}:Scored").open_scoring(None, None) is None


def test_a_task_that_inherits_must_define_the_abstract_members(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("from treegen.tasks import Task\nclass Half(Task):\n    name = 'half'\n")
    with pytest.raises(
        InputError, match=r"abstract methods aggregate, defaults, .*; fix the code of the task"
    ):
        get_task(f"{path}:Half")


def test_a_task_with_steps_that_inherits_nothing_can_be_searched(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    members = {"root": "", "state": "s", "done": True, "answer": "hi", "is_solved": True}
    steps = "".join(
        f"    def {name}(self, *args):\n        return {value!r}\n"
        for name, value in members.items()
    )
    path.write_text(
        OWN_TASK + "\nfrom treegen.tasks.gsm8k import GSM8K\nclass Steps(Echo):\n"
        "    search_defaults = GSM8K.search_defaults\n" + steps
    )
    task = get_search_task(f"{path}:Steps")
    assert isinstance(task, SearchTask) and task.checkable is False
    assert task.state(Problem("a", "q", "1"), "") == "s" and task.search_defaults.method == "beam"
    with pytest.raises(InputError, match="does not support proposing steps with 'list'"):
        task.propose(Problem("a", "q", "1"), "list")


def test_a_file_is_run_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as it was in the same second, nor as a compiled file beside it says."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file, other = tmp_path / "own.py", tmp_path / "other.py"
    other.write_text("value = 'other'\n")
    file.write_text("value = 'first'\n")
    assert load_file(file).value == "first" and not (tmp_path / "__pycache__").exists()
    os.utime(other, ns=(0, 0))
    py_compile.compile(str(other), cache_from_source(str(file)))
    os.utime(file, ns=(0, 0))
    assert load_file(file).value == "first"
    with pytest.raises(InputError, match=r"own\.pyc cannot be imported; name a file that ends in"):
        load_file(file.with_suffix(".pyc"))
