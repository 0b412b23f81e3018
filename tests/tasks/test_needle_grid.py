"""The needle grid, its heat map, and what tables over groups of problems say."""

import sys
from pathlib import Path

import pytest

from treegen.errors import DataError, InputError
from treegen.evals.problem import Problem
from treegen.evals.statistics.metrics import Report, ReportOptions
from treegen.evals.statistics.tables import Grid, by_decile, problem_values, table_by
from treegen.evals.task import TaskData, TaskOptions
from treegen.evals.verdict import SampleScore, Verdict
from treegen.prompts.tree import prompts_of
from treegen.report.plots.heat_map import draw_text, save_png
from treegen.tasks.needle.grid import NeedleGrid

NEEDLE = (
    "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny "
    "day."
)
GRID = Grid(
    "a title",
    "depth",
    ("0%", "50%", "100%"),
    "length",
    ("1,000", "2,000"),
    ((1.0, 0.999), (0.5, 0.001), (0.0, None)),
)


def load(data: str | None = None, **extra: str) -> TaskData:
    return NeedleGrid().load(TaskOptions(data=data, extra=extra))


def test_one_problem_for_each_length_and_depth() -> None:
    data = load(lengths="2000,1000", depths="0-100/5")
    assert [problem.id for problem in data.problems] == [
        f"needle-grid-{length}-{depth}" for length in (1000, 2000) for depth in (0, 25, 50, 75, 100)
    ]
    frame = (
        "Start of document:\n",
        "\nEnd of document\n\nQuestion: What is the best thing to do in San Francisco?\nAnswer:",
    )
    for problem in data.problems:
        text = problem.question.removeprefix(frame[0]).removesuffix(frame[1])
        assert len(text) == len(problem.question) - len("".join(frame))
        length, depth = problem.metadata["length"], problem.metadata["depth"]
        assert length - 40 <= len(text) <= length
        assert text.count(NEEDLE) == 1
        assert problem.metadata["measured_depth"] == text.index(NEEDLE) / len(text)
        # The needle goes back to the last sentence, by at most half a step.
        assert depth / 100 - 0.13 - len(NEEDLE) / length <= text.index(NEEDLE) / len(text)
        assert text.index(NEEDLE) / len(text) <= depth / 100
    first, last = data.problems[0].question, data.problems[4].question
    assert first.startswith(f"Start of document:\n{NEEDLE} ")
    assert f"{NEEDLE}\nEnd of document" in last


def test_prompts_of_one_text_are_the_same_up_to_the_needle() -> None:
    data = load(lengths="4000", depths="50,100")
    middle, end = (problem.question for problem in data.problems)
    start = middle.index(NEEDLE)
    assert start > 1500
    assert middle[:start] == end[:start]


def test_defaults_and_tree() -> None:
    task = NeedleGrid()
    data = task.load(TaskOptions(limit="1-12"))
    assert len(task.load(TaskOptions()).problems) == 55
    prompts = prompts_of(task.tree(data, 2))
    assert [(prompt.id, prompt.samples) for prompt in prompts] == [
        (problem.id, 2) for problem in data.problems
    ]
    assert len(data.problems) == 12


@pytest.mark.parametrize(
    ("text", "answer", "correct"),
    [
        (" Eat a sandwich and sit in Dolores Park on a sunny day.", "sandwich, Dolores Park", True),
        (" Sitting in DOLORES  PARK, eating sandwiches!", "sandwich, Dolores Park", True),
        (" **Dolores-Park** with a *sandwich*, as the text says", "sandwich, Dolores Park", True),
        (" Eat a sandwich.", "sandwich", False),
        (" Go to Dolores and to a park", "go to dolores and to a park", False),
        (" ...", None, False),
        ("", None, False),
    ],
)
def test_an_answer_is_right_if_it_contains_the_facts(
    text: str, answer: str | None, correct: bool
) -> None:
    problem = load(lengths="1000", depths="0").problems[0]
    assert NeedleGrid().score(problem, text) == {"contains": Verdict(answer, correct)}


