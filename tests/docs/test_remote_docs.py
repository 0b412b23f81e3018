"""What docs/integrations shows of searches on a server, and the examples that drive its nodes."""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from cli_cases import served

for _name in ("httpx2", "openai", "prometheus_client", "starlette", "uvicorn"):
    pytest.importorskip(_name)

_BLOCKS = re.compile(r"```py\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)
_URL = "http://127.0.0.1:8000/v1"


@pytest.fixture(name="url", scope="module")
def _url(repository: Path) -> Iterator[str]:
    page = (repository / "docs" / "integrations" / "search-methods.md").read_text()
    (line,) = re.findall(r"^treegen serve (.*)$", page, re.MULTILINE)
    with served(*shlex.split(line)) as url:
        yield url


@pytest.mark.parametrize("name", ["search-methods", "client"])
def test_the_program_of_a_page_prints_what_it_shows(
    repository: Path, url: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (repository / "docs" / "integrations" / f"{name}.md").read_text()
    ((program, shown),) = _BLOCKS.findall(page)
    assert _URL in program
    exec(program.replace(_URL, url), {})
    printed = capsys.readouterr().out
    # How many calls share a request depends on when they are made.
    pages = (re.sub(r"\d+ requests", "N requests", text) for text in (printed, shown))
    lines, expected = ([line.rstrip() for line in text.splitlines()] for text in pages)
    assert lines == expected


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
