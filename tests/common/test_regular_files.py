"""Every file that a user or a foreign run names is opened in one way: pipes and devices are errors.

Nobody writes into the pipes here, so whoever opens one waits for ever.
"""

import ast
import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_cases import Command
from foreign_logs import STAMP, generated_rows, write_lm_eval
from report_cases import make_run

from treegen.common.files import (
    NotRegularError,
    describe_read_error,
    open_regular,
    read_bytes,
    read_regular,
    read_text,
)
from treegen.errors import ModelError, TreegenError
from treegen.model.checkpoint.files import locate
from treegen.report.exchange import import_log

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(120)

# Files of treegen's own, of the system, or that this process has just made.
OWN = {
    "treegen/common/cores.py",
    "treegen/common/files.py",
    "treegen/evals/scoring/verdict_cache.py",
    "treegen/evals/judging/rubric.py",
    "treegen/common/host_memory.py",
    "treegen/report/audit/data_checks.py",
    "treegen/report/audit/__init__.py",
    "treegen/report/html_page.py",
    "treegen/runs/files.py",
    "treegen/runs/record_file.py",
    "tasks/common/sources.py",
    "tasks/environments/directories.py",
    "treegen/common/bounded/worker_server.py",
    "cli/main.py",
}
READERS = {"read_text", "read_bytes"}


