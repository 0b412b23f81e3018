"""What docs/integrations shows of the server and its clients, Inspect and TRL."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cli_cases import served

_SHOWN = re.compile(r"```(bash|py)\n((?:(?!```).)*)```\n\n```text\n(.*?)```", re.DOTALL)
_BLOCKS = re.compile(r"```py\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
_URL = "http://127.0.0.1:8000/v1"


@pytest.fixture(name="url", scope="module")
def _url(repository: Path) -> Iterator[str]:
    """The address of the server that the page on search methods starts."""
    for name in ("httpx2", "openai", "prometheus_client", "starlette", "uvicorn"):
        pytest.importorskip(name)
    (line,) = re.findall(r"^treegen serve (.*)$", _page(repository, "search-methods"), re.MULTILINE)
    with served(*shlex.split(line)) as url:
        yield url


def test_the_clients_of_nodes_get_what_the_page_shows(
    repository: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    blocks = _SHOWN.findall(_page(repository, "nodes"))
    assert [kind for kind, _, _ in blocks] == ["bash", "py", "py"]
    for kind, program, shown in blocks:
        written = program.replace("http://127.0.0.1:8000", url.removesuffix("/v1"))
        if kind == "py":
            names: dict[str, Any] = {}
            exec(written, names)
            names["server"].close()
            printed = capsys.readouterr().out
        else:
            done = subprocess.run(
                ["bash", "-e"], input=written, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            printed = done.stdout
        assert printed.splitlines() == shown.splitlines()


@pytest.mark.parametrize("name", ["search-methods", "client", "server"])
def test_the_program_of_a_page_prints_what_it_shows(
    repository: Path, url: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ((program, shown),) = _BLOCKS.findall(_page(repository, name))
    assert _URL in program
    exec(program.replace(_URL, url), {})
    printed = capsys.readouterr().out
    # How many calls share a request depends on when they are made.
    pages = (re.sub(r"\d+ requests", "N requests", text) for text in (printed, shown))
    lines, expected = ([line.rstrip() for line in text.splitlines()] for text in pages)
    assert lines == expected


def test_a_tool_is_called_as_the_page_shows(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("openai", "prometheus_client", "starlette", "uvicorn", "llguidance"):
        pytest.importorskip(name)
    page = _page(repository, "tools")
    ((program, shown),) = _BLOCKS.findall(page)
    (command,) = re.findall(r"```bash\ntreegen serve (.*?)```", page, re.DOTALL)
    with served(*shlex.split(command.replace("\\\n", " "))) as url:
        names: dict[str, Any] = {}
        exec(program.replace(_URL, url), names)
        names["client"].close()
    assert capsys.readouterr().out == shown


def _page(repository: Path, name: str) -> str:
    return (repository / "docs" / "integrations" / f"{name}.md").read_text()


@pytest.mark.soak
def test_inspect_runs_the_eval_of_the_page(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("inspect_ai")
    ((block, shown),) = re.findall(
        r"```bash\n(.*?)```.*?```text\n(.*?)```", _page(repository, "inspect"), re.DOTALL
    )
    install, script = block.split("\n", 1)
    assert install == "pip install '.[inspect]'"
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-e"],
        input=script,
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert shown.splitlines()[0].split() in lines
    accuracy = next(float(line[1]) for line in lines if line[:1] == ["accuracy"])
    assert accuracy > 0.5


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning")
@pytest.mark.parametrize("has_tools", [False, True])
def test_trl_trains_as_the_page_shows(
    has_tools: bool, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl")
    blocks = re.findall(r"```py\n(.*?)```.*?```text\n(.*?)```", _page(repository, "trl"), re.DOTALL)
    assert len(blocks) == 2
    program, shown = blocks[has_tools]
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {})
    steps = [line for line in printed.getvalue().splitlines() if line.startswith("step ")]
    expected = shown.splitlines()
    if has_tools:  # the rewards depend on the rounding of 120 steps before
        steps, expected = (
            [line.partition(":")[0] for line in lines] for lines in (steps, expected)
        )
    assert steps == expected


# Examples that drive the nodes of a server


def needs(package: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test without a package, before its server starts."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        pytest.param(
            "remote_treequest",
            r"\d+ nodes, \d+ requests\n.*\(left: 10\)",
            marks=needs("treequest"),
        ),
        pytest.param("remote_reasoners", r"[\d/]+ .*", marks=needs("reasoners")),
        ("remote_rollouts", r"(\d sequences: \d+ tokens in segments, \d+ .*\n){4}"),
    ],
    ids=("treequest", "reasoners", "rollouts"),
)
def test_examples_drive_remote_nodes(
    repository: Path,
    url: str,
    name: str,
    shown: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = repository / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 60
    runpy.run_path(str(path))["main"](url)
    assert re.match(shown, capsys.readouterr().out, re.DOTALL)


def test_the_client_table_names_its_script(repository: Path) -> None:
    page = (repository / "docs" / "integrations" / "client.md").read_text()
    (script,) = re.findall(r"python (examples/benchmarks/\w+\.py)", page)
    assert (repository / script).is_file()
