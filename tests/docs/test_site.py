"""The built site of the documentation, in a real browser."""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Tables stand in boxes that scroll; this lists the boxes that would have to.
_WIDE_TABLES = """() => [...document.querySelectorAll(".md-typeset__scrollwrap")]
    .filter(box => box.scrollWidth > box.clientWidth + 1)
    .map(box => box.innerText.slice(0, 60))"""


def last_change(repository: Path) -> float:
    """When a file that the site is made of was last changed."""
    folders = (repository / name for name in ("docs", "examples", "treegen", "tasks", "cli"))
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix != ".pyc"]
    files += [path for path in repository.iterdir() if path.is_file()]
    return max(path.lstat().st_mtime for path in files if not path.is_dir())


def build(repository: Path, folder: Path, *options: str) -> Path:
    """Build the site into a folder, and return the folder."""
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    pytest.importorskip("mkdocstrings", reason="needs the extra docs")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder), *options],
        check=False,
        cwd=repository,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_no_table_of_a_page_is_wider_than_its_box(
    repository: Path, tmp_path: Path, browser: "Browser"
) -> None:
    """The tables that the pages themselves have; without plugins the site is built in a third."""
    config = tmp_path / "mkdocs.yml"
    lines = [f"INHERIT: {repository / '.mkdocs.yml'}", f"docs_dir: {repository / 'docs'}"]
    lines += [f"hooks: [{repository / 'docs' / 'hooks.py'}]", "plugins: []"]
    config.write_text("\n".join(lines))
    check_tables(build(repository, tmp_path / "site", "--config-file", str(config)), browser)


@pytest.mark.soak
def test_no_table_is_wider_than_its_box(
    repository: Path, tmp_path: Path, browser: "Browser"
) -> None:
    """Also those of the reference, in the site that `make docs` built if nothing has changed."""
    built_page = repository / ".site" / "index.html"
    if built_page.is_file() and built_page.stat().st_mtime > last_change(repository):
        check_tables(built_page.parent, browser)
        return
    options = ("--strict", "--config-file", ".mkdocs.yml")
    check_tables(build(repository, tmp_path / "site", *options), browser)


def check_tables(site: Path, browser: "Browser") -> None:
    """Check that no box of a table has to scroll."""
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    wide = {}
    pages = sorted(page for page in site.rglob("*.html") if "<table" in page.read_text("utf-8"))
    assert len(pages) > 30
    for page in pages:
        tab.goto(page.as_uri(), wait_until="domcontentloaded")
        if tables := tab.evaluate(_WIDE_TABLES):
            wide[str(page.relative_to(site))] = tables
    tab.close()
    assert wide == {}
