"""Commands that read a run that names code: none of it runs unless the reader says so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command
from report_cases import make_run, make_search_run

from treegen.api.run import open_run
from treegen.errors import InputError
from treegen.evals.config.base import merge_choices
from treegen.evals.config.eval_settings import EvalSettings, resolve_eval_settings, stored_choices
from treegen.evals.registry import ENTRY_POINT_GROUP
from treegen.evals.search.settings import resolve_search_settings, stored_search_choices
from treegen.report.load import load_run
from treegen.runs import RunDir, SearchRunDir

pytestmark = pytest.mark.usefixtures("elsewhere")

TASK = """
from pathlib import Path
with Path({marker!r}).open("a") as file:
    file.write("ran ")
from treegen.tasks.{module} import {base}

class T({base}):
    name = "theirs"
"""
METHOD = """
from pathlib import Path
with Path({marker!r}).open("a") as file:
    file.write("ran ")

async def solve(root):
    pass
"""
READERS: dict[str, Callable[[Path], list[object]]] = {
    "show": lambda run: ["show", run],
    "report": lambda run: ["report", run, "--no-plots"],
    "score": lambda run: ["score", run],
    "compare": lambda run: ["compare", run, run, "--no-plots"],
    "replay": lambda run: ["replay", run],
    "power": lambda run: ["power", "--run", run],
    "export": lambda run: ["export", run, "--to", "lm-eval"],
    "judge": lambda run: ["judge", run, "--judge", "demo"],
    "usc": lambda run: ["usc", run],
    "verify": lambda run: ["verify", run, "--verifier", "none"],
    "eval": lambda run: ["eval", "--resume", run],
}


class Planted:
    """A file that tells whether it was run."""

    def __init__(self, folder: Path, content: str, **names: str) -> None:
        folder.mkdir()
        self.file, self._marker = folder / "t.py", folder / "marker"
        self.file.write_text(content.format(marker=str(self._marker), **names))

    @property
    def ran(self) -> bool:
        """Whether it was run since it was asked last."""
        there = self._marker.exists()
        self._marker.unlink(missing_ok=True)
        return there


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    return Planted(tmp_path / "theirs", TASK, module="gsm8k", base="GSM8K")


@pytest.fixture
def run(planted: Planted, tmp_path: Path) -> Path:
    """A run of a task in a file."""
    path = make_run(tmp_path / "run", num_problems=3, num_samples=2, task=f"{planted.file}:T")
    assert planted.ran
    return path


@pytest.mark.parametrize("name", READERS)
def test_reading_a_run_runs_nothing_that_it_names(
    treegen: Command, run: Path, planted: Planted, name: str
) -> None:
    done = treegen(*READERS[name](run))
    assert not planted.ran, done
    output = f"{done.out}{done.err}"
    assert "Traceback" not in output
    if name not in ("compare", "replay", "power", "export"):  # these say that nothing is judged
        assert str(planted.file) in output and "--allow-task-code" in output


@pytest.mark.parametrize("name", ["show", "report", "score", "compare", "replay", "power"])
@pytest.mark.parametrize("how", ["task", "allow"])
def test_a_reader_may_name_the_code_or_allow_it(
    treegen: Command, run: Path, planted: Planted, tmp_path: Path, name: str, how: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(planted.file.read_text())
    if how == "task":  # a file of the reader's own, and not the one that the run names
        planted.file.write_text("raise SystemExit('the wrong file')")
    named = ["--task", f"{path}:T"] if how == "task" else ["--allow-task-code"]
    done = treegen(*READERS[name](run), *named)
    assert done.code == 0, done.err
    assert planted.ran and "does not run this code without permission" not in done.err
    # It is not remembered.
    assert ":T" not in (run / "run.json").read_text().replace(f"{planted.file}:T", "")
    treegen(*READERS[name](run))
    assert not planted.ran


def test_a_task_that_is_named_must_be_that_of_the_run(
    treegen: Command, run: Path, planted: Planted
) -> None:
    assert (
        "is a run of the task theirs, not of the task gsm8k"
        in treegen("score", run, "--task", "gsm8k").error
    )
    assert not planted.ran
    with pytest.raises(InputError, match="is a run of the task theirs, not of the task gsm8k"):
        load_run(run, task="gsm8k")


def test_frames_run_nothing_either(run: Path, planted: Planted) -> None:
    pytest.importorskip("pandas")
    frames = open_run(run)
    assert not planted.ran and len(frames.samples()) == 6
    assert "correct" not in frames.samples() and "allow_task_code=True" in frames.view.notices[0]
    assert "correct" in open_run(run, allow_task_code=True).samples() and planted.ran


def test_tasks_of_installed_packages_do_not_run_unasked(
    treegen: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = Planted(tmp_path / "site", TASK, module="gsm8k", base="GSM8K")
    planted.file.rename(planted.file.with_name("their_package.py"))
    info = tmp_path / "site" / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\ntheirs = their_package:T\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    path = make_run(tmp_path / "run", num_problems=2, num_samples=1, task="theirs")
    monkeypatch.delitem(__import__("sys").modules, "their_package")
    assert planted.ran
    error = treegen("score", path).error
    assert "their_package:T of their-package" in error and not planted.ran
    assert treegen("score", path, "--task", "theirs").code == 0 and planted.ran


def _searched(folder: Path, file: Path) -> Path:
    return make_search_run(folder, num_problems=2, method=f"{file}:solve")


@pytest.mark.parametrize("name", ["show", "report", "compare"])
def test_looking_at_a_search_never_runs_its_method(
    treegen: Command, tmp_path: Path, name: str
) -> None:
    planted = Planted(tmp_path / "theirs", METHOD)
    path = _searched(tmp_path / "run", planted.file)
    assert planted.ran
    done = treegen(*READERS[name](path))
    assert done.code == 0, done.err
    assert not planted.ran and "cannot be read" not in done.err
    assert treegen(*READERS[name](path), "--allow-task-code").code == 0
    assert not planted.ran  # it is of no use here


def test_a_search_goes_on_by_the_file_that_the_command_names(
    treegen: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = Planted(tmp_path / "theirs", METHOD)
    path = _searched(tmp_path / "run", planted.file)
    assert planted.ran
    error = treegen("search", "--resume", path).error
    assert str(planted.file) in error and "--allow-task-code" in error and not planted.ran
    # A short name is that of a file here, and not of the one there.
    (tmp_path / "t.py").write_text(planted.file.read_text().replace("ran ", "mine"))
    planted.file.write_text("raise SystemExit('the wrong file')")
    monkeypatch.chdir(tmp_path)
    with SearchRunDir.open(path) as opened:
        stored = stored_search_choices(opened.info)
    settled = resolve_search_settings({"method": "t.py:solve"}, stored)
    assert settled.place == str(tmp_path / "t.py") + ":solve" and planted.ran
    with pytest.raises(InputError, match="the wrong file"):
        resolve_search_settings({"allow_task_code": True}, stored)


def test_a_search_of_a_task_in_a_file(treegen: Command, tmp_path: Path) -> None:
    planted = Planted(tmp_path / "theirs", TASK, module="puzzles.base", base="Countdown")
    path = make_search_run(tmp_path / "run", num_problems=2, task=f"{planted.file}:T")
    assert planted.ran
    for words in (["show", path], ["report", path, "--no-plots"]):
        done = treegen(*words)
        assert done.code == 0 and not planted.ran and "--allow-task-code" in done.err
        assert treegen(*words, "--task", f"{planted.file}:T").code == 0 and planted.ran


def test_code_of_a_model_is_trusted_for_one_command(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_problems=1, num_samples=1, trust_remote_code=True)
    with RunDir.open(run) as opened:
        assert opened.info.free["trust_remote_code"] is True  # it is noted, and nothing more
        stored = stored_choices(opened.info)
    assert resolve_eval_settings({}, stored).engine.trust_remote_code is False
    assert (
        resolve_eval_settings({"trust_remote_code": True}, stored).engine.trust_remote_code is True
    )


@pytest.mark.parametrize("command", ["usc", "eval"])
def test_a_model_that_was_trusted_has_to_be_trusted_again(
    treegen: Command, model: Path, tmp_path: Path, command: str
) -> None:
    marker = tmp_path / "marker"
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "planted.Config", "AutoModelForCausalLM": "planted.Model"}
    (model / "config.json").write_text(json.dumps(config))
    (model / "planted.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    run = make_run(
        tmp_path / "run",
        num_problems=2,
        num_samples=2,
        done=[2, 1],
        trust_remote_code=True,
        model=str(model),
        task="gsm8k",
    )
    done = treegen(*READERS[command](run))
    assert done.code == 2 and not marker.exists()
    assert "--trust-remote-code" in done.err and "Traceback" not in done.err
    treegen(*READERS[command](run), "--trust-remote-code")
    assert marker.exists()


def test_no_choice_that_runs_code_is_taken_from_a_run() -> None:
    stored: dict[str, Any] = {"task": "gsm8k", "trust_remote_code": True, "allow_task_code": True}
    assert "trust_remote_code" not in merge_choices(EvalSettings, {}, stored)
    with pytest.raises(InputError, match="does not run this code without permission"):
        merge_choices(EvalSettings, {}, {**stored, "task": "t.py:T"})
    assert (
        merge_choices(EvalSettings, {"allow_task_code": True}, {**stored, "task": "t.py:T"})["task"]
        == "t.py:T"
    )
