"""What the documentation shows: its programs run, and its commands have the options they name."""

import json
import re
import shlex
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import click
import pytest
from click.testing import CliRunner

from treegen.cli.main import cli
from treegen.tasks import get_task, list_tasks

_PAGES = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in (
            "index",
            "coming-from/transformers",
            "coming-from/vllm",
            "concepts",
            "guides/compare",
            "guides/confidence",
            "guides/frames",
            "guides/reasoning",
            "integrations/server",
            "integrations/training",
            "judging",
            "runs",
            "search",
            "search/ab-mcts",
            "search/budgets",
            "search/loops",
            "search/own-methods",
            "search/refine",
            "search/sandboxes",
            "search/verifiers",
            "speculation",
            "tasks",
            "tasks/puzzles",
            "trust",
            "reference/sampling",
            "reference/api/estimates",
            "reference/api/evaluate",
            "reference/api/llm",
            "reference/api/node",
            "reference/api/plan",
            "reference/api/run-directory",
            "reference/api/search-result",
        )
    ),
    *(
        f"docs/tutorials/{name}.md"
        for name in ("gsm8k", "own-task", "own-search", "own-attention", "prompts")
    ),
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def attention_implementations() -> None:
    """A page registers an implementation, which is for the whole process: once is enough."""
    from treegen.ops.attention.registry import LOADERS

    LOADERS.pop("row-by-row", None)


