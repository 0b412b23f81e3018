"""What pages of search say beside their programs."""

import re
from pathlib import Path

import pytest

from treegen.evals.search.methods import METHODS


@pytest.mark.parametrize("page", ["README.md", "docs/search/methods.md"])
def test_tables_name_methods_in_their_order(repository: Path, page: str) -> None:
    order = [name.removeprefix("tot-").replace("_", "-") for name in METHODS]
    heads = re.findall(r"^\| *(`.*?) *\|", (repository / page).read_text(), re.MULTILINE)
    words = [word for head in heads for word in re.findall(r"`([\w-]+)", head)]
    told = [
        name
        for name in (word.removeprefix("tot-").replace("_", "-") for word in words)
        if name in order
    ]
    assert told == sorted(told, key=order.index)


def test_the_page_of_levels_prints_the_plan_that_it_tells_of(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (repository / "docs" / "search" / "loops.md").read_text()
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], {})
    shown = capsys.readouterr().out
    assert "generated level 2: at most 30 rows, 1,200 tokens; 8 go on" in shown