def _opens(node: ast.AST) -> bool:
    """Whether a call opens a file by its path."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        named = getattr(node.func.value, "id", "")
        if node.func.attr in READERS:
            return True
        return node.func.attr == "open" and (
            named in ("path", "file", "gzip", "io", "os") or isinstance(node.func.value, ast.Call)
        )
    if not isinstance(node.func, ast.Name) or node.func.id != "open" or not node.args:
        return False
    first = node.args[0]
    if isinstance(first, ast.Call) and getattr(first.func, "id", "") == "open_regular":
        return False
    return not (isinstance(first, ast.Name) and first.id in ("fd", "handle"))


def test_no_other_code_opens_files() -> None:
    found = set()
    for folder in ("treegen", "tasks", "cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(("treegen/tasks/", "treegen/cli/", "tasks/sandbox/")):
                continue  # links to the same files, and the sandbox
            if any(map(_opens, ast.walk(ast.parse(path.read_text())))):
                found.add(name)
    assert found <= OWN, f"open them with treegen.common.files: {sorted(found - OWN)}"


def test_files_are_read_with_limits() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("treegen", "tasks", "cli")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "sandbox" not in path.parts and path.name != "worker_server.py"  # reads /proc
        for line in path.read_text().splitlines()
        if re.search(
            r"\b(file|stream)\.(read|readline|readlines)\(\)|in (enumerate\()?file[,:)]", line
        )
    ]
    assert not found, "read them with treegen.common.files"


@pytest.fixture
def pipe(tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        return path

    return make


@pytest.mark.parametrize("read", [open_regular, read_bytes, read_text])
def test_only_regular_files_are_read(
    read: Callable[[Path], object], tmp_path: Path, pipe: Callable[[str], Path]
) -> None:
    (link := tmp_path / "link").symlink_to("/dev/zero")
    for path in (pipe("pipe"), Path("/dev/zero"), Path("/dev/stdin"), link):
        if path.exists() and not path.is_file():
            with pytest.raises(NotRegularError) as caught:
                read(path)
            assert "the path is a pipe or a device" in describe_read_error(path, caught.value)
    with pytest.raises(IsADirectoryError):
        read(tmp_path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")
    assert read_regular(pipe("pipe"), 10) is None and read_regular(tmp_path, 10) is None


def test_what_is_written_follows_no_link(tmp_path: Path, pipe: Callable[[str], Path]) -> None:
    (tmp_path / "mine").write_text("mine")
    (link := tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic link") as caught:
        open_regular(link, os.O_WRONLY)
    assert caught.value.errno == errno.ELOOP
    with pytest.raises(NotRegularError):
        open_regular(pipe("pipe"), os.O_WRONLY | os.O_CREAT)
    os.close(open_regular(tmp_path / "new", os.O_WRONLY | os.O_CREAT))
    assert (tmp_path / "new").read_bytes() == b""


@pytest.mark.parametrize("name", ["log.eval", "log.json", f"results_{STAMP}.json"])
def test_logs(name: str, pipe: Callable[[str], Path], tmp_path: Path, treegen: Command) -> None:
    path = pipe(f"logs/{name}")
    for log in (path, path.parent) if name.startswith("results") else (path,):
        assert (
            "the path is a pipe or a device" in treegen("import", log, "-o", tmp_path / "run").error
        )
    assert not (tmp_path / "run").exists()


def test_logged_samples(pipe: Callable[[str], Path], tmp_path: Path) -> None:
    log = write_lm_eval(tmp_path / "logs", {"task": generated_rows()})
    pipe(f"logs/samples_task_{STAMP}.jsonl")
    with pytest.raises(TreegenError, match="the path is a pipe or a device"):
        import_log(log, tmp_path / "run")


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("task", "option", "name"),
    [
        ("gsm8k", "--data", "a.jsonl"),
        ("gsm8k", "--data", "a.csv"),
        ("gsm8k", "--data", "a.parquet"),
        ("gsm8k", "--data", "a.jsonl.gz"),
        ("gsm8k", "--data", "folder/test.jsonl"),
        ("gsm8k", "--fewshot-file", "a.jsonl"),
        ("gsm8k", "--fewshot-data", "a.jsonl"),
        ("jsonl", "--data", "a.jsonl"),
        ("math", "--data", "test/algebra/1.json"),
        ("mmlu", "--data", "test/anatomy_test.csv"),
        ("apps", "--data", "a.jsonl"),
        ("apps", "--data", "test/0000/question.txt"),
        ("mbpp", "--data", "a.jsonl"),
        ("livecodebench", "--data", "a.jsonl"),
        ("piqa", "--data", "valid.jsonl"),
        ("mmmu", "--data", "a.parquet"),
        ("gsm8k", "--config", "a.yaml"),
        ("gsm8k", "--json-schema", "a.json"),
        ("own.py:Own", "--task-path", "own.py"),
    ],
)
def test_data(
    task: str, option: str, name: str, pipe: Callable[[str], Path], treegen: Command
) -> None:
    path = pipe(name)
    given = path
    if "/" in name:
        given = path.parent if task in ("gsm8k",) else path.parents[name.count("/") - 1]
    if task.endswith("Own"):
        done = treegen("eval", path.with_name("own.py:Own"), "-M", "demo")
    else:
        done = treegen("eval", task, "-M", "demo", option, given)
    assert done.code == 2 and "Traceback" not in done.err
    assert done.err.splitlines()[-1].startswith("Error: ")


@pytest.mark.usefixtures("elsewhere")
def test_tasks_of_lm_eval(pipe: Callable[[str], Path], treegen: Command) -> None:
    pytest.importorskip("lm_eval")
    path = pipe("yamls/mine.yaml")
    for task in (str(path), f"lm-eval:mine@{path.parent}"):
        done = treegen("eval", task, "-M", "demo")
        assert done.code == 2 and "Traceback" not in done.err, done.err


@pytest.mark.usefixtures("elsewhere")
def test_texts_methods_and_traces(
    pipe: Callable[[str], Path], treegen: Command, tmp_path: Path
) -> None:
    texts = pipe("texts.jsonl")
    assert (
        "texts.jsonl: the path is a pipe or a device, which may never end; save the content in a"
        in treegen("score-texts", texts, "-M", "demo", "-o", tmp_path / "o").error
    )
    from treegen.integrations.score_texts import read_texts

    with pytest.raises(TreegenError, match="the path is a pipe or a device"):
        next(read_texts(texts))
    method = pipe("own.py")
    done = treegen("search", "countdown", "-M", "demo", "--method", f"{method}:f")
    assert "the path is a pipe or a device" in done.error
    from speculation import Trace

    from treegen.model.tokenizer import read_chat_template

    for read in (Trace.read, lambda path: read_chat_template(str(path))):
        with pytest.raises(TreegenError):
            read(texts)


@pytest.mark.parametrize("name", ["own.yaml", "own.jinja"])
def test_rubrics(name: str, pipe: Callable[[str], Path], treegen: Command, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_problems=2, num_samples=1)
    path = pipe(name)
    done = treegen("judge", run, "--judge", "demo", "--rubric", path)
    assert "cannot be read" in done.error
    from treegen.evals.judging.judgements import labels_of

    with pytest.raises(TreegenError, match="cannot be read"):
        labels_of(path, {"yes": 1.0, "no": 0.0}, "mine")


@pytest.mark.parametrize("name", ["verifier_scores.jsonl", "usc.jsonl"])
def test_votes_of_a_run(name: str, pipe: Callable[[str], Path], treegen: Command) -> None:
    from treegen.evals.scoring.universal_self_consistency import FILE
    from treegen.evals.scoring.vote_tables import SCORES

    file = FILE if name.startswith("usc") else SCORES
    path = pipe("run/x").parent
    shutil.rmtree(path)
    run = make_run(path, num_problems=2, num_samples=2)
    pipe(f"run/{file}")
    done = treegen("score", run)
    assert done.code == 2 and "the path is a pipe or a device" in done.error


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "other.safetensors"]
)
def test_models(name: str, model: Path, pipe: Callable[[str], Path], treegen: Command) -> None:
    path = pipe(f"{model.name}/{name}")
    with pytest.raises(ModelError, match=f"{path} is not a regular file but a pipe or a device"):
        locate(model, None, weights=True)
    assert "is not a regular file but a pipe or a device" in treegen("models", model).error


# What is said of a file that cannot be read


def read_error(path: Path) -> str:
    with pytest.raises(OSError) as caught:
        path.read_bytes()
    return describe_read_error(path, caught.value)


def test_a_missing_file_is_told_by_the_names_that_are_like_it(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").touch()
    assert read_error(tmp_path / "tset.jsonl").endswith(
        "does not exist; did you mean 'test.jsonl'?"
    )
    assert read_error(tmp_path / "q").endswith("q does not exist; check the path")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "dta" / "test.jsonl"
    where = f"{path} does not exist: there is no {tmp_path / 'dta'}; did you mean 'data'?"
    assert read_error(path) == where


def test_a_relative_name_is_looked_for_where_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test.jsonl").touch()
    assert read_error(Path("test.json")) == "test.json does not exist; did you mean 'test.jsonl'?"


def test_an_empty_path_is_named_as_such() -> None:
    with pytest.raises(OSError) as caught:
        read_text("")
    message = describe_read_error("", caught.value)
    assert message == "the path is empty; pass the path of a file"


def test_a_folder_is_told_with_a_file_of_it(tmp_path: Path) -> None:
    (tmp_path / "b.csv").touch()
    assert read_error(tmp_path).endswith(
        "the path is a folder; pass a file in the folder, such as b.csv"
    )


def test_other_reasons_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert read_error(tmp_path / "file" / "in").endswith("is a file, not a folder; check the path")
    assert "chmod u+r" in describe_read_error("x", PermissionError(13, "Permission denied"))
    assert "cannot read x: Input/output error" in describe_read_error(
        "x", OSError(5, "Input/output error")
    )
