"""`treegen search` on tasks of files: Harbor's folders and repair, in each environment."""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command, run_command
from e2b_cases import KEY, Cloud
from e2b_cases import cloud as cloud
from harbor_cases import save_tasks, save_writer_model

from treegen.runs import RecordFile, SearchRunDir

pytestmark = [
    pytest.mark.usefixtures("elsewhere"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
FEW = ["--depth", "4", "--max-tokens", "160", "--memory", "16MiB", "--temperature", "0.3"]
TWO = [*FEW, "-m", "best-of-n", "-n", "2", "--allow-code-execution"]


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_writer_model(tmp_path_factory.mktemp("writer"))


def records_of(path: Path) -> dict[str, dict[str, Any]]:
    names = ("solved", "scores", "answer", "nodes", "best", "candidates", "stopped")
    with SearchRunDir.open(path) as run:
        return {r["problem_id"]: {name: r[name] for name in names} for r in run.records()}


def environment_options(name: str) -> list[str]:
    if name.startswith("inspect"):
        pytest.importorskip("inspect_ai")
    return ["--environment", name, *(["--sandbox", "none"] if name == "inspect:local" else [])]


@pytest.mark.parametrize("name", ["local", "inspect:local", "e2b"])
def test_harbor_tasks_are_scored_by_their_own_tests(
    treegen: Command, writer: Path, cloud: Cloud, tmp_path: Path, name: str
) -> None:
    tasks = save_tasks(tmp_path / "tasks", "easy")
    save_tasks(tasks, "hard", **{"tests/wanted.py": "TEXT = '43'\n"})
    save_tasks(tasks, "made", **{"environment/Dockerfile": "FROM x\nRUN make\n"})
    run = tmp_path / "run"
    args = ["search", "harbor", "--data", tasks, *environment_options(name)]
    done = treegen(*args, "-M", writer, *TWO, "-o", run)
    assert done.code == 0, done.err
    (line,) = [line for line in done.err.splitlines() if "skipped: " in line]
    assert f"{name} cannot build the Harbor task made" in line and "RUN make" in line
    said = [line for line in done.err.splitlines() if line.startswith(("sandbox: ", "forks: "))]
    assert len(said) == (2 if name == "local" else 0)
    records = records_of(run)
    assert set(records) == {"easy", "hard"}
    assert records["easy"]["solved"] and records["easy"]["scores"] == {"reward": 1.0}
    assert not records["hard"]["solved"] and records["hard"]["scores"] == {"reward": 0.0}
    lines = list(RecordFile(run / "actions.jsonl", writable=False).records())
    assert any(line["action"]["name"] == "write_file" for line in lines)
    assert not cloud.sandboxes and list(cloud.templates) == ["base"]
    assert (name == "e2b") == bool(cloud.requests)
    files = [path for path in run.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    assert not [path for path in files if b"wanted" in path.read_bytes()]
    # Without its trees, the run reads its stored actions. It runs them again to score new copies of
    # the worlds, because the snapshots of a finished run are deleted.
    os.truncate(run / "trees.jsonl", 0)
    consent = ["--allow-code-execution", *environment_options(name)[2:]]
    with pytest.warns(RuntimeWarning, match="treegen runs stored actions again"):
        done = treegen("search", "--resume", run, *consent)
    assert done.code == 0, done.err
    assert records_of(run) == records
    if name == "e2b":
        page = tmp_path / "report.html"
        assert treegen("report", run, "--no-plots", "-o", page).code == 0
        assert KEY not in page.read_text()


@pytest.mark.parametrize("name", ["local", "inspect:local", "e2b"])
def test_a_killed_run_goes_on(
    treegen: Command, writer: Path, cloud: Cloud, tmp_path: Path, name: str
) -> None:
    tasks = save_tasks(tmp_path / "tasks", *"ab")
    options = ["--data", tasks, *environment_options(name), "-M", writer, *TWO]
    options += ["--concurrency", "1"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert treegen("search", "harbor", *options, "-o", whole).code == 0
    actions = killed / "actions.jsonl"
    pid = os.fork()  # this process has imported the libraries already, which takes seconds
    if pid == 0:
        with suppress(BaseException):
            run_command("search", "harbor", *options, "-o", killed)
        os._exit(0)
    while not (actions.exists() and actions.read_bytes()):
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0) == (pid, signal.SIGKILL)
    before = actions.read_bytes().splitlines()
    assert KEY not in (killed / "run.json").read_text()
    consent = ["--allow-code-execution", *environment_options(name)[2:]]
    done = treegen("search", "--resume", killed)
    assert done.code == 2 and "--allow-code-execution" in done.err
    done = treegen("search", "--resume", killed, *consent)
    assert done.code == 0, done.err
    assert records_of(killed) == records_of(whole)
    assert all(record["solved"] for record in records_of(killed).values())
    assert actions.read_bytes().splitlines()[: len(before) - 1] == before[:-1]


def test_what_an_environment_cannot_do_is_refused(
    treegen: Command, writer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text("#!/bin/sh\necho no daemon >&2\nexit 1\n")
    (tmp_path / "bin" / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    tasks = save_tasks(tmp_path / "tasks", "one")
    made = save_tasks(tmp_path / "made", "two", **{"environment/Dockerfile": "FROM x\nRUN make\n"})
    allow = ["--allow-code-execution"]
    for args, message in (
        (["harbor"], "set --data to a task folder or to a folder of task folders"),
        (["harbor", "--data", tasks / "one" / "tests"], "no readable Harbor task was found in"),
        (["harbor", "--data", made, *allow], "has the step RUN make"),
        (["harbor", "--data", tasks], "--allow-code-execution"),
        (["harbor", "--data", tasks, "--environment", "docker"], "no environment 'docker'"),
        (["harbor", "--data", tasks, "--environment", "local:x", *allow], "must be local, inspect"),
        (["repair", "--environment", "e2b:", *allow], "must be e2b, inspect:NAME"),
        (["repair", "--environment", "e2b", *allow], "E2B_API_KEY"),
        (["repair", "--environment", "inspect:local", *allow], "--sandbox none"),
        (["repair", "--environment", "inspect", *allow], "docker does not run (no daemon)"),
    ):
        done = treegen("search", *args, "-M", writer, "-o", tmp_path / "run")
        assert done.code == 2 and message in done.err, (args, done.err)
        assert not (tmp_path / "run").exists(), args
    done = treegen("eval", "harbor", "--data", tasks, "-M", writer)
    assert done.code == 2 and "use `treegen search harbor`" in done.err


def test_a_run_of_harbor_is_bound_to_its_files(
    treegen: Command, writer: Path, tmp_path: Path
) -> None:
    tasks, run = save_tasks(tmp_path / "tasks", "one"), tmp_path / "run"
    assert treegen("search", "harbor", "--data", tasks, "-M", writer, *TWO, "-o", run).code == 0
    assert json.loads((run / "run.json").read_text())["settings"]["free"]["data"] == str(tasks)
    save_tasks(tasks, "one", **{"tests/wanted.py": "TEXT = ''\n"})
    done = treegen("search", "--resume", run, "--allow-code-execution")
    assert done.code == 2, done.err
