"""The figures of the page on tasks for agents."""

import re
from pathlib import Path

import pytest
from agent_runs import measure

# The scripted model runs in a plain event loop, so the order in which episodes end depends on time.
SOLVED, ACTIONS = 4, 3.0


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_page_has_the_figures_that_are_measured(repository: Path, tmp_path: Path) -> None:
    page = read_figures((repository / "docs" / "tasks" / "agents.md").read_text())
    rows = list(measure(tmp_path))
    measured = read_figures("\n".join(rows))
    assert len(measured) == 6 and measured.keys() == page.keys()
    for key, (solved, actions) in measured.items():
        assert abs(solved - page[key][0]) <= SOLVED and abs(actions - page[key][1]) <= ACTIONS, rows


def read_figures(table: str) -> dict[tuple[str, str], tuple[int, float]]:
    """Return the solved problems and the mean number of actions, by task and method."""
    row = r"^\| `([\w-]+)` \| `([\w-]+)` \| (\d+)/60 \|.*\| ([\d.]+) \|$"
    found = re.findall(row, table, re.MULTILINE)
    return {(task, method): (int(solved), float(cost)) for task, method, solved, cost in found}
