"""Bounds of versions: pyproject.toml, the code, constraints.txt and the documentation agree."""

from __future__ import annotations

import re
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
from cli_cases import build_checkpoint
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from treegen.common.version import TESTED, warn_untested
from treegen.errors import ModelWarning

# Packages of whose interfaces some are private or undocumented, or change often.
BOUNDED = (
    "torch",
    "transformers",
    "triton",
    "click",
    "trl",
    "lm-eval",
    "inspect_ai",
    "peft",
    "ray",
    "compressed-tensors",
    "llguidance",
)


@pytest.fixture(name="bounds")
def _bounds(repository: Path) -> dict[str, SpecifierSet]:
    """The bounds of each package, which are the same wherever pyproject.toml names it."""
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    found: dict[str, SpecifierSet] = {}
    for each in (Requirement(line) for lines in lists for line in lines):
        if each.specifier:
            assert found.setdefault(each.name, each.specifier) == each.specifier, each.name
    return found


def lowest_and_limit(bounds: SpecifierSet) -> tuple[str, str]:
    found = {each.operator: each.version for each in bounds}
    return found[">="], found["<"]


@pytest.mark.parametrize("name", BOUNDED)
def test_a_package_is_bounded_by_minor_version(name: str, bounds: dict[str, SpecifierSet]) -> None:
    lowest, limit = lowest_and_limit(bounds[name])
    assert re.match(r"[0-9]+[.][0-9]+", limit) and lowest in bounds[name]
    assert limit not in bounds[name]


def test_the_warning_has_the_bounds(bounds: dict[str, SpecifierSet]) -> None:
    for name, (lowest, highest) in TESTED.items():
        limit = f"{highest[0]}.{highest[1] + 1}"
        assert lowest_and_limit(bounds[name]) == (".".join(map(str, lowest)), limit)


def test_constraints_are_within_the_bounds(
    repository: Path, bounds: dict[str, SpecifierSet]
) -> None:
    lines = (repository / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    names = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pinned.items()}
    for name, allowed in bounds.items():
        version = names.get(re.sub(r"[-_.]+", "-", name).lower())
        assert version is None or version in allowed, f"{name}=={version}"
    # The Makefile installs torch, and each of its CUDA builds pins a Triton of its own.
    assert not {"torch", "triton", "setuptools"} & set(names)
    torch = re.search(r"TORCH [?]= torch==(\S+)", (repository / "Makefile").read_text())
    assert torch and torch[1] in bounds["torch"]
    workflow = (repository / ".github" / "workflows" / "test.yml").read_text()
    assert f"TORCH: torch=={torch[1]} " in workflow
    assert "resolution: [lowest-direct, highest]" in workflow


def test_the_documentation_has_the_bounds(
    repository: Path, bounds: dict[str, SpecifierSet]
) -> None:
    page = (repository / "docs" / "installation.md").read_text()
    shown = dict(re.findall(r"^[|] `([\w-]+)` [|] (from .*?) [|]$", page, re.MULTILINE))
    assert shown == {
        name: "from {}, below {}".format(*lowest_and_limit(bounds[name])) for name in BOUNDED
    }
    span = {name: "{}.{} to {}.{}".format(*low, *high) for name, (low, high) in TESTED.items()}
    assert f"torch {span['torch']} and transformers {span['transformers']}." in page
    rows = re.findall(
        r"^[|] (.*?) [|] 3[.]\d+ [|] (.*?) [|] (.*?) [|] (.*?) [|]$", page, re.MULTILINE
    )
    assert [row[0] for row in rows] == ["newest", "`constraints.txt`", "lowest", "NVIDIA GPU"]
    for _, *versions in rows:
        for name, version in zip(("torch", "transformers", "triton"), versions, strict=True):
            assert version.split()[0] in bounds[name], (name, version)


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("torch", "2.16.0a0+git"),
        ("transformers", "5.25.0"),
        ("transformers", "6.0.0.dev0"),
        ("torch", "2.10.1+cu128"),
    ],
)
def test_an_untested_version_is_told_once_when_a_model_is_loaded(
    name: str, version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from treegen.model.load import load_model

    model = build_checkpoint(tmp_path)
    warn_untested.cache_clear()
    monkeypatch.setattr(sys.modules[name], "__version__", version)
    message = f"{name} {re.escape(version)} is installed, but treegen was tested with {name} "
    with pytest.warns(ModelWarning, match=f"{message}.* to .*; models may fail.*pip install"):
        load_model(model, device="cpu", check=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ModelWarning)
        load_model(model, device="cpu", check=False)
    warn_untested.cache_clear()


def test_versions_that_were_tested_are_loaded_without_a_word(monkeypatch: Any) -> None:
    for name, (_, highest) in TESTED.items():
        monkeypatch.setattr(sys.modules[name], "__version__", "{}.{}.9+cu132".format(*highest))
    warn_untested.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_untested()
    warn_untested.cache_clear()