def test_a_number_is_not_a_part_of_a_longer_one() -> None:
    given = {"needle": "The code is 42.", "question": "Which code?", "facts": "42"}
    problem = load(lengths="1000", depths="0", **given).problems[0]
    assert problem.question.endswith("Question: Which code?\nAnswer:")
    task = NeedleGrid()
    assert [task.score(problem, text)["contains"].correct for text in ("42!", "x42", "1425")] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"lengths": "1000,x"}, "lengths must be comma-separated integers"),
        ({"lengths": "1000,1000"}, "lengths must not repeat a number"),
        ({"lengths": "2000-1000/3"}, "must count up in 2 steps or more"),
        ({"lengths": "1000-2000/1"}, "must count up in 2 steps or more"),
        ({"lengths": ""}, "lengths must be an integer"),
        ({"lengths": "50"}, "needs 95 characters without any filler, but the length is 50"),
        ({"lengths": "300", "depths": "0-100/101"}, "too short for these depths"),
        ({"depths": "101"}, "depths must be from 0 to 100, got 101"),
        ({"needle": "N."}, "needle, question and facts must be set together, got only needle"),
        ({"needle": "N.", "question": "?", "facts": "M"}, "does not contain the fact 'M'"),
        ({"needle": "N is M.", "question": "Is M?", "facts": "M"}, "contains the fact 'M'"),
        ({"needle": "N is M.", "question": "?", "facts": "M|"}, "facts has an empty part"),
        ({"length": "1000"}, "did you mean 'lengths'"),
    ],
)
def test_bad_options(extra: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        load(**extra)
    assert message in str(caught.value)


def test_other_refusals(tmp_path: Path) -> None:
    path = tmp_path / "hay.txt"
    path.write_text(f"Some text. {NEEDLE.upper()} More.")
    with pytest.raises(DataError, match="already contains"):
        load(str(path))
    with pytest.raises(InputError, match="does not support few-shot examples"):
        NeedleGrid().load(TaskOptions(num_fewshot=2))


def report_on(data: TaskData, right: set[tuple[int, int]], skip: tuple[int, int]) -> Report:
    task, scores = NeedleGrid(), []
    for problem in data.problems:
        cell = (problem.metadata["length"], problem.metadata["depth"])
        text = "a sandwich in Dolores Park" if cell in right else "nothing"
        if cell != skip:
            scores.append(SampleScore(problem.id, 0, "stop", task.score(problem, text)))
    ids = [problem.id for problem in data.problems]
    return task.aggregate(
        scores, ReportOptions(problem_ids=ids, num_samples=1, problems=data.problems)
    )


def test_report_has_the_grid_and_its_margins() -> None:
    data = load(lengths="1000,2000", depths="0,50,100")
    report = report_on(data, {(1000, 0), (1000, 50), (2000, 100)}, skip=(2000, 50))
    (grid,) = report.grids
    assert (grid.row_labels, grid.column_labels) == (("0%", "50%", "100%"), ("1,000", "2,000"))
    assert grid.column_name == "length in characters"
    assert grid.values == ((1.0, 0.0), (1.0, None), (0.0, 1.0))
    by_length, by_depth = report.tables
    assert [row[:3] for row in by_length.rows] == [
        ("1,000", 3, pytest.approx(2 / 3)),
        ("2,000", 2, 0.5),
    ]
    assert [row[:3] for row in by_depth.rows] == [("0%", 2, 0.5), ("50%", 1, 1.0), ("100%", 2, 0.5)]
    assert report.value("exact_match", "contains") == pytest.approx(3 / 5)


def test_heat_map_in_a_terminal() -> None:
    assert draw_text(GRID, ascii=True) == (
        "a title\n"
        "       length\n"
        "depth   1,000   2,000\n"
        "   0%  ## 100  ** 100\n"
        "  50%  ::  50  ..   0\n"
        " 100%       0      --"
    )
    assert draw_text(GRID).splitlines()[3] == "   0%  \u2588\u2588 100  \u2593\u2593 100"


def test_heat_map_as_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_png(GRID, tmp_path / "heat_map.png")
    content = (tmp_path / "heat_map.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n") and len(content) > 5000
    with pytest.raises(InputError, match="cannot write"):
        save_png(GRID, tmp_path / "none" / "heat_map.png")
    (other := tmp_path / "other").write_text("mine")
    (link := tmp_path / "link.png").symlink_to(other)
    save_png(GRID, link)
    assert other.read_text() == "mine" and link.read_bytes() == content


def test_a_picture_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match=r"pip install '\.\[plots\]'"):
        save_png(GRID, tmp_path / "heat_map.png")


def test_values_of_problems_are_means_over_their_samples() -> None:
    scores = [
        SampleScore("a", 0, "stop", {"f": Verdict("1", True)}),
        SampleScore("a", 1, "stop", {"f": Verdict("2", False)}),
        SampleScore("b", 0, "stop", {"f": Verdict("2", False, 0.25)}),
    ]
    values = problem_values(scores, "f")
    assert values == {"a": 0.5, "b": 0.25}
    table = table_by("t", "G", [("x", ["a", "b", "c"]), ("y", ["c"])], values)
    assert table.rows[0][:3] == ("x", 2, 0.375)
    assert table.rows[1] == ("y", 0, None, None, None, None)


def test_credit_is_from_0_to_1() -> None:
    with pytest.raises(InputError, match="credit must be from 0 to 1"):
        Verdict("a", True, 1.5)


def test_deciles() -> None:
    groups = by_decile({"a": 0.0, "b": 0.0999, "c": 0.1, "d": 0.999, "e": 1.0})
    assert [label for label, _ in groups][::9] == ["0-10%", "90-100%"]
    assert [ids for _, ids in groups if ids] == [["a", "b"], ["c"], ["d", "e"]]


def test_a_problem_is_the_whole_prompt_so_that_its_hash_covers_the_text() -> None:
    prints = {load(lengths="1000", depths=depths).fingerprint for depths in ("0", "40", "80")}
    assert len(prints) == 3
    assert isinstance(load(lengths="1000", depths="0").problems[0], Problem)


def test_the_grid_over_a_real_book(data_dir: Path) -> None:
    data = load(str(data_dir / "text" / "war_and_peace.txt"), lengths="8000,128000")
    assert len(data.problems) == 22
    for problem in data.problems:
        wanted = problem.metadata["depth"] / 100
        assert wanted - 0.06 <= problem.metadata["measured_depth"] <= wanted
