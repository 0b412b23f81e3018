"""Files that services and tools read: the workflow, templates, hooks, the citation."""

import re
import tomllib
from pathlib import Path

import yaml

import treegen


def _yaml(path: Path) -> dict[object, object]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict) and found, path
    return found


def test_the_workflow_runs_targets_of_make_with_the_torch_of_make(repository: Path) -> None:
    text = (repository / ".github/workflows/test.yml").read_text(encoding="utf-8")
    make = (repository / "Makefile").read_text(encoding="utf-8")
    steps = [word.split()[1] for word in text.split("run: ")[1:] if word.startswith("make ")]
    assert "test" in steps and "release-check" in steps
    assert all(f"\n{step}:" in make for step in steps)
    (torch,) = [line.split()[2] for line in make.splitlines() if line.startswith("TORCH ?=")]
    assert f"TORCH: {torch} " in text
    _yaml(repository / ".github/workflows/test.yml")


def test_actions_are_pinned_by_commit(repository: Path) -> None:
    """A tag can be moved to other code; the comment says which version a commit is."""
    files = [*(repository / ".github").rglob("*.yml"), *(repository / ".github").rglob("*.yaml")]
    used = [
        line
        for file in files
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.match(r"[\s-]*uses:", line)
    ]
    assert len(used) >= 4
    for line in used:
        local = re.search(r"uses: \./", line)
        assert local or re.search(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


def test_templates_and_hooks(repository: Path) -> None:
    for form in ("bug", "wish"):
        found = _yaml(repository / f".github/ISSUE_TEMPLATE/{form}.yml")
        assert {"name", "description", "body"} <= set(found)
    text = (repository / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    make = (repository / "Makefile").read_text(encoding="utf-8")
    for tool in ("ruff check", "ruff format", "lint-imports --no-logo"):
        assert f".venv/bin/{tool}" in text and f"$(BIN)/{tool}" in make
    _yaml(repository / ".pre-commit-config.yaml")


def test_the_citation_is_of_this_version(repository: Path) -> None:
    cited = _yaml(repository / "CITATION.cff")
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert cited["version"] == treegen.__version__ and cited["license"] == project["license"]
    assert cited["repository-code"] == project["urls"]["Homepage"]