# Their programs take more than ten seconds of CPU time, those of the other pages up to three.
_LONG = ("docs/notebooks.md", "docs/tutorials/tools.md")
_SOAKED = [
    *(pytest.param(page, marks=pytest.mark.soak) for page in _LONG),
    pytest.param(
        "docs/scale.md",
        marks=[pytest.mark.soak, pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")],
    ),
    pytest.param("docs/guides/tensor-parallel.md", marks=pytest.mark.soak),
]


@pytest.mark.parametrize("page", [*_PAGES, *_SOAKED])
def test_the_programs_of_a_page_run(
    page: str, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (repository / page).read_text()
    programs = [program for kind, program in _FENCE.findall(text) if kind == "python"]
    assert programs
    (tmp_path / "examples").symlink_to(repository / "examples")
    names: dict[str, object] = {}
    for program in programs:
        exec(compile(program, page, "exec"), names)


def test_every_page_with_programs_is_tested(repository: Path) -> None:
    pages = [repository / "README.md", *(repository / "docs").rglob("*.md")]
    found = {str(p.relative_to(repository)) for p in pages if "```python\n" in p.read_text()}
    others = {"docs/scale.md", "docs/guides/tensor-parallel.md", "docs/images.md"}
    assert found == {*_PAGES, *_LONG, *others}


def test_the_pages_of_tasks_have_each_task_and_argument(repository: Path) -> None:
    pages = [repository / "docs" / "tasks.md", *(repository / "docs" / "tasks").glob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    missing = [
        f"{info.name} {argument}"
        for info in list_tasks()
        if info.source == "treegen"
        for argument in ("", *get_task(info.name).arguments)
        if f"`{info.name}`" not in text or (argument and f"`-T {argument}=" not in text)
    ]
    assert not missing


def test_the_page_of_run_directories_has_each_field(repository: Path, tmp_path: Path) -> None:
    page = (repository / "docs" / "runs.md").read_text()
    named = {word for code in re.findall(r"`([^`]+)`", page) for word in code.split(".")}
    searched = tmp_path / "searched"
    arguments = ["search", "countdown", "--limit", "2", "--budget", "tokens=40", "--quiet"]
    done = CliRunner().invoke(cli, [*arguments, "--output-path", str(searched)])
    assert done.exit_code == 0, done.output
    for run in (repository / "examples" / "run", searched):
        for file in (*run.glob("*.json"), *run.glob("*s.jsonl")):
            if file.name.startswith("words"):
                continue
            text = file.read_text()
            for line in [text] if file.suffix == ".json" else text.splitlines():
                assert not _fields(json.loads(line)) - named, file


# What these hold is by names of levels, kernels, problems, reasons, arguments or answers.
_FREE = {"kernels", "reasons", "errors", "stopped", "extra", "votes", "arguments"}


def _fields(value: object) -> set[str]:
    """Return the names of all fields of a JSON value."""
    if isinstance(value, list):
        return {name for each in value for name in _fields(each)}
    if not isinstance(value, dict):
        return set()
    inner = [_fields(each) for name, each in value.items() if name not in _FREE]
    return set(value).union(*inner)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md", "README.md"])
def test_the_files_that_a_page_names_are_there(page: str, repository: Path) -> None:
    text = (repository / page).read_text()
    named = re.findall(r"`((?:treegen|tasks|cli|tests|docs|examples)/[\w/.]*)`", text)
    named += [link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) if "://" not in link]
    at = (repository, (repository / page).parent)
    assert [name for name in named if not any((each / name).exists() for each in at)] == []


def _commands(repository: Path) -> list[tuple[str, str]]:
    """Return the `treegen` lines of all code blocks, each with its page; output left out."""
    pages = [repository / name for name in ("README.md", "CONTRIBUTING.md")]
    found = []
    for page in [*pages, *sorted((repository / "docs").rglob("*.md"))]:
        text = page.read_text().replace("\\\n", " ")
        blocks = [block for kind, block in _FENCE.findall(text) if kind in ("", "bash")]
        indented = re.findall(r"^ {4,}.*\n", _FENCE.sub("", text), re.MULTILINE)
        for line in re.findall(r"^(?:[ $]*)(treegen [a-z].*)$", "\n".join(blocks + indented), re.M):
            found.append((page.name, line.split(" # ")[0].rstrip()))
    return found


def test_the_commands_have_the_options_that_they_name(repository: Path) -> None:
    commands = _commands(repository)
    assert len(commands) > 20
    for page, line in commands:
        words = shlex.split(line.replace("...", ""))[1:]
        try:
            _parse(cli, words)
        except click.ClickException as error:
            # What stands for a file of the reader's is not there.
            if "does not exist" not in error.format_message():
                raise AssertionError(f"{page}: {line}: {error.format_message()}") from None


def _parse(command: click.Command, words: list[str]) -> None:
    """Parse a command line down to its last subcommand, without running it."""
    context = click.Context(command, info_name=command.name)
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, words)
        assert found is not None, name
        command, context = found, click.Context(found, info_name=name, parent=context)
    command.make_context(command.name, words, parent=context.parent)


def _module(repository: Path, name: str) -> ModuleType:
    spec = spec_from_file_location(name, repository / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_are_those_that_the_script_draws(repository: Path) -> None:
    for name, picture in _module(repository, "charts").draw().items():
        assert (repository / "docs" / name).read_text() == picture


def test_the_figures_of_the_chart_stand_on_the_benchmark_page_and_not_in_the_readme(
    repository: Path,
) -> None:
    page = (repository / "docs" / "performance.md").read_text()
    readme = (repository / "README.md").read_text()
    for job in json.loads((repository / "docs" / "figures.json").read_text())["jobs"]:
        for bar in job["bars"]:
            figure = f"{bar['tokens_per_second']:,}"
            assert figure in page and figure not in readme


def test_the_written_pages_have_each_command_option_and_family(repository: Path) -> None:
    hooks = _module(repository, "hooks")
    page = (repository / "docs" / "reference" / "commands.md").read_text()
    commands = hooks.on_page_markdown(page)
    assert "<!--" not in commands and "\b" not in commands
    for name in cli.list_commands(click.Context(cli)):
        assert f"## treegen {name}\n" in commands
    assert "--max-rows" in commands and "## treegen bench decode\n" in commands
    page = (repository / "docs" / "reference" / "families.md").read_text()
    assert "| `llama` | exact | text |  |" in hooks.on_page_markdown(page)


def test_the_site_keeps_short_words_options_and_ranges_whole(repository: Path) -> None:
    hooks = _module(repository, "hooks")
    page = (
        "<table><td>5 (3-7), 2026-11-23</td><td><code>gsm8k</code> <code>a_very_long_name</code> "
        "<code>few16, x</code></td></table><p>Pass <code>run.py --max-rows 9</code>, 3-7.</p>"
        "<pre><code>run.py --max-rows\n</code></pre>"
    )
    assert hooks.on_page_content(page) == (
        '<table><td>5 <span class="range">(3-7)</span>, <span class="range">2026-11-23</span></td>'
        '<td><code><span class="short">gsm8k</span></code> <code>a_very_long_name</code> '
        '<code><span class="short">few16,</span> <span class="short">x</span></code></td></table>'
        '<p>Pass <code>run.py <span class="option">--max-rows</span> 9</code>, 3-7.</p>'
        "<pre><code>run.py --max-rows\n</code></pre>"
    )


def test_the_readme_is_short(repository: Path) -> None:
    text = (repository / "README.md").read_text()
    assert len(text.splitlines()) <= 120 and len(text.split()) <= 1000


def test_speeds_stand_on_the_pages_of_benchmarks_alone(repository: Path) -> None:
    docs = repository / "docs"
    pages = {*docs.rglob("*.md"), repository / "README.md"}
    pages -= {docs / "performance.md", *(docs / "benchmarks").iterdir()}
    pages -= {*(docs / "internals").iterdir()}
    found = {
        page.name for page in pages if re.search(r"\d tokens/s|\| *tokens/s", page.read_text())
    }
    assert not found
