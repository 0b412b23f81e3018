"""What docs/integrations shows of the server, Inspect and TRL."""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_cases import served

_SHOWN = re.compile(r"```(bash|py)\n((?:(?!```).)*)```\n\n```text\n(.*?)```", re.DOTALL)
_BLOCKS = re.compile(r"```py\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


@pytest.fixture(name="url", scope="module")
def _url() -> Iterator[str]:
    for name in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(name)
    with served("--model", "demo") as url:
        yield url


def test_the_client_of_the_page_gets_what_it_shows(repository: Path, url: str) -> None:
    pytest.importorskip("openai")
    ((program, shown),) = _BLOCKS.findall(_page(repository, "server"))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program.replace("http://127.0.0.1:8000/v1", url), {})
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    assert lines == shown.splitlines()


def test_the_clients_of_nodes_get_what_the_page_shows(repository: Path, url: str) -> None:
    pytest.importorskip("httpx2")
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    blocks = _SHOWN.findall(_page(repository, "nodes"))
    assert [kind for kind, _, _ in blocks] == ["bash", "py", "py"]
    for kind, program, shown in blocks:
        written = program.replace("http://127.0.0.1:8000", url.removesuffix("/v1"))
        run = ["bash", "-e"] if kind == "bash" else [sys.executable, "-"]
        done = subprocess.run(run, input=written, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == shown.splitlines()


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
    wanted = shown.splitlines()
    if has_tools:  # the rewards depend on the rounding of 120 steps before
        steps, wanted = ([line.partition(":")[0] for line in lines] for lines in (steps, wanted))
    assert steps == wanted
