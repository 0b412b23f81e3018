"""The notebooks of examples/ run from their first cell to their last."""

from pathlib import Path
from typing import Any

import pytest

_NAMES = ("self_consistency", "tree_search")


@pytest.mark.parametrize("name", [_NAMES[0], pytest.param(_NAMES[1], marks=pytest.mark.soak)])
def test_a_notebook_runs_and_shows_what_is_stored(
    name: str, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.read(repository / "examples" / f"{name}.ipynb", as_version=4)
    nbformat.validate(book)
    stored = _kinds(book)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=300, resources=place).execute()
    # Times and, on another machine, single samples differ: what is compared is that cells show it.
    assert _kinds(book) == stored


def _kinds(book: Any) -> list[set[str]]:
    """Return what each cell shows: text on stdout, and tables."""
    return [
        {
            "table" if "text/html" in out.get("data", {}) else "text"
            for out in cell.outputs
            if out.get("name") != "stderr"
        }
        for cell in book.cells
        if cell.cell_type == "code"
    ]


def test_each_notebook_is_tested_and_linked(repository: Path) -> None:
    assert {path.stem for path in (repository / "examples").glob("*.ipynb")} == set(_NAMES)
    page = (repository / "docs" / "notebooks.md").read_text()
    assert all(f"examples/{name}.ipynb" in page for name in _NAMES)
