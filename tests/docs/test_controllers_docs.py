"""What docs/search.md shows of controllers of other libraries."""

import contextlib
import io
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("package", ["treequest", "reasoners"])
def test_other_controllers_drive_live_nodes(repository: Path, package: str) -> None:
    pytest.importorskip(package)
    page = (repository / "docs" / "search.md").read_text()
    section = page.partition("\n## Other controllers\n")[2].partition("\n## ")[0]
    programs = re.findall(r"```py\n(.*?)```", section, re.DOTALL)
    (program,) = (each for each in programs if f"{package}" in each)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(program, {})
    assert "(left: 10)" in shown.getvalue() and shown.getvalue().endswith("True\n")
