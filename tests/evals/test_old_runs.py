"""Run directories that an earlier version made are read, resumed, scored again and compared.

tests/data/old_runs has the runs, their problems, and in expected.json the tables of then.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command

import treegen
from treegen.api.judging import judgings
from treegen.runs.settings import versions

RUNS = ("samples", "stopped", "choices", "programs", "judged", "imported", "searched")
SCORED = tuple(name for name in RUNS if name != "searched")
# The log of another tool has no model that could draw the rest of its run.
RESUMED = tuple(name for name in RUNS if name != "imported")
FOLDER = "/old/"
"""Where the runs name their problems."""


@pytest.fixture
def old(repository: Path, tmp_path: Path) -> Path:
    """A copy of the runs, as if made with the versions of today on problems at their new place."""
    folder = tmp_path / "old"
    shutil.copytree(repository / "tests" / "data" / "old_runs", folder)
    for path in folder.rglob("*.json"):
        text = path.read_text().replace(FOLDER, f"{folder}/")
        if path.name in ("run.json", "results.json"):
            for name, version in json.loads(text)["versions"].items():
                text = text.replace(
                    f'"{name}": "{version}"', f'"{name}": "{versions().get(name, version)}"'
                )
        path.write_text(text)
    return folder


def contents(run: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def lines_of(run: Path) -> Path:
    return run / ("trees.jsonl" if run.name == "searched" else "samples.jsonl")


def drawn(path: Path) -> dict[Any, Any]:
    """The samples or searches of a run, without what differs between two machines."""
    rows = map(json.loads, path.read_text().splitlines())
    return {
        (row["problem_id"], row.get("sample_index")): {
            name: row.get(name)
            for name in ("seed", "text", "num_tokens", "finish_reason", "prompt_hash", "solved")
        }
        for row in rows
    }


def tables_of(run: Path, folder: Path) -> str:
    return str(treegen.open_run(run)).replace(str(folder), FOLDER.rstrip("/"))


def tables(folder: Path) -> dict[str, str]:
    """The tables of the runs, of their judgements, and of two compared runs."""
    found = {name: tables_of(folder / name, folder) for name in RUNS}
    a, b = (treegen.open_run(folder / name) for name in ("stopped", "judged"))
    comparison = a.compare(b, partial=True).listing(all_filters=True)
    found["compared"] = str(comparison).replace(str(folder), FOLDER.rstrip("/"))
    found["judgements"] = str(judgings(folder / "judged"))
    return found


def test_old_runs_show_the_tables_of_then(old: Path) -> None:
    before = {name: contents(old / name) for name in RUNS}
    assert tables(old) == json.loads((old / "expected.json").read_text())
    assert before == {name: contents(old / name) for name in RUNS}


@pytest.mark.parametrize("name", SCORED)
def test_old_runs_are_scored_again_to_the_byte(name: str, old: Path, treegen: Command) -> None:
    before = contents(old / name)
    assert treegen("score", old / name, "--quiet").code == 0
    assert contents(old / name) == before


@pytest.mark.parametrize("name", RESUMED)
def test_finished_old_runs_stay_as_they_are(name: str, old: Path, treegen: Command) -> None:
    before = contents(old / name)
    command = "search" if name == "searched" else "eval"
    code = int(name == "programs")  # without permission to run programs the run is not scored
    assert treegen(command, "--resume", old / name, "--quiet").code == code
    after = contents(old / name)
    if name == "programs":
        assert json.loads(after.pop("results.json"))["report"] is None
        del before["results.json"]
    assert after == before


@pytest.mark.parametrize("name", RESUMED)
def test_old_runs_go_on_where_they_stopped(name: str, old: Path, treegen: Command) -> None:
    path = lines_of(old / name)
    whole, results = drawn(path), json.loads((old / name / "results.json").read_text())
    lines = path.read_bytes().splitlines(keepends=True)
    kept = b"".join(lines[: len(lines) // 2])
    path.write_bytes(kept)
    command = "search" if name == "searched" else "eval"
    code = int(name == "programs")  # as above
    assert treegen(command, "--resume", old / name, "--quiet").code == code
    assert path.read_bytes().startswith(kept)
    assert drawn(path) == whole
    again = json.loads((old / name / "results.json").read_text())
    assert again.get("stopping") == results.get("stopping")
    if name not in ("programs", "searched"):
        assert again["report"] == results["report"]
