"""What is installed: names, files, links, and what importing costs."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import treegen

# Folder in the repository -> package that it installs as.
SOURCES = {"treegen": "treegen", "tasks": "treegen.tasks", "cli": "treegen.cli"}
MAX_FILES = 22  # in one folder: what a reader takes in at a look
MAYBE_BAD = re.compile(r"^\s*(from\s+(\.|tasks\b|cli\b)|import\s.*\b(tasks|cli)\b)", re.MULTILINE)
OFFLINE_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
INSTALL = ["install", "--no-deps", "--no-index", "--no-build-isolation"]


@pytest.fixture(scope="module")
def project(repository: Path) -> dict[str, Any]:
    """The content of pyproject.toml."""
    return tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def copied(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, so that building leaves nothing in the repository."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(repository / name, copy / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(copied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without an index."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder)]
    run([*OFFLINE_PIP, "wheel", *options, str(copied)])
    (path,) = folder.glob("*.whl")
    return path


def run(command: list[str], cwd: Path | None = None, **variables: str) -> str:
    """Run a command that must succeed, with PYTHONPATH only if given, and return its stdout."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@cache
def installed_names(repository: Path, pattern: str) -> set[str]:
    """Name every source file that matches as it must be named in the wheel."""
    return {
        f"{package.replace('.', '/')}/{path.relative_to(repository / folder).as_posix()}"
        for folder, package in SOURCES.items()
        for path in source_files(repository / folder, pattern)
    }


def source_files(folder: Path, pattern: str) -> list[Path]:
    """List the matching files below a folder, not following links."""
    found = []
    for path in sorted(folder.glob(pattern)):
        between = path.relative_to(folder).parents
        if not any((folder / parent).is_symlink() for parent in between):
            found.append(path)
    return found


class Names(NamedTuple):
    """What a file imports and defines, with line numbers."""

    imports: list[tuple[int, str]]
    """Modules; a leading dot means relative."""
    strings: list[tuple[int, str]]
    """Arguments of functions that import a module by its name."""
    classes: list[str]


@cache
def names_of(path: Path) -> Names:
    found = Names([], [], [])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ImportFrom():
                found.imports.append((node.lineno, "." * node.level + (node.module or "")))
            case ast.Import():
                found.imports.extend((node.lineno, alias.name) for alias in node.names)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                if name in ("import_module", "__import__"):
                    found.strings.extend((node.lineno, ast.unparse(arg)) for arg in node.args)
            case ast.ClassDef():
                found.classes.append(node.name)
    return found


def test_every_source_folder_is_a_listed_package(repository: Path, project: dict[str, Any]) -> None:
    found = {name.rpartition("/")[0] for name in installed_names(repository, "**/*.py")}
    assert sorted(project["tool"]["setuptools"]["packages"]) == sorted(
        name.replace("/", ".") for name in found
    )
    assert {f"{name}/__init__.py" for name in found} <= installed_names(repository, "**/*.py")


@pytest.mark.parametrize("name", ["treegen", "tasks", "cli"])
def test_no_folder_is_crowded(repository: Path, name: str) -> None:
    files = Counter(path.parent for path in source_files(repository / name, "**/*.py"))
    assert {folder: count for folder, count in files.items() if count > MAX_FILES} == {}


@pytest.mark.parametrize("name", ["tasks", "cli"])
def test_the_links_show_the_folders_under_their_installed_names(
    repository: Path, name: str
) -> None:
    link = repository / "treegen" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"


def test_imports_are_absolute_and_name_installed_packages(repository: Path) -> None:
    bad = []
    for folder in (*SOURCES, "tests", "examples"):
        for path in source_files(repository / folder, "**/*.py"):
            if not MAYBE_BAD.search(path.read_text(encoding="utf-8")):
                continue  # parsing all files would take seconds
            for line, name in names_of(path).imports:
                if re.match(r"\.|(tasks|cli)\b", name):
                    bad.append(f"{path}:{line}: {name}")
    assert not bad


def test_no_import_is_hidden_from_the_linter(repository: Path) -> None:
    """No module of ours is imported by its name as a string: `lint-imports` would not see it."""
    bad = []
    for folder in SOURCES:
        for path in source_files(repository / folder, "**/*.py"):
            strings = names_of(path).strings
            bad += [f"{path}:{line}: {name}" for line, name in strings if "treegen." in name]
    assert not bad


