"""The built site of the documentation, in a real browser."""

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


def build(config_file: Path, folder: Path, *, strict: bool = False) -> Path:
    """Build the site into a folder, and return the folder.

    In this process, for a hook imports torch and transformers.
    """
    pytest.importorskip("mkdocstrings", reason="needs the extra docs")
    config = pytest.importorskip("mkdocs.config", reason="needs the extra docs")
    commands = pytest.importorskip("mkdocs.commands.build", reason="needs the extra docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        loaded = config.load_config(str(config_file), site_dir=str(folder), strict=strict)
        loaded.plugins.on_startup(command="build", dirty=False)
        commands.build(loaded)
        loaded.plugins.on_shutdown()
    return folder


def test_no_table_of_a_page_is_wider_than_its_box(
    repository: Path, tmp_path: Path, browser: "Browser"
) -> None:
    """The tables that the pages themselves have; without plugins the site is built in a third."""
    config = tmp_path / "mkdocs.yml"
    lines = [f"INHERIT: {repository / '.mkdocs.yml'}", f"docs_dir: {repository / 'docs'}"]
    lines += [f"hooks: [{repository / 'docs' / 'hooks.py'}]", "plugins: []"]
    config.write_text("\n".join(lines))
    check_tables(build(config, tmp_path / "site"), browser)


@pytest.mark.soak
def test_no_table_is_wider_than_its_box(
    repository: Path, tmp_path: Path, browser: "Browser"
) -> None:
    """Also those of the reference, in the site that `make docs` built if nothing has changed."""
    built_page = repository / ".site" / "index.html"
    if built_page.is_file() and built_page.stat().st_mtime > last_change(repository):
        check_tables(built_page.parent, browser)
        return
    check_tables(build(repository / ".mkdocs.yml", tmp_path / "site", strict=True), browser)


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
