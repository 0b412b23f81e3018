"""Runs come from other people: their links lead to no file of the reader's, their pipes block none.

A folder that somebody has packed may have links to anywhere in the places of a run's files.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_cases import Command
from report_cases import make_run, make_search_run

from treegen.api.run import open_run
from treegen.errors import RunError, TreegenError
from treegen.evals.progress.run_progress import RunProgress
from treegen.evals.progress.usage import NAME, Timeline, read_timeline
from treegen.report.exchange import export_run
from treegen.report.load import load_run
from treegen.runs.files import Lock, check_no_link, read_json
from treegen.runs.record_file import RecordFile

PRECIOUS = b"the user's own\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", num_problems=2, num_samples=2)


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file of the user's own, outside of the run."""
    file = tmp_path / "mine"
    file.write_bytes(PRECIOUS)
    return file


def replaced(file: Path, target: Path) -> Path:
    """Put a link in the place of a file."""
    file.unlink(missing_ok=True)
    file.symlink_to(target)
    return file


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", ["score", "show", "report", "compare", "replay"])
@pytest.mark.parametrize("target", ["mine", "none"])
def test_a_lock_that_is_a_link_is_not_followed(
    treegen: Command, run: Path, precious: Path, name: str, target: str
) -> None:
    replaced(run / "run.lock", precious.with_name(target))
    done = treegen(name, run, *([run] if name == "compare" else []))
    assert done.code in (0, 2) and "Traceback" not in done.err
    assert precious.read_bytes() == PRECIOUS and not precious.with_name("none").exists()


def test_a_run_with_such_a_lock_is_not_resumed(run: Path, precious: Path) -> None:
    with pytest.raises(RunError, match=r"run\.lock is a symbolic link.*remove the link"):
        Lock(replaced(run / "run.lock", precious))
    assert precious.read_bytes() == PRECIOUS


def test_records_are_not_mended_through_a_link(run: Path, precious: Path) -> None:
    # Its one line looks like what a crash has left, which is cut off.
    link = replaced(run / "samples.jsonl", precious)
    with pytest.raises(RunError, match="the path is a symbolic link"):
        RecordFile(link, writable=True)
    assert precious.read_bytes() == PRECIOUS


