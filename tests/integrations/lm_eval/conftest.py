"""Fixtures of the tests of lm-eval."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of lm-eval, one of each kind."""
    from lm_eval_kinds import write_kinds

    return write_kinds(tmp_path_factory.mktemp("tasks"))
