"""The figures of the page on tasks for agents."""

from pathlib import Path

import pytest
from agent_runs import measure


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_page_has_the_figures_that_are_measured(repository: Path, tmp_path: Path) -> None:
    page = (repository / "docs" / "tasks" / "agents.md").read_text()
    rows = list(measure(tmp_path))
    assert len(rows) == 6 and all(row in page for row in rows), rows
