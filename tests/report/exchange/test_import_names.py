"""Names from files never lead out of a folder, and a failed import removes what it made alone."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command
from foreign_logs import STAMP, generated_rows, write_lm_eval
from report_cases import content, edit_run, make_run

from treegen.common.files import file_name, is_path_component, path_component
from treegen.errors import InputError, ModelError, RunError, TreegenError
from treegen.model.checkpoint.files import check_weights, weight_files
from treegen.report.exchange import export_run, import_log
from treegen.report.load import load_run
from treegen.runs.settings import RunInfo, from_json, to_json
from treegen.tasks.imported import Imported

BAD = ["..", ".", "", "a/b", "/etc", "../out", "a\\b", "a\0b", "a\nb", "x" * 300, "\ud800"]


@pytest.fixture
def around(tmp_path: Path) -> Path:
    """A folder with a run, in which others are to be imported."""
    make_run(tmp_path / "runs" / "mine", num_problems=2, num_samples=1)
    (tmp_path / "runs" / "notes.txt").write_text("the user's own")
    return tmp_path / "runs"


@pytest.mark.parametrize("name", BAD)
def test_only_a_plain_name_becomes_a_part_of_a_path(name: str) -> None:
    assert not is_path_component(name)
    with pytest.raises(InputError, match=r"a task has the name .* use a name without"):
        path_component(name, "a task")


def test_plain_names_stay_as_they_are() -> None:
    for name in ("gsm8k", "leaderboard:bbh", "größe 2", "..a", ".hidden", "a b"):
        assert path_component(name, "a task") == name
    with pytest.raises(InputError):
        path_component(5, "a task")
    assert all(is_path_component(file_name(name)) for name in BAD)


@pytest.mark.parametrize("name", [name for name in BAD if "\0" not in name and len(name) < 200])
@pytest.mark.parametrize("broken", [False, True])
def test_a_task_whose_name_leads_elsewhere_touches_nothing(
    around: Path, name: str, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(around)
    log = write_lm_eval(around.parent / "log", {"good": generated_rows()})

    def add(results: dict[str, Any]) -> None:
        results["configs"][name] = results["configs"]["good"]

    results = json.loads(log.read_text())
    add(results)
    log.write_text(json.dumps(results))
    rows = "".join(f"{json.dumps(row)}\n" for row in generated_rows())
    if "/" not in name and "\ud800" not in name:
        log.with_name(f"samples_{name}_{STAMP}.jsonl").write_text(rows)
    if broken:
        monkeypatch.setattr("treegen.report.exchange.external_log.write_results", _fail)
    for out in (around / "imported", around / "imported" / "deep"):
        with pytest.raises(InputError, match="is not a valid file name"):
            import_log(log, out)
    assert content(around) == before
    assert not (around / "imported").exists()


def _fail(*args: object) -> None:
    raise OSError(28, "No space left on device")


def test_an_import_of_two_tasks_that_fails_changes_nothing(
    around: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = write_lm_eval(around.parent / "log", {"one": generated_rows(), "two": generated_rows()})
    (around / "here").mkdir()  # empty folders of the user's stay
    before = content(around)
    calls = []

    def fail_at_last(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("treegen.report.exchange.external_log.write_results", fail_at_last)
    for out in (around / "new", around / "here"):
        calls.clear()
        with pytest.raises(RunError, match="no space left on device; free some disk space"):
            import_log(log, out)
        assert content(around) == before
    assert (around / "here").is_dir() and not list((around / "here").iterdir())
    assert not (around / "new").exists()


def test_a_concurrently_created_file_is_kept(around: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = write_lm_eval(around.parent / "log", {"one": generated_rows()})

    def other_writes(*args: Any) -> None:
        (around / "new" / "samples.jsonl").write_text("another's")

    monkeypatch.setattr("treegen.report.exchange.external_log.write_results", other_writes)
    with pytest.raises(RunError, match="another program wrote to the directory"):
        import_log(log, around / "new")
    assert content(around / "new") == {"samples.jsonl": hashlib.sha256(b"another's").hexdigest()}


def test_a_file_that_appears_in_one_directory_ends_the_import_of_all(
    around: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = write_lm_eval(around.parent / "log", {"one": generated_rows(), "two": generated_rows()})
    before, calls = content(around), []

    def other_writes(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            (around / "new" / "two" / "samples.jsonl").write_text("another's")

    monkeypatch.setattr("treegen.report.exchange.external_log.write_results", other_writes)
    with pytest.raises(RunError, match="another program wrote to the directory"):
        import_log(log, around / "new")
    assert content(around).keys() - before.keys() == {"new/two/samples.jsonl"}


def test_an_undone_import_keeps_files_that_replaced_its_own(
    around: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = write_lm_eval(around.parent / "log", {"one": generated_rows(), "two": generated_rows()})
    rename = os.rename

    def other_writes(source: Path, target: Path) -> None:
        rename(source, target)
        if target.name == "samples.jsonl" and target.parent.name == "one":
            (other := around / "other").write_text("another's")
            os.replace(other, target)
            (around / "new" / "two" / "run.json").write_text("another's")

    monkeypatch.setattr("treegen.report.exchange.external_log.os.rename", other_writes)
    with pytest.raises(RunError, match="another program wrote to the directory"):
        import_log(log, around / "new")
    assert (around / "new" / "one" / "samples.jsonl").read_text() == "another's"
    assert (around / "new" / "two" / "run.json").read_text() == "another's"
    assert not (around / "new" / "two" / "samples.jsonl").exists()


def test_an_import_after_a_killed_import_succeeds(around: Path) -> None:
    log = write_lm_eval(around.parent / "log", {"one": generated_rows()})
    left = around / "new" / ".import.4000000.tmp"
    left.mkdir(parents=True)
    (left / "samples.jsonl").write_text("half a")
    (path,) = import_log(log, around / "new")
    assert not left.exists() and load_run(path).num_done == 3
    assert not list(path.glob(".import*"))
    info = json.loads((path / "run.json").read_text())
    assert info["settings"]["free"]["data"] == str(path / "problems.jsonl")


def test_one_good_task_can_be_named(around: Path, treegen: Command) -> None:
    log = write_lm_eval(around.parent / "log", {"..": generated_rows(), "good": generated_rows()})
    before = content(around)
    done = treegen("import", log, "-o", around / "new")
    assert done.code == 2 and done.err.count("\n") == 1 and content(around) == before
    assert treegen("import", log, "-o", around / "new", "--task", "good").code == 0
    assert load_run(around / "new").num_done == 3
    # One task alone needs no folder of its name, but the name of the samples' file is made of it.
    assert treegen("import", log, "-o", around / "other", "--task", "..").code == 2


@pytest.mark.parametrize("name", ["..", "a\0b", "../.."])
@pytest.mark.parametrize("to", ["lm-eval", "every-eval-ever", "inspect", "parquet"])
def test_an_export_stays_in_its_folder(tmp_path: Path, name: str, to: str) -> None:
    run = make_run(tmp_path / "runs" / "mine", num_problems=2, num_samples=1)

    def edit(document: dict[str, Any]) -> None:
        document["settings"]["free"]["model"] = name

    edit_run(run, edit)
    before = content(tmp_path)
    out = tmp_path / "out" / "deep"
    try:
        files = export_run(run, to, out / "made.eval" if to == "inspect" else out)
    except TreegenError:
        files = []
    assert all(file.resolve().is_relative_to(out) for file in files)
    assert {
        name: each for name, each in content(tmp_path).items() if not name.startswith("out/deep/")
    } == before


def test_arguments_of_an_imported_task_may_be_nested_too_deeply() -> None:
    for filters in ("[" * 200_000, "{}", '[""]', "[NaN]"):
        with pytest.raises(InputError, match=r"import the log again|JSON list of names"):
            Imported().configure({"filters": filters})


def test_the_time_of_a_run_is_a_time(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_problems=2, num_samples=1)
    edit_run(run, lambda document: document.update(created="/../../2026"))
    with pytest.raises(RunError, match=r"run\.json is corrupt"):
        load_run(run)


def test_stored_data_are_looked_for_in_the_run_alone(tmp_path: Path) -> None:
    from treegen.evals.config.base import find_moved_files

    run = tmp_path / "run"
    run.mkdir()
    (run / "problems.jsonl").touch()
    assert find_moved_files(run, {"data": "/gone/.."}) == {"data": "/gone/.."}
    assert find_moved_files(run, {"data": "/gone/problems.jsonl"})["data"] == str(
        run / "problems.jsonl"
    )


def test_an_index_of_weights_names_files_of_its_folder(tmp_path: Path) -> None:
    for name in ("../other.safetensors", "/etc/passwd", "..", "a/b"):
        index = {"weight_map": {"a": name}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        for read in (check_weights, weight_files):
            with pytest.raises(ModelError, match="is not a valid file name"):
                read(tmp_path)


def test_settings_come_back(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_problems=2, num_samples=1)
    info: RunInfo = from_json(json.loads((run / "run.json").read_text()), "run.json")
    assert from_json(to_json(info), "run.json") == info
