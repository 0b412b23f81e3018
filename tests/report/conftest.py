"""Fixtures of the tests of reports and certificates."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certified run, its model and its data."""
    from certified_run import make_certified_run

    return make_certified_run(tmp_path_factory.mktemp("certified"))


@pytest.fixture
def copied(certified: Path, tmp_path: Path) -> Path:
    """A copy of the run, whose model and data stay where they are."""
    return shutil.copytree(certified / "run", tmp_path / "run")
