"""Pages in a real browser: what they ask for and complain of."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def launched() -> Iterator["Browser"]:
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


@dataclass
class Visit:
    """An open page and what it asked for or complained of."""

    page: "Page"
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def row_count(self) -> str:
        """What the sample browser says of its number."""
        return self.page.locator(".samples .row-count").inner_text()

    def place(self) -> str:
        """What the address has after its #. Playwright's own note of it may lag behind."""
        return str(self.page.evaluate("() => location.hash"))

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait for something; the page's own policy forbids asking it by evaluating text."""
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, "the page did not come to what was waited for"
            time.sleep(0.02)

    def click(self, target: "Locator", condition: Callable[[], bool]) -> None:
        """Click until something holds; a click is lost if the page replaces the target."""
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, "no click led to what was waited for"
            target.click()
            again = time.monotonic() + 20
            while not condition() and time.monotonic() < again:
                time.sleep(0.02)

    def check(self) -> None:
        """Nothing was asked of the network, and nothing went wrong or was taken over."""
        assert self.complaints == []
        assert all(url.startswith("data:") for url in self.requests[1:]), self.requests
        assert self.page.evaluate("() => window.owned") is None
        assert self.page.evaluate("() => document.title") != "owned"
        # Scripts and pictures are the page's own, and no text became an element.
        assert self.page.locator("script:not([id])").count() == 1
        assert self.page.locator("[onerror], [onload], article script, h2 script").count() == 0
        assert self.page.locator("img:not(figure > img), article > svg, iframe").count() == 0


@contextmanager
def visiting(browser: "Browser") -> Iterator[Callable[..., Visit]]:
    """What opens pages, each of a given size in a fresh window.

    at: what follows the name of a page in its address. script: what runs before the page's own
    scripts.
    """
    contexts = []

    def open_page(
        path: Path | str,
        *,
        at: str = "",
        script: str = "",
        width: int = 1280,
        height: int = 900,
        **options: Any,
    ) -> Visit:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.add_init_script(script)
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