@pytest.mark.parametrize(
    "command",
    [["usc"], ["verify", "--verifier"], ["judge", "--judge"], ["eval", "--resume"]],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("of", ["lock", "jsonl"])
def test_commands_that_append_follow_no_link(
    treegen: Command, tiny: Path, tmp_path: Path, precious: Path, command: list[str], of: str
) -> None:
    run = make_run(tmp_path / "run", num_problems=2, num_samples=2, checkpoint=tiny, done=[2, 1])
    first, *rest = command
    words = {
        "usc": [first, run],
        "verify": [first, run, *rest, tiny, "--mark", "\n", "--tokens", "a", "b"],
        "judge": [first, run, *rest, tiny],
        "eval": [first, *rest, run],
    }[first]
    whole = shutil.copytree(run, tmp_path / "whole")
    treegen(*words)
    for file in [*run.rglob(f"*.{of}")]:
        replaced(file, precious)
    if of == "lock":  # what there was is there
        shutil.copytree(whole, run, ignore=shutil.ignore_patterns("*.lock"), dirs_exist_ok=True)
    done = treegen(*words)
    assert "Traceback" not in done.err
    assert precious.read_bytes() == PRECIOUS


def test_a_timeline_is_not_written_through_a_link(run: Path, precious: Path) -> None:
    replaced(run / NAME, precious)
    Timeline(run, 0).note(RunProgress(1, 1, 1, 1, 1, 1, 1.0, None), last=True)
    assert precious.read_bytes() == PRECIOUS


WRITTEN: dict[str, Callable[[Path], object]] = {
    "lm-eval": lambda run: export_run(run, "lm-eval"),
    "every-eval-ever": lambda run: export_run(run, "every-eval-ever"),
    "parquet": lambda run: export_run(run, "parquet"),
    "inspect": lambda run: export_run(run, "inspect"),
    "report": lambda run: open_run(run).report(),
}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", WRITTEN)
def test_writes_do_not_follow_links_out_of_a_run(run: Path, precious: Path, name: str) -> None:
    for package in {"parquet": ["pyarrow", "pandas"], "inspect": ["inspect_ai"]}.get(name, []):
        pytest.importorskip(package)
    before = {*run.rglob("*")}
    WRITTEN[name](run)
    written = [file for file in run.rglob("*") if file not in before and file.is_file()]
    assert written
    for file in written if name != "inspect" else []:
        replaced(file, precious)
    # Names of scratch files can be guessed.
    if name == "parquet":
        replaced(run / "parquet" / "samples.tmp", precious)
    if name == "inspect":
        replaced(run / f".{run.name}.part.eval", precious)
    WRITTEN[name](run)
    assert precious.read_bytes() == PRECIOUS
    assert all(file.is_file() and not file.is_symlink() for file in written)


@pytest.mark.parametrize("name", ["lm-eval", "every-eval-ever", "parquet", "report_plots"])
def test_no_folder_in_a_run_leads_out_of_it(run: Path, tmp_path: Path, name: str) -> None:
    (other := tmp_path / "other").mkdir()
    replaced(run / name, other)
    with pytest.raises(RunError, match="is a symbolic link that leads out of the run"):
        WRITTEN[name.partition("_")[0]](run)
    assert not [*other.iterdir()]


def test_plots_of_a_comparison_stay_in_the_run(treegen: Command, run: Path, tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    replaced(run / "compared_with_run", other)
    done = treegen("compare", run, run)
    assert done.code == 2 and "is a symbolic link that leads out of the run" in done.err
    assert not [*other.iterdir()]


def test_a_run_may_be_reached_by_a_link(run: Path, tmp_path: Path) -> None:
    (link := tmp_path / "link").symlink_to(run)
    assert load_run(link).num_done == 4
    assert export_run(link, "lm-eval")
    check_no_link(link, link / "a" / "b")


@pytest.mark.parametrize("name", ["run.json", "samples.jsonl", "progress.jsonl", "results.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_in_a_run_do_not_block(run: Path, name: str, kind: str) -> None:
    file = run / name
    if kind == "device":
        replaced(file, Path("/dev/zero"))
    else:
        file.unlink(missing_ok=True)
        os.mkfifo(file)
    if name == "progress.jsonl":  # nothing depends on it
        assert read_timeline(run) == [] and load_run(run).num_done == 4
    elif name == "results.json":
        with pytest.raises(RunError, match="pipe or a device"):
            read_json(file)
    else:
        remedy = (
            "replace the path with a copy" if name == "samples.jsonl" else "which may never end"
        )
        with pytest.raises(RunError, match=f"the path is a pipe or a device.*{remedy}"):
            load_run(run)


@pytest.mark.parametrize("name", ["data", "fewshot_data", "fewshot_file"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_no_device_is_read_for_data(
    treegen: Command, run: Path, tmp_path: Path, name: str, kind: str
) -> None:
    place = "/dev/zero"
    if kind == "pipe":
        os.mkfifo(place := str(tmp_path / "pipe"))
    document = json.loads((run / "run.json").read_text())
    document["settings"]["free"][name] = place
    (run / "run.json").write_text(json.dumps(document))
    message = f"the {name} of the run must be a regular file, but {place} is a pipe or a device"
    assert any(message in notice for notice in load_run(run).notices)
    assert "is a pipe or a device" in treegen("score", run).error


def test_a_pipe_for_trees_is_an_error(tmp_path: Path) -> None:
    run = make_search_run(tmp_path / "run", num_problems=2)
    (run / "trees.jsonl").unlink()
    os.mkfifo(run / "trees.jsonl")
    with pytest.raises(TreegenError, match="the path is a pipe or a device; replace the path"):
        load_run(run)
