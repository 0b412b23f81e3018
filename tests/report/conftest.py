"""A browser for the tests of pages."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browsing import Visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    """A headless Chromium: that of TREEGEN_TEST_BROWSER, or the system's."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    given = os.environ.get("TREEGEN_TEST_BROWSER")
    program = given or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium here; install one (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        # Its own sandbox is not to be had for root, nor in most containers.
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: "Browser") -> Iterator[Callable[..., Visit]]:
    """Open a page of a given size in a fresh window. at: what follows its name in the address."""
    contexts = []

    def open_page(
        path: Path | str, *, at: str = "", width: int = 1280, height: int = 900, **options: Any
    ) -> Visit:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        visit = Visit(context.new_page())
        page = visit.page
        page.on("console", lambda message: visit.complaints.append(message.text))
        page.on("pageerror", lambda error: visit.complaints.append(str(error)))
        page.on("dialog", lambda dialog: visit.complaints.append(dialog.message))
        page.on("request", lambda request: visit.requests.append(request.url))
        address = path if isinstance(path, str) else path.resolve().as_uri()
        page.goto(f"{address}{at}")
        page.wait_for_selector("article[data-ready]")
        return visit

    yield open_page
    for context in contexts:
        context.close()