def test_the_wheel_holds_the_sources_and_the_data_and_nothing_else(
    repository: Path, wheel: Path
) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {name for name in names if not name.startswith("treegen_lm-")}
    assert shipped == (
        installed_names(repository, "**/*.py")
        | installed_names(repository, "data/*.jsonl")
        | installed_names(repository, "data/*.jsonl.gz")
        | installed_names(repository, "data/LICENSE*")
        | installed_names(repository, "report/page/*")
        | installed_names(repository, "report/audit/*.jsonl")
        | installed_names(repository, "evals/judging/rubrics/*")
        | installed_names(repository, "demo/data/*.jsonl")
        | installed_names(repository, "demo/model/*")
        | installed_names(repository, "demo/agent/*")
        | installed_names(repository, "demo/*_CARD.md")
        | {"treegen/bench/shapes.json", "treegen/py.typed"}
    )
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_wheel_names_version_and_command(wheel: Path, project: dict[str, Any]) -> None:
    version = treegen.__version__
    assert wheel.name == f"treegen_lm-{version}-py3-none-any.whl"
    archive = zipfile.ZipFile(wheel)
    info = f"treegen_lm-{version}.dist-info"
    metadata = archive.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    for requirement in project["project"]["dependencies"]:
        name = re.split(r"[<>=,]", requirement)[0]
        assert f"Requires-Dist: {name}" in metadata
    assert "treegen = treegen.__main__:main" in archive.read(f"{info}/entry_points.txt").decode()
    assert archive.read(f"{info}/top_level.txt").decode().split() == ["treegen"]


def test_the_installed_wheel_imports_from_where_it_was_installed(
    wheel: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    run([*OFFLINE_PIP, *INSTALL, "--target", str(site), str(wheel)])
    assert sorted(p.name for p in site.iterdir() if not p.name.startswith("treegen_lm-")) == [
        "bin",
        "treegen",
    ]
    code = (
        "import treegen, treegen.tasks, treegen.cli.main as main\n"
        "assert callable(main.main)\n"
        "print(treegen.__file__, treegen.tasks.__file__, main.__file__, sep='\\n')"
    )
    files = run([sys.executable, "-c", code], cwd=tmp_path, PYTHONPATH=str(site)).split()
    assert files == [
        str(site / "treegen" / name) for name in ("__init__.py", "tasks/__init__.py", "cli/main.py")
    ]


def test_the_editable_install_follows_the_sources(copied: Path, tmp_path: Path) -> None:
    # A fresh environment that also sees the packages of this one. Files named in a .pth of a folder
    # that a .pth added are not read, so this environment's own treegen stays invisible.
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False, symlinks=True)
    python = str(environment / "bin" / "python")
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run([python, "-c", code]).strip())
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    # Without --ignore-installed, pip would look at the treegen of the outer environment.
    pip = [python, *OFFLINE_PIP[1:], *INSTALL, "--ignore-installed"]
    run([*pip, "--editable", str(copied)])

    assert (environment / "bin" / "treegen").exists()
    (copied / "tasks" / "added_later.py").write_text("VALUE = 1\n", encoding="utf-8")
    (copied / "cli" / "added_later.py").write_text("VALUE = 2\n", encoding="utf-8")
    code = (
        "import treegen\n"
        "from treegen.tasks import added_later as task\n"
        "from treegen.cli import added_later as command\n"
        "print(treegen.__file__, task.VALUE, command.VALUE)"
    )
    output = run([python, "-c", code], cwd=tmp_path).split()
    assert output == [str(copied / "treegen" / "__init__.py"), "1", "2"]
    for name in ("tasks", "cli"):
        (copied / name / "added_later.py").unlink()


def test_light_names_import_no_torch() -> None:
    code = (
        "import sys, treegen\n"
        "loaded = {'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "treegen.Node, treegen.SamplingParams, treegen.TreegenError, treegen.Completion\n"
        "treegen.Plan\n"
        "loaded = {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    run([sys.executable, "-c", code])


def test_public_names_agree() -> None:
    """Each name is listed, typed for checkers, and found where it is said to be."""
    tree = ast.parse(Path(treegen.__file__).read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == treegen._MODULE_OF
    assert sorted(treegen.__all__) == sorted(typed)
    assert set(treegen.__all__) <= set(dir(treegen))
    for name in treegen.__all__:
        assert getattr(treegen, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nodes'"):
        _ = treegen.Nodes  # type: ignore[attr-defined]


def test_no_message_or_page_names_the_package_of_somebody_else(repository: Path) -> None:
    """PyPI's `treegen` is not this one: extras come from the checkout, or from a wheel."""
    files = [repository / "README.md", *(repository / "docs").rglob("*.md")]
    for folder in ("treegen", "tasks", "cli"):
        files += (repository / folder).rglob("*.py")
    bad = re.compile(r"install\s+'?treegen(?![\w/.])")
    assert not [str(file) for file in files if bad.search(file.read_text())]


def test_no_class_name_stands_twice(repository: Path) -> None:
    places: dict[str, list[str]] = {}
    for folder in SOURCES:
        for path in source_files(repository / folder, "**/*.py"):
            for name in names_of(path).classes:
                if not name.startswith("_"):
                    places.setdefault(name, []).append(str(path.relative_to(repository)))
    assert len(places) > 500
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
