"""What pages of search say beside their programs."""

import contextlib
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from cli_cases import Command
from tiny_models import save_tiny_model

from treegen.evals.search.methods import METHODS


@pytest.mark.parametrize("page", ["README.md", "docs/search/methods.md"])
def test_tables_name_methods_in_their_order(repository: Path, page: str) -> None:
    order = [name.removeprefix("tot-").replace("_", "-") for name in METHODS]
    heads = re.findall(r"^\| *(`.*?) *\|", (repository / page).read_text(), re.MULTILINE)
    words = [word for head in heads for word in re.findall(r"`([\w-]+)", head)]
    names = [
        name
        for name in (word.removeprefix("tot-").replace("_", "-") for word in words)
        if name in order
    ]
    assert names == sorted(names, key=order.index)


def test_the_page_of_levels_prints_the_plan_that_it_tells_of(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (repository / "docs" / "search" / "loops.md").read_text()
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], {})
    shown = capsys.readouterr().out
    assert "generated level 2: at most 30 rows, 1,200 tokens; 8 go on" in shown


# What docs/search/controllers.md shows of controllers of other libraries


@pytest.mark.slow
@pytest.mark.parametrize("package", ["treequest", "reasoners"])
def test_other_controllers_drive_live_nodes(repository: Path, package: str) -> None:
    pytest.importorskip(package)
    page = (repository / "docs" / "search" / "controllers.md").read_text()
    programs = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    (program,) = (each for each in programs if f"{package}" in each)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(program, {})
    assert "(left: 10)" in shown.getvalue() and shown.getvalue().endswith("True\n")


# The examples of searches run, offline, with a checkpoint of random weights


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return save_tiny_model(folder, max_position_embeddings=1024)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("game24", ["Numbers left: 1 2 3 4", "(left: 24)", "tokens_decoded="]),
        pytest.param("mcts", ["SearchUsage("], marks=pytest.mark.soak),
        pytest.param(
            "adaptive", ["pens: ", "walk: ", "cake: ", "tokens decoded"], marks=pytest.mark.soak
        ),
        ("tool", ["tokens_decoded=", "nodes="]),
    ],
)
def test_example_runs(
    name: str,
    shown: list[str],
    checkpoint: Path,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = repository / "examples" / f"search_{name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60
    monkeypatch.setattr(sys, "argv", [path.name, str(checkpoint)])
    monkeypatch.setattr("rich._console", None)  # another program's settings of it may be left
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert not end.value.code
    printed = capsys.readouterr().out
    assert all(text in printed for text in shown), printed


@pytest.mark.soak
def test_methods_are_compared_at_equal_tokens(repository: Path, tmp_path: Path) -> None:
    script = repository / "examples" / "compare_methods.py"
    args = ["--budgets", "60", "--methods", "sample,ab-mcts rule=a", "--", "-L", "2"]
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "runs"), *args],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    _, _, plain, other = done.stdout.splitlines()
    assert plain.startswith("|sample|0.") and other.startswith("|ab-mcts rule=a|0.")
    assert " to " in other


def test_the_own_task_of_the_tutorial_is_searched(
    repository: Path, tmp_path: Path, treegen: Command
) -> None:
    text = (repository / "docs" / "tutorials" / "own-task.md").read_text()
    (program,) = (p for p in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Triples" in p)
    file = tmp_path / "triples.py"
    file.write_text(program)
    task = f"{file}:Triples"
    args = ["search", task, "--model", "demo", "-L", "4", "-o", tmp_path / "run", "-q", "--json"]
    done = treegen(*args)
    assert done.code == 0, done.err
    (run,) = done.document["runs"]
    assert run["settings"]["method"] == "best-first" and run["settings"]["evaluate"] == "nearness"
    assert run["num_solved"] == 4 and not run["errors"]
    listed = treegen(*args[:-3], tmp_path / "listed", "--propose", "all", *args[-2:])
    assert listed.code == 0, listed.err
    (run,) = listed.document["runs"]
    assert run["num_solved"] == 4 and not run["errors"]
    assert run["cost"]["tokens_decoded"]["mean"] == 0, "given steps are not decoded"
