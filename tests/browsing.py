"""Pages in a real browser: what they ask for and complain of."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page


@dataclass
class Visit:
    """An open page and what it asked for or complained of."""

    page: "Page"
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def told(self) -> str:
        """What the sample browser says of its number."""
        return self.page.locator(".samples .told").inner_text()

    def place(self) -> str:
        """What the address has after its #. Playwright's own note of it may lag behind."""
        return str(self.page.evaluate("() => location.hash"))

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait for something; the page's own policy forbids asking it by evaluating text."""
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, "the page did not come to what was waited for"
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
