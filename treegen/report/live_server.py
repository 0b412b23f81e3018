"""Serves the page of runs in progress to a browser on this machine.

The server reads the run directories. It takes no lock and writes nothing, so it does not affect the
runs. It renders the page only on request, and waits after each page for ten times the processor
time that the page took.

The server listens on 127.0.0.1. Another site could still resolve its own name to that address and
read the page (DNS rebinding). So the server rejects requests with another host name.
"""

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from treegen.common.formatting import safe_text
from treegen.errors import InputError, TreegenError
from treegen.report.html_page import LivePage, render_page
from treegen.report.load import load_run

HOST: Final = "127.0.0.1"
# Minimum seconds until the next page, per second of processor time that a page took.
_PAUSE_FACTOR: Final = 10.0
# Changes of these files in a run change the version of the page.
_FILES: Final = ("*.json", "*.jsonl", "judged/*/*.jsonl")


class WatchedPage:
    """The page of some runs in progress, rendered again after the runs have changed.

    Args:
        paths: The directories of the runs.
        options: Options for reading the runs; see `treegen.evals.config.base.OpenRunOptions`.
        every: Minimum seconds between two checks of the runs.
        clock: Returns the time in seconds.
        cpu: Returns the processor time of the thread in seconds.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        options: Mapping[str, Any] | None = None,
        every: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._paths, self._every = tuple(paths), every
        self._options: Any = options or {}
        # If the runs keep all processors busy, a page takes long by the clock, because this process
        # has a low priority. So the delay before the next page follows from processor time.
        self._clock, self._cpu = clock, cpu
        self._lock = threading.Lock()
        self._version, self._due = "", float("-inf")
        self._page, self._page_version, self._ended = b"", "", False

    def state(self) -> dict[str, Any]:
        """Return the version of the page, and whether its runs have all their samples."""
        with self._lock:
            self._check_runs()
            return {"version": self._version, "ended": self._ended}

    def page(self) -> bytes:
        """Return the page, rendered again if the runs have changed.

        Raises:
            TreegenError: a run cannot be read.
        """
        with self._lock:
            self._check_runs()
            if self._page_version != self._version:
                begin = self._cpu()
                version = self._version
                views = [load_run(path, **self._options) for path in self._paths]
                page = render_page(views, live=LivePage(version, self._every))
                self._page, self._page_version = page.encode(), version
                self._ended = all(view.num_done >= view.info.planned for view in views)
                pause = max(self._every, _PAUSE_FACTOR * (self._cpu() - begin))
                self._due = self._clock() + pause
            return self._page

    def _check_runs(self) -> None:
        """Update the version if the runs have changed, unless the last check is too recent."""
        now = self._clock()
        if now >= self._due:
            self._version = _hash_file_stats(self._paths)
            self._due = now + self._every


def _hash_file_stats(paths: Sequence[Path]) -> str:
    """Return a text that changes when a file of the runs changes."""
    stamps = []
    for path in paths:
        for file in sorted(file for pattern in _FILES for file in path.glob(pattern)):
            try:
                stat = file.stat()
            except OSError:  # the file was just replaced
                continue
            stamps.append(f"{file} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(stamps).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def make_server(watched: WatchedPage, port: int = 0) -> ThreadingHTTPServer:
    """Return a server for a page; it listens at its `server_port`. The caller runs it.

    Args:
        watched: The page.
        port: The port; 0 takes any free port.

    Raises:
        InputError: the port cannot be used.
    """
    try:
        server = _Server((HOST, port), _Handler)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"cannot listen at {HOST} port {port}: {error}; choose another port with --port, or "
            "pass --port 0 to use any free port"
        ) from None
    server.watched = watched
    return server


class _Server(ThreadingHTTPServer):
    watched: WatchedPage
    daemon_threads = True
    # With port reuse, another program could listen at the port of a running server.
    allow_reuse_port = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a traceback, unless the browser has disconnected or is too slow."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for the page and its version."""

    server: _Server
    server_version = "treegen"
    sys_version = ""
    timeout = 30.0  # seconds in which a request must arrive

    def do_GET(self) -> None:
        """Answer with a body."""
        self._answer(body=True)

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self._answer(body=False)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing on the terminal."""

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        if not self._has_allowed_host():
            message = f"open this page as http://{HOST}:{self.server.server_port}"
            return self._send(HTTPStatus.FORBIDDEN, message.encode(), body=body)
        try:
            if path == "/":
                return self._send(HTTPStatus.OK, self.server.watched.page(), "text/html", body=body)
            if path == "/version":
                state = json.dumps(self.server.watched.state()).encode()
                return self._send(HTTPStatus.OK, state, "application/json", body=body)
        except TreegenError as error:
            message = safe_text(f"{error}\n")
            return self._send(HTTPStatus.SERVICE_UNAVAILABLE, message.encode(), body=body)
        return self._send(HTTPStatus.NOT_FOUND, b"there is no such page\n", body=body)

    def _has_allowed_host(self) -> bool:
        """Return whether the request names this server as its host; other sites' pages cannot."""
        hosts = self.headers.get_all("Host") or []
        port = self.server.server_port
        suffixes = (f":{port}", "") if port == 80 else (f":{port}",)  # browsers omit port 80
        return hosts in ([name + suffix] for name in (HOST, "localhost") for suffix in suffixes)

    def _send(
        self, status: HTTPStatus, content: bytes, kind: str = "text/plain", *, body: bool
    ) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(content))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Referrer-Policy", "no-referrer"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)
